"""The web page at /: one file without anything from elsewhere, and what a browser may do with it. Knows no model."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from rvllm.api.http import Exchange

_SOURCE = Path(__file__).with_name("page.html")


class WebPage:
    """The page's handler. It holds no data, so it needs no key; what it asks for does."""

    def __init__(self) -> None:
        self._data = _SOURCE.read_bytes()
        etag = f'"{hashlib.sha256(self._data).hexdigest()[:32]}"'
        self._told = {
            # A browser asks each time whether it has changed: a new version is seen at once.
            "cache-control": "no-cache",
            "etag": etag,
            "content-security-policy": policy(self._data.decode()),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def __call__(self, exchange: Exchange) -> None:
        known = [tag.strip().removeprefix("W/") for tag in exchange.headers.get("if-none-match", "").split(",")]
        if self._told["etag"] in known or "*" in known:
            await exchange.reply(b"", 304, self._told)
        else:
            await exchange.reply(self._data, headers={**self._told, "content-type": "text/html; charset=utf-8"})


def policy(html: str) -> str:
    """A Content-Security-Policy under which the page's own style and script run, and nothing that got into it does."""
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
