"""What is said on stderr while it serves: notes, faults, where asked for a line a request. Never a word of a prompt.

As text, or as JSON objects, one a line: {"time", "level", "message", ...}.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from rvllm.api.http import Exchange


def json_line(level: str, message: str, **more: Any) -> str:
    """One event as a line of JSON, without its end."""
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1000):03d}Z"
    return msgspec.json.encode({"time": stamp, "level": level, "message": message, **more}).decode()


@dataclass(frozen=True, slots=True)
class Log:
    """note_text: says a note as text.

    access: a line for every reply, but for those of `quiet_routes`; requests: one for every request for text, with its
    lengths; stacks: the traceback of a fault of ours, which may hold anything.
    """

    note_text: Callable[[str], None]
    as_json: bool = False
    access: bool = False
    quiet_routes: Collection[str] = ()
    requests: bool = False
    stacks: bool = False

    def note(self, message: str) -> None:
        if self.as_json:
            self._write(json_line("info", message))
        else:
            self.note_text(message)

    def error(self, message: str) -> None:
        self._write(json_line("error", message) if self.as_json else f"error: {message}")

    def ended(self, exchange: Exchange) -> None:
        """An exchange is over, its status 0 where the client was gone first."""
        if self.access and exchange.route not in self.quiet_routes:
            self._event("access", exchange, {})
        if self.requests and exchange.told:
            self._event("request", exchange, exchange.told)

    def fault(self, error: BaseException, exchange: Exchange) -> None:
        """A fault of ours: what kind and where in the code, not its words, which may hold a prompt."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
        said = f"unexpected {type(error).__name__} at {where} in a request to {exchange.route}, {exchange.request_id}"
        stack = "".join(traceback.format_exception(error)) if self.stacks else ""
        if self.as_json:
            self._write(json_line("error", said, **({"stack": stack} if stack else {})))
        else:
            hint = "" if stack else "hint: --log-error-stack shows the traceback"
            self._write(f"error: {said}\n{stack or hint}".rstrip("\n"))

    def _event(self, name: str, exchange: Exchange, more: dict[str, Any]) -> None:
        fields = {
            "client": exchange.client,
            "method": exchange.scope["method"],
            "route": exchange.route,
            "status": exchange.status,
            "seconds": round(time.monotonic() - exchange.came_s, 4),
            "id": exchange.request_id,
            **more,
        }
        if self.as_json:
            self._write(json_line("info", name, **fields))
        else:
            self._write(f"{name}: " + " ".join(f"{key}={value}" for key, value in fields.items()))

    @staticmethod
    def _write(line: str) -> None:
        # One write a line: fronts share stderr.
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
