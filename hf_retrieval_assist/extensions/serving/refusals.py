"""Requests that are not served, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What is at fault, by what pydantic calls it; other faults are values that a field cannot have.
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "not_served": "unsupported_value",
}
_SHOWN = 80  # characters of a value


class RefusedError(Exception):
    """A request that is not served.

    Args:
        message: what was expected and what came.
        param: the field of the request that is at fault; None: none is.
        code: one of OpenAI's.
        status: of HTTP.
        retry_after: seconds after which it may be served.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = "invalid_value",
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        # What came may hold half of a character, which no answer can.
        self.message = message.encode(errors="replace").decode()
        self.param = param and param.encode(errors="replace").decode()
        self.code, self.status, self.retry_after = code, status, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's, in JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        told = {"message": self.message, "type": _KINDS.get(self.status, kind)}
        return {"error": told | {"param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


FAILED = RefusedError("the answer could not be completed", code="server_error", status=500)
"""What a client is told of a fault of the server's, which the log tells whole."""


def of_faults(faults: Iterable[Any]) -> RefusedError:
    """The refusal of a body with faults that pydantic found, of which the first counts."""
    fault = next(iter(faults))
    place = fault["loc"][1:]  # the first part is "body"
    kind, param = fault["type"], str(place[0]) if place else None
    message = fault["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        said = f"body: expected JSON, got {fault['ctx']['error']} at character {place[0]}"
        return RefusedError(said)
    if not place:
        message = "expected a JSON object, sent as content-type: application/json"
    elif kind not in ("missing", "extra_forbidden"):
        message += f", got {fault['input']!r:.{_SHOWN}}"
    path = ".".join(map(str, place)) or "body"
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return RefusedError(f"{path}: {message}", param, code)
