"""Work that other threads do."""

from concurrent.futures import ThreadPoolExecutor


def in_threads(work, arguments):
    """What `work` returns for each argument, in as many threads at once."""
    arguments = list(arguments)
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))
