"""What a Redis or Valkey server keeps for all processes that share an output memory.

Two keys. `hf-retrieval-assist:1:outputs` is a stream with one entry per output:

    by     the process that wrote it (16 random bytes)
    seq    its place among that process's outputs; `by` and `seq` identify an output
    model  the fingerprint of the model that wrote it
    ids    the token ids (uint32, little-endian)

`hf-retrieval-assist:1:state` is a hash: `epoch`, how often everything was forgotten, and `bytes`,
the size of the stream's contents, which is bounded.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray

_KEYS = ("hf-retrieval-assist:1:outputs", "hf-retrieval-assist:1:state")
_TIMEOUT = 2.0  # seconds that the server may take to answer
_OVERHEAD = 64  # bytes of an entry besides its model and ids

# One exchange. What was finished before a forgetting that its writer has not heard of is not taken;
# the epoch in the answer tells the writer, who forgets it too.
# ARGV: the writer's epoch, the last entry it has read, entries to return at most, bytes to keep,
# then by, seq, model and ids of each output.
_EXCHANGE = """
local function size(entry)
  local bytes = 0
  for _, part in ipairs(entry) do bytes = bytes + #part end
  return bytes
end
local epoch, known = tonumber(redis.call('HGET', KEYS[2], 'epoch') or 0), tonumber(ARGV[1])
if known > epoch then  -- the server has lost what it knew
  epoch = known
  redis.call('HSET', KEYS[2], 'epoch', epoch)
end
if known == epoch and #ARGV > 4 then
  local kept = tonumber(redis.call('HGET', KEYS[2], 'bytes') or 0)
  if redis.call('XLEN', KEYS[1]) == 0 then kept = 0 end
  for i = 5, #ARGV, 4 do
    local entry = {'by', ARGV[i], 'seq', ARGV[i + 1], 'model', ARGV[i + 2], 'ids', ARGV[i + 3]}
    redis.call('XADD', KEYS[1], '*', unpack(entry))
    kept = kept + size(entry)
  end
  while kept > tonumber(ARGV[4]) do
    local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
    if not oldest then break end
    redis.call('XDEL', KEYS[1], oldest[1])
    kept = kept - size(oldest[2])
  end
  redis.call('HSET', KEYS[2], 'bytes', kept)
end
local news = redis.call('XREAD', 'COUNT', ARGV[3], 'STREAMS', KEYS[1], ARGV[2])
return {epoch, news and news[1][2] or {}}
"""

# Trimmed, not deleted, so that later entries have higher names than those that were read.
_FORGET = """
local epoch = math.max(tonumber(redis.call('HGET', KEYS[2], 'epoch') or 0), tonumber(ARGV[1])) + 1
redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
redis.call('HSET', KEYS[2], 'epoch', epoch, 'bytes', 0)
return epoch
"""


@dataclass(frozen=True)
class Output:
    """A finished output on its way.

    Attributes:
        by: the process that wrote it.
        sequence: its place among that process's outputs.
        fingerprint: of the model.
        token_ids: int32 [n].
    """

    by: bytes
    sequence: int
    fingerprint: str
    token_ids: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return 4 * len(self.token_ids) + len(self.fingerprint) + _OVERHEAD

    def fields(self) -> tuple[bytes, int, bytes, bytes]:
        ids = self.token_ids.astype("<u4").tobytes()
        return self.by, self.sequence, self.fingerprint.encode(), ids


class RedisServer:
    """The server at `url`; every call waits for its answer.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as the `redis` client reads it; with a password,
            unless the host is this machine.

    Attributes:
        place: the host, or the socket, without user and password.
        errors: what calls raise when the server is away, slow, or refuses.

    Raises:
        ValueError: the URL is none of the client's, or lacks a password.
        ImportError: the `redis` extra is not installed.
    """

    def __init__(self, url: str) -> None:
        self.place = _checked_place(url)
        redis = _client_library()
        self.errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        client = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        self._exchange = client.register_script(_EXCHANGE)
        self._forget = client.register_script(_FORGET)

    def exchange(
        self, epoch: int, after: bytes, most: int, keep_bytes: int, outputs: Sequence[Output]
    ) -> tuple[int, list[tuple[bytes, Output | None]]]:
        """Write outputs and read others, in one round trip and as one operation.

        Args:
            epoch: the newest that the caller knows of; the outputs are taken only if it is the
                server's.
            after: name of the last entry that was read; b"0" before the first.
            most: entries to return.
            keep_bytes: bound on what the server keeps.
            outputs: to write.

        Returns:
            The server's epoch, and the entries after `after` with their names; None in the place
            of one that is no output.
        """
        written = [part for output in outputs for part in output.fields()]
        answer = self._exchange(keys=_KEYS, args=[epoch, after, most, keep_bytes, *written])
        return int(answer[0]), [(name, _parse(fields)) for name, fields in answer[1]]

    def forget(self, epoch: int) -> int:
        """Delete all outputs. Returns the new epoch, which is above `epoch`."""
        return int(self._forget(keys=_KEYS, args=[epoch]))


def _parse(fields: list[bytes]) -> Output | None:
    """An entry's output, or None where it is damaged or somebody else's."""
    parts = dict(zip(fields[::2], fields[1::2], strict=False))
    with suppress(KeyError, ValueError):
        ids = np.frombuffer(parts[b"ids"], "<u4")
        # An id that no model has would be refused by the tree; the output's other ids are good.
        token_ids = ids[ids < 2**31].astype(np.int32)
        model = parts[b"model"].decode(errors="replace")
        return Output(parts[b"by"], int(parts[b"seq"]), model, token_ids)
    return None


def _client_library() -> Any:
    try:
        import redis
    except ImportError as error:
        message = "a memory on a server needs: pip install 'hf-retrieval-assist[redis]'"
        raise ImportError(message) from error
    return redis


def _checked_place(url: str) -> str:
    """The host or socket that a URL names, if outputs may be sent there."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError(
            f"url: expected redis://, rediss:// or unix://, got {parts.scheme or 'no scheme'}"
        )
    host = parts.hostname or "localhost"
    if not (_is_local(host) or parts.password or "password" in parse_qs(parts.query)):
        raise ValueError(f"url: expected a password for a host other than this one, got {host}")
    return host if parts.port is None else f"{host}:{parts.port}"


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
