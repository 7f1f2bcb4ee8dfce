"""The benchmarks of kernels and steps at tiny size: they run, and what they print adds up."""

from contextlib import nullcontext

import pytest
import torch
from transformers import Gemma3ForCausalLM

from benchmarks import kernel
from benchmarks.report import Report
from hf_retrieval_assist.engines.cpu.reroute import reroute
from tests.support.benchmarks import quick, silent
from tests.support.lossless import build
from tests.support.rounding import within

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return build(Gemma3ForCausalLM, head_dim=16)


@pytest.fixture
def report():
    return Report("kernel", {})


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setattr(kernel, "ROWS", (1, 3))
    options = quick()
    options.kernel_repeats = 1
    return options


def text(length):
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(0))


def test_attention_is_timed_under_a_mask(report, options, monkeypatch):
    for name, value in (("HEADS", ((4, 2, 16),)), ("SLOTS", (8,))):
        monkeypatch.setattr(kernel, name, value)
    kernel.attentions(report, options, silent)
    (heads,) = (table.rows for table in report.tables)
    assert len(heads) == 4
    assert all(row["1"] > 0 and row["3"] > 0 for row in heads)


def test_logits_of_a_screened_output_layer_are_counted():
    """Rows whose tokens are certain, and rows that are too small for bounds."""
    table = Report("kernel", {}).table("Screened", kernel.SCREEN_COLUMNS)
    weight = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    kinds = {"certain": weight[:3] * 2, "zero": torch.zeros(2, 64)}
    kernel.screened(table, "tiny", weight, kinds, silent)
    found = {row["text"]: row for row in table.rows}
    assert found["certain"]["logits"] == "0 / 0 / 0"
    assert found["certain"]["whole"] == "0.0%"
    assert found["zero"]["whole"] == "100.0%"
    assert found["zero"]["logits"] is None
    assert found["all"]["tokens"] == 5


def test_lifted_rows_have_their_products_and_are_longer():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(20, 8, generator=generator), torch.randn(3, 8, generator=generator)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    deep, deep_x = kernel.lifted(weight, basis, side=0), kernel.lifted(x, basis, side=1)
    torch.testing.assert_close(deep_x @ deep.T, x @ weight.T, rtol=1e-4, atol=1e-4)
    for rows, before in ((deep, weight), (deep_x, x)):
        expected = before.norm(dim=1) * 2**0.5
        torch.testing.assert_close(rows.norm(dim=1), expected, **within(expected, rows.shape[1]))


def test_flips_are_counted_against_one_row(model, report, monkeypatch):
    monkeypatch.setattr(kernel, "PREFIX", 4)
    monkeypatch.setattr(kernel, "PIECE", 12)
    monkeypatch.setattr(kernel, "COMPARED", 5)
    kernel.flips(report, model, text(32).view(2, 16), 6, silent)
    rows = report.tables[0].rows
    assert [row["positions"] for row in rows] == [24, 24, 24]
    assert all(row["flips"] == 0 and row["largest"] < 1e-4 for row in rows)


def test_logits_belong_to_their_positions(model, monkeypatch):
    monkeypatch.setattr(kernel, "PREFIX", 4)
    piece = text(16)
    with torch.no_grad():
        expected = model(piece[None]).logits[0, 4:]
    for rows, scope in ((1, nullcontext), (5, reroute)):
        found = kernel.logits_of(model, piece, rows, scope)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
