"""Errors as HTTP tells them: a status and OpenAI's error object. Knows no route and no socket."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from rvllm.errors import BadRequest, EngineError, PromptTooLong, RvllmError

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class HttpError(Exception):
    """A reply that is an error. `code`: OpenAI's word for it, where there is one; `headers`: beside the usual ones."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, headers

    def body(self) -> bytes:
        """{"error": {"message", "type", "param", "code"}}"""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": told})


def unavailable(message: str, code: str) -> HttpError:
    """No request can be answered now, but perhaps soon."""
    return HttpError(503, message, kind="service_unavailable", code=code, headers={"retry-after": "1"})


def http_error(error: Exception) -> HttpError:
    """What a client is told of an error. Of one that is a fault of ours only its kind: its words may hold anything."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, PromptTooLong):
        # Clients that cut their history tell this error by these words.
        said = f"the prompt is too long: {error}"
        return HttpError(400, said, param=error.param, code="context_length_exceeded")
    if isinstance(error, BadRequest):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, EngineError):
        return unavailable(error.message, "engine_error")
    if isinstance(error, RvllmError):
        return HttpError(500, error.message, kind="server_error")
    return HttpError(500, f"unexpected {type(error).__name__}: this is a fault of rvllm", kind="server_error")
