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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from kernels_ptx.build import HEADERS, ROOTS
from kernels_ptx.source import Source, read_source
from kernels_ptx.tiers import TIERS, Tier

FOLDER = Path(__file__).parent / "shim"
CACHE = Path(__file__).parents[2] / ".cache" / "shim"
MOST_SHARED_BYTES = 227 << 10  # that a block of any GPU may ask for
SCHEDULES = ("round robin", "reverse", "random", "one warp")
SANITIZED = os.environ.get("RVLLM_SHIM_SANITIZE") == "1"

_ASKS_FOR_TIER = re.compile(r"^#if TIER >= (\d+)$", re.MULTILINE)

# No contraction, as in the build of the PTX. Unique symbols would be shared between libraries, and so would the shared
# memory of functions that two kernels include.
_FLAGS = ("-x", "c++", "-std=c++17", "-Og", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_RULES = ("-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden")
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_MACHINE = ("-x", "c++", "-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fno-builtin", "-c")
_WATCHED = ("-DSHIM_SANITIZED", "-fno-omit-frame-pointer")  # the machine of sanitized libraries
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
    assert shared_bytes <= MOST_SHARED_BYTES, f"{entry}: {shared_bytes} bytes of shared memory are more than a GPU has"
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
    path = _kept(f"{stem}-{tier}", _hash(source, tier_of, text), ".so", lambda to: _compile(source, tier_of, text, to))
    return ctypes.CDLL(str(path))


def _kept(name: str, digest: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The path in the cache, where `make` has put it unless it was there; those of other digests go."""
    kind = "-sanitized" if SANITIZED else ""
    path = CACHE / f"{name}-{digest}{kind}{suffix}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}{kind}.lock").open("w") as lock:  # of processes side by side, one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for old in CACHE.glob(f"{name}-{'[0-9a-f]' * len(digest)}{kind}{suffix}"):
                old.unlink()
            make(path)
    return path


def _program(source: Source) -> str:
    """A translation unit: the source, and a way in for each entry that this tier has."""
    entries = "".join(f"SHIM_ENTRY({entry.name})\n" for entry in source.entries)
    return f'#include "{source.stem}.cu"\n#include "entry.h"\n{entries}'


def _hash(source: Source, tier: Tier, text: str) -> str:
    digest = hashlib.sha256("\0".join((*_FLAGS, *_RULES, *_SANITIZERS, tier.name, text, _machine_hash())).encode())
    for name, part in source.files.items():
        digest.update(f"\0{name}\0{part}".encode())
    return digest.hexdigest()[:16]


@functools.cache
def _machine_hash() -> str:
    digest = hashlib.sha256("\0".join((*_MACHINE, *_RULES, *_WATCHED)).encode())
    for path in sorted(FOLDER.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def preprocessed(stem: str, tier: str) -> str:
    """What the host's compiler reads of a source for a tier."""
    return _compiler(source_of(stem), TIERS[tier], _program(source_of(stem)), "-E", "-P")


def _compile(source: Source, tier: Tier, text: str, path: Path) -> None:
    machine = _kept("machine", _machine_hash(), ".o", _compile_machine)
    partial = path.with_suffix(f".{os.getpid()}")
    _compiler(source, tier, text, "-x", "none", str(machine), "-o", str(partial))
    partial.rename(path)


def _compile_machine(path: Path) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    watched = _WATCHED if SANITIZED else ()
    _gxx("machine.cc", *_MACHINE, *_RULES, *watched, str(FOLDER / "machine.cc"), "-o", str(partial))
    partial.rename(path)


def _compiler(source: Source, tier: Tier, text: str, *wanted: str) -> str:
    folders = [f"-I{root / 'src'}" for root in ROOTS] + [f"-I{FOLDER}"]
    sanitizers = _SANITIZERS if SANITIZED else ()
    flags = [*_FLAGS, *_RULES, *sanitizers, f"-DTIER={tier.number}", *folders]
    return _gxx(f"{source.stem}.cu", *flags, "-", *wanted, text=text)


def _gxx(what: str, *arguments: str, text: str = "") -> str:
    compiler = shutil.which("g++")
    assert compiler is not None, "the kernel tests compile with g++, which is not there. hint: apt-get install g++"
    done = subprocess.run([compiler, *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{what} does not compile for the host:\n{done.stderr}"
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
