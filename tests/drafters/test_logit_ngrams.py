"""What texts teach the table of logit n-grams, and whose it is."""

import numpy as np
import pytest
import torch
import transformers
from transformers import LogitsProcessorList

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.decoding.selection import RowPreview, TokenSelector
from hf_retrieval_assist.drafters import logit_ngrams
from hf_retrieval_assist.drafters.base import Feedback, Target
from hf_retrieval_assist.drafters.call_view import CallView, Law
from hf_retrieval_assist.drafters.logit_ngrams import LogitNgramDrafter
from hf_retrieval_assist.memory import output_memory
from hf_retrieval_assist.structures.logit_ngrams import BLIND, CLASS_SHAPE, GREEDY, RACED
from hf_retrieval_assist.types.row_text import RowText
from hf_retrieval_assist.verification.verified import TopLogits
from tests.support.lossless import build, run
from tests.support.one_text import OneText
from tests.support.trees import ids, paths

CPU = torch.device("cpu")
VOCAB = 60


def target(fingerprint="a", vocab_size=VOCAB, **others):
    return Target(vocab_size, CPU, fingerprint, **others)


def preferring(*tokens):
    """Logits whose likeliest tokens are these, one a row."""
    logits = torch.zeros(len(tokens), VOCAB)
    logits[range(len(tokens)), list(tokens)] = 9.0
    return logits


def feed(session, fed, likely, committed, parents=None, accepted=None):
    n = len(fed)
    parents = range(-1, n - 1) if parents is None else parents
    accepted = range(n) if accepted is None else accepted
    top = TopLogits(preferring(*likely))
    session.commit(committed, Feedback(ids(*fed), ids(*accepted), ids(*parents), top=top))


def first(session):
    """The likeliest next token, and how many tokens of context told it; None: nothing did."""
    tree = session.propose(1)
    order = np.unravel_index(tree.classes, CLASS_SHAPE)[1]
    return (int(tree.token_ids[0]), int(order[0])) if len(tree) else None


def test_rejected_nodes_and_prompts_are_learnt_on_their_own_paths():
    drafter = LogitNgramDrafter()
    session = OneText(drafter, [1, 2, 3, 4], target())
    assert first(session) is None
    feed(session, (3, 4), (30, 31), [5])  # the last rows of the prompt
    feed(session, (5, 6, 7, 8), (32, 33, 34, 35), [6, 9], parents=(-1, 0, 1, 0), accepted=(0, 1))
    for text, expected in (
        ((1, 2, 3), (30, 3)),
        ((1, 2, 3, 4), (31, 4)),
        ((2, 3, 4, 5), (32, 4)),
        ((4, 5, 6, 7), (34, 4)),
        ((3, 4, 5, 8), (35, 4)),
        ((9, 8), (35, 1)),
    ):
        other = OneText(drafter, [*text], target())
        other.read_prompt(0)
        assert first(other) == expected
    session.commit([6, 7], None)  # without logits nothing is known of the last one's place
    assert first(session) == (34, 2)


def test_rows_of_a_batch_teach_as_they_do_one_by_one(monkeypatch):
    """Each row feeds tokens of its own, and `_MOST_REJECTED` bounds every row by itself."""
    monkeypatch.setattr(logit_ngrams, "_MOST_REJECTED", 2)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((15, VOCAB), dtype=np.float32))
    fed = rng.permutation(VOCAB)[:15].astype(np.int32)
    parts = [np.arange(0, 6), np.arange(6, 8), np.arange(8, 15)]
    accepted, known = [ids(0, 3), ids(0), ids(0, 5)], []
    for together in (True, False):
        drafter = LogitNgramDrafter()
        sessions = [
            OneText(drafter, [row, fed[part[0]]], target()) for row, part in enumerate(parts)
        ]
        for session in sessions:
            session.read_prompt(0)
        tops = [TopLogits(logits, part) if together else TopLogits(logits[part]) for part in parts]
        feedbacks = [
            Feedback(fed[part], right, np.array([-1] + [0] * (len(part) - 1), np.int32), top=top)
            for part, right, top in zip(parts, accepted, tops, strict=True)
        ]
        tokens = [[7]] * 3
        if together:
            drafter.commit([one.session for one in sessions], tokens, feedbacks)
        else:
            for session, given, feedback in zip(sessions, tokens, feedbacks, strict=True):
                session.commit(given, feedback)
        texts = [OneText(drafter, [token], target()) for token in range(VOCAB)]
        for text in texts:
            text.read_prompt(0)
        known.append([paths(text.propose(20)) for text in (*texts, *sessions)])
    assert known[0] == known[1]
    # Roots, two rejected ones of the first and the third row, the second's only one, accepted ones.
    assert sum(map(bool, known[0][:VOCAB])) == (1 + 2 + 1) + 2 + (1 + 2 + 1)


@pytest.mark.parametrize(
    "changes", [{"learn": False}, {"expected": (ids(3, 7, 5),)}, {"forms": "of a schema"}]
)
def test_a_text_in_confidence_teaches_itself_alone(changes):
    drafter = LogitNgramDrafter()
    feed(OneText(drafter, [1], target()), (1,), (8,), [1])
    private = OneText(drafter, [2], target(**changes))
    feed(private, (2,), (9,), [1])
    assert first(private) == (8, 1)
    private.commit([2], None)
    assert first(private) == (9, 1)
    other = OneText(drafter, [2], target())
    other.read_prompt(0)
    assert first(other) is None


def test_tables_are_a_models_and_a_tenants_and_go_with_the_memory():
    memory = OutputMemory()
    tenants = [memory, memory.namespace("a"), memory.namespace("b")]

    def known(place, fingerprint="m", drafter=None):
        session = OneText(drafter or LogitNgramDrafter(place), [1], target(fingerprint))
        session.read_prompt(0)
        return first(session)

    for token, place in enumerate(tenants):
        feed(OneText(LogitNgramDrafter(place), [1], target("m")), (1,), (20 + token,), [5])
    assert [known(place) for place in tenants] == [(20, 1), (21, 1), (22, 1)]
    assert known(memory, "other model") is None
    tenants[1].forget()
    assert [known(place) for place in tenants] == [(20, 1), None, (22, 1)]
    memory.forget()
    assert [known(place) for place in tenants] == [None] * 3
    for number in range(output_memory._MOST_TABLES):  # the one in use stays
        other = memory.namespace(f"tenant {number}")
        feed(OneText(LogitNgramDrafter(other), [1], target("m")), (1,), (30,), [5])
        OneText(LogitNgramDrafter(tenants[2]), [1], target("m"))
    assert len(memory._tables) == output_memory._MOST_TABLES
    assert known(memory.namespace("tenant 0")) is None
    assert known(memory.namespace("tenant 9")) == (30, 1)
    own = LogitNgramDrafter()
    feed(OneText(own, [1], target("m")), (1,), (20,), [5])
    assert known(None, "m", own) == (20, 1)
    own.memory.forget()
    assert known(None, "m", own) is None


WARPERS = [
    transformers.TemperatureLogitsWarper(0.8),
    transformers.TopKLogitsWarper(20),
    transformers.TopPLogitsWarper(0.9),
    transformers.MinPLogitsWarper(0.05),
]


@pytest.mark.parametrize(("count", "vocab_size"), [(1, VOCAB), (2, 9000)])
@pytest.mark.parametrize("do_sample", [True, False])
def test_drafts_know_the_draws_that_they_will_be_judged_by(count, vocab_size, do_sample):
    """Rows get on at their own pace."""
    rows = [RowText(i, torch.tensor([2]), 20) for i in range(count)]
    for row in rows:
        row.generated.append(1)
    select = TokenSelector(LogitsProcessorList(WARPERS if do_sample else []), do_sample, rows)
    previews = [RowPreview(select, row) for row in rows]
    drafter = LogitNgramDrafter()
    sessions = [
        OneText(drafter, [1], target(vocab_size=vocab_size, call=CallView(preview)))
        for preview in previews
    ]
    logits = torch.full((VOCAB, vocab_size), -100.0)
    logits[:, :VOCAB] = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(3)) * 2
    for session in sessions:
        session.read_prompt(0)
        for token in range(VOCAB):
            top = TopLogits(logits[token][None])
            session.commit([1], Feedback(ids(token), ids(0), ids(-1), top=top))
    torch.manual_seed(5)
    [token] = select.choose(rows[:1], logits[1][None])  # from now on it is known what is drawn from
    rows[0].generated.append(token)
    sessions[0].commit([token], None)
    assert not previews[0].ahead(vocab_size + 1, 3)
    for size in (vocab_size, vocab_size - 1):
        assert len(previews[0].ahead(size, 3)) == (3 if do_sample else 0)
    assert select.draws.anchors <= 1
    modes, hits, tried = set(), 0, 0
    for step in range(12):
        trees = drafter.propose([one.session for one in sessions], [6] * count)
        for tree, row, session in zip(trees, rows, sessions, strict=True):
            modes |= {int(kind) for kind in np.unravel_index(tree.classes, CLASS_SHAPE)[0]}
            if row.index and step % 3 == 0:
                continue
            [token] = select.choose([row], logits[row.last][None])
            hits += int(tree.token_ids[tree.parents < 0][0]) == token
            tried += 1
            row.generated.append(token)
            session.commit([token], None)
    assert modes == {RACED if do_sample else GREEDY}
    assert hits >= (0.7 * tried if do_sample else tried)
    assert previews[0].law == (Law(0.8, 20, 0.9, 0.05) if do_sample else Law())


def test_draws_that_nobody_knows_leave_what_is_likeliest(monkeypatch):
    row = RowText(0, torch.tensor([1]), 20)
    preview = RowPreview(TokenSelector(LogitsProcessorList(WARPERS), True, [row]), row)
    monkeypatch.setattr(type(preview.select.draws), "works", lambda self, size: False)
    session = OneText(LogitNgramDrafter(), [1], target(call=CallView(preview)))
    feed(session, (1,), (8,), [1])
    tree = session.propose(2)
    assert tree.token_ids[0] == 8
    assert np.unravel_index(tree.classes, CLASS_SHAPE)[0].tolist() == [BLIND] * len(tree)


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_wider_than_the_vocabulary_keep_the_seed(rows):
    """Columns that fill an output layer up are never drawn, but have random numbers."""
    model, prompt = build(), torch.arange(3, 15)[None]
    wide = torch.nn.Linear(model.config.hidden_size, 4400)
    torch.nn.init.constant_(wide.bias, -1e4)
    with torch.no_grad():
        wide.weight[: model.config.vocab_size] = model.lm_head.weight
        wide.bias[: model.config.vocab_size] = 0.0
    model.lm_head = wide
    options = {"do_sample": True, "temperature": 0.7, "num_return_sequences": rows}
    for seed in range(3):
        plain = run(model, prompt, seed, max_new_tokens=24, **options)
        state = torch.get_rng_state()
        assistant = SamAssistant(fallback="logit_ngrams", budget=6)
        found = run(model, prompt, seed, max_new_tokens=24, assistant=assistant, **options)
        assert torch.equal(found, plain)
        assert torch.equal(torch.get_rng_state(), state)
        assert assistant.stats.last.keeps_seed
