"""The table of what is watched, and that nothing of transformers' loop is missing in it."""

import gc
from pathlib import Path

from transformers import GenerationMixin

from hf_retrieval_assist.host import plain_step
from hf_retrieval_assist.host.transformers_private import loop
from hf_retrieval_assist.verification import service
from tests.support.callers import agree
from tests.support.lossless import build

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "watched.md"


def test_the_page_shows_the_table():
    assert plain_step.table() in PAGE.read_text(encoding="utf-8")


def test_every_name_of_the_loop_is_known():
    """A release whose loop asks something else is met here first."""
    assert not isinstance(plain_step._of_loop(), str)
    assert not isinstance(plain_step._of_caches(), str)
    asked = {*plain_step.names_in(loop().__code__)}
    known = {*plain_step.LOOP_METHODS, *(name for _, name in plain_step._CHOOSERS)}
    rows = " ".join(row.what for row in plain_step.TABLE)
    for name in asked & vars(GenerationMixin).keys():
        assert name in known or f"`{name}`" in rows or name in ONCE, name


# What the loop asks once, before the first token.
ONCE = {"_valid_auto_compile_criteria", "get_compiled_call"}


def test_verdicts_hold_no_model():
    model = build()
    agree(model, dict)
    before = len(service._services)
    del model
    gc.collect()
    assert len(service._services) < before
