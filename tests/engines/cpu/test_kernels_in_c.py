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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C compiler")
@pytest.mark.parametrize("kernel", ["linear", "attention", "small"])
def test_every_path_against_single_numbers(kernel, tmp_path):
    kernels, program = ROOT / "cython_ext" / "kernels", tmp_path / kernel
    sources = [Path(__file__).parent / "c" / f"check_{kernel}.c", *kernels.glob("*.c")]
    options = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command = [COMPILER, *options, f"-I{kernels}", *sources, "-o", program, "-static", "-lm"]
    subprocess.run(command, check=True)
    result = subprocess.run([*RUNNER, program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert ", 0 failures" in result.stdout
