"""SuffixDecoding's Algorithm 1 on outputs small enough to count by hand, and its hybrid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.papers import SuffixDecoding
from hf_retrieval_assist.policy.policy import Ask
from hf_retrieval_assist.structures.suffix_tree import SuffixTree
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.scripted import Scripted
from tests.support.trees import paths

TARGET = Target(vocab_size=1000, fingerprint="m")
texts = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def drafted(assistant, prompt, output, target=TARGET):
    """The tree behind a text, and its SCORE."""
    session = assistant.policy.start(np.array(prompt, np.int32), target)
    session.begin(output)
    (tree,) = assistant.policy.draft(Ask([session])).trees
    return tree, session.sessions[0].score


def knowing(*outputs, **options):
    """An assistant whose texts teach nothing more."""
    assistant = SuffixDecoding(**options)
    for output in outputs:
        assistant.memory.add(output, "m")
    return assistant.private()


def test_a_tree_grows_to_alpha_nodes_a_matched_token():
    """Behind 1: 2 twice and 5 once; behind 1 2: 3 and 4, once each; 6 behind 1 5."""
    for alpha, nodes in ((1, 0), (1.5, 1), (2, 1), (3, 2), (4, 3), (8, 5)):
        tree, _ = drafted(knowing([1, 2, 3], [1, 2, 4], [1, 5, 6], alpha=alpha), [9], [1])
        assert len(tree) == nodes
    assert paths(drafted(knowing([1, 2, 3], [1, 2, 4], [1, 5, 6]), [9], [1])[0])[0] == (2,)


def test_among_equal_scores_the_outputs_tree_stays():
    """Behind 3 of the output 4 came; in the text 8 came behind 3, and more behind 2 3."""
    assistant = knowing([1, 2, 3, 4], alpha=2)
    for prompt, tokens, score in (([3, 8, 9, 2], [4], 2.0), ([2, 3, 8, 9, 2], [8, 9, 2], 4.0)):
        tree, found = drafted(assistant, prompt, [3])
        assert (tree.token_ids.tolist(), found) == (tokens, score)


@given(st.lists(texts, max_size=3), texts, texts)
def test_the_draft_is_the_best_of_both_trees(earlier, prompt, output):
    assistant = knowing(*earlier, memory=OutputMemory(max_depth=8))
    target = Target(vocab_size=5, fingerprint="m")
    tree, score = drafted(assistant, prompt, output, target)
    assert (tree.token_ids < 5).all()
    text = np.array(prompt + output, np.int32)
    own = SuffixTree(8)
    own.extend(own.add_sequence(), text)
    structures = [own, *([assistant.memory.tree("m")] if earlier else [])]
    # Here the text's end itself is matched too, a tree of one node.
    scores = [one.speculate(text, 255).score for one in structures]
    assert max(1.0, score) == pytest.approx(max(1.0, *scores), abs=1e-5)


def test_outputs_teach_when_they_have_ended_and_prompts_never():
    assistant = SuffixDecoding()
    running = assistant.policy.start(np.array([50, 51, 52], np.int32), TARGET)
    running.begin([1, 2, 3, 4])
    assert not len(drafted(assistant, [9], [2])[0])
    running.close()
    assert paths(drafted(assistant, [9], [2])[0]) == [(3,), (3, 4)]
    assert not len(drafted(assistant, [9], [51])[0])


@pytest.mark.parametrize(
    ("threshold", "token", "tokens", "asks"),
    [
        (3.9, 2, [3, 4, 5], 0),
        (4.1, 2, [7], 1),
        (None, 2, [3, 4, 5], 1),
        (None, 8, [7], 1),
        (0.0, 8, [], 0),
    ],
)
def test_the_fallback_drafts_below_the_threshold_alone(threshold, token, tokens, asks):
    asked = []
    seven = Scripted(lambda budget: asked.append(budget) or TokenTree.chain([7], [0.5]))
    assistant = knowing([1, 2, 3, 4, 5, 6], threshold=threshold, fallback=seven)
    tree, _ = drafted(assistant, [9], [token])
    assert tree.token_ids.tolist() == tokens
    assert len(asked) == asks
