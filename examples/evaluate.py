"""An evaluation by lm-eval, sped up by an assistant: `python examples/evaluate.py`.

The harness calls `model.generate` itself and knows nothing of the assistant, which is attached to
the model. Its task is written here: name the capital, after three worked examples. Results with and
without the assistant are the same; the speeds stand side by side. Needs the `ecosystem` and `demo`
extras.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.tools.demo_model import load_demo_model

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Austria": "Vienna",
}
WORKED = "".join(
    f"Question: What is the capital of {country}?\n"
    f"Thought: The question asks for the capital of {country}. The capital of {country} is "
    f"{city}.\nAnswer: {city}\n\n"
    for country, city in (("Germany", "Berlin"), ("Poland", "Warsaw"), ("Portugal", "Lisbon"))
)


def requests(tokens: int) -> list[Instance]:
    """One request of the harness per country."""
    return [
        Instance(
            request_type="generate_until",
            doc={"country": country},
            arguments=(
                f"{WORKED}Question: What is the capital of {country}?\nThought:",
                {"until": ["\n\n"], "max_gen_toks": tokens},
            ),
            idx=i,
        )
        for i, country in enumerate(CAPITALS)
    ]


def answer(
    harness: Any, asked: list[Instance], assistant: SamAssistant | None
) -> tuple[list[str], float]:
    """The answers, with an assistant attached where there is one, and the seconds they took."""
    scope = contextlib.nullcontext() if assistant is None else assistant.attached(harness.model)
    with scope:
        started = time.perf_counter()
        answers = harness.generate_until(asked, disable_tqdm=True)
        return answers, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    arguments = parser.parse_args()
    model, tokenizer = load_demo_model()
    batch_size = arguments.batch_size
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device)
    )
    everything = requests(arguments.tokens)
    # What only first calls take is no part of the comparison. The assistant that is compared has
    # not seen these answers.
    for warming in (None, SamAssistant()):
        answer(harness, everything[:batch_size], warming)
    assistant = SamAssistant(memory=OutputMemory())
    plain, assisted = [], []
    seconds = [0.0, 0.0]
    for first in range(0, len(everything), batch_size):
        asked = everything[first : first + batch_size]
        for number, answers in enumerate((plain, assisted)):
            found, took = answer(harness, asked, (None, assistant)[number])
            answers += found
            seconds[number] += took
    right = sum(
        f"Answer: {city}" in text for text, city in zip(assisted, CAPITALS.values(), strict=True)
    )
    same = "the same" if plain == assisted else "DIFFER"
    print(f"{right} of {len(CAPITALS)} right, answers {same}")
    print(f"plain {seconds[0]:.2f} s, assisted {seconds[1]:.2f} s: {seconds[0] / seconds[1]:.2f}x")
    print(assistant.stats)


if __name__ == "__main__":
    main()
