"""Whose request it is, and the assistant that drafts for it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...system.locks import Lock
from .refusals import RefusedError

_MOST = 256  # tenants whose assistants are kept; outputs stay in the memory


class Tenants:
    """Gives each tenant an assistant of its own.

    Args:
        make: makes the assistant of a tenant.
        forget: erases what is remembered of a tenant; how many outputs that were.
        header: that names the tenant of a request, as a proxy sets it: in UTF-8, percent-encoded
            or as it is. None: its API key does.
        keys: API key -> tenant.
        admin_key: who may erase tenants; None: nobody may.
    """

    def __init__(
        self,
        make: Callable[[str], Any],
        forget: Callable[[str], int],
        header: str | None = None,
        keys: Mapping[str, str] | None = None,
        admin_key: str | None = None,
    ) -> None:
        self._make, self._forget, self._header = make, forget, header
        self._keys, self._admin_key = dict(keys or {}), admin_key
        self._assistants: dict[str, Any] = {}  # who asked last comes last
        self._lock = Lock()

    def __repr__(self) -> str:
        by = f"header {self._header}" if self._header else f"{len(self._keys)} API keys"
        return f"{by}, {'with' if self._admin_key else 'without'} an administrator's key"

    def of(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request; RefusedError where it has none."""
        if self._header is not None:
            if name := _decoded(headers.get(self._header, "")):
                return name
            expected = f"a header {self._header} that names the tenant"
        else:
            key = _bearer(headers)
            for known, name in self._keys.items():
                if hmac.compare_digest(known.encode(), key.encode()):
                    return name
            expected = "a known API key"
        raise RefusedError(f"expected {expected}, got none", code="invalid_api_key", status=401)

    def assistant(self, name: str) -> Any:
        """A tenant's."""
        with self._lock:
            found = self._assistants.pop(name, None)
            self._assistants[name] = found = self._make(name) if found is None else found
            if len(self._assistants) > _MOST:
                del self._assistants[next(iter(self._assistants))]
            return found

    def erase(self, name: str, headers: Mapping[str, str], going_on: Iterable[Any] = ()) -> int:
        """Forget a tenant's outputs, and all that was learnt of its texts.

        Args:
            name: of the tenant.
            headers: of the request for it.
            going_on: assistants of the tenant's requests that go on, which teach nothing from here
                on.

        Returns:
            How many outputs were remembered.

        Raises:
            RefusedError: whoever asks does not hold the administrator's key, nothing is known of
                such a tenant, or the memory's file or server could not be told.
        """
        key = _bearer(headers)
        if self._admin_key is None or not hmac.compare_digest(
            self._admin_key.encode(), key.encode()
        ):
            raise RefusedError(
                "expected the administrator's key as a bearer token, got another",
                code="invalid_api_key",
                status=403 if key else 401,
            )
        with self._lock:
            assistant = self._assistants.pop(name, None)
        known = assistant is not None or name in self._keys.values()
        for one in (*going_on, *([] if assistant is None else [assistant])):
            one.policy.teaches = False
        try:
            count = self._forget(name) if name else 0
        except OSError as error:
            said = f"this process has forgotten {name!r}, and could tell no other: {error}"
            raise RefusedError(said, code="server_error", status=500) from error
        if not count and not known:
            said = f"expected a tenant that something is known of, got {name!r}"
            raise RefusedError(said, code="not_found", status=404)
        return count


def read_keys(path: Path) -> dict[str, str]:
    """API key -> tenant, from a file with a name and a key in each line.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line of another form, or a key of two tenants.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not (words := line.split()) or line.lstrip().startswith("#"):
            continue
        if len(words) != 2 or words[1] in keys:
            raise ValueError(f"{path}:{number}: expected a tenant's name and a key of its own")
        keys[words[1]] = words[0]
    if not keys:
        raise ValueError(f"{path}: expected a tenant's name and key in each line, got none")
    return keys


def _utf8(value: str) -> str:
    """A header's value, which the server has read as Latin-1."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _decoded(value: str) -> str:
    """A tenant's name as a header has it, and as it would stand in a URL."""
    with suppress(UnicodeDecodeError):
        if "\n" not in (name := unquote(_utf8(value), errors="strict")):
            return name
    raise RefusedError(f"expected a tenant's name in one line of UTF-8, got {value!r:.80}")


def _bearer(headers: Mapping[str, str]) -> str:
    kind, _, key = _utf8(headers.get("authorization", "")).partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
