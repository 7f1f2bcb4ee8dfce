"""What drafts read of an output layer in eight bits: the first rows, and those of tokens seen."""

import pytest
import torch
from torch import nn

from hf_retrieval_assist.engines.cpu import few_bits
from hf_retrieval_assist.engines.cpu.few_bits import FewBits, OutputReader, ShortOutput
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.skinny import PATHS, product
from tests.support.few_bits import pack_small
from tests.support.lossless import build
from tests.support.products import random

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

FIRST, TOKENS, DEPTH = 512, 838, 70


@pytest.fixture
def whole():
    return QuantizedWeight.pack(random(TOKENS, DEPTH))


def read(reader, whole, dtype=torch.float32):
    """The tokens behind the first ones, of which all have their logits in the whole layer."""
    x = random(1, 1, DEPTH, dtype=dtype, seed=1)
    logits, among = reader(x)
    token_ids = among.token_ids
    assert among.vocab_size == TOKENS
    assert torch.equal(token_ids[:FIRST], torch.arange(FIRST))
    assert torch.equal(logits, product(x[0].float(), whole.matrix)[:, token_ids])
    everywhere = torch.full((1, TOKENS), -torch.inf)
    everywhere[:, token_ids] = logits
    for scores in (logits + 1, logits):
        assert torch.equal(among.spread(scores), everywhere + (scores is not logits))
    expected = logits[0].topk(5)
    tokens, values = reader.best(x, 5)
    assert tokens == token_ids[expected.indices].tolist()
    assert values == expected.values.tolist()
    assert reader.best(x, 1)[0] == [token_ids[logits.argmax()]]
    return token_ids[FIRST:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_tokens_that_were_seen_stand_behind_the_first(whole, dtype):
    output = ShortOutput(whole, FIRST)
    reader, seen = OutputReader(output), []
    x = random(1, DEPTH, dtype=dtype, seed=1).float()
    likeliest = product(x, whole.matrix)[0, FIRST:].topk(3).indices
    for new in ([3, 511], [FIRST], [TOKENS - 1, 5, FIRST, 600], (likeliest + FIRST).tolist()):
        output.add(new)
        seen += sorted({token for token in new if token >= FIRST} - {*seen})
        assert read(reader, whole, dtype) == seen
        assert read(OutputReader(output), whole, dtype) == seen
        assert output.seen == len(seen)


def test_the_newest_take_the_place_of_the_oldest(whole, monkeypatch):
    monkeypatch.setattr(few_bits, "MOST_SEEN", 4)
    output = ShortOutput(whole, FIRST)
    reader = OutputReader(output)
    for new, kept in (
        ([600, 601, 602], {600, 601, 602}),
        ([700], {600, 601, 602, 700}),
        ([701, 602], {601, 602, 700, 701}),
        ([600, 703], {700, 701, 600, 703}),
    ):
        output.add(new)
        assert {*read(OutputReader(output), whole)} == kept
        assert {*read(reader, whole)} == kept
    output.add(range(TOKENS))
    assert len({*read(OutputReader(output), whole)}) == 4


def test_a_token_that_others_add_meanwhile_is_read_once(whole, monkeypatch):
    """Another thread comes first wherever one waits for the lock."""
    monkeypatch.setattr(few_bits, "MOST_SEEN", 4)
    output = ShortOutput(whole, FIRST)

    class Late:
        def __enter__(self):
            output._lock = lock
            output.add([600, 601])
            lock.__enter__()

        def __exit__(self, *error):
            lock.__exit__(*error)

    lock, output._lock = output._lock, Late()
    output.add([600, 602])
    assert sorted(read(OutputReader(output), whole)) == [600, 601, 602]
    output.add([700, 701, 702, 703])
    assert sorted(read(OutputReader(output), whole)) == [700, 701, 702, 703]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("share", "least", "first"),
    [(1 / 6, 8192, 1000), (1 / 6, 300, 300), (3.0, 0, 891), (0.0, 700, 700), (9.0, 0, 1000)],
)
def test_how_many_rows_of_an_output_layer_come_first(share, least, first, tied, monkeypatch):
    """A share of what all other layers take."""
    pack_small(monkeypatch)
    monkeypatch.setattr(few_bits, "OUTPUT_SHARE", share)
    monkeypatch.setattr(few_bits, "LEAST_ROWS", least)
    model = build(vocab_size=1000, head_dim=16, tie_word_embeddings=tied)
    packed = FewBits(model)
    assert packed.output.first == first
    assert packed.output.whole is packed.by_id[id(model.lm_head.weight)]
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert packed.by_id.keys() == {id(layer.weight) for layer in linears}
