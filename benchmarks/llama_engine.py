"""llama.cpp on the same CPU with the same weights, beside transformers with and without us.

    npm install --prefix NODE --ignore-scripts node-llama-cpp
    python -m benchmarks.llama_engine --gguf FOLDER --node NODE --output benchmarks/results

Whole calls, greedy, prompts that nothing was tuned on, in alternating order, each with the same
number of new tokens: plain decoding, the kernels, a `SamAssistant` that is new in every call, with
drafts and without any, and llama.cpp with each kind of weights, which are written to `--gguf` where
they are missing. It runs as node-llama-cpp brings it, in a process of its own. Texts may differ
between precisions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_retrieval_assist import SamAssistant, reroute
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools.demo_model import MODELS, demo_model, packed_weights

from .inputs import UNTUNED, Prompt, first_of_each, load_real, read_prompts
from .methods import Method, Run, assisted, run_method
from .model import COLUMNS, KERNELS, PLAIN, Turns, summary, take_turns
from .report import Report, Table
from .timing import lock_memory

# ggml's numbers for what keys and values are kept in.
CACHE_TYPES = {"float32": 0, "bfloat16": 30}
# llama.cpp's numbers for files of weights.
FILE_TYPES = {"float32": 0, "bfloat16": 32, "Q8_0": 7}
SLOTS = 2048
SCRIPT = Path(__file__).with_name("node_llama.mjs")


class NodeLlama:
    """A model under llama.cpp as node-llama-cpp brings it, in a process of its own.

    Args:
        folder: whose `node_modules` hold it.
        path: of the GGUF.
        threads: that compute.

    Attributes:
        description: the library's release, and the model.
    """

    def __init__(self, folder: Path, path: Path, threads: int):
        command = ["node", str(SCRIPT), str(path.resolve()), str(threads), str(SLOTS)]
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.description: str = self._answer()["description"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"node: expected an answer, it ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """Greedy `model.generate`, which no end of text ends."""
        print(json.dumps([prompt, new_tokens]), file=self._process.stdin, flush=True)
        answer = self._answer()
        new = torch.tensor([answer["ids"]])
        return Run(new.numel(), new.numel(), answer["seconds"], new, None, {})


class LlamaCpp:
    """A model under llama.cpp as llama-cpp-python binds it, one sequence at a time.

    Args:
        path: of the GGUF.
        dtype: of the keys and values.
        threads: that compute.
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
        self._context = library.llama_init_from_model(model, parameters)
        self._memory = library.llama_get_memory(self._context)
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


def write_gguf(path: Path, kind: str, model: str) -> None:
    """A demo model for llama.cpp, its matrices of a kind of `FILE_TYPES`, made of the packaged ones
    of four bits, of which the demo model's are made as well."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

    full = GGMLQuantizationType.F32
    matrices = {"float32": full, "bfloat16": GGMLQuantizationType.BF16}
    matrices["Q8_0"] = GGMLQuantizationType.Q8_0
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        packed, written = Path(folder) / "packed.gguf", Path(folder) / "written.gguf"
        packed_weights(demo_model(model), packed)
        reader = GGUFReader(packed)
        writer = GGUFWriter(written, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                value = FILE_TYPES[kind] if name == "general.file_type" else field.contents()
                writer.add_key_value(name, value, field.types[0], field.types[-1])
        for tensor in reader.tensors:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
            kept = matrices[kind] if values.ndim > 1 else full
            writer.add_tensor(tensor.name, quants.quantize(values, kept), raw_dtype=kept)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(written, path)


def calls_of(
    engines: Mapping[str, NodeLlama], model: Any, tokenizer: Any, new_tokens: int
) -> dict[str, Callable[[Prompt], Run]]:
    """A run of each method of ours and of each engine, by what its weights are kept in."""
    # Texts of several precisions would end at several places.
    model.generation_config.eos_token_id = None
    drafting = partial(SamAssistant, costs=CostModels())
    ours = [
        Method(PLAIN, dict),
        Method(KERNELS, dict, scope=reroute),
        assisted("without drafts", partial(drafting, budget=0)),
        assisted("SamAssistant", drafting),
    ]

    def call(method: Method, prompt: Prompt) -> Run:
        options = {"do_sample": False, "max_new_tokens": new_tokens}
        return run_method(method, model, prompt.inputs(tokenizer), **options)

    def theirs(engine: NodeLlama, prompt: Prompt) -> Run:
        ids = prompt.inputs(tokenizer)["input_ids"][0].tolist()
        return engine.generate(ids, new_tokens)

    calls: dict[str, Callable[[Prompt], Run]] = {m.name: partial(call, m) for m in ours}
    return calls | {llama_name(kind): partial(theirs, one) for kind, one in engines.items()}


def llama_name(kind: str) -> str:
    return f"llama.cpp, {kind}"


def fill(table: Table, place: Mapping[str, str], done: Sequence[Turns], kinds: list[str]) -> None:
    """A row of each method: its figures, and its tokens a second over each of llama.cpp's."""
    found = {name: summary(done, name) for name in done[0].runs}
    for figures in found.values():
        over = {kind: figures["rate"] / found[llama_name(kind)]["rate"] for kind in kinds}
        table.add(**place, **figures, **over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gguf", type=Path, required=True, help="folder of weights for llama.cpp")
    parser.add_argument("--node", type=Path, required=True, help="folder of node-llama-cpp")
    parser.add_argument("--kinds", nargs="+", choices=FILE_TYPES, default=["bfloat16", "Q8_0"])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["smollm2", "gemma3"])
    parser.add_argument("--dtype", choices=CACHE_TYPES, default="bfloat16", help="of ours")
    parser.add_argument("--prompts", type=Path, default=UNTUNED, help="folder of them")
    parser.add_argument("--count", type=int, default=2, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=48, help="to generate per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="that compute (default: PyTorch's)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    names = ("dtype", "tokens", "count", "repeats")
    report = Report(f"llama-{arguments.dtype}", {name: getattr(arguments, name) for name in names})
    lock_memory(report)
    columns = COLUMNS | {kind: f"x {llama_name(kind)}" for kind in arguments.kinds}
    table = report.table("Beside llama.cpp", columns)
    prompts = first_of_each(read_prompts(arguments.prompts), arguments.count)
    for name in arguments.model:
        model, tokenizer = load_real(getattr(torch, arguments.dtype), name)
        engines = {}
        for kind in arguments.kinds:
            path = arguments.gguf / f"{name}-{kind}.gguf"
            if not path.is_file():
                write_gguf(path, kind, name)
            engines[kind] = NodeLlama(arguments.node, path, torch.get_num_threads())
            report.settings[f"{name}, {kind}"] = engines[kind].description
        calls = calls_of(engines, model, tokenizer, arguments.tokens)
        take_turns(prompts[:1], calls, 2, print)
        rows, done = list(table.rows), list[Turns]()
        # Written after every prompt, so that a run which is cut off leaves those before.
        for prompt in prompts:
            done += take_turns([prompt], calls, arguments.repeats, print)
            table.rows = list(rows)
            fill(table, {"model": name, "dtype": arguments.dtype}, done, arguments.kinds)
            report.save(arguments.output)
    print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
