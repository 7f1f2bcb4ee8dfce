"""Prints what CHANGELOG.md says of a release: `python .github/release_notes.py v1.2.3`.

Exits with 1 and a line that says why where the tag is not the version of pyproject.toml, or where
the changelog has no text of that version or still calls it unreleased.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """The changelog's text of a tag's version, without its heading.

    Raises:
        ValueError: the project is not ready to be released under this tag.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if tag != f"v{project['version']}":
        raise ValueError(
            f"tag: expected v{project['version']}, as pyproject.toml has it, got {tag}"
        )
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.split(r"(?m)^## +(.*)$", changelog)[1:]
    for heading, text in zip(entries[::2], entries[1::2], strict=True):
        version, _, rest = heading.partition(" ")
        if version == project["version"]:
            if "unreleased" in rest.lower() or not text.strip():
                raise ValueError(f"CHANGELOG.md: expected the text of a release, got {heading!r}")
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md: expected an entry of {project['version']}, found none")


if __name__ == "__main__":
    try:
        print(notes(*sys.argv[1:]), end="")
    except ValueError as error:
        sys.exit(str(error))
