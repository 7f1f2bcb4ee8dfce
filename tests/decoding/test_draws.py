"""Random draws that are known beforehand, batches that draw what plain decoding draws, and the
exponentially distributed numbers behind them."""

import numpy as np
import pytest
import torch
import transformers
from transformers import LogitsProcessorList

from hf_retrieval_assist.decoding import draws as module
from hf_retrieval_assist.decoding import exponential as exponentials
from hf_retrieval_assist.decoding.draws import KnownDraws
from hf_retrieval_assist.decoding.exponential import exponential
from hf_retrieval_assist.decoding.selection import RowPreview, TokenSelector
from hf_retrieval_assist.structures.draws import Numbers
from hf_retrieval_assist.types.row_text import RowText
from tests.support.lossless import build, padded, same
from tests.support.oracle_drafter import oracle_assistant
from tests.support.quick import cases

WIDTHS = [7, 16, 17, 1000, 70_001]


def rows_of(count):
    return [RowText(i, torch.tensor([1, 2]), 4) for i in range(count)]


def laws(rows, width, count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn((rows, width), generator=generator).softmax(-1) for _ in range(count)]


@pytest.mark.parametrize("width", WIDTHS)
def test_foreseen_draws_are_multinomials(width):
    """Any mixture of positions that were looked at before and not; same tokens, same state."""
    steps = laws(1, width, 12)
    torch.manual_seed(1)
    expected = [torch.multinomial(law, 1).item() for law in steps]
    left = torch.rand(3)
    torch.manual_seed(1)
    [row] = rows_of(1)
    draws = KnownDraws([row])
    for place, law in enumerate(steps):
        for ahead in range(place, place + place % 4):
            assert draws.reaches([row], width)
            draws.noise(ahead, 0)
        row.generated += draws.draw(law, [row])
    assert row.generated == expected
    assert torch.equal(torch.rand(3), left)
    assert draws.plain


@pytest.mark.parametrize(("few", "at_once"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (1, 3)])
@pytest.mark.parametrize("most", [0, 1 << 14, 1 << 20])
def test_rows_that_get_on_unequally_draw_what_the_batch_draws(most, at_once, few, monkeypatch):
    monkeypatch.setattr(module, "_FEW_NUMBERS", few * 1000)
    monkeypatch.setattr(module, "_MOST_BYTES", most)
    monkeypatch.setattr(module, "draws_by_quotients", lambda *key: key[-1] == at_once)
    steps = laws(3, 1000, 6)
    torch.manual_seed(2)
    expected = torch.cat([torch.multinomial(law, 1) for law in steps], 1).tolist()
    left = torch.rand(3)
    torch.manual_seed(2)
    rows = rows_of(3)
    draws = KnownDraws(rows)
    turns = [(0, 1, 2), (1,), (1, 2), (1,), (1, 2), (0,), (1, 2), (0, 2), (0, 2), (0,), (0,)]
    for turn in turns:
        law = torch.stack([steps[len(rows[i].generated)][i] for i in turn])
        tokens = draws.draw(law, [rows[i] for i in turn])
        for i, token in zip(turn, tokens, strict=True):
            rows[i].generated.append(token)
            rows[i].finished = len(rows[i].generated) == len(steps)
    assert [row.generated for row in rows] == expected
    draws.end(len(steps))
    assert torch.equal(torch.rand(3), left)
    assert draws.plain


def test_the_state_goes_back_to_the_end_of_the_text():
    torch.manual_seed(2)
    rows = rows_of(2)
    for law in laws(2, 50, 2):
        torch.multinomial(law, 1)
    left = torch.rand(3)
    torch.manual_seed(2)
    draws = KnownDraws(rows)
    for law in laws(2, 50, 4):
        # The first row goes on alone, past the end that the other one sets.
        rows[0].generated += draws.draw(law[:1], rows[:1])
    draws.end(2)
    assert torch.equal(torch.rand(3), left)


def test_another_way_of_drawing_is_left_alone(monkeypatch):
    """Nothing is foreseen, single rows keep their seed, batches say that they do not."""
    monkeypatch.setattr(module, "draws_by_quotients", lambda *key: False)
    model = build()
    _, _, assistant = same(model, do_sample=True)
    assert assistant.stats.last.keeps_seed
    inputs = padded(3) | {"do_sample": True, "max_new_tokens": 24}
    assistant = oracle_assistant(model.generate(**inputs), inputs["attention_mask"])
    model.generate(**inputs, assistant=assistant)
    assert not assistant.stats.last.keeps_seed
    [row] = rows_of(1)
    select = TokenSelector(LogitsProcessorList(), do_sample=True, rows=[row])
    preview = RowPreview(select, row)
    assert not preview.knows(50)
    [law] = laws(1, 50, 1)
    assert preview.best(law.log(), [[]], 1)[1] == law.argmax()


def test_a_generator_that_is_not_reached():
    row = RowText(0, torch.empty(2, dtype=torch.long, device="meta"), 4)
    assert not KnownDraws([row]).works(50)


@pytest.mark.parametrize("shape", [(1, 262_144), (3, 50), (7,), (0,)])
@pytest.mark.parametrize("fault", [None, "uncertain", "slow"])
def test_torch_draws_the_same(shape, fault, monkeypatch):
    exponentials.is_fast()  # asked once in a process
    if fault == "uncertain":  # every number could be rounded to either side
        monkeypatch.setattr(exponentials, "_ERROR", 0.5)
    if fault == "slow":
        monkeypatch.setattr(exponentials, "is_fast", lambda: False)
    own, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(3):
        expected = torch.empty(shape).exponential_(generator=own)
        assert torch.equal(exponential(shape, other), expected)
        assert torch.equal(other.get_state(), own.get_state())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("_by_many", lambda shape, generator: torch.zeros(shape)),
        ("state_after", lambda state, count: state),
    ],
)
def test_a_torch_that_draws_otherwise_is_noticed(name, other, monkeypatch):
    monkeypatch.setattr(exponentials, name, other)
    assert not exponentials.is_fast.__wrapped__()


@pytest.mark.parametrize("width", cases([1, 7, 311, 312, 313, 1000, 70_001], 6))
def test_a_token_needs_few_of_its_numbers(width):
    """As torch draws it, however many words of a block earlier draws have left."""
    own = torch.Generator().manual_seed(width)
    numbers = Numbers(width)
    for turn in range(20):
        law = (torch.randn(width, generator=own) * (1 + turn % 4)).softmax(-1)
        law[turn % width if width > 1 else 1 :: 3] = 0.0
        state = own.get_state()
        noise = torch.empty(width).exponential_(generator=own)
        after = own.get_state()
        own.set_state(state)
        expected = torch.multinomial(law, 1, generator=own).item()
        assert np.array_equal(numbers.begin(state.numpy()), after.numpy())
        assert numbers.token(law.numpy()) == expected
        assert torch.equal(exponentials.state_after(state, width), after)
        ids, gains = numbers.reaching(law.log().numpy(), law.log().numpy(), width)
        assert ids.tolist() == law.nonzero()[:, 0].tolist()
        assert np.allclose(gains, -noise[ids].log(), rtol=1e-6, atol=1e-6)
        assert len(numbers.words) == 2 * width == 2 * len(numbers)
        torch.rand(turn % 3, generator=own)


@pytest.mark.parametrize("fault", [0.0, -1.0, torch.nan])
def test_what_is_no_distribution_has_no_token(fault):
    law, numbers = np.full(1000, fault, np.float32), Numbers(1000)
    with pytest.raises(ValueError, match="expected 0 numbers, got 1000"):
        numbers.token(law)  # it has none yet
    numbers.begin(torch.Generator().get_state().numpy())
    assert numbers.token(law) < 0
    for wrong, message in (
        (lambda: numbers.begin(np.zeros(9, np.uint8)), "expected 5056 bytes, got 9"),
        (lambda: numbers.token(law[1:]), "expected 1000 numbers, got 999"),
        (lambda: numbers.reaching(law, law[1:], 1), "expected 1000 numbers, got 999"),
        (
            lambda: exponentials.state_after(torch.full((5056,), 255, dtype=torch.uint8), 1),
            "expected one of a Mersenne",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "warpers",
    [
        {"top_k": 50},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.9, "top_k": 3, "min_p": 0.2},
        {"temperature": 0.3, "top_k": 20, "top_p": 0.6},
        {"top_k": 200, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 1},
    ],
)
def test_few_logits_are_drawn_of_as_all_are(warpers, batch_size, dtype, monkeypatch):
    """Logits of bfloat16 have many equals, the last one that a top-k leaves among them."""
    kinds = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    processors = LogitsProcessorList([kinds[name](value) for name, value in warpers.items()])
    rows = rows_of(batch_size)
    select, few = TokenSelector(processors, True, rows), 0
    given = select.draw_of_few

    def counting(*arguments):
        nonlocal few
        found = given(*arguments)
        few += found is not None
        return found

    monkeypatch.setattr(select, "draw_of_few", counting)
    generator = torch.Generator().manual_seed(batch_size)
    torch.manual_seed(9)
    for step in range(40):
        shape = batch_size, 9000
        logits = (torch.randn(shape, generator=generator) * (1 + step % 5)).to(dtype)
        state = torch.get_rng_state()
        scores = processors(torch.zeros((batch_size, 1), dtype=torch.long), logits.float())
        expected = torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert select.choose(rows, logits) == expected
        for row, token in zip(rows, expected, strict=True):
            row.generated.append(token)
        select.draws.end(step + 1)
        assert torch.equal(torch.get_rng_state(), after)
    assert few >= 36
    assert select.draws.plain


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_drawn_of_as_plain_decoding_does(fault):
    processors = LogitsProcessorList([transformers.TopKLogitsWarper(5)])
    select, logits = TokenSelector(processors, True, rows_of(1)), torch.zeros((1, 9000))
    logits[0, 4000] = fault
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        select.choose(select.rows, logits)


def test_rounding_that_may_decide_is_left_to_torch():
    numbers = Numbers(1000)
    numbers.begin(torch.Generator().manual_seed(9).get_state().numpy())  # draws the fifth
    ids, flat = np.arange(40, dtype=np.int32), np.zeros(40, np.float32)
    falling = np.linspace(0, -3, 40, dtype=np.float32)

    def drawn(logits, top_k=10, temperature=1.0, top_p=1.0, min_p=0.0):
        return numbers.token_among(ids, logits, top_k, temperature, top_p, min_p)

    assert drawn(falling) >= 0
    assert drawn(flat) == -2  # nobody knows whether others equal the last one
    assert drawn(falling, top_k=40) == -2
    assert drawn(falling, temperature=0.0) == -2
    assert drawn(np.full(40, np.nan, np.float32)) == -2
    zeros = np.zeros(1000, np.float32)
    gains = numbers.reaching(zeros, zeros, 1000)[1]
    order = gains[:40].argsort().astype(np.int32)  # so that all have one score
    assert numbers.token_among(order, -gains[order], 10, 1.0, 1.0, 0.0) == -2
    near = falling.copy()
    near[10] = np.nextafter(near[9], np.float32(-9))  # may be equal once it is divided
    assert drawn(near) == -2
    first = drawn(falling)
    assert first == 4
    shares = np.exp(falling[:10].astype(np.float64))
    edge = shares[first:].sum() / shares.sum()  # a top-p that leaves so much out removes it
    assert drawn(falling, top_p=1 - edge) == -2
    assert drawn(falling, top_p=1 - edge + 0.01) == first != drawn(falling, top_p=1 - edge - 0.01)
    bound = float(np.exp(falling[first]))
    assert drawn(falling, min_p=bound) == -2
    assert drawn(falling, min_p=0.99 * bound) == first != drawn(falling, min_p=1.01 * bound)
    for wrong, message in (
        (lambda: numbers.token_among(ids, flat[1:], 5, 1.0, 1.0, 0.0), "got 40 and 39"),
        (lambda: numbers.token_among(ids + 970, flat, 5, 1.0, 1.0, 0.0), "0 to 999, got 1000"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
