"""Work that other threads do."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def computing_by(threads):
    """Scope in which PyTorch and the kernels compute by so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(work, arguments):
    """What `work` returns for each argument, in as many threads at once."""
    arguments = list(arguments)
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))


@contextmanager
def elsewhere(*scopes):
    """Another thread is in these scopes meanwhile."""
    entered, done = threading.Event(), threading.Event()

    def other():
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            entered.set()
            done.wait()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert entered.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join(60)
