"""Run a kernel's own source on the host: compile it with g++ against shim/, load it, launch it. Needs no GPU.

Each source and tier becomes one shared library, kept under .cache/shim by the hash of all that it is made from; tiers
that differ in their PTX alone share one. With RVLLM_SHIM_SANITIZE=1 it is built with the address and undefined-behaviour sanitizers; the process must then have been
started with libasan preloaded (`sanitizer_environment`).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from kernels_ptx.build import HEADERS, ROOTS
from kernels_ptx.source import Source, read_source
from kernels_ptx.tiers import TIERS, Tier

FOLDER = Path(__file__).parent / "shim"
CACHE = Path(__file__).parents[2] / ".cache" / "shim"
SCHEDULES = ("round robin", "reverse", "random", "one warp")
SANITIZED = os.environ.get("RVLLM_SHIM_SANITIZE") == "1"

_ASKS_FOR_TIER = re.compile(r"^#if TIER >= (\d+)$", re.MULTILINE)

# No contraction, as in the build of the PTX. Unique symbols would be shared between libraries, and so would the shared
# memory of functions that two kernels include.
_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_RULES = ("-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden")
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_NUMBERS: dict[str, Any] = {"i": ctypes.c_int32, "u": ctypes.c_uint32, "l": ctypes.c_int64, "f": ctypes.c_float}

Argument = int | float  # an address is an int


class LaunchFailed(Exception):
    """A kernel did what no device would forgive: a deadlock, a misaligned access, a mixed-up warp."""


class _Late(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_int * 3),
        ("block", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("message", ctypes.c_char * 1024),
        ("late_count", ctypes.c_int),
        ("late", _Late * 8),
    ]


@functools.cache
def source_of(stem: str) -> Source:
    """The source of that stem, of the kernels or of the probes."""
    for root in ROOTS:
        path = root / "src" / f"{stem}.cu"
        if path.exists():
            return read_source(path, HEADERS)
    raise FileNotFoundError(f"{stem}.cu")


def tiers_of(stem: str) -> tuple[str, ...]:
    """The names of the tiers that a source is built for, the lowest first."""
    return tuple(tier.name for tier in source_of(stem).tiers)


@functools.cache
def host_tier(stem: str, tier: str) -> str:
    """The lowest tier of a source whose program on the host is that of `tier`."""
    source = source_of(stem)
    # What follows this, in intrinsics.cuh, is CUDA's alone.
    seen = [text.partition("#ifndef __CUDACC__")[0] for text in source.files.values()]
    asked = [int(number) for text in seen for number in _ASKS_FOR_TIER.findall(text)]
    answers = {known.name: [known.number >= number for number in asked] for known in TIERS.values()}
    return next((known.name for known in source.tiers if answers[known.name] == answers[tier]), tier)


def launch(
    stem: str,
    entry: str,
    grid: tuple[int, ...],
    block: int,
    arguments: Sequence[Argument],
    shared_bytes: int = 0,
    schedule: str = "round robin",
    seed: int = 0,
    tier: str | None = None,
    late: Sequence[npt.NDArray[Any]] = (),
) -> None:
    """Launch `entry` and wait. Raises LaunchFailed with what went wrong and where.

    late: up to 8 contiguous arrays that the grid before is still writing. They hold poison until all threads of a block
    have waited for that grid; a block that ends without is an error.
    """
    most = next(known.threads for known in source_of(stem).entries if known.name == entry)
    assert 0 < block <= most, f"{entry} takes blocks of up to {most} threads, not {block}"
    library = load(stem, tier or tiers_of(stem)[0])
    signature = getattr(library, f"signature_{entry}")
    signature.restype = ctypes.c_char_p
    values = _packed(entry, signature().decode(), arguments)
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    sizes = (ctypes.c_int * 3)(*grid, *(1,) * (3 - len(grid)))
    assert all(array.flags.c_contiguous for array in late)
    lates = (_Late * 8)(*(_Late(array.ctypes.data, array.nbytes) for array in late))
    given = _Launch(sizes, block, shared_bytes, SCHEDULES.index(schedule), seed, b"", len(late), lates)
    if getattr(library, f"launch_{entry}")(ctypes.byref(given), addresses) != 0:
        raise LaunchFailed(f"{entry}, schedule {schedule!r}: {given.message.decode(errors='replace')}")


def _packed(entry: str, signature: str, arguments: Sequence[Argument]) -> list[ctypes._SimpleCData[Any]]:
    assert len(signature) == len(arguments), f"{entry} takes {len(signature)} arguments, {len(arguments)} were given"
    values: list[ctypes._SimpleCData[Any]] = []
    for letter, argument in zip(signature, arguments):
        if letter == "p":
            assert isinstance(argument, int), f"{entry}: {argument!r} is no address"
            values.append(ctypes.c_void_p(argument))
        else:
            assert isinstance(argument, float) == (letter == "f"), f"{entry}: {argument!r} for {letter!r}"
            values.append(_NUMBERS[letter](argument))
            assert letter == "f" or values[-1].value == argument, f"{entry}: {argument} does not fit {letter!r}"
    return values


@functools.cache
def load(stem: str, tier: str) -> ctypes.CDLL:
    """The library of a source for a tier, compiled if it is not in the cache."""
    tier = host_tier(stem, tier)
    source, tier_of = source_of(stem), TIERS[tier]
    text = _program(source)
    kind = "-sanitized" if SANITIZED else ""
    path = CACHE / f"{stem}-{tier}-{_hash(source, tier_of, text)}{kind}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{stem}-{tier}{kind}.lock").open("w") as lock:  # of processes side by side, one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for old in CACHE.glob(f"{stem}-{tier}-*{kind or '[0-9a-f]'}.so"):
                old.unlink()
            _compile(source, tier_of, text, path)
    return ctypes.CDLL(str(path))


def _program(source: Source) -> str:
    """A translation unit: the source, and a way in for each entry that this tier has."""
    entries = "".join(f"SHIM_ENTRY({entry.name})\n" for entry in source.entries)
    return f'#include "{source.stem}.cu"\n#include "entry.h"\n{entries}'


def _hash(source: Source, tier: Tier, text: str) -> str:
    digest = hashlib.sha256("\0".join((*_FLAGS, *_RULES, *_SANITIZERS, tier.name, text)).encode())
    for name, part in source.files.items():
        digest.update(f"\0{name}\0{part}".encode())
    for path in sorted(FOLDER.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def preprocessed(stem: str, tier: str) -> str:
    """What the host's compiler reads of a source for a tier."""
    return _compiler(source_of(stem), TIERS[tier], _program(source_of(stem)), "-E", "-P")


def _compile(source: Source, tier: Tier, text: str, path: Path) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    _compiler(source, tier, text, "-o", str(partial))
    partial.rename(path)


def _compiler(source: Source, tier: Tier, text: str, *wanted: str) -> str:
    compiler = shutil.which("g++")
    assert compiler is not None, "the kernel tests compile with g++, which is not there. hint: apt-get install g++"
    folders = [f"-I{root / 'src'}" for root in ROOTS] + [f"-I{FOLDER}"]
    flags = [*_FLAGS, *_RULES, *(_SANITIZERS if SANITIZED else ()), f"-DTIER={tier.number}", *folders]
    done = subprocess.run([compiler, *flags, "-", *wanted], input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{source.stem}.cu does not compile for the host:\n{done.stderr}"
    return done.stdout


def sanitizer_environment() -> dict[str, str]:
    """The environment in which a Python process can load sanitized kernels."""
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    # Python itself frees little before it ends, so leaks say nothing.
    return {
        **os.environ,
        "RVLLM_SHIM_SANITIZE": "1",
        "LD_PRELOAD": library.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
