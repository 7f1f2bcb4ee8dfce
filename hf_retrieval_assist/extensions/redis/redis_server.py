"""What a Redis or Valkey server keeps for all processes that share an output memory.

Three keys. `{hf-retrieval-assist}:2:outputs` is a stream with one entry per output:

    by     the writer (16 random bytes)
    seq    its place among that writer's outputs; `by` and `seq` identify an output
    model  the fingerprint of the model that wrote it
    ids    the token ids (uint32, little-endian)

Entries are named by the server's time, in milliseconds, and their names only grow.
`{hf-retrieval-assist}:2:forgotten` is a hash: the names of forgettings, milliseconds as well, and
the prefix of fingerprints that each was of. `{hf-retrieval-assist}:2:state` is a hash: `epoch`,
which grows with every forgetting, and `bytes`, the size of the stream's contents, which is bounded.
The part of the keys in braces lets a cluster keep all in one place.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from ...memory.outputs import MOST_FORGETTINGS, Forgettings, Output
from ...system.versions import of_extra

_KEYS = [f"{{hf-retrieval-assist}}:2:{name}" for name in ("outputs", "state", "forgotten")]
_TIMEOUT = 2.0  # seconds that the server may take to answer
_OPTIONS = (
    *("client_name", "db", "password", "username"),
    *("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"),
)

_SIZE = """
local function size(entry)
  local bytes = 0
  for _, part in ipairs(entry) do bytes = bytes + #part end
  return bytes
end
"""

# One exchange. A process that does not know the epoch is told what was forgotten, and the time;
# nothing is taken from it until it does. An earlier version forgot everything, and kept no names.
# An entry that was read last and is gone made room, or was lost with all that were read: what there
# is now is read from the beginning. The stream is bounded in bytes, for which XADD has no limit.
# ARGV: the epoch that the caller knows or "", the last entry it has read, entries to return at
# most, bytes to keep, then by, seq, model and ids of each output.
_EXCHANGE = """
local epoch = redis.call('HGET', KEYS[2], 'epoch') or '0'
if ARGV[1] ~= epoch then
  if redis.call('HDEL', KEYS[2], 'forgotten') == 1 then redis.call('HSET', KEYS[3], epoch, '') end
  return {epoch, redis.call('TIME'), redis.call('HGETALL', KEYS[3]), {}}
end
if #ARGV > 4 then
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
local after = #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) == 1 and '(' .. ARGV[2] or '-'
return {epoch, {0, 0}, {}, redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', ARGV[3])}
"""

# Delete the entries with a prefix and a name below a forgetting's: all entries for a new one, older
# entries for one that an older copy of the server lacks. Later entries are named from the epoch on.
# ARGV: the latest epoch that the caller knows, forgettings to keep one by one, then of each
# forgetting its name, or "", and its prefix.
_FORGET = """
local last = redis.call('XADD', KEYS[1], '*', 'forgotten', '')
local stored = tonumber(redis.call('HGET', KEYS[2], 'epoch') or 0)
local epoch = math.max(tonumber(last:match('^%d+')), stored, tonumber(ARGV[1])) + 1
local mark = redis.call('XADD', KEYS[1], string.format('%.0f-0', epoch), 'forgotten', '')
redis.call('XDEL', KEYS[1], last, mark)
local names = {}
for i = 3, #ARGV, 2 do
  names[i] = tonumber(ARGV[i]) or epoch
  redis.call('HSET', KEYS[3], string.format('%.0f', names[i]), ARGV[i + 1])
end
local bytes = 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  local made, model, gone = tonumber(entry[1]:match('^%d+')), entry[2][6] or '', false
  for i, name in pairs(names) do
    gone = gone or made < name and model:sub(1, #ARGV[i + 1]) == ARGV[i + 1]
  end
  if gone then redis.call('XDEL', KEYS[1], entry[1]) else bytes = bytes + size(entry[2]) end
end
local all, most = redis.call('HKEYS', KEYS[3]), tonumber(ARGV[2])
if #all > 2 * most then
  table.sort(all, function(a, b) return tonumber(a) > tonumber(b) end)
  for i = most + 1, #all do redis.call('HDEL', KEYS[3], all[i]) end
  redis.call('HSET', KEYS[3], all[most], '')
end
redis.call('HSET', KEYS[2], 'epoch', string.format('%.0f', epoch), 'bytes', bytes)
return string.format('%.0f', epoch)
"""


class Answer(NamedTuple):
    """What an exchange brought.

    Attributes:
        epoch: the server's; where it is another than the caller's, nothing was written or read.
        now: the server's time then, in milliseconds.
        forgotten: everything that the server knows to be forgotten, then.
        entries: outputs with their names, None in the place of an entry that is no output.
    """

    epoch: int
    now: float = 0.0
    forgotten: Forgettings = {}  # noqa: RUF012
    entries: Sequence[tuple[bytes, Output | None]] = ()


class RedisServer:
    """The server at `url`; every call waits for its answer.

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
        self._exchange = self._client.register_script(_SIZE + _EXCHANGE)
        self._forget = self._client.register_script(_SIZE + _FORGET)

    def exchange(
        self,
        epoch: int | None,
        after: bytes,
        most: int,
        keep_bytes: int,
        outputs: Sequence[Output],
    ) -> Answer:
        """Write outputs, and read at most `most` entries behind the one named `after` (b"0": from
        the first on), in one operation; neither unless `epoch` is the server's. The server drops
        its oldest entries beyond `keep_bytes`.

        Raises an exception of any kind if the server is away, slow, refuses or answers otherwise.
        """
        written = [part for output in outputs for part in output.fields()]
        args = ["" if epoch is None else epoch, after, most, keep_bytes, *written]
        found, time, forgotten, entries = self._exchange(keys=_KEYS, args=args)
        seconds, microseconds = map(int, time)
        table = {int(n): p.decode() for n, p in zip(forgotten[::2], forgotten[1::2], strict=True)}
        read = [(bytes(memoryview(name)), _parse(fields)) for name, fields in entries]
        return Answer(int(found), 1e3 * seconds + 1e-3 * microseconds, table, read)

    def forget(self, epoch: int | None, forgettings: Sequence[tuple[int | None, str]]) -> int:
        """Delete the outputs with each prefix that are older than a name; for None, all of them.

        Returns the new epoch, which is above `epoch` and names what is forgotten now. Raises as
        `exchange` does.
        """
        pairs = [part for name, prefix in forgettings for part in (name or "", prefix)]
        return int(self._forget(keys=_KEYS, args=[epoch or 0, MOST_FORGETTINGS, *pairs]))


def _parse(fields: list[bytes]) -> Output | None:
    """An entry's output, or None where it is damaged or somebody else's."""
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        parts = dict(zip(fields[::2], fields[1::2], strict=False))
        model = parts[b"model"].decode(errors="replace")
        by, seq = bytes(memoryview(parts[b"by"])), int(parts[b"seq"])
        return Output.from_fields(by, seq, model, parts[b"ids"])
    return None


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
