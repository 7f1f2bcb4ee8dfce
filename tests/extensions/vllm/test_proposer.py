"""The proposer for vLLM, driven by a stand-in of vLLM's model runner."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from hf_retrieval_assist.drafters.suffix import SuffixDrafter
from hf_retrieval_assist.extensions.vllm import proposer as proposers
from hf_retrieval_assist.extensions.vllm.proposer import Proposer
from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.policy.cost_model import CostModel
from tests.support.watching import calls_of

EOS, VOCAB = 1, 300
LONGEST = 200


def make_proposer(longest_draft=6, rank=0, **options):
    model = SimpleNamespace(
        hf_config=SimpleNamespace(name_or_path="a", to_diff_dict=lambda: {"eos_token_id": EOS}),
        hf_text_config=SimpleNamespace(eos_token_id=EOS),
        max_model_len=LONGEST,
        get_vocab_size=lambda: VOCAB,
        try_get_generation_config=lambda: {"eos_token_id": [EOS, 2]},
    )
    return Proposer(
        SimpleNamespace(
            model_config=model,
            speculative_config=SimpleNamespace(num_speculative_tokens=longest_draft),
            parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
            device_config=SimpleNamespace(device_type="cpu"),
            additional_config={"hf_retrieval_assist": {"budget": longest_draft} | options},
        )
    )


class Request:
    """A text that the model is going to write, of which a part is written."""

    def __init__(self, prompt, output):
        self.prompt, self.output = list(prompt), list(output)
        self.text = list(prompt)
        self.draft = []
        self.steps = 0

    @property
    def done(self):
        return len(self.text) >= len(self.prompt) + len(self.output)

    def verify(self):
        """The tokens of a step: the draft's right ones and one more, ends of text or not."""
        whole = self.prompt + self.output
        place = len(self.text)
        new = [whole[place]]
        for drafted in self.draft:
            if drafted != new[-1] or place + len(new) >= len(whole):
                break
            new.append(whole[place + len(new)])
        self.text += new
        self.steps += 1
        return new


class Runner:
    """Batches requests as vLLM's runner does: rows in one array, whose places change."""

    def __init__(self, proposer, rows=4):
        self.proposer = proposer
        self.tokens = np.full((rows, LONGEST), -7, np.int32)
        self.lengths = np.zeros(rows, np.int32)

    def step(self, requests, prefilling=()):
        """One step of the requests, in this order of rows; some only feed a part of a prompt."""
        sampled = [[] if request in prefilling else request.verify() for request in requests]
        for row, request in enumerate(requests):
            self.tokens[row, : len(request.text)] = request.text
            self.tokens[row, len(request.text) :] = -7
            self.lengths[row] = len(request.text)
        drafts = self.proposer.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        assert len(drafts) == len(requests)
        for request, new, draft in zip(requests, sampled, drafts, strict=True):
            room = max(0, LONGEST - len(request.text) - 1)
            assert len(draft) <= min(self.proposer.longest_draft, room)
            assert all(type(token) is int and 0 <= token < VOCAB for token in draft)
            assert new or not draft
            request.draft = draft

    def run(self, requests):
        while running := [request for request in requests if not request.done]:
            self.step(running)
        self.step([])


def known(proposer):
    """The outputs in the proposer's memory, sorted."""
    memory = proposer.policy.drafters[0].memory
    tree = memory.tree(proposer.target.fingerprint)
    return sorted(tree.tokens(output.sequence).tolist() for output in memory._outputs)


def texts(count, seed=0, length=40):
    return np.random.default_rng(seed).integers(3, VOCAB, (count, length)).tolist()


def test_a_text_that_was_written_before_is_drafted():
    """Equal requests side by side are two."""
    prompt, output, other = texts(3)
    proposer = make_proposer()
    runner = Runner(proposer)
    requests = [Request(prompt, output) for _ in range(2)]
    for request in requests:
        runner.run([request])
    assert requests[0].steps == 40
    assert requests[1].steps < 12
    assert known(proposer) == [output, output]
    total = proposer.policy.stats.total
    assert (total.calls, total.tokens) == (2, 80)
    assert total.accepted == 80 - 2 - total.steps
    runner.run([Request(prompt, text) for text in (output, other, output)])
    assert known(proposer) == sorted([*[output] * 4, other])


def test_rows_change_places_and_vanish_and_come_back():
    rng = np.random.default_rng(1)
    proposer = make_proposer()
    runner = Runner(proposer)
    outputs, inputs = texts(6), texts(6, seed=1)
    outputs[1] = outputs[0][:20] + outputs[1][20:]
    requests = [Request(*pair) for pair in zip(inputs, outputs, strict=True)]
    waiting, running, preempted = requests[:], [], 0
    while waiting or running:
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
        runner.step(running)
        running = [request for request in running if not request.done]
        rng.shuffle(running)
        if preempted < 3 and len(running) > 1 and rng.random() < 0.1:
            preempted += 1
            paused = running.pop()
            paused.draft = []
            waiting.append(paused)
    runner.step([])
    assert preempted == 3
    # A preempted request teaches what it brought; the rest is learnt when it was resumed.
    pieces = Counter(token for piece in known(proposer) for token in piece)
    assert pieces == Counter(token for output in outputs for token in output)
    assert len(known(proposer)) == 6 + preempted


def test_only_the_ends_of_long_texts_are_compared(monkeypatch):
    """Unless two are of one length: here with one end as well, and they change places."""
    monkeypatch.setattr(proposers, "_COMPARED", 8)
    asked = calls_of(monkeypatch, proposers.Row, "has")
    end, output, *heads = texts(4)
    proposer = make_proposer()
    runner = Runner(proposer)
    runner.run([Request([*heads[0], *end], output)])
    assert {compared for _, _, compared in asked} == {8}
    asked.clear()
    twins = [Request([*head, *end], output) for head in heads]
    for _ in range(6):
        runner.step(twins)
        for row, twin in zip(proposer._rows, twins, strict=True):
            text = row.session.sessions[0].text
            assert text.tree.tokens(text.sequence)[:40].tolist() == twin.text[:40]
        twins.reverse()
    assert max(compared for _, _, compared in asked) > 80
    assert proposer.policy.stats.total.calls == 1


def test_prompts_in_chunks_start_nothing_and_are_not_timed():
    prompt, output, *other = texts(4)
    proposer = make_proposer()
    runner = Runner(proposer)
    long, short = Request(prompt, output), Request(*other)
    for _ in range(3):
        runner.step([long, short], prefilling=[long])
    assert len(proposer._rows) == 1
    assert proposer.cost.observations == 0
    runner.step([long, short])
    assert proposer.cost.observations == 0
    runner.step([long, short])
    assert proposer.cost.observations == 1
    runner.run([long, short])
    assert known(proposer) == sorted([output, other[1]])


def test_a_price_that_is_known_is_timed_at_every_third_step():
    proposer = make_proposer()
    request = Request([3], *texts(1, length=150))
    Runner(proposer).run([request])
    assert request.steps == 150
    # The step of the first token fed the prompt.
    assert proposer.cost.observations == 64 + (149 - 64) // 3


@pytest.mark.parametrize("end", [EOS, 2])
def test_what_follows_the_end_of_a_text_is_learnt_only_if_it_goes_on(end):
    prompt, output = texts(2)
    output[20] = end
    proposer = make_proposer()
    runner = Runner(proposer)
    runner.run([Request(prompt, output)])
    assert known(proposer) == [output]
    # Drafted over its end, and ended there by the engine.
    request = Request(prompt, output)
    while end not in request.text:
        runner.step([request])
    assert request.text[-1] != end
    runner.step([])
    assert known(proposer) == sorted([output, output[:21]])


def test_requests_that_may_not_grow_are_not_drafted_for(monkeypatch):
    """One has ended, one has no room, and the third one goes on."""
    asked = calls_of(monkeypatch, SuffixDrafter, "propose")
    going_on = [5, 6, 7, 8] * 10
    full = [9, 10, 11] * LONGEST
    proposer = make_proposer(longest_draft=4)
    requests = [
        Request([3, 4], [EOS, 5]),
        Request(full[: LONGEST - 2], full[:9]),
        Request([3], going_on),
    ]
    runner = Runner(proposer)
    runner.step(requests)
    assert [len(sessions) for _, sessions, _ in asked] == [1]
    assert [len(request.draft) for request in requests[:2]] == [0, 0]


def test_only_the_first_process_of_a_group_drafts_and_learns():
    proposer = make_proposer(rank=3)
    request = Request([5] * 20, [5] * 20)
    Runner(proposer).run([request])
    assert request.steps == 20
    assert not proposer._rows
    assert len(proposer.policy.drafters[0].memory) == 0


def test_the_drafts_of_all_requests_share_what_a_step_affords():
    """Each token costs 0.2 of a plain step, so only what is rather sure is verified."""
    (output,) = texts(1)
    proposer = make_proposer(longest_draft=8, budget="auto")
    proposer.cost = CostModel.fixed(lambda n: 1.0 + 0.2 * (n - 1))
    runner = Runner(proposer)
    memory = proposer.policy.drafters[0].memory
    for i in range(8):
        memory.add([*output[:20], 50 + i, *output[21:]], proposer.target.fingerprint)

    def drafts():
        requests = [Request(output[:n], output[n:]) for n in (5, 19)]
        runner.step(requests)
        return [request.draft for request in requests]

    sure, unsure = drafts()
    assert sure == output[6 : 6 + len(sure)]
    assert len(sure) >= 4
    assert unsure == []
    proposer.cost = CostModel.fixed(lambda n: 1.0)
    sure, unsure = drafts()
    assert sure == output[6:14]
    assert len(unsure) == 8


def test_outputs_outlive_the_engine(tmp_path):
    prompt, output = texts(2)
    proposer = make_proposer(memory=str(tmp_path / "log"), max_bytes=1 << 22)
    runner = Runner(proposer)
    request = Request(prompt, output)
    for _ in range(3):
        runner.step([request])
    proposer.close()
    again = OutputMemory(path=tmp_path / "log")
    assert again.tree(proposer.target.fingerprint).token_count == 3


def test_unknown_options_are_refused():
    """And the import takes neither transformers nor vLLM."""
    with pytest.raises(ValueError, match=r"expected options .* got 'budgte'"):
        make_proposer(budgte=3)
    with pytest.raises(ValueError, match="redis://, rediss:// or unix://, got http"):
        make_proposer(memory="http://localhost")
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


IMPORT = """
import sys
import hf_retrieval_assist.extensions.vllm
assert not [name for name in sys.modules if name.split(".")[0] in ("transformers", "vllm")]
"""
