"""Records of calls: who proposed what, what became of it, and how it is shown."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel, OpenAIGPTLMHeadModel

from hf_retrieval_assist import Assistant, SamAssistant, TokenTree
from hf_retrieval_assist.extensions.record import html
from hf_retrieval_assist.extensions.record.pieces import readable, text_pieces
from hf_retrieval_assist.extensions.record.steps import MODEL
from tests.support.byte_model import small_model
from tests.support.lossless import NEW_TOKENS, PROMPT, build, knowing, run
from tests.support.memories import remembering
from tests.support.oracle_drafter import OracleDrafter
from tests.support.rounding import near
from tests.support.threads import in_threads


@pytest.fixture(scope="module")
def recorded(llama):
    """A greedy call whose text a corpus holds: (plain ids, record, assistant)."""
    plain = run(llama)
    assistant = knowing(plain)
    with assistant.record() as record:
        assisted = run(llama, assistant=assistant)
    assert torch.equal(plain, assisted)
    return plain[0, PROMPT.shape[1] :].tolist(), record, assistant


def test_the_steps_tell_the_text_and_the_figures(recorded):
    """Tokens are credited to the most confident source that named them."""
    text, record, assistant = recorded
    (call,) = record.calls
    stats = assistant.stats.last
    assert call.generated(0).tolist() == text
    assert call.prompts[0].tolist() == PROMPT[0].tolist()
    assert len(call.steps) == stats.steps + 1
    assert sum(len(step.tree) for step in call.steps) == stats.drafted
    assert sum(len(step.accepted) for step in call.steps) == stats.accepted > 0
    ends = np.cumsum([len(step.token_ids) for step in call.steps]).tolist()
    assert [step.position for step in call.steps] == [0, *ends[:-1]]
    for step in call.steps:
        spelt = step.tree.token_ids[step.accepted].tolist()
        assert spelt == step.token_ids[: len(spelt)].tolist()
        assert step.accepted.tolist() == step.tree.follow(step.token_ids)[: len(spelt)].tolist()
        assert step.credits[len(spelt) :] == [MODEL] * (len(step.token_ids) - len(spelt))
        for node, named in enumerate(step.witnesses):
            assert step.tree.probs[node] == max(witness.prob for witness in named)
            assert step.credit(node) == named[0].origin
    assert record.by_origin()["corpus"][2] > 0
    assert sum(tokens for *_, tokens in record.by_origin().values()) == len(text)
    for phase in ("draft", "forward", "walk", "cache"):
        added = sum(step.seconds.get(phase, 0.0) for step in call.steps)
        assert added == near(stats.seconds[phase])
    assert set(call.steps[0].seconds) == {"prefill", "draft"}


class Fixed(OracleDrafter):
    """Knows a text; named and numbered by its classes."""

    def __init__(self, name, texts, prob, origins=()):
        super().__init__(texts, miss=0.0)
        self.name, self.prob, self._origins = name, prob, origins

    @property
    def origins(self):
        return self._origins or super().origins

    def origins_of(self, classes):
        return np.arange(len(classes), dtype=np.int32) % len(self.origins)

    def draft(self, coming, budget):
        left = coming[:3]
        return TokenTree.chain(left, [self.prob**i for i in range(1, len(left) + 1)])


def test_a_node_of_two_drafters_has_both_as_witnesses(llama):
    plain = run(llama)[0].tolist()
    drafters = [Fixed("weak_one", [plain], 0.5), Fixed("strong", [plain], 0.9, ("odd", "even"))]
    assistant = Assistant(drafters, budget=8, reroute=False)
    with assistant.record() as record:
        run(llama, assistant=assistant)
    step = record.calls[0].steps[1]
    assert [[w.origin for w in named] for named in step.witnesses] == [
        ["odd", "weak one"],
        ["even", "weak one"],
        ["odd", "weak one"],
    ]
    assert step.credits == ["odd", "even", "odd", MODEL]
    assert step.witnesses[1][1].prob == near(0.25)
    assert record.origins == ["weak one", "odd", "even", "grammar", MODEL]


def test_origins_of_the_memory_and_the_text(llama):
    assistant = remembering(budget=16, fallback=None)
    run(llama, assistant=assistant)
    with assistant.record() as record:
        run(llama, assistant=assistant)
    by_origin = record.by_origin()
    assert by_origin["memory"][2] > NEW_TOKENS // 2
    assert set(by_origin) == {"text", "memory", "grammar", MODEL}
    assert by_origin["grammar"][2] == 0


def test_rows_of_a_batch_have_texts_of_their_own(llama):
    """What they write while they wait for each other, to be cut to one length, is left out."""
    rows = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(rows)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = llama.generate(rows, **options)
    assistant = SamAssistant(budget=8)
    with assistant.record() as record:
        llama.generate(rows, **options, assistant=assistant)
    (call,) = record.calls
    assert call.prompts[1].tolist() == rows[1, 3:].tolist()
    for row in range(2):
        assert call.generated(row).tolist() == plain[row, rows.shape[1] :].tolist()
        assert len(call.credits(row)) == 12
        assert len({step.forward for step in call.of_row(row)}) == len(call.of_row(row))
    assert "row 1" in record._repr_html_()


@pytest.mark.parametrize("model_class", [GPT2LMHeadModel, OpenAIGPTLMHeadModel])
def test_other_tiers_are_recorded_too(model_class):
    model = build(model_class)
    plain = run(model)
    assistant = knowing(plain)
    with assistant.record() as record:
        run(model, assistant=assistant)
    assert record.calls[0].generated(0).tolist() == plain[0, PROMPT.shape[1] :].tolist()
    accepted = sum(len(step.accepted) for step in record.steps)
    assert (accepted > 0) == (record.calls[0].stats.tier != "plain")
    assert record._repr_html_()


def test_calls_are_recorded_by_their_own_records_alone(llama):
    """Not those of other assistants, after the block, or of private twins."""
    assistant, other = SamAssistant(), SamAssistant()
    with assistant.record() as outer, assistant.record() as inner:
        run(llama, assistant=other)
        in_threads(lambda one: run(llama, assistant=one), [assistant])
    run(llama, assistant=assistant)
    assert len(outer) == len(inner) == 1
    assert outer.calls == inner.calls
    private, heard = assistant.private(), []
    with assistant.record() as record, private.expecting([1, 2]).record() as own:
        run(llama, assistant=private)
        run(llama, assistant=private.expecting([3, 4]))
        run(llama, assistant=assistant.private())
    assert (len(record), len(own)) == (0, 2)
    with assistant.record(on_step=heard.append) as record:
        run(llama, assistant=assistant.expecting([1, 2]))
    assert len(record) == 1
    assert heard == record.calls[0].steps


def test_json_and_print_hold_everything(recorded):
    text, record, assistant = recorded
    (call,) = json.loads(record.to_json())["calls"]
    assert call["generated"] == [text]
    assert call["credits"] == [record.calls[0].credits(0)]
    assert sum(len(step["accepted"]) for step in call["steps"]) == assistant.stats.last.accepted
    for step in call["steps"]:
        assert all(node["parent"] < i for i, node in enumerate(step["tree"]))
        assert all(node["named_by"] for node in step["tree"])
    lines = str(record).splitlines()
    assert any(line.startswith("corpus") for line in lines)
    assert not any(line.startswith("grammar") for line in lines)  # it brought no token
    assert lines[-1].split() == [*MODEL.split(), str(record.by_origin()[MODEL][2])]
    with SamAssistant().record() as record:
        pass
    assert Page(record.to_html()).tags >= {"html", "table"}
    assert json.loads(record.to_json())["calls"] == []
    assert str(record).startswith("no call yet\n")


class Page(HTMLParser):
    """Every tag that opens must close; scripts and addresses have no place."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], set(), []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


class Evil:
    """A tokenizer for which every token is markup."""

    def decode(self, ids, **_):
        return "".join(f"<script>alert({token})</script>&amp;\x1b[2J\u202e" for token in ids)


def test_a_page_shows_each_token_and_the_verified_trees(recorded, monkeypatch):
    """And escapes what models write."""
    text, record, _ = recorded
    shown = record._repr_html_()
    Page(shown)
    assert shown.count('class="tok"') == len(text)
    assert shown.count('class="panel"') == len(record.calls[0].steps)
    assert shown.count('class="node hit"') > 0
    record.tokenizer = Evil()
    try:
        page = Page(record.to_html())
    finally:
        record.tokenizer = None
    assert "script" not in page.tags
    shown = "".join(page.text)
    assert "<script>alert(" in shown
    assert "&amp;" in shown
    assert not {"\x1b", "\u202e"} & {*shown}
    monkeypatch.setattr(html, "_MOST_STEPS", 1)
    short = record._repr_html_()
    assert short.count('class="panel"') == 2
    assert "The first 1 have one." in short


def test_pieces_join_to_the_text():
    _, tokenizer = small_model()
    text = "naïve 日本 🙂\n end"
    ids = tokenizer(text)["input_ids"]
    pieces = text_pieces(tokenizer, ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids)
    assert pieces.count("") == len(ids) - len(text)
    assert text_pieces(tokenizer, ids[:3])[-1].endswith("\ufffd")
    assert text_pieces(tokenizer, ids[4:], ids[:4])[0] == text_pieces(tokenizer, ids)[4]
    assert readable("a\tb\n é日") == "a\tb\n é日"
    assert readable("\x1b[0m\x00\x7f\r") == "�[0m���"
