"""Fixtures of the kernel tests: the device that kernels run on, the element format, the tier."""

from __future__ import annotations

import pytest

from tests.kernels.device import Device, ShimMemory
from tests.kernels.elements import ELEMENTS, Element
from tests.kernels.shim import host_tier, tiers_of


@pytest.fixture(scope="session", params=["shim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "shim":
        return Device(ShimMemory())
    # The GPU's side of the seam: a `Memory` over rvllm.backend.cuda. It skips where no device opens.
    gpu_memory = pytest.importorskip("tests.kernels.gpu_memory", reason="nothing here launches on a GPU")
    return Device(gpu_memory.open_memory())


@pytest.fixture(params=ELEMENTS, ids=lambda element: element.name)
def element(request: pytest.FixtureRequest) -> Element:
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `tier` runs for every tier that its module's STEM is built for."""
    if "tier" in metafunc.fixturenames:
        metafunc.parametrize("tier", tiers_of(metafunc.module.STEM))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the host, where tiers that differ in their PTX alone are one program, a test runs once for each program."""
    again = [item for item in items if _runs_for_a_lower_tier(item)]
    config.hook.pytest_deselected(items=again)
    kept = set(items) - set(again)
    items[:] = [item for item in items if item in kept]


def _runs_for_a_lower_tier(item: pytest.Item) -> bool:
    chosen = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if chosen.get("device") != "shim" or "tier" not in chosen:
        return False
    return host_tier(item.getparent(pytest.Module).obj.STEM, chosen["tier"]) != chosen["tier"]
