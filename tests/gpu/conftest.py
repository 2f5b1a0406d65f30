"""Where the whole-model tests run: on the host's stand-in for a GPU, which CI has, and on a GPU, which it has not."""

from __future__ import annotations

import functools
import os

import pytest

from rvllm.backend.cuda import kernels
from rvllm.backend.cuda.kernels import FORCED_TIER, Gpu
from rvllm.engine import load
from rvllm.errors import DeviceError
from tests.gpu.running import Backend
from tests.kernels.host_device import HostDevice


@functools.cache
def gpu_or_reason() -> Gpu | str:
    try:
        return Gpu(0, print)
    except DeviceError as reason:
        return str(reason)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The device that the test's parameter names; on the host, LLM(device="cuda") opens the stand-in."""
    if request.param == "cpu":
        return Backend("cpu", None)  # type: ignore[arg-type]  # it has none, and its tests look for none
    if request.param == "cuda":
        gpu = gpu_or_reason()
        if isinstance(gpu, str):
            pytest.skip(gpu)
        return Backend("cuda", gpu)
    host = HostDevice(os.environ.get(FORCED_TIER, "t80"))
    monkeypatch.setattr(load, "choose_device", lambda asked, warn: "cuda")
    monkeypatch.setattr(kernels, "Gpu", lambda index, warn: host)
    return Backend("shim", host)


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU, for what the host cannot stand in for."""
    found = gpu_or_reason()
    if isinstance(found, str):
        pytest.skip(found)
    return found
