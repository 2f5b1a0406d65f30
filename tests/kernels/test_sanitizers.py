"""The kernels under the address and undefined-behaviour sanitizers, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.shim import SANITIZED, sanitizer_environment

FOLDER = Path(__file__).parent
CHOSEN = "shim and not 8192 and not 20000 and not spins and (not gemm_t90a or need_no)"  # a warpgroup's are slow here
TESTS = [path for path in sorted(FOLDER.glob("test_*.py")) if path != Path(__file__)]
FILES = [path.name for path in TESTS if "device: Device" in path.read_text(encoding="utf-8")]


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-s", "-p", "no:cacheprovider", *arguments]
    # -s: a process that a sanitizer ends would take with it what pytest has caught. Plugins of other packages, which no
    # kernel test asks for, would cost each process four seconds.
    env = {**sanitizer_environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=FOLDER.parents[1], env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(SANITIZED, reason="this is that process")
@pytest.mark.parametrize("file", FILES)
def test_no_kernel_touches_memory_that_is_not_its_own(file: str) -> None:
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
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=sanitizer_environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "probe_overrun" in done.stderr
