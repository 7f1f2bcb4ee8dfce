"""How much memory copies of weights may take."""

import pytest

from hf_retrieval_assist.system.memory import may_take


@pytest.mark.parametrize(
    ("nbytes", "limit", "others", "may"),
    [
        (5, 10, 5, True),
        (6, 10, 5, False),
        (0, None, 0, True),
        (1 << 60, None, 0, False),
        # Nothing more, but copies that others have made are not used either.
        (0, 0, 0, False),
    ],
)
def test_a_limit_counts_what_others_have(nbytes, limit, others, may):
    assert may_take(nbytes, limit, others) is may
