"""Which web pages of other origins may ask, and how browsers are told: the Fetch standard's CORS. Knows headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rvllm.api.errors import HttpError

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
KEPT_S = 600
"""How long a browser may keep the answer to a preflight."""


@dataclass(frozen=True, slots=True)
class Cors:
    """`*` among them: all. credentials: whether pages may send cookies along, which means nothing here."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def told(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What every reply has, an error too. headers: the request's, their names in lower case."""
        if not self.origins:
            return {}
        anyone = "*" in self.origins and not self.credentials
        vary = {} if anyone else {"vary": "origin"}
        origin = headers.get("origin")
        if origin is None or not self._has(origin, self.origins):
            return vary
        credentials = {"access-control-allow-credentials": "true"} if self.credentials else {}
        return {"access-control-allow-origin": "*" if anyone else origin, **credentials, **vary}

    def preflight(self, method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """The answer to a browser that asks whether it may ask; None where it is none. Raises HttpError, 400."""
        asked = headers.get("access-control-request-method")
        if not self.origins or method != "OPTIONS" or asked is None or "origin" not in headers:
            return None
        wanted = headers.get("access-control-request-headers", "")
        names = [name.strip().lower() for name in wanted.split(",") if name.strip()]
        known = [name.lower() for name in self.headers]
        for what, allowed in (
            ("origin", self._has(headers["origin"], self.origins)),
            ("method", self._has(asked, self.methods)),
            ("headers", all(self._has(name, known) for name in names)),
        ):
            if not allowed:
                raise HttpError(400, f"pages of other origins are not allowed this {what}", code="cors")
        return {
            "access-control-allow-methods": ", ".join(METHODS if "*" in self.methods else self.methods),
            "access-control-allow-headers": ", ".join(names if "*" in self.headers else known),
            "access-control-max-age": str(KEPT_S),
        }

    @staticmethod
    def _has(value: str, allowed: tuple[str, ...] | list[str]) -> bool:
        return "*" in allowed or value in allowed
