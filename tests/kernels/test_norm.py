"""norm against its definition, and the promise that a row's bits do not depend on its batch."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.backend import definitions as define
from tests.kernels.device import Array, Device
from tests.kernels.elements import Bits, Element, poison, ulps

STEM = "norm"
EPSILON = 1e-5
RNG = np.random.default_rng(4)


def block_of(hidden: int) -> int:
    return min(1024, 32 * -(-hidden // 256))


def run(device: Device, element: Element, x: Bits, weight: Bits, out: Array, tier: str | None = None) -> None:
    hidden = x.shape[1]
    args = [x, weight, EPSILON, out, hidden]
    device.run(STEM, f"norm_{element.name}", (len(x),), block_of(hidden), args, tier=tier)


def assert_close(element: Element, out: Bits, x: Bits, weight: Bits) -> None:
    """The sum's order and 1/sqrt differ in the last places of a float, which moves a rounding to X now and then: by one
    place of X before the product with the weight, and so by up to two after it."""
    expected = element.encode(define.norm(element.decode(x), element.decode(weight), EPSILON, element.dtype))
    off = ulps(out, expected)
    assert off.max() <= 2
    assert (off > 0).sum() <= 2 + 0.02 * off.size


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(1, 8), (2, 40), (3, 36), (9, 576), (5, 896), (4, 1536), (7, 3584), (1, 2000), (2, 1111), (6, 8192), (1, 20000)],
)
def test_rows_are_normed(device: Device, element: Element, tier: str, tokens: int, hidden: int) -> None:
    x, weight = element.normal(RNG, tokens, hidden, spread=4), element.normal(RNG, hidden)
    out = poison(tokens, hidden)
    run(device, element, x, weight, out, tier)
    assert_close(element, out, x, weight)


@pytest.mark.parametrize("hidden", [36, 64, 576, 8192])
def test_a_row_of_equal_sizes_is_exact(device: Device, element: Element, tier: str, hidden: int) -> None:
    """Squares of 2 add up exactly in any order, so bits must be equal: that finds every lost or doubled element."""
    signs = RNG.choice([-2.0, 2.0], (3, hidden)).astype(np.float32)
    x, weight = element.encode(signs), element.encode(RNG.integers(-5, 6, hidden).astype(np.float32))
    out = poison(3, hidden)
    run(device, element, x, weight, out, tier)
    expected = element.encode(define.norm(signs, element.decode(weight), EPSILON, element.dtype))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("hidden", [36, 576, 8192])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(device: Device, element: Element, hidden: int) -> None:
    x, weight = element.normal(RNG, 9, hidden), element.normal(RNG, hidden)
    together, alone = poison(9, hidden), poison(1, hidden)
    run(device, element, x, weight, together)
    for row in (0, 4, 8):
        run(device, element, x[row : row + 1], weight, alone)
        assert np.array_equal(alone[0], together[row])


def test_the_result_may_replace_the_row(device: Device, element: Element) -> None:
    x, weight, out = element.normal(RNG, 2, 20000), element.normal(RNG, 20000), poison(2, 20000)
    run(device, element, x, weight, out)
    run(device, element, x, weight, x)
    assert np.array_equal(x, out)


def test_a_zero_row_stays_zero(device: Device, element: Element) -> None:
    x, out = np.zeros((1, 64), dtype=np.uint16), poison(1, 64)
    run(device, element, x, element.normal(RNG, 64), out)
    assert not element.decode(out).any()
