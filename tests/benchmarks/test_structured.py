"""The benchmark of structured output, on a small random model and whatever libraries there are."""

from importlib.util import find_spec

import pytest

from benchmarks import structured
from benchmarks.report import Report
from benchmarks.schemas import SIZES

from ..support.benchmarks import quick, rows, silent
from ..support.byte_model import small_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report():
    arguments = quick("--structured-tokens", 24)
    found = Report("structured", {})
    model, tokenizer = small_model()
    tokenizer.eos_token = "<pad>"
    structured.measure(found, model, tokenizer, arguments, silent)
    return found


def test_first_calls_take_fewer_forwards_with_tools(report):
    found = rows(report, "First calls")
    assert len(found) == 7
    assert all(row["with"] > 1.5 * row["without"] >= 1.5 for row in found)


@pytest.mark.skipif(find_spec("xgrammar") is None, reason="make test-structured")
def test_outputs_under_the_libraries_are_plains(report):
    found = rows(report, "The same calls")
    assert {row["library"] for row in found} >= {"xgrammar"}
    ours = [row for row in found if row["method"] == "SamAssistant"]
    assert {(row["equal"], row["raised"]) for row in ours} == {("1 of 1", "0")}
    lookup = [row for row in found if row["method"] == "prompt lookup"]
    assert {row["equal"] for row in lookup if row["library"] == "xgrammar"} == {"0 of 1"}
    by_method = {(row["size"], row["method"]): row for row in rows(report, "Schemas of three")}
    for size in SIZES:
        grammar, retrieval = by_method[size, "with grammar"], by_method[size, "retrieval"]
        assert grammar["per_forward"] > retrieval["per_forward"]
        assert grammar["equal"] == "1 of 1"


def test_what_is_not_installed_is_named(report):
    missing = {"xgrammar", "llguidance", "outlines-core"}
    missing -= {row["library"] for row in rows(report, "The same calls")}
    assert sorted(report.notes) == sorted(f"{name} is not installed" for name in missing)
