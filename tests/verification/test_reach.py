"""Models that make something else of a position when others are fed beside it."""

from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.reach import Reach
from hf_retrieval_assist.verification.service import choose_service
from tests.support.lossless import build, prompts_of, rope_model
from tests.support.oracle_drafter import oracle_assistant
from tests.support.watching import a_librarys

ORIGINAL = 32


def phi3():
    return rope_model("longrope", ORIGINAL, "Phi3ForCausalLM")


def prepares(longest=None, **lengths):
    """A model that prepares its inputs itself, and drops its cache behind a length, if any."""
    model = build(**lengths)

    class Prepares(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, ids, **options):
            if longest is not None and ids.shape[1] > longest:
                options |= {CACHE: None}
            return super().prepare_inputs_for_generation(ids, **options)

    Prepares.prepare_inputs_for_generation = a_librarys(Prepares.prepare_inputs_for_generation)
    model.__class__ = Prepares
    return model


@pytest.mark.parametrize(
    ("make", "reach"),
    [
        (partial(rope_model, "default", ORIGINAL), Reach()),
        (partial(rope_model, "yarn", ORIGINAL), Reach()),
        (partial(rope_model, "longrope", ORIGINAL), Reach(borders=(ORIGINAL,))),
        (partial(rope_model, "dynamic", ORIGINAL), Reach(apart_from=ORIGINAL)),
        (phi3, Reach(borders=(ORIGINAL,), restart=ORIGINAL + 1)),
        (partial(prepares, 40, max_context_length=40), Reach(restart=41)),
        # An original length says nothing by itself.
        (partial(prepares, original_max_position_embeddings=ORIGINAL), Reach()),
    ],
)
def test_borders_and_lengths_at_which_the_cache_is_dropped_are_found(make, reach):
    assert choose_service(make(), {}).reach == reach


@pytest.mark.parametrize(
    ("lengths", "new", "tier"),
    [
        *(([14], 40, "plain"), ([14], 12, "tree"), ([40], 20, "plain")),
        # A forward of many rows feeds more tokens than the length at which the cache is dropped.
        *(([14, 11, 6], 30, "plain"), ([14, 11, 6] * 4, 14, "tree")),
    ],
)
def test_a_cache_that_the_model_drops(lengths, new, tier):
    model = phi3()
    for seed in range(2):
        options = prompts_of(lengths, seed) | {"max_new_tokens": new, "do_sample": False}
        plain = model.generate(**options)
        for assistant in (oracle_assistant(plain, options["attention_mask"]), SamAssistant()):
            assert torch.equal(plain, model.generate(**options, assistant=assistant))
            # Where this was written; older versions may be served more cautiously.
            if Version(transformers.__version__) >= Version("5.23"):
                assert assistant.stats.last.tier == tier


@pytest.mark.parametrize(
    ("model_class", "end"),
    [
        ("GPT2LMHeadModel", 128),
        ("RobertaForCausalLM", 127),
        ("BartForCausalLM", 128),
    ],
)
def test_drafts_end_at_a_table_of_positions(model_class, end):
    """Plain decoding goes on to the table's last position and ends there by its end token."""
    model = build(model_class)
    assert choose_service(model, {}).reach.end == end
    ids = torch.tensor([([5, 9, 33, 21, 60, 7, 44] * 18)[: end - 12]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    given["forced_eos_token_id"] = None
    free = model.generate(**given, max_new_tokens=12)[0].tolist()
    eos = None if free[-1] in free[end - 12 : -1] else free[-1]
    given |= {"max_new_tokens": 200 if eos is not None else 12, "eos_token_id": eos}
    plain = model.generate(**given)
    for budget in (4, 16):
        assistant = SamAssistant([*plain.tolist(), free * 2], budget=budget)
        assert model.generate(**given, assistant=assistant).tolist() == plain.tolist()
        assert assistant.stats.last.accepted > 0
