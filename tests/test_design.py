"""docs/design.md names files that exist, and every folder of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_retrieval_assist"
TEXT = (ROOT / "docs" / "design.md").read_text()
# A path with a folder, or a module of the package's root.
NAMES = sorted(set(re.findall(r"\b(?:\w+/)+(?:\w+\.\w+)?|\b\w+\.py\b", TEXT)))


def test_it_names_files():
    assert len(NAMES) > 30


def test_every_file_that_is_named_exists():
    missing = [
        name
        for name in NAMES
        if not (PACKAGE / name).exists() and not (ROOT / name).exists() and "NAME" not in name
    ]
    assert not missing


def test_every_folder_is_described():
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    missing = [f"`{path.relative_to(PACKAGE)}/`" for path in folders]
    assert not [name for name in missing if name not in TEXT]
