"""The kernels under the address and undefined-behaviour sanitizers, in processes of their own.

python -m tests.kernels.test_sanitizers     run all, and write down what was found clean:
                                            benchmarks/results/sanitized.json, which the tests believe by hash
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import pytest

from tests.kernels.shim import SANITIZED, sanitizer_environment

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
RECORD = ROOT / "benchmarks" / "results" / "sanitized.json"
CHOSEN = "shim and not 8192 and not 20000 and not spins and (not gemm_t90a or need_no)"  # a warpgroup's are slow here
TESTS = [path for path in sorted(FOLDER.glob("test_*.py")) if path != Path(__file__)]
FILES = [path.name for path in TESTS if "device: Device" in path.read_text(encoding="utf-8")]
ALWAYS = "test_add.py"
"""The shortest, whatever is written down: it may be another compiler."""


@cache
def common_hash() -> str:
    """Of all that a sanitized process is made of but its own tests: kernels, the host device, launches, fixtures."""
    patterns = ("kernels_ptx/**/src/*", "kernels_ptx/*.py", "rvllm/backend/**/*.py", "tests/kernels/shim/*")
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    paths |= {path for path in FOLDER.rglob("*") if path.suffix in (".py", ".cu", ".cuh") and path not in TESTS}
    digest = hashlib.sha256(CHOSEN.encode())
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def hash_of(file: str) -> str:
    return hashlib.sha256(common_hash().encode() + (FOLDER / file).read_bytes()).hexdigest()


def recorded() -> dict[str, str]:
    """The hash of each file whose tests were clean."""
    clean: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8"))["clean"] if RECORD.exists() else {}
    return clean


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-s", "-p", "no:cacheprovider", *arguments]
    # -s: a process that a sanitizer ends would take with it what pytest has caught. Plugins of other packages, which no
    # kernel test asks for, would cost each process four seconds.
    env = {**sanitizer_environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(SANITIZED, reason="this is that process")
@pytest.mark.parametrize("file", FILES)
def test_no_kernel_touches_memory_that_is_not_its_own(file: str) -> None:
    if file != ALWAYS and recorded().get(file) == hash_of(file):
        pytest.skip(f"nothing of it has changed since it was clean: {RECORD.relative_to(ROOT)}")
    done = pytest_run(str(FOLDER / file), "-k", CHOSEN)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


FAULT = """
from tests.kernels import shim
import numpy as np
out = np.zeros({length}, dtype=np.int32)
shim.launch("probe", "probe_overrun", (1,), 1, [out.ctypes.data, {shared}, {far}], 100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "far", "length"), [(100, 0, 1000), (99, 1000, 1000)])
def test_the_sanitizer_sees_a_fault(shared: int, far: int, length: int) -> None:
    code = FAULT.format(shared=shared, far=far, length=length)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=sanitizer_environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "probe_overrun" in done.stderr


def main() -> int:
    """Run every file's tests, and write those down that are clean. The exit code is 1 where one is not."""
    clean: dict[str, str] = {}
    tests = 0
    for file in FILES:
        found = hash_of(file)
        done = pytest_run(str(FOLDER / file), "-k", CHOSEN)
        passed = re.search(r"(\d+) passed", done.stdout)
        print(f"{file}: {done.stdout.splitlines()[-1] if done.stdout else done.stderr[-2000:]}", flush=True)
        if done.returncode == 0 and passed:
            clean[file] = found
            tests += int(passed[1])
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    told = {"date": date, "compiler": compiler, "tests": tests, "clean": clean}
    RECORD.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(len(clean) < len(FILES))


if __name__ == "__main__":
    sys.exit(main())
