"""Modules that are loaded again in a running process: calls go on, plainly where parts of the
package no longer fit together."""

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="forks are POSIX's"),
]

# One of each kind: what holds the wrapper, what is checked for its class, what others exchange, and
# what is called in every step.
SOME = [
    *("hook", "assistants", "attachment", "policy.policy", "system.reloads"),
    *("host.scopes", "decoding.call"),
]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([f"hf_retrieval_assist.{name}" for name in SOME], id="some"),
        pytest.param([], id="every"),
    ],
)
def test_calls_go_on_after_modules_were_loaded_again(names):
    command = [sys.executable, "-m", "tests.system.reloading_process", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = int(done.stdout.split()[0])
    assert cases == 3 * (len(names) + 2) if names else cases > 400
