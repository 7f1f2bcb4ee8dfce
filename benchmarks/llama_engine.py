"""llama.cpp on the same CPU with the same weights, beside transformers with and without us.

    python -m benchmarks.llama_engine --gguf FILE [--write Q8_0] [--model smollm2]
        [--dtype float32] [--tokens 32] [--prompts FOLDER] [--count 1] [--repeats 3]

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_retrieval_assist import SamAssistant, reroute
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools.demo_model import MODELS, demo_model, load_demo_model, packed_weights

from .baselines import LOOKUP_NGRAM, LOOKUP_TOKENS
from .inputs import PROMPTS, Prompt, first_of_each, read_prompts
from .methods import Method, Run, assisted, baselines, run_method
from .model import COLUMNS, KERNELS, Turns, summary, take_turns
from .report import Report

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
        """Greedy `model.generate`; with drafts by the bindings' prompt lookup."""
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
        return Run(new.numel(), forwards, seconds, new, None, {})

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


def write_gguf(path: Path, kind: str, model: str) -> None:
    """A demo model for llama.cpp, its weights of a kind of `FILE_TYPES`."""
    import llama_cpp.llama_cpp as library

    parameters = library.llama_model_quantize_default_params()
    # The packaged weights have four bits, of which the demo model's are made as well.
    parameters.allow_requantize = True
    parameters.ftype = FILE_TYPES[kind]
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "model.gguf"
        packed_weights(demo_model(model), packed)
        if library.llama_model_quantize(str(packed).encode(), str(path).encode(), parameters):
            raise RuntimeError(f"llama_model_quantize: expected to write {path}")


def calls_of(
    engine: LlamaCpp, model: Any, tokenizer: Any, new_tokens: int
) -> dict[str, Callable[[Prompt], Run]]:
    """A run of each method of both."""
    ends = set(np.atleast_1d(model.generation_config.eos_token_id).tolist())
    costs = CostModels()
    drafts_itself = ["token_recycling", "quantized_self"]
    ours = [
        *baselines(),
        Method(KERNELS, dict, scope=reroute),
        assisted("SamAssistant", partial(SamAssistant, costs=costs)),
        assisted(
            "SamAssistant, quantized_self",
            partial(SamAssistant, fallback=drafts_itself, costs=costs),
        ),
    ]

    def call(method: Method, prompt: Prompt) -> Run:
        options = {"do_sample": False, "max_new_tokens": new_tokens}
        return run_method(method, model, prompt.inputs(tokenizer), **options)

    def theirs(drafts: bool, prompt: Prompt) -> Run:
        ids = prompt.inputs(tokenizer)["input_ids"][0].tolist()
        return engine.generate(ids, new_tokens, ends, drafts)

    return {method.name: partial(call, method) for method in ours} | {
        "llama.cpp": partial(theirs, False),
        "llama.cpp, prompt lookup": partial(theirs, True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gguf", type=Path, required=True, help="the demo model for llama.cpp")
    parser.add_argument("--write", choices=FILE_TYPES, help="the file first, with such weights")
    parser.add_argument("--model", choices=MODELS, default="gemma3")
    parser.add_argument("--dtype", choices=CACHE_TYPES, default="float32", help="of ours")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of them")
    parser.add_argument("--count", type=int, default=1, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=32, help="to generate per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write_gguf(arguments.gguf, arguments.write, arguments.model)
    model, tokenizer = load_demo_model(getattr(torch, arguments.dtype), arguments.model)
    engine = LlamaCpp(arguments.gguf, arguments.dtype, torch.get_num_threads())
    calls = calls_of(engine, model, tokenizer, arguments.tokens)
    prompts = first_of_each(read_prompts(arguments.prompts), arguments.count)
    take_turns(prompts[:1], calls, 1, print)
    settings = {name: getattr(arguments, name) for name in ("model", "dtype", "tokens", "repeats")}
    done: list[Turns] = []
    # Written after every prompt, so that a run which is cut off leaves those before.
    for prompt in prompts:
        done += take_turns([prompt], calls, arguments.repeats, print)
        report = Report("llama", settings | {"llama.cpp": engine.description})
        table = report.table("Beside llama.cpp", COLUMNS)
        for name in calls:
            table.add(**summary(done, name))
        print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
