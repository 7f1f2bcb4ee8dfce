"""The real libraries: what they force is drafted, and outputs are plain's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from hf_retrieval_assist import SamAssistant, TokenTree
from hf_retrieval_assist.grammars.constraint import constraint_of
from tests.lossless import build, run

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "boolean"}, "count": {"enum": [10, 20, 30]}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
)
PIECES = [b'{"na', b'me": ', b"true", b"false", b'"count"', b", ", b"10", b"0}"]
# Every byte is a token, so anything can be spelt in several ways; the last token ends a text.
VOCABULARY = [*(bytes([byte]) for byte in range(256)), *PIECES, b"</s>"]
EOS = len(VOCABULARY) - 1


def xgrammar_processor():
    xgrammar = pytest.importorskip("xgrammar", reason="make test-structured")
    info = xgrammar.TokenizerInfo(
        VOCABULARY, xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[EOS]
    )
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
    return xgrammar.contrib.hf.LogitsProcessor(grammar)


def outlines_processor():
    pytest.importorskip("outlines", reason="make test-structured")
    from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    tokens = {text: [number] for number, text in enumerate(VOCABULARY[:EOS])}
    index = Index(build_regex_from_schema(SCHEMA), Vocabulary(EOS, tokens))
    return OutlinesCoreLogitsProcessor(index, "torch")


class _Tokenizer:
    """What llguidance asks of one: the longest token first."""

    eos_token_id, bos_token_id = EOS, None
    tokens, special_token_ids = VOCABULARY, [EOS]

    def __call__(self, text):
        text, ids = text.encode() if isinstance(text, str) else text, []
        while text:
            best = max(filter(text.startswith, VOCABULARY[:EOS]), key=len)
            ids.append(VOCABULARY.index(best))
            text = text[len(best) :]
        return ids


def llguidance_processor():
    llguidance = pytest.importorskip("llguidance", reason="make test-structured")
    pytest.importorskip("outlines", reason="make test-structured")
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokenizer()))
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        SCHEMA, defaults={"whitespace_flexible": False}
    )
    return LLGuidanceLogitsProcessor(grammar, tokenizer, "torch")


LIBRARIES = {
    "xgrammar": xgrammar_processor,
    "outlines-core": outlines_processor,
    "llguidance": llguidance_processor,
}


class Counted(LogitsProcessor):
    """Notes the texts that a processor is called with."""

    def __init__(self, inner):
        self.inner, self.texts = inner, []
        # Where an assistant finds the grammar.
        for name in ("compiled_grammars", "index", "llg_tokenizer", "grammar"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids.tolist())
        return self.inner(input_ids, scores)


@pytest.fixture(scope="module")
def model():
    return build(LlamaForCausalLM, vocab_size=len(VOCABULARY))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}, {"do_sample": True, "seed": 3}])
@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_and_calls_are_plains(model, library, sampling, rows):
    options = sampling | {
        "ids": torch.tensor([[5, 6, 7]] * rows),
        "max_new_tokens": 24,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    plain, ours = (Counted(LIBRARIES[library]()) for _ in range(2))
    expected = run(model, logits_processor=LogitsProcessorList([plain]), **options)
    assistant = SamAssistant(budget=8)
    found = run(model, logits_processor=LogitsProcessorList([ours]), assistant=assistant, **options)
    assert torch.equal(expected, found)
    assert ours.texts == plain.texts


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_forced_and_what_is_forbidden(library):
    constraint = constraint_of([LIBRARIES[library]()], 0)
    key, brace, word = VOCABULARY.index(b'{"na'), ord("{"), VOCABULARY.index(b"true")
    tree = TokenTree.build([key, 5, word, brace], [-1, -1, 0, -1], [0.5, 0.3, 0.1, 0.1])
    assert constraint.prune(tree).token_ids.tolist() == [key, brace]
    for token in constraint.forced(8):
        assert constraint.advance(token)
    assert not constraint.advance(5)


def test_a_processor_without_a_grammar_has_none():
    processor = SimpleNamespace(index=3, grammar="x", compiled_grammars=[None])
    assert constraint_of([processor], 0) is None
