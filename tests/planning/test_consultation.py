"""Whether a costly drafter is asked."""

from __future__ import annotations

from hf_retrieval_assist.planning.consultation import Consultation
from hf_retrieval_assist.planning.cost_model import CostModel
from hf_retrieval_assist.token_tree import TokenTree

FLAT = CostModel.fixed(lambda n: 1.0)


def chain(length, prob):
    return TokenTree.chain(list(range(length)), [prob**i for i in range(1, length + 1)])


def test_a_drafter_is_asked_before_anything_is_known():
    assert Consultation().worthwhile(TokenTree.empty(), FLAT)


def test_a_drafter_that_brings_nothing_is_asked_rarely():
    record = Consultation()
    record.observe(TokenTree.empty(), 0.01)
    asked = 0
    for _ in range(640):
        if record.worthwhile(TokenTree.empty(), FLAT):
            asked += 1
            record.observe(TokenTree.empty(), 0.01)
    assert asked == 10


def test_a_drafter_that_pays_is_always_asked():
    record = Consultation()
    for _ in range(50):
        assert record.worthwhile(TokenTree.empty(), FLAT)
        record.observe(chain(6, 0.9), 0.5)


def test_what_is_at_hand_makes_a_drafter_superfluous():
    record = Consultation()
    record.observe(chain(6, 0.9), 0.1)
    assert not record.worthwhile(chain(8, 0.95), FLAT)
    assert record.worthwhile(chain(2, 0.3), FLAT)


def test_what_drafting_takes_is_weighed():
    record = Consultation()
    record.observe(chain(6, 0.9), 10.0)
    assert not record.worthwhile(TokenTree.empty(), FLAT)


def test_one_slow_call_does_not_silence_a_drafter():
    record = Consultation()
    for _ in range(5):
        record.observe(chain(6, 0.9), 0.01)
    record.observe(chain(6, 0.9), 100.0)
    assert record.worthwhile(TokenTree.empty(), FLAT)


def test_it_is_asked_beside_what_leaves_much_open():
    record = Consultation()
    record.observe(chain(6, 0.9), 0.2)
    weak = TokenTree.build([1, 2, 3], [-1, 0, 1], [0.5, 0.5, 0.5])
    assert record.worthwhile(weak, FLAT)
    sure = TokenTree.build([1, 2, 3], [-1, 0, 1], [0.97, 0.95, 0.94])
    dear = Consultation()
    dear.observe(chain(2, 0.9), 0.2)
    assert not dear.worthwhile(sure, FLAT)


def test_one_poor_draft_does_not_silence_a_drafter():
    record = Consultation()
    for _ in range(5):
        record.observe(chain(6, 0.9), 0.1)
    record.observe(TokenTree.empty(), 0.1)
    assert record.worthwhile(TokenTree.empty(), FLAT)
