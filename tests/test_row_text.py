"""What one walk through a tree brought."""

from hf_retrieval_assist.row_text import Path


def test_behind_the_token_that_ends_a_text_nothing_was_chosen():
    """Its node is kept in the cache, and no token of the text stands behind it."""
    assert Path(3, tokens=[5, 2], accepted=[0, 1, 4]).chosen == [0, 1]
    assert Path(3, tokens=[5, 2, 8], accepted=[0, 1, 4]).chosen == [0, 1, 4]
