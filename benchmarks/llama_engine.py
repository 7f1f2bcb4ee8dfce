"""llama.cpp on the same CPU with the same weights, beside transformers with and without us.

    python -m benchmarks.llama_engine --gguf FILE [--dtype float32] [--tokens 32] [--repeats 3]

Greedy, the first prompt of every kind, all in one process in alternating order: plain decoding of
both; the prompt lookup of llama.cpp's Python bindings and of transformers, both with n-grams of two
and ten tokens; `SamAssistant`. Needs `llama_cpp` (llama-cpp-python) and the demo model as GGUF in
the same precision.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_retrieval_assist.demo_model import load_demo_model

from .baselines import LOOKUP_NGRAM, LOOKUP_TOKENS
from .methods import Run, run_method
from .model import COLUMNS, Comparison, first_of_each, methods, read_prompts, summarise
from .report import Report
from .timing import alternate

# ggml's numbers for what keys and values are kept in.
CACHE_TYPES = {"float32": 0, "bfloat16": 30}
SLOTS = 2048


class LlamaCpp:
    """A model under llama.cpp, decoded greedily, one sequence at a time."""

    def __init__(self, path: Path, dtype: str, threads: int):
        import llama_cpp.llama_cpp as library

        self.library = library
        self._silent = library.llama_log_callback(lambda *_: None)
        library.llama_log_set(self._silent, ctypes.c_void_p(0))
        model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        if not model:
            raise ValueError(f"gguf: expected a model, got {path}")
        parameters = library.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = SLOTS
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = CACHE_TYPES[dtype]
        self._context = library.llama_init_from_model(model, parameters)
        self._memory = library.llama_get_memory(self._context)
        self._width = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self._batch = library.llama_batch_init(SLOTS, 0, 1)

    def decode(self, ids: list[int], past: int, answers: int) -> None:
        """Process ids that stand behind `past` others, for the logits of the last `answers`."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, past + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i >= len(ids) - answers
        if self.library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: expected room for {past + len(ids)} tokens")
        self.library.llama_synchronize(self._context)

    def clear(self) -> None:
        """Forget all tokens."""
        self.library.llama_memory_clear(self._memory, True)

    def forward(self, ids: list[int], past: int, answers: int) -> list[int]:
        """The likeliest tokens after each of the last `answers` of the ids, which stand behind
        `past` others."""
        self.decode(ids, past, answers)
        rows = [
            np.ctypeslib.as_array(
                self.library.llama_get_logits_ith(self._context, i), (self._width,)
            )
            for i in range(len(ids) - answers, len(ids))
        ]
        return [int(row.argmax()) for row in rows]

    def generate(self, prompt: list[int], new_tokens: int, ends: set[int], drafts: bool) -> Run:
        """As `model.generate` under greedy decoding; with drafts by the bindings' prompt lookup."""
        started = time.perf_counter()
        self.clear()
        ids = [*prompt, *self.forward(prompt, 0, 1)]
        forwards = 1
        while len(ids) - len(prompt) < new_tokens and ids[-1] not in ends:
            room = len(prompt) + new_tokens - len(ids) - 1
            draft = self._draft(ids)[:room] if drafts else []
            past = len(ids) - 1
            answers = self.forward([ids[-1], *draft], past, 1 + len(draft))
            forwards += 1
            for guess, answer in zip([*draft, None], answers, strict=True):
                ids.append(answer)
                if guess != answer or answer in ends:
                    break
            self.library.llama_memory_seq_rm(self._memory, 0, len(ids) - 1, -1)
        seconds = time.perf_counter() - started
        new = torch.tensor([ids[len(prompt) :]])
        return Run(new.numel(), forwards, 0.0, seconds, {}, new)

    def _draft(self, ids: list[int]) -> list[int]:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        drafted: list[int] = LlamaPromptLookupDecoding.find_candidate_pred_tokens(
            np.array(ids, np.intc), LOOKUP_NGRAM, LOOKUP_TOKENS
        ).tolist()
        return drafted


def measure(
    engine: LlamaCpp, model: Any, tokenizer: Any, arguments: argparse.Namespace
) -> Iterator[Comparison]:
    """Every prompt through every method of both."""
    settings = model.generation_config
    ends = set(np.atleast_1d(settings.eos_token_id).tolist())
    options = {"do_sample": False, "max_new_tokens": arguments.tokens}
    ours = [method for method in methods() if method.name != "SuffixAssistant"]

    def calls_on(text: str) -> dict[str, Any]:
        inputs = dict(tokenizer(text, return_tensors="pt"))
        ids = inputs["input_ids"][0].tolist()
        theirs = {"llama.cpp": False, "llama.cpp, prompt lookup": True}
        return {m.name: partial(run_method, m, model, inputs, **options) for m in ours} | {
            name: partial(engine.generate, ids, arguments.tokens, ends, drafts)
            for name, drafts in theirs.items()
        }

    prompts = first_of_each(read_prompts(), 1)
    for call in calls_on(prompts[0].text).values():
        call()
    for prompt in prompts:
        yield Comparison(prompt, *alternate(calls_on(prompt.text), arguments.repeats, print))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gguf", type=Path, required=True, help="the demo model for llama.cpp")
    parser.add_argument("--dtype", choices=CACHE_TYPES, default="float32", help="of the weights")
    parser.add_argument("--tokens", type=int, default=32, help="to generate per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    model, tokenizer = load_demo_model(getattr(torch, arguments.dtype))
    engine = LlamaCpp(arguments.gguf, arguments.dtype, torch.get_num_threads())
    names = ("dtype", "tokens", "repeats")
    done: list[Comparison] = []
    # Written after every prompt, so that a run which is cut off leaves those before.
    for comparison in measure(engine, model, tokenizer, arguments):
        done.append(comparison)
        report = Report("llama", {name: getattr(arguments, name) for name in names})
        summarise(report.table("Beside llama.cpp", COLUMNS), done)
        print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
