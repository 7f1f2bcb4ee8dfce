"""With an EAGLE head `generate` must return what it returns without, and draft while doing so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.drafters.eagle import EagleDrafter
from hf_retrieval_assist.eagle import EagleHead
from tests.eagle_fixtures import load_case


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def assistant_of(head: EagleHead, *more: Any) -> Assistant:
    """A fixed budget: what pays on this machine must not decide what is tested."""
    return Assistant(
        [EagleDrafter(head, top_k=4, depth=3, total=16, min_prob=0.0), *more], budget=12
    )


def prompts(rows: int, vocab_size: int = 128) -> dict[str, torch.Tensor]:
    """A batch of unequal prompts, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, vocab_size, (rows, 11), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def check_lossless(target: Any, assistant: Assistant, rows: int, **arguments: Any) -> None:
    options = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None, **arguments}
    set_seed(11)
    expected = target.generate(**prompts(rows), **options)
    set_seed(11)
    found = target.generate(**prompts(rows), assistant=assistant, **options)
    assert found.tolist() == expected.tolist()
    assert assistant.stats.total.drafted > 0


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("rows", "arguments"), [(1, {}), (3, {}), (1, SAMPLING)], ids=["greedy", "batch", "seeded"]
)
@pytest.mark.parametrize("name", ["eagle1_fcbias", "eagle3_target_hidden48_theta5e5"])
def test_recorded_heads(name: str, rows: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    case = load_case(name)
    target = case.target()
    head = EagleHead.from_pretrained(case.save(tmp_path), target)
    check_lossless(target, assistant_of(head), rows, **arguments)
