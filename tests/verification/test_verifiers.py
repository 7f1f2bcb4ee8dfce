"""Rows of a batch behind one another in a forward give what padded rows give, for less."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.cache.kv_cache import SlotCache
from hf_retrieval_assist.cache.states import SavedStates
from hf_retrieval_assist.engines.cpu.screened import ScreenedVerified
from hf_retrieval_assist.engines.cpu.skinny import FEW_ROWS, MAX_ROWS
from hf_retrieval_assist.engines.cpu.tree_verifier import CpuTreeVerifier
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.types.row_text import RowText
from hf_retrieval_assist.types.token_tree import Forest, TokenTree
from hf_retrieval_assist.verification import verified
from hf_retrieval_assist.verification.engine import engine_of
from hf_retrieval_assist.verification.largest import host_scores
from hf_retrieval_assist.verification.options import CallOptions
from hf_retrieval_assist.verification.service import choose_service
from hf_retrieval_assist.verification.tiers import Service, Tier
from hf_retrieval_assist.verification.tree_attention import layer_masks, single_mask
from hf_retrieval_assist.verification.tree_verifier import TreeVerifier
from hf_retrieval_assist.verification.verified import TopLogits, Verified
from hf_retrieval_assist.verification.verifier import ForwardScope
from tests.support.lossless import build, prompts_of
from tests.support.oracle_drafter import oracle_assistant
from tests.support.scripted import Scripted
from tests.support.watching import fed_shapes

ROWS, LENGTH = 4, 11


def arguments(pads):
    given = prompts_of([LENGTH - pads * (3 * row % 7) for row in range(ROWS)], seed=1)
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return given.pop("input_ids"), given | {"position_ids": positions, "use_cache": True}


def started(model, packed, pads, tier=Tier.TREE):
    """A verifier behind a prefill, and rows of one generated token."""
    config = model.config.get_text_config(decoder=True)
    ids, kwargs = arguments(pads)
    kwargs[CACHE] = cache = SlotCache(config)
    model(input_ids=ids, **kwargs)
    cache.begin(ROWS)
    rules = layer_masks(config) or single_mask(config)
    service = Service(tier, "", rules, packed=packed)
    engine = engine_of(ids.device)
    given = model, cache, kwargs, ids, service, CallOptions(), ForwardScope()
    verifier = engine.verifier(*given)
    verifier.prepare()
    rows = [RowText(row, ids[row], 32) for row in range(ROWS)]
    for row in rows:
        row.generated.append(7 + row.index)
    return verifier, rows


def run(model, ids, mask, assistant=None, **options):
    return model.generate(
        ids, attention_mask=mask, do_sample=False, pad_token_id=0, assistant=assistant, **options
    )


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Gemma3ForCausalLM"])
def model(request):
    return build(request.param)


def ending(model, pads=True):
    """A batch whose rows end at different tokens, and what ends them."""
    ids, kwargs = arguments(pads)
    free = run(model, ids, kwargs["attention_mask"], max_new_tokens=30, eos_token_id=None)
    new = free[:, LENGTH:].tolist()
    eos = [new[0][3], new[1][8]]
    return ids, kwargs["attention_mask"], {"max_new_tokens": 30, "eos_token_id": eos}


@pytest.mark.parametrize("pads", [False, True])
def test_rows_that_have_ended_leave(model, pads):
    """Padded or not: `generate` may drop a mask that hides nothing, and with it the number of
    rows."""
    ids, mask, options = ending(model, pads)
    plain = run(model, ids, mask, **options)
    assistant = oracle_assistant(plain, mask)
    run(model, ids, mask, assistant, **options)
    assistant = oracle_assistant(plain, mask)
    with fed_shapes(model) as shapes:
        assisted = run(model, ids, mask, assistant, **options)
    assert torch.equal(plain, assisted)
    steps = shapes[1:]
    # Side by side while all are there and fed equally much.
    assert {rows for rows, _ in steps} <= {1, ROWS}
    assert steps[-1][0] == 1
    # Every root and every node once, and nothing else.
    stats = assistant.stats.last
    assert sum(rows * tokens for rows, tokens in steps) == stats.steps + stats.drafted
    assert stats.steps < ROWS * len(steps)
    assert stats.accepted > 0


def test_a_cache_goes_on_from_a_forward_that_could_not_begin(model, monkeypatch):
    def without_memory(*arguments):
        raise MemoryError

    ids, mask, options = ending(model)
    plain = run(model, ids, mask, **options)
    run(model, ids, mask, oracle_assistant(plain, mask), **options)  # the model passes its test
    cache = DynamicCache(config=model.config)
    assistant = oracle_assistant(plain, mask)
    with monkeypatch.context() as patched:
        patched.setattr(CpuTreeVerifier, "_feed_packed", without_memory)
        # It goes on without drafts, rows side by side.
        assert torch.equal(plain, run(model, ids, mask, assistant, **options))
        patched.setattr(TreeVerifier, "_feed", without_memory)
        with pytest.raises(MemoryError):
            run(model, ids, mask, assistant, **{CACHE: cache}, **options)
    length = cache.get_seq_length() + 1
    assert LENGTH < length < plain.shape[1]
    mask = torch.cat([mask, mask.new_ones(ROWS, length - LENGTH)], dim=1)
    options["max_new_tokens"] = plain.shape[1] - length
    expected = run(model, plain[:, :length], mask, **options)
    assert torch.equal(expected, run(model, plain[:, :length], mask, **{CACHE: cache}, **options))


def served(model, rows=ROWS, **inputs):
    """How a padded batch is."""
    mask = arguments(True)[1]["attention_mask"][ROWS - rows :]
    return choose_service(model, {"attention_mask": mask} | inputs, rows)


def test_what_is_packed(model):
    assert served(model).packed
    # One row has nothing to pack; of other inputs nobody knows what they say of which row.
    assert not served(model, rows=1).packed
    assert not served(model, row_scales=torch.ones(ROWS)).packed
    eager = build(type(model).__name__, attn_implementation="eager")
    assert (served(eager).tier, served(eager).packed) == (Tier.TREE, False)


def many(budget):
    """All nodes that are asked for, in chains below the root."""
    return TokenTree.build(
        [3 + node % 50 for node in range(budget)],
        [node - 50 if node >= 50 else -1 for node in range(budget)],
        [0.9] * budget,
    )


@pytest.mark.parametrize(
    ("dtype", "rows", "rerouted", "limited"),
    [
        (torch.bfloat16, 1, True, True),
        (torch.bfloat16, ROWS, True, True),
        (torch.bfloat16, 1, False, False),
        (torch.float32, 1, True, False),
        (torch.bfloat16, FEW_ROWS + 1, True, False),
    ],
)
def test_half_precision_is_fed_what_the_kernels_serve(dtype, rows, rerouted, limited):
    """A token beyond that would not round as in plain decoding by the same kernels."""
    model = build().to(dtype)
    ids = arguments(False)[0][:1].repeat(rows, 1)
    assistant = Assistant([Scripted(many)], budget=100, reroute=rerouted)
    options = {"do_sample": False, "assistant": assistant}
    # The self-test, which is of any width, comes first.
    model.generate(ids, max_new_tokens=1, **options)
    with fed_shapes(model) as shapes:
        model.generate(ids, max_new_tokens=6, **options)
    fed = [batch * tokens for batch, tokens in shapes if tokens != LENGTH or batch == 1]
    assert (max(fed) <= MAX_ROWS) == limited
    assert assistant.stats.last.drafted > 0


@pytest.mark.parametrize("packed", [False, True])
def test_limits_are_those_of_one_forward(packed):
    verifier, rows = started(build(), packed, False)
    limits = verifier.limits(rows, rows, [None] * ROWS)
    assert (limits.nodes, limits.total, limits.packed) == (verifier.most_fed - 1, None, packed)
    verifier.most_tokens = 65
    limits = verifier.limits(rows, rows, [None] * ROWS)
    assert limits.total == (65 - ROWS if packed else None)
    assert packed or limits.nodes == 65 // ROWS - 1


@pytest.mark.parametrize(("most_fed", "most_tokens"), [(8, None), (1 << 30, 8 * ROWS)])
@torch.no_grad()
def test_tokens_that_wait_to_be_fed_leave_less_room_for_drafts(most_fed, most_tokens):
    verifier, rows = started(build(), False, False, Tier.CHAIN)
    verifier.most_fed, verifier.most_tokens = most_fed, most_tokens
    rows[1].generated += [8, 9, 10]
    limits = verifier.limits(rows, rows, [None] * ROWS)
    assert (limits.nodes, limits.backlog) == (4, 3)
    nodes = limits.nodes
    trees = Forest.of([TokenTree.chain([5] * nodes, [0.5] * nodes)] * ROWS)
    assert verifier.forward(rows, trees).width == 8
    # Nothing is drafted where what waits fills the forward.
    rows[1].generated += [11] * 9
    assert verifier.limits(rows, rows, [None] * ROWS).nodes == 0


def test_a_long_backlog_of_a_recurrence_is_fed_without_drafts():
    """It bounds how many tokens replaying adds to a forward; tokens would be the same without."""
    saved = SavedStates(Mock(layers=[SimpleNamespace(total=torch.tensor(10.0))]))
    for tokens, full in ((15, False), (16, True), (20, True)):
        saved.begin(undo=True)
        saved.keep(tokens, tokens + 1)
        assert saved.full == full
    saved.begin(undo=False)
    saved.keep(20, 20)
    assert not saved.full


@pytest.mark.parametrize("on_host", [False, True])
def test_tokens_of_several_rows_are_looked_at_as_one(on_host, monkeypatch):
    """And without what fills the vocabulary up."""
    monkeypatch.setattr(verified, "_CHUNK_CELLS", 60)
    logits = torch.randn(9, 30)
    logits[:, 25:] = 100
    best = logits[:, :25].topk(4)
    given, ids = (best.values.numpy(), best.indices.numpy()) if on_host else (logits, None)
    parts = (np.arange(1, 3), np.arange(4, 5), np.arange(5, 9))
    first, *others = (TopLogits(given, part, ids) for part in parts)
    top = first.joined(others)
    assert (len(top), len(TopLogits(given, ids=ids))) == (7, 9)
    for nodes, places in (([0, 2, 3, 6], [1, 4, 5, 8]), ([], [])):
        expected = logits[places, :25].topk(3)
        found = top.of(np.array(nodes, np.int64), 3, 25)
        np.testing.assert_array_equal(found[0], expected.indices)
        np.testing.assert_array_equal(found[1], expected.values)
    with pytest.raises(ValueError, match="one forward"):
        first.joined([TopLogits(logits.clone())])


@pytest.mark.parametrize("screened", [False, True])
def test_a_forward_tells_those_of_a_rows_tokens_in_their_order(screened):
    """The second of two rows of five tokens has its root behind a pending token; a screen's logits
    have not been rounded to the model's dtype."""
    logits = torch.stack([torch.randperm(30) for _ in range(10)]).view(2, 5, 30).bfloat16()
    near = torch.randn(10, 30)
    verified = Verified(logits, [0, 1], None)
    if screened:
        verified = ScreenedVerified(verified, SimpleNamespace(scores=host_scores(near)))
    expected = (near[6:9] if screened else logits[1, 1:4].float()).topk(3)
    ids, values = verified.top(1, 2).of(np.arange(3), 3, 30)
    assert (ids == expected.indices.numpy()).all()
    assert (values == expected.values.numpy()).all()
