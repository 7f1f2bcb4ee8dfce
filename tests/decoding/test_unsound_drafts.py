"""A drafted token whose forward is not finite costs time, and never a token: 0 times NaN is NaN, so
it reaches what a mask hides it from."""

import pytest
import torch

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.lossless import PROMPT, build, knowing, run, same
from tests.support.oracle_drafter import OracleDrafter, oracle_assistant
from tests.support.quick import cases, crossed

MODELS = {
    "tree": build,
    "windows": lambda: build("Gemma3ForCausalLM"),
    "indexed": lambda: build("GlmMoeDsaForCausalLM", index_topk=24, index_n_heads=16),
    "chain": lambda: build("BartForCausalLM"),
    "convolution": lambda: build("Lfm2ForCausalLM"),
    "replay": lambda: build("Qwen3NextForCausalLM"),
}
ROWS = torch.cat([PROMPT, PROMPT.roll(3, 1), PROMPT.flip(1)])


class Poisoned(OracleDrafter):
    """Drafts true tokens, one that poisons, and true ones behind and beside it."""

    def __init__(self, texts, poison):
        super().__init__(texts)
        self.poison, self.drafts = poison, 0

    def draft(self, coming, budget):
        self.drafts += 1
        if len(coming) < 2 or self.drafts % 2 == 0:
            return TokenTree.chain(coming[:2], [0.9] * len(coming[:2]))
        tokens = [coming[0], self.poison, coming[1]]
        return TokenTree.build(tokens, [-1, 0, 0], [0.9, 0.8, 0.8])


# Recurrent states of a batch would only go back together, so that none is drafted for.
DRAFTED = [case for case in crossed(MODELS, [1, 3]) if case != ("replay", 3)]


@pytest.mark.parametrize(("name", "rows"), cases(DRAFTED, [("tree", 1), ("convolution", 1)]))
def test_tokens_and_later_calls_are_plain(name, rows):
    model = MODELS[name]()
    ids = ROWS[:rows]
    plain, _, _ = same(model, ids)  # passes the model's test
    # A token that plain decoding never writes nor is given.
    poison = min({*range(model.config.vocab_size)} - {*plain.flatten().tolist()})
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    assert run(model, ids).tolist() == plain.tolist()
    assistant = Assistant([Poisoned(plain.tolist(), poison)], budget=8)
    options = {"assistant": assistant, "return_dict_in_generate": True}
    first = run(model, ids, **options)
    assert first.sequences.tolist() == plain.tolist()
    assert assistant.stats.last.accepted > 0
    assert assistant.stats.last.forwards > assistant.stats.last.steps / rows
    longer = run(model, plain)
    cache = first[CACHE]
    held = [x for layer in cache.layers for x in vars(layer).values() if torch.is_tensor(x)]
    assert all(states.isfinite().all() for states in held)
    again = run(model, plain, **{CACHE: cache}) if name != "replay" else run(model, plain)
    assert again.tolist() == longer.tolist()


def test_a_text_that_is_not_finite_itself_is_drafted_for_no_more(told):
    """Plain decoding writes token 0 from there on."""
    model = build()
    text, _, _ = same(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[text[0, 20]] = torch.nan
    plain, _, assistant = same(model, assistant=oracle_assistant)
    assert assistant.stats.last.forwards < 2 * plain.shape[1]
    assert told.text.count("were not finite") == 1


# The tiers: tree, chain, convolutions, replay.
RAISING = ["LlamaForCausalLM", "BartForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM"]


@pytest.mark.parametrize(("name", "rows"), cases(crossed(RAISING, [3, 1]), 1))
def test_a_forward_that_raises_over_a_draft_is_repeated_without(name, rows, told):
    model = build(name)
    ids = torch.cat([PROMPT, PROMPT.flip(1), PROMPT.roll(3, 1)])[:rows]
    plain = run(model, ids)
    run(model, ids, assistant=knowing(plain))
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))

    def expect_one(module, args):
        if args[0].shape[-2] not in (1, ids.shape[1]):
            raise ValueError("expected one token")

    blocks[1].register_forward_pre_hook(expect_one)
    assistant = SamAssistant(plain.tolist(), budget=4, trust_forward=True)
    assert run(model, ids, assistant=assistant).tolist() == plain.tolist()
    assert assistant.stats.last.accepted == 0
    assert "expected one token" in told.text
    # Rows that are left when others have ended are not fed behind one another either.
    late = plain[0, -3].item()
    options = {"eos_token_id": late, "return_dict_in_generate": True}
    shorter = run(model, ids, **options).sequences
    for helper in (assistant, SamAssistant()):
        found = run(model, ids, **options, assistant=helper).sequences
        assert found.tolist() == shorter.tolist()
