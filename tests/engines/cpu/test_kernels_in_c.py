"""The kernels compiled into programs of their own, which other architectures can run as well."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Another architecture's compiler, and what runs its programs here (`make test-arm`).
COMPILER = os.environ.get("KERNEL_CC", "cc")
RUNNER = os.environ.get("KERNEL_RUN", "").split()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler"),
]


def check(kernel, folder, *options):
    """What a program prints that checks kernels."""
    kernels, program = ROOT / "cython_ext" / "kernels", folder / kernel
    sources = [Path(__file__).parent / "c" / f"check_{kernel}.c", *kernels.glob("*.c")]
    numbers = ["-std=c11", "-O2", "-ffp-contract=off"]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command = [COMPILER, *numbers, *warnings, f"-I{kernels}", *sources, "-o", program]
    subprocess.run([*command, "-lm", "-pthread", *options], check=True)
    result = subprocess.run([*RUNNER, program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("kernel", ["linear", "attention", "small", "program"])
def test_every_path_against_single_numbers(kernel, tmp_path):
    assert ", 0 failures" in check(kernel, tmp_path, "-static")


@pytest.mark.skipif(bool(RUNNER), reason="another architecture's threads are not watched")
def test_threads_of_a_program_have_no_races(tmp_path):
    assert "WARNING" not in check("program", tmp_path, "-fsanitize=thread", "-g")
