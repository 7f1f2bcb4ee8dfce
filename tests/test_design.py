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


# What stands for each stage of a step. Ranks agree round the plan.
STAGES = {
    "draft": ("policy/policy.py", "draft"),
    "plan": ("policy/planner.py", "plan"),
    "verify": ("verification/verifier.py", "verify"),
    "forward": ("verification/tree_verifier.py", "forward"),
    "walk": ("decoding/walk.py", "__call__"),
    "keep": ("verification/tree_verifier.py", "keep"),
    "learn": ("policy/policy.py", "learn"),
    "observe": ("policy/cost_model.py", "observe"),
}


def way_of_a_token():
    """(stage or "", file) of the page's picture, in its order."""
    picture = TEXT.split("## One token's way", 1)[1].split("```")[1]
    lines = [line.lstrip(" |") for line in picture.splitlines()]
    found = [re.match(r"(?:(\w\S*)\s+)?([\w/]+\.py)", line) for line in lines]
    return [(match.group(1) or "", match.group(2)) for match in found if match]


def entered(work):
    """(file of the package, function) of every call that `work` makes, in order."""
    calls = []

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    with profiled(note):
        work()
    return calls


def test_a_token_goes_the_way_that_is_told():
    """Every file of the picture is entered, and the stages of a step follow one another in it."""
    model = build()
    assistant = knowing(run(model), budget=3)
    for _ in range(8):  # all of its forwards are repeated then
        run(model, assistant=assistant)
    calls = entered(lambda: run(model, assistant=assistant))
    assert assistant.stats.last.tier == "tree", assistant.stats.last.reason
    way = way_of_a_token()
    assert not {file for _, file in way} - {file for file, _ in calls}
    told = [(stage, file) for stage, file in way if stage in STAGES]
    assert told == [(stage, file) for stage, (file, _) in STAGES.items()]
    names = {place: stage for stage, place in STAGES.items()}
    went = [names[call] for call in calls if call in names]
    # The walk of the prefill's token comes before them.
    steps = went[went.index("draft") :]
    assert steps == list(STAGES) * assistant.stats.last.forwards


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
