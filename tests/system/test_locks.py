"""Forks while other threads hold locks."""

import os
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_retrieval_assist
from hf_retrieval_assist.system import locks as locks_module
from hf_retrieval_assist.system.lazy import cached_property
from hf_retrieval_assist.system.locks import Lock
from tests.support.forks import in_child
from tests.support.lossless import INPUTS, build
from tests.support.memories import check_memory, remembering
from tests.support.threads import elsewhere

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX's")


def take(lock):
    with lock:
        pass


@contextmanager
def repeated(work, threads=1):
    """Other threads do this again and again meanwhile."""
    stop = threading.Event()

    def repeat():
        while not stop.is_set():
            work()

    others = [threading.Thread(target=repeat) for _ in range(threads)]
    for thread in others:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in others:
            thread.join()


def test_a_fork_waits_for_what_a_lock_guards():
    lock, state, entered = Lock(), [0, 0], threading.Event()

    def change():
        with lock:
            state[0] = 1
            entered.set()
            time.sleep(0.2)
            state[1] = 1

    thread = threading.Thread(target=change)
    thread.start()
    entered.wait()

    def check():
        take(lock)
        assert state == [1, 1]

    assert in_child(check) == 0
    thread.join()


def test_a_lock_that_is_held_for_long_is_free_in_the_child(monkeypatch):
    monkeypatch.setattr(locks_module, "_PATIENCE", 0.05)
    lock = Lock()
    with elsewhere(lock):
        assert in_child(lambda: take(lock), seconds=10) == 0
    take(lock)


def test_who_forks_inside_a_lock_still_holds_it_in_both_processes():
    lock = Lock()
    with lock:
        assert in_child(lambda: take(lock), seconds=10) == 0

        def leave():
            lock.__exit__()
            thread = threading.Thread(target=take, args=(lock,))
            thread.start()
            thread.join(5)
            assert not thread.is_alive()

        assert in_child(leave, seconds=20) == 0


def test_a_property_that_another_thread_computes_is_computed_in_the_child():
    entered, done = threading.Event(), threading.Event()

    class Lazy:
        computed = 0

        @cached_property
        def value(self):
            self.computed += 1
            if not entered.is_set():
                entered.set()
                done.wait()
            return self.computed

    slow, quick = Lazy(), Lazy()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    entered.wait()

    def ask():
        assert [quick.value, quick.value] == [1, 1]

    try:
        assert in_child(ask, seconds=10) == 0
    finally:
        done.set()
        thread.join()
    assert slow.value == 1


def test_nothing_but_this_module_makes_locks():
    # Locks of others are not freed in a child. Conditions are, where they are made.
    makes = re.compile(r"thread(ing)?\.(Lock|RLock|Semaphore)\b|functools import .*cached_property")
    root = Path(hf_retrieval_assist.__file__).parent
    found = {path.name for path in root.rglob("*.py") if makes.search(path.read_text())}
    assert found == {"locks.py"}


@pytest.mark.parametrize("forks", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_children_of_a_generating_process_generate(forks):
    model, assistant = build(), remembering()

    def generate():  # no seed, for which torch holds a lock of its own
        model.generate(**INPUTS["one row"], do_sample=False, max_new_tokens=20, assistant=assistant)

    generate()

    def child():
        torch.set_num_threads(1)
        check_memory(assistant.memory)
        assistant.memory.add(np.arange(50, dtype=np.int32), "other")
        generate()
        check_memory(assistant.memory)

    with repeated(generate, threads=2):
        assert [in_child(child) for _ in range(forks)] == [0] * forks
