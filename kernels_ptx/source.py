"""What a kernel's source says of itself: tiers, entries with their arguments, included files. Compiles nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kernels_ptx.tiers import TIERS, Tier

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)
_TIERS = re.compile(r"^// tiers: (.+)$", re.MULTILINE)
_SPILLS = re.compile(r"^// spills: at most (\d+) bytes$", re.MULTILINE)
_ENTRY = re.compile(r"^KERNEL\((\d+)\)\s+void (\w+)\(([^)]*)\)", re.MULTILINE)


class SourceError(Exception):
    """A source does not say what the build needs, or says it wrongly."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel: its name, the most threads of a block, and its arguments' names in order."""

    name: str
    threads: int
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One `.cu` file. `files` maps its own name and those of the headers it includes to their text, by name."""

    stem: str
    tiers: tuple[Tier, ...]
    spill_bytes: int
    entries: tuple[Entry, ...]
    files: dict[str, str]

    @property
    def text(self) -> str:
        return self.files[f"{self.stem}.cu"]


def read_source(path: Path, headers: Path) -> Source:
    """Parse `path`; what it includes lies beside it or in `headers`. Raises SourceError, OSError."""
    text = path.read_text(encoding="utf-8")
    named = _TIERS.search(text)
    if named is None:
        raise SourceError(f"{path}: no tiers. hint: its head block needs a line like '// tiers: t70 t80'")
    unknown = set(named[1].split()) - set(TIERS)
    if unknown:
        raise SourceError(f"{path}: no such tier: {', '.join(sorted(unknown))}. hint: known are {', '.join(TIERS)}")
    entries = read_entries(text)
    if not entries:
        raise SourceError(f"{path}: no entry. hint: one begins with 'KERNEL(256) void name('")
    spills = _SPILLS.search(text)
    return Source(
        stem=path.stem,
        tiers=tuple(TIERS[name] for name in named[1].split()),
        spill_bytes=int(spills[1]) if spills else 0,
        entries=entries,
        files=dict(sorted({path.name: text, **_headers(text, (path.parent, headers))}.items())),
    )


def read_entries(text: str) -> tuple[Entry, ...]:
    """Every entry that a source's text defines, in order."""
    return tuple(
        Entry(name, int(threads), tuple(re.findall(r"(\w+)\s*(?:,|$)", arguments)))
        for threads, name, arguments in _ENTRY.findall(text)
    )


def _headers(text: str, folders: tuple[Path, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    wanted = _INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        if name not in found:
            path = next((folder / name for folder in folders if (folder / name).exists()), folders[-1] / name)
            found[name] = path.read_text(encoding="utf-8")
            wanted += _INCLUDE.findall(found[name])
    return found
