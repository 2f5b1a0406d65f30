"""Assemble PTX with ptxas, to prove that it assembles and to read registers, shared memory and spills. Keeps no cubin.

Each ptxas comes from its own wheel, fetched once by pip into a cache folder outside the tree: RVLLM_BUILD_CACHE, or
~/.cache/rvllm/build. No GPU, driver or CUDA toolkit is used.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"Function properties for (\w+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_COMPILING = re.compile(r"Compiling entry function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FATAL_WARNING = re.compile(r".*\(C75\d\d\).*")


class AssemblyError(Exception):
    """ptxas refuses a PTX, or warns of what makes it slow."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one entry takes on one GPU: registers a thread, shared memory a block, spilled bytes a thread."""

    registers: int
    shared_bytes: int
    spill_bytes: int


def assemble(ptx: str, target: str, version: str, *, may_be_slow: bool = False) -> dict[str, Resources]:
    """Every entry's resources on sm_`target`, by the ptxas of `version`. Raises AssemblyError.

    may_be_slow: what it warns of is how fast the kernel will be, and does not matter here.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="ascii")
        command = [str(ptxas(version)), "-v", f"-arch=sm_{target}", "-o", os.devnull, str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode != 0:
        raise AssemblyError(f"ptxas {version} refuses it for sm_{target}:\n{report.strip()}")
    fatal = _FATAL_WARNING.findall(report)
    if fatal and not may_be_slow:
        raise AssemblyError(f"ptxas {version} warns for sm_{target}:\n" + "\n".join(fatal))
    return read_report(report)


def read_report(report: str) -> dict[str, Resources]:
    """Parse what `ptxas -v` prints. The spills of functions that an entry calls are added to it."""
    found = {}
    entry, spilled = "", 0
    for line in report.splitlines():
        if compiling := _COMPILING.search(line):
            entry, spilled = compiling[1], 0
        elif spills := _SPILLS.search(line):
            spilled += int(spills[1]) + int(spills[2])
        elif registers := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            found[entry] = Resources(int(registers[1]), int(shared[1]) if shared else 0, spilled)
    return found


def ptxas(version: str) -> Path:
    """The executable of that version, fetched if it is not in the cache. Raises AssemblyError where pip cannot."""
    folder = cache_folder() / "ptxas" / version
    executable = folder / "nvidia/cuda_nvcc/bin/ptxas"
    if not executable.exists():
        wheel = f"nvidia-cuda-nvcc-cu12=={version}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wheel]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise AssemblyError(f"cannot fetch {wheel}: {done.stderr.strip()}. hint: {' '.join(command)}")
    return executable


def cache_folder() -> Path:
    """Where fetched tools are kept between runs."""
    named = os.environ.get("RVLLM_BUILD_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rvllm" / "build"
