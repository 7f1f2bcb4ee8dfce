"""What a Redis or Valkey server keeps for all processes that share an output memory.

Two keys, whose part in braces lets a cluster keep both in one place.
`{hf-retrieval-assist}:3:outputs` is a stream with one entry per output: `by`, the process that
wrote it, `model`, the fingerprint of its model, and `ids`, its token ids (int32, little-endian).
`{hf-retrieval-assist}:3:state` is a hash: `mark`, a random text that every forgetting replaces, and
`bytes`, the size of all ids, which is bounded.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from ...memory.log import Output
from ...system.versions import of_extra

_KEYS = [f"{{hf-retrieval-assist}}:3:{name}" for name in ("outputs", "state")]
_TIMEOUT = 2.0  # seconds that the server may take to answer
_ENTRIES = 64  # read in one exchange
_OPTIONS = (
    *("client_name", "db", "password", "username"),
    *("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"),
)

# Nothing is written or read unless the mark is the caller's; a server that has none takes a new
# one. The stream is bounded in bytes, for which XADD has no limit. ARGV: the caller's mark, a new
# one, the last entry that was read, entries to return at most, bytes to keep, the writer, then
# model and ids of each output.
_EXCHANGE = """
local mark = redis.call('HGET', KEYS[2], 'mark')
if not mark then
  mark = ARGV[2]
  redis.call('HSET', KEYS[2], 'mark', mark, 'bytes', 0)
end
if mark ~= ARGV[1] then return {mark, {}} end
local kept = tonumber(redis.call('HGET', KEYS[2], 'bytes') or 0)
for i = 7, #ARGV, 2 do
  redis.call('XADD', KEYS[1], '*', 'by', ARGV[6], 'model', ARGV[i], 'ids', ARGV[i + 1])
  kept = kept + #ARGV[i + 1]
end
while kept > tonumber(ARGV[5]) do
  local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  if not oldest then kept = 0 break end
  redis.call('XDEL', KEYS[1], oldest[1])
  kept = kept - #(oldest[2][6] or '')
end
redis.call('HSET', KEYS[2], 'bytes', kept)
return {mark, redis.call('XRANGE', KEYS[1], '(' .. ARGV[3], '+', 'COUNT', ARGV[4])}
"""

# ARGV: a prefix of models, whose entries are deleted, and a new mark. Returns the mark before.
_FORGET = """
local before, kept = redis.call('HGET', KEYS[2], 'mark') or '', 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  local model, ids = entry[2][4] or '', entry[2][6] or ''
  if model:sub(1, #ARGV[1]) == ARGV[1] then redis.call('XDEL', KEYS[1], entry[1])
  else kept = kept + #ids end
end
redis.call('HSET', KEYS[2], 'mark', ARGV[2], 'bytes', kept)
return before
"""


class Answer(NamedTuple):
    """What an exchange brought.

    Attributes:
        mark: the server's; where it is another than the caller's, nothing was written or read.
        last: the name of the last entry that was read.
        outputs: of other processes.
        more: whether there may be further entries.
    """

    mark: bytes
    last: bytes
    outputs: list[Output]
    more: bool


class RedisServer:
    """The server at `url`; every call waits for its answer, and raises an exception of any kind if
    the server is away, slow, refuses or answers otherwise.

    A connection that the server has closed is opened again, once for each call.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as the `redis` client reads it; with a password,
            unless the host is this machine.

    Attributes:
        place: the host, or the socket, without user and password.

    Raises:
        ValueError: the URL is none of the client's, or lacks a password.
        ImportError: the `redis` extra is not installed.
    """

    def __init__(self, url: str) -> None:
        self.place = _checked_place(url)
        redis = of_extra("redis", "a memory on a server needs")
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            # Newer clients of the third protocol hand out connections that hold old answers.
            protocol=2,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.ConnectionError,)),
        )
        self._exchange = self._client.register_script(_EXCHANGE)
        self._forget = self._client.register_script(_FORGET)

    def exchange(
        self, mark: bytes, after: bytes, writer: bytes, keep_bytes: int, outputs: Sequence[Output]
    ) -> Answer:
        """Write outputs, and read entries behind the one named `after` (b"0": from the first on),
        in one operation; neither unless `mark` is the server's. The server drops its oldest entries
        beyond `keep_bytes`."""
        written = [part for one in outputs for part in (one.fingerprint, one.stored_ids())]
        args = [mark, os.urandom(8).hex(), after, _ENTRIES, keep_bytes, writer, *written]
        found, entries = self._exchange(keys=_KEYS, args=args)
        read: list[Output] = []
        for name, fields in entries:
            after = bytes(memoryview(name))
            # An entry of another kind, or one that is damaged, is passed over.
            with suppress(AttributeError, KeyError, TypeError, ValueError):
                parts = dict(zip(fields[::2], fields[1::2], strict=True))
                if parts[b"by"] != writer:
                    read.append(Output.parse(parts[b"model"].decode(), parts[b"ids"]))
        return Answer(bytes(memoryview(found)), after, read, len(entries) == _ENTRIES)

    def forget(self, prefix: str) -> tuple[bytes, bytes]:
        """Delete the outputs with a prefix; the mark before, and the new one."""
        mark = os.urandom(8).hex().encode()
        return bytes(memoryview(self._forget(keys=_KEYS, args=[prefix, mark]))), mark


def _checked_place(url: str) -> str:
    """The host or socket that a URL names, if outputs may be sent there."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        found = parts.scheme or "no scheme"
        raise ValueError(f"url: expected redis://, rediss:// or unix://, got {found}")
    # The client takes whatever argument a URL names, among them another host.
    options = parse_qs(parts.query, keep_blank_values=True)
    if unknown := sorted(options.keys() - {*_OPTIONS}):
        known = ", ".join(_OPTIONS)
        raise ValueError(f"url: expected no options but {known}, got {', '.join(unknown)}")
    if parts.scheme == "unix":
        return unquote(parts.path)
    host = unquote(parts.hostname or "localhost")
    local = host == "localhost"
    with suppress(ValueError):
        local |= ipaddress.ip_address(host).is_loopback
    if not (local or parts.password or any(options.get("password", ()))):
        raise ValueError(f"url: expected a password for a host other than this one, got {host}")
    return host if parts.port is None else f"{host}:{parts.port}"
