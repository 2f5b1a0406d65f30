"""Where rvllm keeps what it fetched, unpacked or compiled. Knows the environment; not what is kept."""

from __future__ import annotations

import os
from pathlib import Path

from rvllm.errors import StartError


def cache_folder() -> Path:
    """$RVLLM_CACHE, else $XDG_CACHE_HOME/rvllm, else ~/.cache/rvllm; it may not exist yet.

    Raises StartError where there is no home folder to be found.
    """
    try:
        if own := os.environ.get("RVLLM_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rvllm"
    except RuntimeError:
        raise StartError(
            "there is no folder to keep files in: HOME is not set, and this user has no home folder",
            hint="set RVLLM_CACHE to a folder that can be written",
        ) from None
