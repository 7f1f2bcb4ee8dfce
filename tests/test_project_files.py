"""Workflows, what is deployed, the citation and the metadata agree with the project."""

import re
import runpy
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import typer
import yaml
from packaging.version import Version

import hf_retrieval_assist
from hf_retrieval_assist.host.private_names import NEWEST, OLDEST
from hf_retrieval_assist.tools.cli import serve

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NAMED = ("README.md", "CONTRIBUTING.md", "pyproject.toml", "constraints.txt")
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_steps_and_make_targets_that_there_are(workflow):
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    targets = [
        target
        for step in steps
        for line in step.get("run", "").splitlines()
        if (words := line.split())[:1] == ["make"]
        for target in words[1:]
        if "=" not in target
    ]
    known = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert targets or workflow.name == "scans.yml"
    assert set(targets) <= known


notes = runpy.run_path(str(ROOT / ".github" / "release_notes.py"))["notes"]


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.3.0", "## 1.2.0\n\nText.\n", "tag: expected v1.2.0"),
        ("v1.2.0", "## 1.2.0 (unreleased)\n\nText.\n", "got '1.2.0 \\(unreleased\\)'"),
        ("v1.2.0", "## 1.2.0\n\n## 1.1.0\n\nText.\n", "got '1.2.0'"),
        ("v1.2.0", "## 1.2.01\n\nText.\n", "an entry of 1.2.0, found none"),
    ],
)
def test_a_release_says_what_the_changelog_has_of_its_version(tag, changelog, message, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(ValueError, match=message):
        notes(tag, tmp_path)
    entries = "## 1.3.0 (unreleased)\n\n## 1.2.0 (May)\n\n### Added\n\n- Text.\n\n## 1.1.0\n"
    (tmp_path / "CHANGELOG.md").write_text(entries)
    assert notes("v1.2.0", tmp_path) == "### Added\n\n- Text.\n"


CODE = (".py", ".pyx", ".pxd", ".pxi", ".h", ".c")


def part_of(path):
    """The part that a file of the package, or of what is compiled into it, counts among."""
    folder, *names = path.relative_to(ROOT).parts
    if folder in ("tests", "benchmarks"):
        return folder
    if folder == "cython_ext":
        return "engines/cpu" if names[0] == "kernels" else "core"
    if names[0] == "engines" and len(names) > 2:
        return "/".join(names[:2])
    return "extensions and tools" if names[0] in ("extensions", "tools") else "core"


def test_each_part_keeps_to_its_budget_of_lines():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = Counter()
    for folder in ("hf_retrieval_assist", "cython_ext", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            counts = (".py",) if folder in ("tests", "benchmarks") else CODE
            if path.suffix in counts:
                lines[part_of(path)] += path.read_text(encoding="utf-8").count("\n")
    print(dict(lines))
    budget = project["tool"]["hf-retrieval-assist"]["lines"]
    assert {*lines} == {*budget}
    assert not {part: (n, budget[part]) for part, n in lines.items() if n > budget[part]}


def test_releases_of_transformers_are_told_as_they_are_known():
    """Pages and files name the floor and the ceiling that the package knows, and no other."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    told = {path.name: re.findall(rf"{OLDEST} to (5\.\d+)", text) for path, text in texts.items()}
    assert {ceiling for found in told.values() for ceiling in found} == {NEWEST}
    assert told["README.md"]
    assert told["transformers_versions.md"]
    assert f'"transformers>={OLDEST}",' in texts[ROOT / "pyproject.toml"]
    assert f"transformers=={NEWEST}." in texts[ROOT / "constraints.txt"]
    (matrix,) = re.findall(r"^TRANSFORMERS \?= (.*)$", MAKEFILE, re.MULTILINE)
    releases = [Version(release) for release in matrix.split()]
    assert min(releases) == Version(OLDEST)
    assert max(releases) < Version(NEWEST)  # which `make test` runs
    workflows = [workflow.read_text(encoding="utf-8") for workflow in WORKFLOWS]
    assert not [line for text in workflows for line in re.findall(r".*transformers[=<>].*", text)]


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert citation["version"] == hf_retrieval_assist.__version__
    assert f'version = "{hf_retrieval_assist.__version__}"' in project


def test_the_unit_and_the_image_start_the_command_by_options_that_it_has():
    files = ("deploy/hf-retrieval-assist.service", "deploy/Dockerfile", "docs/howto/deploy.md")
    unit, image, page = ((ROOT / name).read_text(encoding="utf-8") for name in files)
    (line,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
    unit = shlex.split(line.replace("\\\n", " "))
    assert Path(unit[0]).name == "hf-retrieval-assist"
    assert unit[1:3] == ["serve", "${MODEL}"]
    (line,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", image, re.MULTILINE)
    started = re.findall(r'"([^"]*)"', line)
    assert started[:2] == ["hf-retrieval-assist", "serve"]
    environment = shlex.split(*re.findall(r'^OPTIONS="(.*)"$', page, re.MULTILINE))
    (arguments,) = re.findall(r"^    hf-retrieval-assist /models/(.*)$", page, re.MULTILINE)
    commands = unit, started, environment, arguments.split()
    asked = [{word for word in words if word.startswith("--")} for words in commands]
    program = typer.Typer()
    program.command()(serve.serve)
    known = {name for param in typer.main.get_command(program).params for name in param.opts}
    assert all(asked)
    assert set.union(*asked) <= known
