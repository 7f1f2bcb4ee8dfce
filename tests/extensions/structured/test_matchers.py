"""What the real libraries force and forbid."""

from types import SimpleNamespace

import pytest

from hf_retrieval_assist import TokenTree
from hf_retrieval_assist.extensions.structured.constraint import constraint_of
from hf_retrieval_assist.extensions.structured.grammar import GrammarSession
from tests.support.watching import calls_of

from .libraries import LIBRARIES, SCHEMA, VOCABULARY, xgrammar_processor


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


@pytest.mark.parametrize("grammars", [[None], []])
def test_a_processor_without_a_grammar_has_none(grammars):
    pytest.importorskip("xgrammar", reason="make test-structured")
    processor = SimpleNamespace(index=3, grammar="x", compiled_grammars=grammars)
    assert constraint_of([processor], 0) is None


def test_every_row_has_the_grammar_at_its_place():
    other = {"const": [True]}
    processor = xgrammar_processor(SCHEMA, other)
    ((cuts,), (other_cuts,)) = (constraint_of([processor], row).forced(1) for row in range(2))
    assert cuts == [VOCABULARY.index(b'{"na'), ord("{")]
    assert other_cuts == [ord("[")]
    assert constraint_of([processor], 2) is None


def test_the_vocabulary_is_not_listed_anew_for_every_grammar(monkeypatch):
    xgrammar = pytest.importorskip("xgrammar", reason="make test-structured")
    listed = []
    texts = xgrammar.TokenizerInfo.decoded_vocab
    monkeypatch.setattr(
        xgrammar.TokenizerInfo,
        "decoded_vocab",
        property(lambda info: listed.append(info) or texts.fget(info)),
    )
    assert constraint_of([xgrammar_processor()], 0).forced(1)
    assert not listed


def test_the_mask_of_a_node_is_computed_once(monkeypatch):
    """However little of what is forced a step verifies; pruning needs no mask."""
    xgrammar = pytest.importorskip("xgrammar", reason="make test-structured")
    masks = calls_of(monkeypatch, xgrammar.GrammarMatcher, "fill_next_token_bitmask")
    session = GrammarSession(constraint_of([xgrammar_processor({"const": "x" * 20})], 0))
    for _ in range(18):
        tree = session.propose(4)
        assert session.restrict(tree) is tree
        session.commit(tree.token_ids[:1].tolist(), None)
    assert len(tree) == 4
    assert len(masks) == 18 + 3
