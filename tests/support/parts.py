"""Parts of the package that may be left out of a tree, and the tests that need them."""

import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from hf_retrieval_assist import plugins

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"
PACKAGE = Path(plugins.__file__).parent
_IMPORTED = re.compile(r"hf_retrieval_assist\.((?:engines|extensions|tools)(?:\.\w+)*)")
_RELATIVE = re.compile(r"(?m)^from \.{2,}((?:engines|extensions|tools)(?:\.\w+)*) import")
_ROOT = re.compile(r"from hf_retrieval_assist import (\([^)]*\)|[^\n]*)")
_SUPPORT = re.compile(r"\bsupport\.(\w+)|\bsupport import (\w+)")
# Names of the package's root, and of fallbacks, that a part brings.
_NAMES, _FALLBACKS = (
    {name: path.partition(":")[0] for name, path in plugins.OURS[kind].items()}
    for kind in ("names", "fallbacks")
)


@cache
def missing(path):
    """A module that a test file, or the support that it imports, needs and this tree lacks; None:
    there is none."""
    text = path.read_text(encoding="utf-8")
    words = re.findall(r"\w+", " ".join(_ROOT.findall(text)))
    needed = {*_IMPORTED.findall(text), *_RELATIVE.findall(text)}
    needed |= {_NAMES[word] for word in {*words} & {*_NAMES}}
    needed |= {module for name, module in _FALLBACKS.items() if f'"{name}"' in text}
    used = [TESTS / "support" / f"{''.join(names)}.py" for names in _SUPPORT.findall(text)]
    if path.is_relative_to(TESTS) and re.search(r"^from benchmarks", text, re.MULTILINE):
        used += BENCHMARKS.glob("*.py")
        if not BENCHMARKS.exists():
            return "benchmarks"
    for module in sorted(needed):
        place = PACKAGE.joinpath(*module.split(".")[:2])
        if not (place.is_dir() or place.with_suffix(".py").exists()):
            return module
        if module.startswith("tools"):  # which may import extensions
            used += [place.with_suffix(".py"), *place.rglob("*.py")]
    return next(filter(None, (missing(one) for one in used if one != path and one.exists())), None)


def needs(*parts):
    """Skips a test in a tree without one of these folders of the package."""
    lacking = [part for part in parts if not (PACKAGE / part).is_dir()]
    return pytest.mark.skipif(bool(lacking), reason=f"a tree without {lacking}")


def since(release, what):
    """Skips a test under earlier releases of transformers, which do not have what it needs."""
    old = Version(transformers.__version__) < Version(release)
    return pytest.mark.skipif(old, reason=f"{what} needs transformers {release}")
