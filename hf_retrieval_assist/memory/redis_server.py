"""What a Redis or Valkey server keeps for all processes that share an output memory.

Two keys. `{hf-retrieval-assist}:2:outputs` is a stream with one entry per output:

    by     the writer (16 random bytes)
    seq    its place among that writer's outputs; `by` and `seq` identify an output
    model  the fingerprint of the model that wrote it
    ids    the token ids (uint32, little-endian)

Entries are named by the server's time, in milliseconds, and their names only grow.
`{hf-retrieval-assist}:2:state` is a hash: `epoch`, the name below which everything was forgotten,
`forgotten`, the time when it was, and `bytes`, the size of the stream's contents, which is bounded.
The part of the keys in braces lets a cluster keep both in one place.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .outputs import Output

_KEYS = ("{hf-retrieval-assist}:2:outputs", "{hf-retrieval-assist}:2:state")
_TIMEOUT = 2.0  # seconds that the server may take to answer
_OPTIONS = (
    *("client_name", "db", "password", "username"),
    *("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"),
)

# One exchange. Outputs are not taken from a process that has not heard of the last forgetting; the
# epoch in the answer tells it, and it forgets them too. One that has heard of none yet says when it
# began, by the server's clock. A process that knows a later epoch than the server, which has come
# back from an older copy, has it forget anew; what was written there since is named by a later time
# and stays.
# An entry that was read last and is gone made room, or was lost with all that were read: what there
# is now is read from the beginning.
# ARGV: the writer's epoch or "", the millisecond when it began, the last entry it has read, entries
# to return at most, bytes to keep, then by, seq, model and ids of each output.
_EXCHANGE = """
local function size(entry)
  local bytes = 0
  for _, part in ipairs(entry) do bytes = bytes + #part end
  return bytes
end
local function stored(name)
  return tonumber(redis.call('HGET', KEYS[2], name) or 0)
end
local epoch, known = stored('epoch'), tonumber(ARGV[1])
if known and known > epoch then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
  local bytes = 0
  for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
    bytes = bytes + size(entry[2])
  end
  redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'forgotten', ARGV[1], 'bytes', bytes)
  epoch = known
end
local forgotten = known and known < epoch or not known and stored('forgotten') > tonumber(ARGV[2])
if forgotten then return {string.format('%.0f', epoch), 1, {}} end
if #ARGV > 5 then
  local kept = stored('bytes')
  if redis.call('XLEN', KEYS[1]) == 0 then kept = 0 end
  for i = 6, #ARGV, 4 do
    local entry = {'by', ARGV[i], 'seq', ARGV[i + 1], 'model', ARGV[i + 2], 'ids', ARGV[i + 3]}
    redis.call('XADD', KEYS[1], '*', unpack(entry))
    kept = kept + size(entry)
  end
  while kept > tonumber(ARGV[5]) do
    local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
    if not oldest then break end
    redis.call('XDEL', KEYS[1], oldest[1])
    kept = kept - size(oldest[2])
  end
  redis.call('HSET', KEYS[2], 'bytes', kept)
end
local after = '-'
if #redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3]) == 1 then after = '(' .. ARGV[3] end
local entries = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', ARGV[4])
return {string.format('%.0f', epoch), 0, entries}
"""

# ARGV: the epoch that the caller knows.
_FORGET = """
local last = redis.call('XADD', KEYS[1], '*', 'forgotten', '')
local epoch = math.max(tonumber(last:match('^%d+')), tonumber(ARGV[1])) + 1
redis.call('XADD', KEYS[1], string.format('%.0f-0', epoch), 'forgotten', '')
redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
local time = redis.call('TIME')
local now = string.format('%.3f', time[1] * 1000 + time[2] / 1000)
redis.call('HSET', KEYS[2], 'epoch', string.format('%.0f', epoch), 'forgotten', now, 'bytes', 0)
return string.format('%.0f', epoch)
"""


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
        self._time = client.time
        self._exchange = client.register_script(_EXCHANGE)
        self._forget = client.register_script(_FORGET)

    def exchange(
        self,
        epoch: int | None,
        began: float,
        after: bytes,
        most: int,
        keep_bytes: int,
        outputs: Sequence[Output],
    ) -> tuple[int, bool, list[tuple[bytes, Output | None]]]:
        """Write outputs and read others, as one operation and in one round trip, once the caller
        knows an epoch.

        Args:
            epoch: the newest that the caller knows of, None if none.
            began: `time.monotonic()` when the caller did.
            after: name of the last entry that was read; b"0" before the first.
            most: entries to return.
            keep_bytes: bound on what the server keeps.
            outputs: to write.

        Returns:
            The server's epoch; whether everything was forgotten since the one that the caller
            knows of, or since it began, so that its outputs are not taken; and else the entries
            after `after` with their names, None in the place of one that is no output.
        """
        written = [part for output in outputs for part in output.fields()]
        known, start = ("", self._by_its_clock(began)) if epoch is None else (epoch, 0.0)
        args = [known, f"{start:.3f}", after, most, keep_bytes, *written]
        answer = self._exchange(keys=_KEYS, args=args)
        entries = [(name, _parse(fields)) for name, fields in answer[2]]
        return int(answer[0]), bool(answer[1]), entries

    def _by_its_clock(self, instant: float) -> float:
        """The server's millisecond of a past `time.monotonic()`, or one somewhat before it: what
        was on its way for long is not taken for younger than it is."""
        seconds, microseconds = self._time()
        return 1e3 * seconds + 1e-3 * microseconds - 1e3 * (time.monotonic() - instant)

    def forget(self, epoch: int | None) -> int:
        """Delete all outputs. Returns the new epoch, which is above `epoch`."""
        return int(self._forget(keys=_KEYS, args=[epoch or 0]))


def _parse(fields: list[bytes]) -> Output | None:
    """An entry's output, or None where it is damaged or somebody else's."""
    parts = dict(zip(fields[::2], fields[1::2], strict=False))
    with suppress(KeyError, ValueError):
        model = parts[b"model"].decode(errors="replace")
        return Output.from_fields(parts[b"by"], int(parts[b"seq"]), model, parts[b"ids"])
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
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            f"url: expected redis://, rediss:// or unix://, got {parts.scheme or 'no scheme'}"
        )
    # The client takes whatever argument a URL names, among them another host.
    if unknown := parse_qs(parts.query, keep_blank_values=True).keys() - {*_OPTIONS}:
        known = ", ".join(_OPTIONS)
        raise ValueError(f"url: expected no options but {known}, got {', '.join(sorted(unknown))}")
    if parts.scheme == "unix":
        return unquote(parts.path)
    host = unquote(parts.hostname or "localhost")
    if not (_is_local(host) or parts.password or parse_qs(parts.query).get("password")):
        raise ValueError(f"url: expected a password for a host other than this one, got {host}")
    return host if parts.port is None else f"{host}:{parts.port}"


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
