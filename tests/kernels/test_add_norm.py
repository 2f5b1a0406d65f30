"""add_norm has the bits of add and norm, one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import test_add, test_norm
from tests.kernels.device import Array, Device
from tests.kernels.elements import Bits, Element, poison

STEM = "add_norm"
RNG = np.random.default_rng(5)


def run(device: Device, element: Element, x: Bits, y: Bits, weight: Bits, total: Array, out: Array, tier: str) -> None:
    hidden = x.shape[1]
    args = [x, y, weight, test_norm.EPSILON, total, out, hidden]
    device.run(STEM, f"add_norm_{element.name}", (len(x),), test_norm.block_of(hidden), args, tier=tier)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (3, 36), (9, 576), (4, 896), (2, 3584), (5, 8192), (1, 20000)])
def test_fused_equals_unfused(device: Device, element: Element, tier: str, tokens: int, hidden: int) -> None:
    x, y = element.normal(RNG, tokens, hidden), element.normal(RNG, tokens, hidden, spread=3)
    weight = element.normal(RNG, hidden)
    total, out, other_total, other_out = (poison(tokens, hidden) for _ in range(4))
    run(device, element, x, y, weight, total, out, tier)
    test_add.run(device, element, x, y, other_total, tier)
    test_norm.run(device, element, other_total, weight, other_out, tier)
    assert np.array_equal(total, other_total)
    assert np.array_equal(out, other_out)


@pytest.mark.parametrize("hidden", [36, 576, 20000])
def test_the_sum_may_replace_either_term(device: Device, element: Element, tier: str, hidden: int) -> None:
    x, y, weight = element.normal(RNG, 3, hidden), element.normal(RNG, 3, hidden), element.normal(RNG, hidden)
    total, out = poison(3, hidden), poison(3, hidden)
    run(device, element, x, y, weight, total, out, tier)
    for which in (0, 1):
        terms, again = (x.copy(), y.copy()), poison(3, hidden)
        run(device, element, terms[0], terms[1], weight, terms[which], again, tier)
        assert np.array_equal(terms[which], total)
        assert np.array_equal(again, out)
