"""The suffix drafter: what it drafts, from where, and what it learns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.draft_tree import path_products
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.suffix import SuffixDrafter, acceptance_rates
from hf_retrieval_assist.output_memory import OutputMemory
from hf_retrieval_assist.suffix_tree import BLEND_SHAPE

TARGET = Target(vocab_size=1000, fingerprint="m")


def session(drafter, prompt, output=(), target=TARGET):
    started = drafter.start(np.array(prompt, dtype=np.int32), target)
    for token in output:
        started.commit([token], None)
    return started


def paths(tree):
    return {tuple(tree.token_ids[tree.path(node)].tolist()) for node in range(len(tree))}


texts = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(st.lists(texts, max_size=3), texts, texts, st.integers(0, 20), st.booleans())
def test_drafts_are_valid_trees_of_seen_continuations(earlier, prompt, output, budget, branching):
    memory = OutputMemory(max_depth=8)
    for text in earlier:
        memory.add(text, "m")
    drafter = SuffixDrafter(memory, max_depth=8, min_prob=0.001, tree=branching)
    started = session(drafter, prompt, output)
    tree = started.propose(budget)
    tree.check_invariants()
    assert len(tree) <= budget
    assert branching or tree.is_chain
    assert started.score == pytest.approx(tree.probs.sum())
    assert np.allclose(tree.probs, path_products(tree.parents, drafter.priors()[tree.classes]))
    text = prompt + output
    seen = {tuple(t[i : i + n]) for t in [text, *earlier] for n in range(10) for i in range(len(t))}
    assert {(text[-1], *path)[:9] for path in paths(tree)} <= seen
    memory.check_invariants()


@given(st.lists(st.integers(0, 5), min_size=1, unique=True), texts)
def test_a_learnt_output_is_matched_as_its_context_is(earlier, prompt):
    """A running output's own suffixes lead where matching the text from scratch does."""
    drafts = []
    for learn in (True, False):
        memory = OutputMemory(max_depth=8)
        memory.add(earlier, "m")
        drafter = SuffixDrafter(memory, max_depth=8, learn=learn)
        drafts.append(session(drafter, prompt, [6, *earlier[:3]]).propose(16))
    assert drafts[0].token_ids.tolist() == drafts[1].token_ids.tolist()
    assert drafts[0].classes.tolist() == drafts[1].classes.tolist()


def test_the_prompt_is_continued():
    tree = session(SuffixDrafter(), [1, 2, 3, 4, 5, 1, 2], [3]).propose(8)
    assert tree.token_ids.tolist()[:2] == [4, 5]


def test_outputs_teach_each_other_while_they_run_and_prompts_do_not():
    drafter = SuffixDrafter()
    running = session(drafter, [50, 51, 52], [1, 2, 3, 4])
    other = session(drafter, [9], [1, 2])
    assert (3, 4) in paths(other.propose(8))
    assert len(session(drafter, [50, 51]).propose(8)) == 0
    running.close()
    assert (3, 4) in paths(session(drafter, [9], [1, 2]).propose(8))


def test_both_trees_contribute_to_one_draft():
    drafter = SuffixDrafter()
    session(drafter, [9], [1, 2, 30]).close()
    tree = session(drafter, [1, 2, 40, 7], [1, 2]).propose(8)
    assert {(30,), (40,)} <= paths(tree)
    sources = np.unravel_index(tree.classes, BLEND_SHAPE)[0]
    assert set(sources[tree.parents < 0].tolist()) == {0, 1}


def test_a_text_that_repeats_at_length_is_drafted_beyond_the_depth_of_the_match():
    """Matches of equal count are one: the shortest of them leaves room for the draft."""
    text = list(range(100, 300))
    tree = session(SuffixDrafter(), [*text, 5, *text[:99]], [text[99]]).propose(60)
    assert len(tree) > 50
    assert tree.token_ids.tolist()[:50] == text[100:150]


def test_opting_out_leaves_no_trace(tmp_path):
    memory = OutputMemory(path=tmp_path / "log")
    private = session(SuffixDrafter(memory, learn=False), [1], [2, 3, 4])
    private.close()
    assert len(memory) == memory.token_count == 0
    assert not (tmp_path / "log").exists()


def test_prompts_are_learnt_when_asked_for():
    drafter = SuffixDrafter(learn_prompts=True)
    session(drafter, [50, 51, 52], [1, 2]).close()
    assert (52, 1) in paths(session(drafter, [50, 51]).propose(8))


def test_models_and_ids_out_of_the_vocabulary_are_not_drafted():
    memory = OutputMemory()
    memory.add([1, 2, 5000, 3], "m")
    memory.add([1, 2, 70], "other")
    drafter = SuffixDrafter(memory)
    assert len(session(drafter, [9], [1, 2]).propose(8)) == 0
    large = Target(vocab_size=10_000, fingerprint="m")
    assert (5000, 3) in paths(session(drafter, [9], [1, 2], large).propose(8))


def test_an_output_cut_by_the_memory_still_drafts():
    rng = np.random.default_rng(3)
    drafter = SuffixDrafter(OutputMemory(max_bytes=100_000))
    text = rng.integers(0, 900, 2_000).tolist()
    started = session(drafter, [1], text)
    started.commit(text[:40], None)
    assert started.propose(8).token_ids.tolist()[:4] == text[40:44]
    started.close()


def test_alpha_bounds_the_nodes_by_the_match():
    drafter = SuffixDrafter(alpha=1.0)
    assert len(session(drafter, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2]).propose(64)) == 2


def test_rates_are_probabilities_that_grow_with_the_evidence():
    rates = acceptance_rates().reshape(BLEND_SHAPE)
    assert 0 < rates.min() <= rates.max() < 1
    assert (np.diff(rates[:, 0, 2:6, 1:4, :7], axis=-1) > 0).all()
    assert (rates[:, 0, 7] > rates[:, 0, 0])[:, :, -1].all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="alpha: expected a number above 0, got 0"):
        SuffixDrafter(alpha=0)
    with pytest.raises(ValueError, match="min_prob: expected a number above 0, at most 1, got 0"):
        SuffixDrafter(min_prob=0)
