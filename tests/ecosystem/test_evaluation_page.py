"""The page on lm-eval: its task and its command run as a reader runs them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .small_world import small_world

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "loops.md"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page's blocks by language, its task in the working directory, and a tiny model."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = {}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        blocks.setdefault(language, []).append(text)
    monkeypatch.chdir(tmp_path)
    for name in ("capitals.jsonl", "capitals.yaml", "assisted_lm_eval.py"):
        shutil.copy(ROOT / "examples" / name, name)
    world = small_world(ALPHABET, max_position_embeddings=1024)
    return blocks, *world


def test_from_the_command_line(written):
    blocks, model, tokenizer = written
    for part in (model, tokenizer):
        part.save_pretrained("model")
    commands = [block for block in blocks["console"] if "assisted_lm_eval.py" in block]
    (command,) = (block.removeprefix("$ ") for block in commands)
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"MODEL": "model", "PATH": here, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        command, shell=True, env=environment, check=True, capture_output=True, text=True
    )
    assert re.search(r"\|capitals\|.*\|answer\|.*exact_match", found.stdout.replace(" ", ""))
    assert "all 4 calls: " in found.stdout
    assert "not assisted" not in found.stdout
