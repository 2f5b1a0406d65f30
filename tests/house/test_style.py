"""Formatting, lint and types, as tests: one command is the whole gate."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_finds_nothing(command: tuple[str, ...]) -> None:
    run(sys.executable, "-m", "ruff", *command, "--quiet", ".")


def test_mypy_strict_finds_nothing() -> None:
    run(sys.executable, "-m", "mypy")


def test_clang_format_finds_nothing() -> None:
    tool = shutil.which("clang-format", path=f"{Path(sys.executable).parent}:{Path('/usr/bin')}")
    assert tool, "clang-format is in the test extra: pip install -e '.[test]'"
    sources = sorted(
        str(p) for ending in ("cu", "cuh", "cpp", "h") for p in ROOT.glob(f"kernels_ptx/src/**/*.{ending}")
    )
    if sources:
        run(tool, "--dry-run", "--Werror", *sources)
