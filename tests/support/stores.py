"""Places where several memories keep one set of outputs, and a process that writes to one."""

import subprocess
import sys
from pathlib import Path

from hf_retrieval_assist import system
from hf_retrieval_assist.memory.output_memory import OutputMemory
from tests.support.memories import WAIT
from tests.support.redis_process import RedisProcess


class Alone:
    """Nobody shares the memory."""

    def __init__(self, folder):
        self.memory = OutputMemory()

    def view(self):
        return self.memory

    def holds(self, ids):
        return False

    def close(self):
        pass


class OnDisk(Alone):
    def __init__(self, folder):
        self.path = folder / "log"

    @property
    def place(self):
        return "path", self.path

    def view(self, **options):
        return OutputMemory(path=self.path, **options)

    def holds(self, ids):
        return any(ids in file.read_bytes() for file in self.path.parent.iterdir())


class OnServer(Alone):
    def __init__(self, folder, appendonly="no"):
        self.process = RedisProcess(folder, appendonly=appendonly)

    @property
    def place(self):
        return "url", self.process.url

    def view(self, **options):
        return OutputMemory(url=self.process.url, **options)

    def holds(self, ids):
        return any(ids == fields[b"ids"] for fields in self.process.entries())

    def close(self):
        self.process.close()


def sync(*memories):
    """Each has what the others finished."""
    for memory in memories * 2:
        assert memory.sync(WAIT)


# Writes outputs and, if it shall, says which ones others can read. It imports the modules alone:
# importing the package would take most of its life.
WRITER = """
import sys, types
package = types.ModuleType("hf_retrieval_assist")
package.__path__ = [sys.argv[1]]
sys.modules["hf_retrieval_assist"] = package
import numpy as np
from hf_retrieval_assist.memory import log
from hf_retrieval_assist.memory.output_memory import OutputMemory

log._PATIENCE = 30.0
if sys.argv[2] == "url":
    from hf_retrieval_assist.extensions.redis import stream
    stream._PERIOD = 0.01
memory, first, count, say = OutputMemory(**{sys.argv[2]: sys.argv[3]}), *map(int, sys.argv[4:])
for i in range(first, first + count):
    memory.add(np.arange(30 + i % 100, dtype=np.int32) + 1000 * i, "m")
    if say:
        assert memory.sync(30)
        print(i, flush=True)
"""


def start_writer(store, first, outputs, say=True):
    """A process that writes numbered outputs, as `known` counts them."""
    folder = Path(system.__file__).parents[1]
    arguments = [folder, *store.place, first, outputs, int(say)]
    command = [sys.executable, "-c", WRITER, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
