"""add against its definition: one rounding of one sum, so every bit counts."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.backend import definitions as define
from tests.kernels.device import Array, Device
from tests.kernels.elements import Element, poison

STEM = "add"
RNG = np.random.default_rng(3)


def run(device: Device, element: Element, x: Array, y: Array, out: Array, tier: str) -> None:
    device.run(STEM, f"add_{element.name}", (-(-x.size // 2048),), 256, [x, y, out, x.size], tier=tier)


@pytest.mark.parametrize("shape", [(1, 8), (1, 1), (1, 23), (7, 36), (3, 40), (9, 576), (1, 3584), (2, 8192)])
def test_sums_are_rounded_once(device: Device, element: Element, tier: str, shape: tuple[int, int]) -> None:
    x, y = element.normal(RNG, *shape), element.normal(RNG, *shape, spread=30)
    out = poison(*shape)
    run(device, element, x, y, out, tier)
    expected = element.encode(define.add(element.decode(x), element.decode(y), element.dtype))
    assert np.array_equal(out, expected)


def test_the_sum_may_replace_a_term(device: Device, element: Element, tier: str) -> None:
    x, y = element.normal(RNG, 5, 100), element.normal(RNG, 5, 100)
    expected = element.encode(define.add(element.decode(x), element.decode(y), element.dtype))
    run(device, element, x, y, x, tier)
    assert np.array_equal(x, expected)


def test_infinities_and_nan_pass_through(device: Device, element: Element, tier: str) -> None:
    x = element.encode(np.array([np.inf, np.inf, np.nan, 1, -np.inf, 0, -0.0, 2], dtype=np.float32))
    y = element.encode(np.array([1, -np.inf, 1, np.nan, -np.inf, -0.0, -0.0, -2], dtype=np.float32))
    out = poison(8)
    run(device, element, x, y, out, tier)
    expected = np.array([np.inf, np.nan, np.nan, np.nan, -np.inf, 0, -0.0, 0], dtype=np.float32)
    assert np.array_equal(element.decode(out), expected, equal_nan=True)
    assert out[6] == 0x8000
