"""llama.cpp on the same CPU with a demo model's weights, as node-llama-cpp brings it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_retrieval_assist.tools.demo_model import demo_model, packed_weights

from .methods import Run

# llama.cpp's numbers for files of weights.
FILE_TYPES = {"bfloat16": 32, "Q8_0": 7}
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
        nbytes: of the GGUF, which a forward reads but for the vocabulary's texts.
    """

    def __init__(self, folder: Path, path: Path, threads: int):
        command = ["node", str(SCRIPT), str(path.resolve()), str(threads), str(SLOTS)]
        self.nbytes = path.stat().st_size
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
        """Greedy `model.generate`, which no end of text ends; the prefill is up to the first."""
        print(json.dumps([prompt, new_tokens]), file=self._process.stdin, flush=True)
        answer = self._answer()
        new, split = torch.tensor([answer["ids"]]), {"prefill": answer["first"]}
        return Run(new.numel(), new.numel(), answer["seconds"], new, None, split)


def write_gguf(path: Path, kind: str, model: str) -> None:
    """A demo model for llama.cpp, its matrices of a kind of `FILE_TYPES`, made of the packaged ones
    of four bits, of which the demo model's are made as well."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

    full = GGMLQuantizationType.F32
    matrices = {"bfloat16": GGMLQuantizationType.BF16, "Q8_0": GGMLQuantizationType.Q8_0}
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


def engines(
    folder: Path, model: str, kinds: Sequence[str], settings: dict[str, Any]
) -> dict[str, NodeLlama]:
    """llama.cpp with each kind of a demo model's weights, which are written where they are missing;
    what it says of itself goes to a report's settings.

    Args:
        folder: of node-llama-cpp and the weights.
    """
    found = {}
    for kind in kinds:
        path = folder / f"{model}-{kind}.gguf"
        if not path.is_file():
            write_gguf(path, kind, model)
        found[kind] = NodeLlama(folder, path, torch.get_num_threads())
        settings[f"llama.cpp, {model}, {kind}"] = found[kind].description
    return found
