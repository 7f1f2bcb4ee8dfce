"""What `deploy/` and its page say agrees with the command and the package."""

import re
import shlex
from pathlib import Path

import typer

from hf_retrieval_assist.tools.cli import serve

ROOT = Path(__file__).parent.parent
UNIT = (ROOT / "deploy" / "hf-retrieval-assist.service").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "howto" / "deploy.md").read_text(encoding="utf-8")


def value_of(name):
    (value,) = re.findall(rf"^{name}=((?:.*\\\n)*.*)$", UNIT, re.MULTILINE)
    return value.replace("\\\n", " ")


def options_in(words):
    return {word for word in words if word.startswith("--")}


def options_of_the_command():
    program = typer.Typer()
    program.command()(serve.serve)
    return {name for param in typer.main.get_command(program).params for name in param.opts}


def test_the_unit_and_the_image_start_the_command_by_options_that_it_has():
    unit = shlex.split(value_of("ExecStart"))
    assert Path(unit[0]).name == "hf-retrieval-assist"
    assert unit[1:3] == ["serve", "${MODEL}"]
    (image,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", DOCKERFILE, re.MULTILINE)
    started = re.findall(r'"([^"]*)"', image)
    assert started[:2] == ["hf-retrieval-assist", "serve"]
    environment = shlex.split(*re.findall(r'^OPTIONS="(.*)"$', PAGE, re.MULTILINE))
    (arguments,) = re.findall(r"^    hf-retrieval-assist /models/(.*)$", PAGE, re.MULTILINE)
    asked = [options_in(words) for words in (unit, started, environment, arguments.split())]
    assert all(asked)
    assert set.union(*asked) <= options_of_the_command()
