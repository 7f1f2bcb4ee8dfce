"""What drafts read of an output layer in eight bits: the first rows, and those of tokens seen."""

from collections import deque
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_retrieval_assist.engines.cpu import few_bits
from hf_retrieval_assist.engines.cpu.few_bits import FewBits, OutputReader, ShortOutput
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.skinny import PATHS, product
from tests.support.few_bits import pack_small
from tests.support.lossless import build
from tests.support.products import DTYPES, random

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

FIRST, TOKENS, DEPTH = 512, 838, 70


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
    [tokens], [values] = reader.best(x, 5)
    assert tokens == token_ids[expected.indices].tolist()
    assert values == expected.values.tolist()
    assert reader.best(x, 1)[0] == [[token_ids[logits.argmax()]]]
    rows = torch.cat([x[0] + 1, x[0]])
    assert torch.equal(reader(rows)[0], product(rows.float(), whole.matrix)[:, token_ids])
    return token_ids[FIRST:].tolist()


@settings(max_examples=40)
@given(
    texts=st.lists(st.lists(st.integers(0, 15), max_size=6), min_size=1, max_size=8),
    most=st.integers(1, 12),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_of_the_newest_tokens_stand_behind_the_first(texts, most, dtype):
    """The likeliest among them."""
    whole = QuantizedWeight.pack(random(TOKENS, DEPTH))
    likely = product(random(1, DEPTH, seed=1), whole.matrix)[0, FIRST:].topk(4).indices + FIRST
    tokens = [*likely.tolist(), 3, 511, *range(FIRST, FIRST + 9), TOKENS - 1]
    with mock.patch.object(few_bits, "MOST_SEEN", most):
        output = ShortOutput(whole, FIRST)
    reader, seen = OutputReader(output), deque(maxlen=most)
    for text in texts:
        new = {tokens[number] for number in text}
        output.add(new)
        seen += sorted(token for token in new - {*seen} if token >= FIRST)[:most]
        assert sorted(read(reader, whole, dtype)) == sorted(seen)
        assert sorted(read(OutputReader(output), whole, dtype)) == sorted(seen)
        assert output.seen == len(seen)


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
    model = build(vocab_size=1000, hidden_size=32, head_dim=16, tie_word_embeddings=tied)
    packed = FewBits(model)
    assert packed.output.first == first
    assert packed.output.whole is packed.by_id[id(model.lm_head.weight)]
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert packed.by_id.keys() == {id(layer.weight) for layer in linears}
