"""docs/design.md names files that exist, every folder of the package and the way of a token."""

import re
from pathlib import Path

from tests.support.lossless import build, knowing, run
from tests.support.watching import profiled

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_retrieval_assist"
TEXT = (ROOT / "docs" / "design.md").read_text()
# A path with a folder, or a module of the package's root.
NAMES = sorted(set(re.findall(r"\b(?:\w+/)+(?:\w+\.\w+)?|\b\w+\.py\b", TEXT)))


def test_every_file_that_is_named_exists():
    assert len(NAMES) > 30
    missing = [
        name
        for name in NAMES
        if not any((place / name).exists() for place in (PACKAGE, ROOT, ROOT / "docs"))
        and "NAME" not in name
    ]
    assert not missing


def test_every_folder_is_described():
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    missing = [f"`{path.relative_to(PACKAGE)}/`" for path in folders]
    assert not [name for name in missing if name not in TEXT]


def way_of_a_token():
    """The files of the page's picture."""
    picture = TEXT.split("## One token's way", 1)[1].split("```")[1]
    return {*re.findall(r"(?m)^[ |]*(?:\w\S*\s+)?([\w/]+\.py)", picture)}


def test_a_token_goes_the_way_that_is_told():
    """Every file of the picture is entered."""
    model, entered = build(), set()
    assistant = knowing(run(model), budget=3)
    for _ in range(8):  # all of its forwards are repeated then
        run(model, assistant=assistant)

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    with profiled(note):
        run(model, assistant=assistant)
    assert assistant.stats.last.tier == "tree", assistant.stats.last.reason
    assert way_of_a_token() <= entered


PREPOSITIONS = (
    "about|above|across|after|against|along|among|around|as|at|before|behind|below|beneath|beside|"
    "besides|between|beyond|by|despite|during|except|for|from|in|inside|into|like|near|of|off|on|"
    "onto|out|outside|over|past|per|since|than|through|throughout|to|towards?|under|unlike|until|"
    "up|upon|via|with|within|without"
)


def test_prose_of_the_package_begins_with_its_subject():
    found = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "cython_ext").rglob("*.[pch]*")]:
        # What continues a comment is no beginning.
        text = re.sub(r"(?m)^([ \t]*#.*\n)(?:[ \t]*#.*\n)+", r"\1", path.read_text())
        first = rf'(?im)(?:"""|/\*|(?:^|\s)#:?)[ \t]*[*`]*(?:{PREPOSITIONS})\b.*'
        found += [f"{path.relative_to(ROOT)}: {line}" for line in re.findall(first, text)]
    assert not found
