"""Each part beside the core can be left out alone, and the core does without all of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.parts import since

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_retrieval_assist"
FOLDERS = [PACKAGE / "engines", PACKAGE / "extensions"]
PARTS = [
    str(part.relative_to(PACKAGE))
    for folder in FOLDERS
    for part in sorted(folder.iterdir())
    if (part / "__init__.py").exists()
]
BESIDE = [*(folder.name for folder in FOLDERS), "tools"]

# What has the same name as a package that need not be there imports that.
WITHOUT = """
import importlib, pkgutil, sys
from transformers import LlamaForCausalLM
import torch
import hf_retrieval_assist
from hf_retrieval_assist import OutputMemory, SamAssistant
from tests.support.lossless import build, run

# What needs a library, and what no engine but that of CUDA is asked for.
OTHERS = "triton_attention", "_matcher", ".tools", "recorded_layers"
assert hf_retrieval_assist.__file__.startswith(sys.argv[1])
for module in pkgutil.walk_packages(hf_retrieval_assist.__path__, "hf_retrieval_assist."):
    if not any(part in module.name for part in OTHERS):
        importlib.import_module(module.name)
names = [name for name in hf_retrieval_assist.__all__ if name != "suggest"]
assert all(getattr(hf_retrieval_assist, name) for name in names)
model, assistant = build(LlamaForCausalLM), SamAssistant(memory=OutputMemory())
options = {"do_sample": True, "temperature": 0.7}
assert torch.equal(run(model, **options), run(model, **options, assistant=assistant))
assert assistant.stats.last.tier == "tree", assistant.stats.last
"""


def test_there_are_parts():
    assert {"engines/cpu", "engines/cuda", "extensions/record"} <= set(PARTS)


@since("5.20", "the server, which is imported,")
@pytest.mark.parametrize("parts", [*([part] for part in PARTS), ["tools"], BESIDE], ids="+".join)
def test_the_rest_works_without(parts, tmp_path):
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for part in parts:
        shutil.rmtree(copy / part)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    work = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    subprocess.run(work, cwd=tmp_path, check=True, env=None)
