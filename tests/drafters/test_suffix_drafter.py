"""The suffix drafter: what it drafts, from where, and what it learns."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.suffix import Mixture, SuffixDrafter
from hf_retrieval_assist.memory.output_memory import OutputMemory
from tests.support.memories import check_memory
from tests.support.one_text import OneText
from tests.support.rounding import near
from tests.support.trees import paths

TARGET = Target(vocab_size=1000, fingerprint="m")


def session(drafter, prompt, output=(), target=TARGET):
    started = OneText(drafter, prompt, target)
    for token in output:
        started.commit([token], None)
    return started


texts = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def memory_of(texts):
    memory = OutputMemory(max_depth=8)
    for text in texts:
        memory.add(text, "m")
    return memory


@given(st.lists(texts, max_size=3), texts, texts, st.integers(0, 20))
def test_drafts_are_valid_trees_of_seen_tokens(earlier, prompt, output, budget):
    memory = memory_of(earlier)
    drafter = SuffixDrafter(memory, max_depth=8, min_prob=0.001)
    tree = session(drafter, prompt, output).propose(budget)
    assert tree.fault(1 << 30, 1 << 30) is None
    assert len(tree) <= budget
    above = np.append(tree.probs, np.float32(1))[tree.parents]
    for parent in {-1, *tree.parents.tolist()}:
        siblings = tree.probs[tree.parents == parent].sum()
        assert siblings <= above[tree.parents == parent][:1].sum() + 1e-5
    assert {*tree.token_ids.tolist()} <= {*prompt, *output}.union(*earlier)
    check_memory(memory)


@given(st.lists(st.integers(0, 5), min_size=1, unique=True), texts)
def test_a_learnt_output_is_matched_as_its_context_is(earlier, prompt):
    """A running output's own suffixes lead where matching the text from scratch does."""
    memory = memory_of([earlier])
    started = session(SuffixDrafter(memory, max_depth=8), prompt, [6, *earlier[:3]])
    assert started.output.live_sequence is not None
    mixer, texts, trees = Mixture.trained().mixer(), [started.text], [memory.tree("m")]
    own = mixer.draft(texts, trees, [started.output.live_sequence], None, [16], min_prob=0.001)
    scratch = mixer.draft(texts, trees, [None], None, [16], min_prob=0.001)
    # Only what stood before the output, in the prompt, tells them apart, and it was not learnt.
    for mine, theirs in zip(own, scratch, strict=True):
        assert mine.tolist() == near(theirs.tolist())


def test_outputs_teach_each_other_while_they_run_and_prompts_do_not():
    drafter = SuffixDrafter()
    running = session(drafter, [50, 51, 52], [1, 2, 3, 4])
    other = session(drafter, [9], [1, 2])
    assert (3, 4) in paths(other.propose(8))
    assert len(session(drafter, [50, 51]).propose(8)) == 0
    running.close()
    assert (3, 4) in paths(session(drafter, [9], [1, 2]).propose(8))


def test_a_corpus_contributes_and_is_only_read():
    corpus = [[1, 2, 30, 31], [1, 2, 30], []]
    drafter = SuffixDrafter(corpus=corpus, min_prob=0.0001)
    tree = session(drafter, [1, 2, 40, 7], [1, 2]).propose(8)
    assert {(30,), (40,), (30, 31)} <= {*paths(tree)}
    assert drafter.corpus.token_count == 7


def test_a_text_that_repeats_at_length_is_drafted_beyond_the_depth_of_the_match():
    """Matches of equal count are one: the shortest of them leaves room for the draft."""
    text = list(range(100, 300))
    drafter = SuffixDrafter(min_prob=1e-6)
    tree = session(drafter, [*text, 5, *text[:99]], [text[99]]).propose(60)
    assert len(tree) > 50
    assert tree.token_ids.tolist()[:50] == text[100:150]


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
