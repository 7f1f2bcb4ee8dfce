"""Processors of the real libraries over a small vocabulary, and what they were called with."""

import json

import pytest
from transformers import LogitsProcessor

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "boolean"}, "count": {"enum": [10, 20, 30]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
PIECES = [b'{"na', b'me": ', b"true", b"false", b'"count"', b", ", b"10", b"0}"]
# Every byte is a token, so anything can be spelt in several ways; the last token ends a text.
VOCABULARY = [*(bytes([byte]) for byte in range(256)), *PIECES, b"</s>"]
EOS = len(VOCABULARY) - 1


def xgrammar_processor(*schemas):
    """The processor of one schema for all rows, or one for each."""
    xgrammar = pytest.importorskip("xgrammar", reason="make test-structured")
    info = xgrammar.TokenizerInfo(
        VOCABULARY, xgrammar.VocabType.RAW, vocab_size=len(VOCABULARY), stop_token_ids=[EOS]
    )
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [
        compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        for schema in schemas or (SCHEMA,)
    ]
    return xgrammar.contrib.hf.LogitsProcessor(grammars)


def outlines_processor(schema=SCHEMA):
    pytest.importorskip("outlines", reason="make test-structured")
    from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    tokens = {text: [number] for number, text in enumerate(VOCABULARY[:EOS])}
    index = Index(build_regex_from_schema(json.dumps(schema)), Vocabulary(EOS, tokens))
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


def llguidance_processor(schema=SCHEMA):
    llguidance = pytest.importorskip("llguidance", reason="make test-structured")
    pytest.importorskip("outlines", reason="make test-structured")
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokenizer()))
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": False}
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
