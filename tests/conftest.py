"""Settings of the whole suite."""

import gc
import logging
import os
import re
import time

import hypothesis
import pytest
import torch
import transformers

from hf_retrieval_assist.policy import cost_store
from hf_retrieval_assist.verification import service
from tests.support.lossless import build, run
from tests.support.parts import missing
from tests.support.watching import results_of

try:
    from hf_retrieval_assist.engines.cpu import repeated_forward, skinny
except ModuleNotFoundError:  # a tree without it
    repeated_forward = skinny = None

# PyTorch's code for older CPUs is not made for what oneDNN chooses on this one.
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
_LEFT_OUT = pytest.StashKey()
transformers.logging.set_verbosity_error()
# CI=true in the environment sends transformers' log to the root logger too, and to `told` twice.
transformers.logging.disable_propagation()
# Forwards are recorded at once, so that whatever is tested meets those that are repeated.
if repeated_forward is not None:
    repeated_forward.PATIENCE = 1
# Nothing depends on how busy the machine is.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    paths = () if skinny is None else skinny.PATHS
    parser.addoption("--kernels", choices=paths, help="the newest instructions to compute by")
    # The models are tiny; threads would only wait for each other.
    parser.addoption("--threads", type=int, default=1, help="of PyTorch and the kernels")
    text = "of CPU time a test may take that is not marked slow; inf where all take longer"
    parser.addoption("--seconds", type=float, default=3.0, help=text)
    parser.addoption("--shard", default="1/1", help="3/4: every fourth test from the third on")


def pytest_configure(config):
    torch.set_num_threads(config.getoption("threads"))
    if (newest := config.getoption("kernels")) is not None:
        skinny.PATHS = skinny.PATHS[: skinny.PATHS.index(newest) + 1]
    expected = os.environ.get("HFRA_EXPECT_TRANSFORMERS", transformers.__version__)
    if transformers.__version__ != expected:
        raise pytest.UsageError(
            f"expected transformers {expected}, got {transformers.__version__} "
            f"from {transformers.__file__}"
        )


def pytest_report_header():
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def pytest_ignore_collect(collection_path, config):
    """Tests of parts that this tree lacks are left out, and said to be."""
    name = collection_path.name
    if re.fullmatch(r"test_\w+\.py", name) and (module := missing(collection_path)) is not None:
        config.stash.setdefault(_LEFT_OUT, {})[collection_path] = f"{name} needs {module}"
        return True
    return None


def pytest_collection_modifyitems(config, items):
    first, shards = map(int, config.getoption("shard").split("/"))
    items[:] = items[first - 1 :: shards]


def pytest_collection_finish():
    """What was imported is not looked through whenever a test collects garbage."""
    gc.collect()
    gc.freeze()


def cpu_seconds():
    """This process's, and those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def slowness():
    """How many times the CPU time that a quick machine takes for some Python this one takes now."""
    before = time.process_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.process_time() - before) / 0.04)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Tests stay quick. Since CPU time is counted, no busy machine fails them, and no slow one."""
    before = cpu_seconds()
    result = yield
    taken, most = cpu_seconds() - before, item.config.getoption("seconds")
    if item.get_closest_marker("slow") is None and taken > most:
        most *= slowness()
        if taken > most:
            pytest.fail(
                f"expected at most {most:.1f} s of CPU time, got {taken:.1f}: mark the test slow, "
                "split it, or keep fewer of its cases quick (tests/support/quick.py)",
                pytrace=False,
            )
    return result


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(_LEFT_OUT, {}).values():
        terminalreporter.write_line(f"left out: {line}")


@pytest.fixture(autouse=True)
def costs_of_its_own(monkeypatch):
    """What a test has timed says nothing to others."""
    monkeypatch.setattr(cost_store, "OF_PROCESS", cost_store.CostModels())


@pytest.fixture
def told(caplog):
    """`caplog` with what the package's log shows to users who have set nothing up."""
    root = logging.getLogger("transformers")
    logging.Logger.warning_once.cache_clear()
    root.addHandler(caplog.handler)
    transformers.logging.set_verbosity_warning()
    yield caplog
    transformers.logging.set_verbosity_error()
    root.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def llama():
    """A tiny decoder of the commonest kind."""
    return build()


@pytest.fixture(scope="module")
def model(llama):
    """The same, where a module has no other."""
    return llama


@pytest.fixture(scope="module")
def plain(model):
    """What it generates."""
    return run(model)


@pytest.fixture
def tests(monkeypatch):
    """What the tests of models have found."""
    return results_of(monkeypatch, service, "run_self_test")
