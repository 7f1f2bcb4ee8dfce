"""A Redis server of the tests' own, on a free port, that can be killed, stopped and started."""

import shutil
import signal
import socket
import subprocess
import threading
from importlib.util import find_spec

import pytest

from .memories import wait_until

PASSWORD = "not a secret"


needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or find_spec("redis") is None,
    reason="needs redis-server (Debian: apt-get install redis-server) and the redis extra",
)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RedisProcess:
    """A server that keeps what it acknowledged through its own death, with `appendonly`."""

    def __init__(self, folder, password=None, appendonly="yes", cluster=False):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.password = password
        self.options = {"appendonly": appendonly}
        if cluster:
            self.options |= {"cluster-enabled": "yes", "cluster-port": free_port()}
        self.port = free_port()
        self.start()

    @property
    def url(self):
        user = "" if self.password is None else f":{self.password.replace(' ', '%20')}@"
        return f"redis://{user}127.0.0.1:{self.port}/0"

    @property
    def client(self):
        import redis

        return redis.Redis(port=self.port, password=self.password, socket_timeout=20)

    def entries(self):
        """What the stream of outputs holds; the server's count of its bytes must be right."""
        found = [fields for _, fields in self.client.xrange("{hf-retrieval-assist}:3:outputs")]
        size = sum(len(fields[b"ids"]) for fields in found)
        assert size == int(self.client.hget("{hf-retrieval-assist}:3:state", "bytes") or 0)
        return found

    def start(self):
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self.folder, "save": ""}
        options |= {"requirepass": self.password or "", "appendfsync": "always", **self.options}
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["redis-server", *flags], **quiet)
        wait_until(self._answers)

    def _answers(self):
        import redis

        assert self.process.poll() is None, "redis-server did not start"
        try:
            return self.client.ping()
        except redis.ConnectionError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def hang(self):
        """Connections stay open, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        if self.process.poll() is None:
            self.go_on()
            self.kill()


class OddServer:
    """Speaks to one client at a time, and answers every script with the same bytes.

    Attributes:
        answer: those bytes.
        tries: scripts that came.
    """

    def __init__(self, answer):
        self.answer = answer
        self.tries = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"redis://{self.place}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._speak, args=(connection,), daemon=True).start()

    def _speak(self, connection):
        file = connection.makefile("rb")
        try:
            while line := file.readline():
                parts = [file.read(int(file.readline()[1:]) + 2) for _ in range(int(line[1:]))]
                if parts[0][:4].upper() == b"EVAL":
                    self.tries += 1
                    connection.sendall(self.answer)
                    if not self.answer.endswith(b"\r\n"):
                        break
                elif parts[0][:5].upper() == b"HELLO":
                    connection.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                else:
                    connection.sendall(b"+OK\r\n")
        except OSError:
            pass
        connection.close()

    def close(self):
        self._socket.close()
