"""The real libraries: what they force, and calls under their processors, which are plain's."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList

from hf_retrieval_assist import SamAssistant, TokenTree
from hf_retrieval_assist.extensions.structured.constraint import constraint_of
from tests.support.lossless import build, run
from tests.support.watching import Spectator

from .libraries import EOS, LIBRARIES, SCHEMA, VOCABULARY, Counted, xgrammar_processor

# llguidance says so of rows that have ended, with an assistant and without.
pytestmark = pytest.mark.filterwarnings("ignore:Error in LLMatcher")

PROMPT = [5, 6, 7]
SAMPLING = {
    "greedy": {},
    "seeded": {"do_sample": True, "top_k": 8, "seed": 3},
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}
OTHER = {"type": "array", "items": {"enum": [10, 100]}, "minItems": 2, "maxItems": 3}
ROWS = [SCHEMA, OTHER, {"const": "count"}, {"type": "boolean"}]


@pytest.fixture(scope="module")
def model():
    return build(LlamaForCausalLM, vocab_size=len(VOCABULARY))


def call(model, make, assistant=None, rows=1, **options):
    """A call under a new processor, and the texts that the processor saw."""
    processor = Counted(make())
    options = {
        "ids": torch.tensor([PROMPT] * rows),
        "max_new_tokens": 24,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "logits_processor": LogitsProcessorList([processor]),
    } | options
    return run(model, assistant=assistant, **options), processor.texts


def assert_plains(model, make, **options):
    assistant = SamAssistant(budget=8)
    plain, seen = call(model, make, **options)
    ours, seen_by_ours = call(model, make, assistant, **options)
    assert torch.equal(plain, ours)
    assert seen_by_ours == seen
    # A processor of others may follow all rows of a batch, which is plain then.
    assert (assistant.stats.last.accepted > 0) == (options.get("rows", 1) == 1)
    return ours


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("library", LIBRARIES)
def test_batches(model, library, sampling, rows):
    assert_plains(model, LIBRARIES[library], rows=rows, **SAMPLING[sampling])
    if (sampling, rows) == ("greedy", 1):
        plain, ours = Spectator(), Spectator()
        call(model, LIBRARIES[library], streamer=plain)
        call(model, LIBRARIES[library], SamAssistant(budget=8), streamer=ours)
        assert ours.sent == plain.sent


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_constraint_for_each_row_and_rows_that_end_early(model, sampling):
    """Too few grammars are the library's to refuse, and a processor without one has none."""
    found = assert_plains(model, lambda: xgrammar_processor(*ROWS), rows=4, **SAMPLING[sampling])
    lengths = (found[:, len(PROMPT) :] != 0).sum(1)
    assert lengths.max() > lengths.min()
    for assistant in (None, SamAssistant(budget=8)):
        with pytest.raises(AssertionError, match="number of compiled grammars"):
            call(model, lambda: xgrammar_processor(*ROWS[:2]), assistant, rows=4)
    for grammars in ([None], []):
        processor = SimpleNamespace(index=3, grammar="x", compiled_grammars=grammars)
        assert constraint_of([processor], 0) is None


HOSTILE = {
    "empty": {},
    "recursive": {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "enormous": {
        "properties": {f"key {n}": {"const": n} for n in range(40)},
        "required": [f"key {n}" for n in range(40)],
        "additionalProperties": False,
    },
    "contradictory": {"type": "string", "minLength": 3, "maxLength": 1},
    "impossible": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "no choice": {"enum": []},
    "no such type": {"type": "nothing"},
}


def outcome(model, make, assistant=None):
    """The output and what the processor saw, or what the library says."""
    try:
        found, seen = call(model, make, assistant, do_sample=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found.tolist(), seen


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_library_says_of_a_hostile_schema_reaches_the_user(model, library, kind):
    def make():
        return LIBRARIES[library](HOSTILE[kind])

    assert outcome(model, make, SamAssistant(budget=8)) == outcome(model, make)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_forced_and_what_is_forbidden(library):
    constraint = constraint_of([LIBRARIES[library]()], 0)
    key, brace, word = VOCABULARY.index(b'{"na'), ord("{"), VOCABULARY.index(b"true")
    tree = TokenTree.build([key, 5, word, brace], [-1, -1, 0, -1], [0.5, 0.3, 0.1, 0.1])
    assert constraint.prune(tree).token_ids.tolist() == [key, brace]
    forced = constraint.forced(8)
    # outlines-core forces a token that has no alternative, and does not know how text may be cut.
    assert bool(forced) == (library != "outlines-core")
    for cuts in forced:
        assert all(map(constraint.advance, cuts[-1:]))
        constraint.rollback(1)
        assert constraint.advance(cuts[0])
    assert not constraint.advance(5)
    constraint = constraint_of([LIBRARIES[library]()], 0)
    assert all(map(constraint.advance, b'{"nam'))
    assert constraint.forced(2)[0] == [ord("e")]
