"""With an EAGLE head `generate` must return what it returns without, and draft while doing so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from hf_retrieval_assist import Assistant, SamAssistant, SuffixAssistant
from hf_retrieval_assist.draft_models import EagleHead
from hf_retrieval_assist.draft_models.eagle import EagleDrafter
from tests.support.eagle_fixtures import load_case, tiny_target
from tests.support.heads import eagle_head


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


@pytest.mark.parametrize("preset", [SamAssistant, SuffixAssistant])
@pytest.mark.parametrize("budget", [12, "paper"])
@pytest.mark.parametrize(
    ("rows", "arguments"), [(1, {}), (3, {}), (1, SAMPLING)], ids=["greedy", "batch", "seeded"]
)
def test_as_the_fallback_of_suffix_structures(
    preset: Any, rows: int, arguments: dict[str, Any], budget: Any, tmp_path: Path
) -> None:
    case = load_case("eagle3_d2t")
    target = case.target()
    head = EagleHead.from_pretrained(case.save(tmp_path), target)
    fallback = EagleDrafter(head, top_k=4, depth=3, total=16, min_prob=0.0)
    assistant = preset(fallback=fallback, budget=budget)
    check_lossless(target, assistant, rows, **arguments)


def with_lora(target: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(target, config).eval()


def offloaded(target: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(target, torch.device("cpu"))


class Int8Linear(torch.nn.Module):
    """A linear layer whose weights are kept as int8 with one scale a row."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale)


def quantised(target: Any) -> Any:
    linear = [name for name, m in target.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in linear:
        target.set_submodule(name, Int8Linear(target.get_submodule(name)))
    return target


@pytest.mark.filterwarnings("ignore:`is_gradient")
@pytest.mark.parametrize("wrap", [with_lora, offloaded, quantised])
@pytest.mark.parametrize("name", ["eagle1_fcbias", "eagle3_d2t"])
def test_wrapped_targets(name: str, wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    case = load_case(name)
    target = wrap(case.target())
    head = EagleHead.from_pretrained(case.save(tmp_path), target)
    check_lossless(target, assistant_of(head), rows=1)


@pytest.mark.slow
def test_sampled_batches_follow_the_targets_distribution() -> None:
    """Pairs of tokens of a five-token vocabulary against their exact probabilities."""
    target = tiny_target(32, num_layers=4, vocab_size=5)
    with torch.no_grad():
        target.lm_head.weight.mul_(40)
    torch.manual_seed(0)
    head = eagle_head(target)
    prompt = torch.tensor([[3, 4, 3, 1]])
    rows = 600
    set_seed(5)
    found = target.generate(
        prompt.expand(rows, -1),
        attention_mask=torch.ones(rows, 4, dtype=torch.long),
        assistant=assistant_of(head),
        max_new_tokens=3,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
    )[:, 5:]
    shares = torch.bincount(5 * found[:, 0] + found[:, 1], minlength=25) / rows
    expected = exact_pairs(target, prompt)
    # Three standard errors and a little, for the largest of 25 deviations.
    limit = 3.5 * (expected * (1 - expected) / rows).sqrt() + 1e-3
    assert ((shares - expected).abs() < limit).all()


@torch.no_grad()
def exact_pairs(target: Any, prompt: torch.Tensor) -> torch.Tensor:
    """[25], probability of the second and third token after a prompt, over all first ones."""
    total = torch.zeros(25)
    first = target(prompt).logits[0, -1].softmax(-1)
    for token in range(5):
        text = torch.cat([prompt, torch.tensor([[token]])], dim=1)
        second = target(text).logits[0, -1].softmax(-1)
        longer = torch.cat([text.expand(5, -1), torch.arange(5)[:, None]], dim=1)
        third = target(longer).logits[:, -1].softmax(-1)
        total += first[token] * (second[:, None] * third).flatten()
    return total
