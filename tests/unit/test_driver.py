# ruff: noqa: N802  (the driver's names)
"""The driver's answers, from a driver made of Python: what works, and what each refusal tells the user to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from rvllm.backend.cuda import driver
from rvllm.backend.cuda.driver import Gpu, devices, driver_version, ptx_tier, unusable_driver
from rvllm.engine.device import choose_device
from rvllm.errors import DeviceError

OK = cuda.CUresult.CUDA_SUCCESS
HAS_DRIVER = driver.version_without_binding() is not None
GIB = 1 << 30


class FakeDriver:
    """cuda.bindings.driver's functions over a list of GPUs; `broken` gives another status to the calls it names."""

    CUdevice_attribute = cuda.CUdevice_attribute

    def __init__(
        self, gpus: list[Gpu] | None = None, *, version: int = 13000, broken: dict[str, Any] | None = None
    ) -> None:
        self._gpus = gpus or []
        self._version = version
        self._broken = broken or {}

    def _answer(self, call: str, *values: object) -> tuple[Any, ...]:
        if call in self._broken:
            return (self._broken[call], *(None for _ in values))
        return (OK, *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        if not self._gpus and "cuInit" not in self._broken:
            return (cuda.CUresult.CUDA_ERROR_NO_DEVICE,)
        return self._answer("cuInit")

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer("cuDriverGetVersion", self._version)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetCount", len(self._gpus))

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGet", self._gpus[index])

    def cuDeviceGetName(self, length: int, device: Gpu) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetName", device.name.encode().ljust(length, b"\0"))

    def cuDeviceTotalMem(self, device: Gpu) -> tuple[Any, ...]:
        return self._answer("cuDeviceTotalMem", device.total_bytes)

    def cuDeviceGetAttribute(self, which: Any, device: Gpu) -> tuple[Any, ...]:
        place = 0 if which == self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR else 1
        return self._answer("cuDeviceGetAttribute", device.compute_capability[place])

    def cuDeviceGetUuid_v2(self, device: Gpu) -> tuple[Any, ...]:
        return self._answer(
            "cuDeviceGetUuid_v2", SimpleNamespace(bytes=bytes.fromhex(device.uuid[4:].replace("-", "")))
        )


H200 = Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, "GPU-00112233-4455-6677-8899-aabbccddeeff")
SLICE = Gpu(1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 5 * GIB, "MIG-ffeeddcc-bbaa-9988-7766-554433221100")


@pytest.fixture(autouse=True)
def every_gpu_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_devices_are_told_as_the_driver_numbers_them() -> None:
    assert devices(FakeDriver([H200, SLICE])) == [H200, SLICE]


@pytest.mark.parametrize(("number", "version"), [(12000, (12, 0)), (12040, (12, 4)), (13010, (13, 1))])
def test_the_version_is_split_into_major_and_minor(number: int, version: tuple[int, int]) -> None:
    assert driver_version(FakeDriver(version=number)) == version


def test_an_old_driver_is_refused_with_both_versions() -> None:
    with pytest.raises(DeviceError) as refusal:
        devices(FakeDriver([H200], version=11040))
    assert "CUDA 11.4" in refusal.value.message
    assert "12.0" in refusal.value.message
    assert "R525" in str(refusal.value.hint)


def test_a_driver_too_old_for_the_binding_is_refused_with_both_versions() -> None:
    refusal = unusable_driver(RuntimeError("Failed to get cuGetProcAddress_v2"), 11040)
    assert "CUDA 11.4" in refusal.message
    assert "12.0" in refusal.message


def test_a_missing_library_is_named() -> None:
    refusal = unusable_driver(RuntimeError("whatever the binding says"), None)
    assert "libcuda.so.1" in refusal.message
    assert "NVIDIA driver" in str(refusal.hint)


def test_what_else_the_binding_says_is_passed_on() -> None:
    assert "odd" in unusable_driver(RuntimeError("odd"), 13000).message
    assert "odd" in unusable_driver(RuntimeError("odd"), 0).message


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (cuda.CUresult.CUDA_ERROR_UNKNOWN, "nvidia-uvm"),
        (cuda.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "reboot"),
        (cuda.CUresult.CUDA_ERROR_STUB_LIBRARY, "LD_LIBRARY_PATH"),
        (cuda.CUresult.CUDA_ERROR_SYSTEM_NOT_READY, "fabricmanager"),
    ],
)
def test_a_driver_that_does_not_start_is_named_with_its_cure(status: Any, advice: str) -> None:
    with pytest.raises(DeviceError) as refusal:
        devices(FakeDriver([H200], broken={"cuInit": status}))
    assert f"cuInit failed: {status.name} ({int(status)})" in refusal.value.message
    assert advice in str(refusal.value.hint)


def test_every_call_is_checked() -> None:
    for call in (
        "cuDriverGetVersion", "cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem",
        "cuDeviceGetAttribute", "cuDeviceGetUuid_v2",
    ):  # fmt: skip
        with pytest.raises(DeviceError, match=f"{call} failed: CUDA_ERROR_INVALID_DEVICE"):
            devices(FakeDriver([H200], broken={call: cuda.CUresult.CUDA_ERROR_INVALID_DEVICE}))


def test_a_status_that_the_binding_does_not_know_is_told_by_number() -> None:
    with pytest.raises(DeviceError, match="4711"):
        devices(FakeDriver([H200], broken={"cuInit": 4711}))


def test_no_gpu_at_all_is_said() -> None:
    with pytest.raises(DeviceError, match="finds no GPU"):
        devices(FakeDriver())


@pytest.mark.parametrize("visible", ["", "-1", "99", "abc"])
def test_a_variable_that_hides_every_gpu_is_quoted(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError) as refusal:
        devices(FakeDriver())
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in refusal.value.message


@pytest.mark.parametrize(
    ("capability", "cuda_version", "tier"),
    [
        ((6, 1), (13, 0), None),
        ((7, 0), (12, 0), "t70"),
        ((7, 2), (12, 0), "t70"),
        ((7, 5), (12, 0), "t75"),
        ((8, 0), (12, 0), "t80"),
        ((8, 6), (13, 0), "t80"),
        ((8, 9), (12, 3), "t80"),
        ((8, 9), (12, 4), "t89"),
        ((9, 0), (12, 0), "t90a"),
        ((10, 0), (13, 0), "t90"),
        ((12, 1), (13, 0), "t90"),
    ],
)
def test_each_gpu_gets_the_highest_tier_it_runs(
    capability: tuple[int, int], cuda_version: tuple[int, int], tier: str | None
) -> None:
    assert ptx_tier(capability, cuda_version) == tier


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has a driver")
def test_without_a_driver_the_real_binding_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 was not found"):
        devices()
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 was not found"):
        driver_version()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_DRIVER, reason="this machine has no driver")
def test_the_real_driver_tells_its_gpus() -> None:
    first = devices()[0]
    assert first.total_bytes > GIB
    assert first.compute_capability >= (7, 0)
    assert driver_version() >= (12, 0)


def test_importing_the_module_imports_no_binding() -> None:
    source = Path(driver.__file__).read_text(encoding="utf-8")
    assert "\nfrom cuda" not in source
    assert "\nimport cuda" not in source


def found() -> list[Gpu]:
    return [H200]


def refused() -> list[Gpu]:
    raise DeviceError("there is no usable NVIDIA driver", hint="install it")


def test_auto_without_a_gpu_takes_the_cpu_and_says_why_in_one_line() -> None:
    notes: list[str] = []
    assert choose_device("auto", notes.append, refused) == "cpu"
    assert notes == ["running on the CPU: there is no usable NVIDIA driver"]


def test_a_gpu_is_used_without_a_word_where_there_is_one() -> None:
    notes: list[str] = []
    assert [choose_device(asked, notes.append, found) for asked in ("auto", "cuda")] == ["cuda", "cuda"]
    assert notes == []


def test_cpu_asks_no_driver_and_says_nothing() -> None:
    def unasked() -> list[Gpu]:
        raise AssertionError

    notes: list[str] = []
    assert choose_device("cpu", notes.append, unasked) == "cpu"
    assert notes == []


def test_cuda_without_a_driver_is_refused_with_the_drivers_reason() -> None:
    with pytest.raises(DeviceError, match="there is no usable NVIDIA driver"):
        choose_device("cuda", print, refused)
