"""What a Redis or Valkey server keeps for all processes that share an output memory.

Two keys, whose part in braces lets a cluster keep both in one place.
`{hf-retrieval-assist}:3:outputs` is a stream with one entry per output: `by`, the process that
wrote it, `model`, the fingerprint of its model, and `ids`, its token ids (int32, little-endian).
`{hf-retrieval-assist}:3:state` is a hash: `mark`, a random text that every forgetting replaces, and
`bytes`, the size of all ids, which is bounded.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ...system.versions import of_extra

KEYS = [f"{{hf-retrieval-assist}}:3:{name}" for name in ("outputs", "state")]
_TIMEOUT = 2.0  # seconds that the server may take to answer
_OPTIONS = (
    *("client_name", "db", "password", "username"),
    *("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"),
)

# Nothing is written or read unless the mark is the caller's; a server that has none takes a new
# one. The stream is bounded in bytes, for which XADD has no limit. ARGV: the caller's mark, a new
# one, the last entry that was read, entries to return at most, bytes to keep, the writer, then
# model and ids of each output.
EXCHANGE = """
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
FORGET = """
local before, kept = redis.call('HGET', KEYS[2], 'mark') or '', 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  local model, ids = entry[2][4] or '', entry[2][6] or ''
  if model:sub(1, #ARGV[1]) == ARGV[1] then redis.call('XDEL', KEYS[1], entry[1])
  else kept = kept + #ids end
end
redis.call('HSET', KEYS[2], 'mark', ARGV[2], 'bytes', kept)
return before
"""


def client_of(url: str) -> Any:
    """A client of the server at `url`.

    A connection that the server has closed is opened again, once for each call.

    Raises:
        ImportError: the `redis` extra is not installed.
    """
    redis = of_extra("redis", "a memory on a server needs")
    return redis.Redis.from_url(
        url,
        socket_timeout=_TIMEOUT,
        socket_connect_timeout=_TIMEOUT,
        # Newer clients of the third protocol hand out connections that hold old answers.
        protocol=2,
        retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.ConnectionError,)),
    )


def checked_place(url: str) -> str:
    """The host or socket that a URL names, without user and password, if outputs may be sent there.

    Raises:
        ValueError: the URL is none of the client's, or lacks a password for another machine.
    """
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
