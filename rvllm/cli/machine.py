"""What this machine offers, read from the system. Facts for people and scripts; decides nothing, never raises.

A fact that cannot be had is None. Sizes are bytes.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rvllm.backend.cuda.driver import devices, driver_version, ptx_tier
from rvllm.cache import cache_folder
from rvllm.errors import DeviceError, StartError
from rvllm.version import VERSION

Facts = dict[str, Any]

CPU_FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx_vnni", "amx_bf16")


def machine() -> Facts:
    """All facts, by section."""
    return {
        "rvllm": VERSION,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "glibc": _glibc(),
        "cpu": cpu(_text("/proc/cpuinfo") or ""),
        "memory": memory(_text),
        "cache": cache(),
        "default_model": default_model(),
        "numpy": numpy(),
        "nvidia": nvidia(),
    }


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _glibc() -> str | None:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    except (OSError, ValueError):
        return None


def cpu(cpuinfo: str) -> Facts:
    """Model, cores of the machine, cores this process may use, and features that matter here."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "model": model[1].strip() if model else platform.processor() or None,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": [feature for feature in CPU_FEATURES if feature in present],
    }


def memory(text: Callable[[str], str | None]) -> Facts:
    """Total and available memory, and a container's limit; `text` gives a file's text, or None."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text("/proc/meminfo") or "", re.MULTILINE))
    total, available = (int(found[key]) * 1024 if key in found else None for key in ("MemTotal", "MemAvailable"))
    limits = (text("/sys/fs/cgroup/memory.max"), text("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    limit = next((int(value) for value in limits if value and value.strip().isdigit()), None)
    if limit is not None and total is not None and limit >= total:  # how version 1 says "none"
        limit = None
    return {"total": total, "available": available, "limit": limit}


def free_memory(facts: Facts) -> int | None:
    """What a process can count on: available memory, or a container's limit where that is less."""
    known = [value for value in (facts["available"], facts["limit"]) if value is not None]
    return min(known) if known else None


def cache() -> Facts:
    """The folder for fetched and unpacked files: whether one can write there, and run programs from there."""
    try:
        folder = cache_folder()
    except StartError as error:
        return {"folder": error.message, "exists": False, "writable": False, "executable": None, "free": None}
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        system = os.statvfs(place)
    except OSError:
        return {"folder": str(folder), "exists": False, "writable": False, "executable": None, "free": None}
    return {
        "folder": str(folder),
        "exists": folder.exists(),
        "writable": os.access(place, os.W_OK | os.X_OK),
        "executable": not system.f_flag & os.ST_NOEXEC,
        "free": system.f_bavail * system.f_frsize,
    }


def default_model() -> Facts:
    """Where the default model is, or why it is not here. Fetches nothing."""
    from rvllm.model.default_model import SMOLLM2, find

    try:
        return {"name": SMOLLM2.name, "path": str(find(SMOLLM2, offline=True, progress=None)), "problem": None}
    except StartError as error:
        # Being offline is this function's doing, so not a reason to tell.
        return {"name": SMOLLM2.name, "path": None, "problem": error.message.partition("; it was not fetched")[0]}


def numpy() -> Facts:
    """numpy's version and the BLAS that multiplies on the CPU backend."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    blas = (config or {}).get("Build Dependencies", {}).get("blas", {})
    return {"version": np.__version__, "blas": blas.get("name"), "blas_version": blas.get("version")}


def nvidia() -> Facts:
    """Driver and GPUs, or why none can be used."""
    facts: Facts = {"driver": _kernel_driver(), "cuda": None, "gpus": [], "problem": None, "hint": None}
    try:
        version = driver_version()
        facts["cuda"] = f"{version[0]}.{version[1]}"
        facts["gpus"] = [
            {
                "index": gpu.index,
                "name": gpu.name,
                "compute_capability": f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}",
                "memory": gpu.total_bytes,
                "uuid": gpu.uuid,
                "kernels": ptx_tier(gpu.compute_capability, version),
            }
            for gpu in devices()
        ]
    except DeviceError as error:
        facts |= {"problem": error.message, "hint": error.hint}
    return facts


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """The commit of these files: of an archive that git made, or of what is checked out, marked where files differ.

    None where neither is known: a wheel and the one file have only a version.
    """
    archival = _text(str(root / ".git_archival.txt"))
    if archival is None:  # not our repository's root, whatever repository it may lie in
        return None
    archived = archival.split()[1]
    if not archived.startswith("$"):
        return archived
    import subprocess

    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def _kernel_driver() -> str | None:
    """The version of the kernel's NVIDIA module, such as 580.65.06."""
    module = _text("/sys/module/nvidia/version")
    if module:
        return module.strip()
    line = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text("/proc/driver/nvidia/version") or "")
    return line[1] if line else None
