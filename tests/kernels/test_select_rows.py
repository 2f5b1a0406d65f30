"""select_rows: a copy, so every bit counts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.device import Device
from tests.kernels.elements import Element, poison

STEM = "select_rows"
RNG = np.random.default_rng(2)


@pytest.mark.parametrize("hidden", [8, 36, 576, 1111, 3584])
@pytest.mark.parametrize("rows", [[4], [0, 8], [8, 7, 6, 5, 4, 3, 2, 1, 0]])
def test_rows_are_copied_bit_for_bit(device: Device, element: Element, tier: str, hidden: int, rows: list[int]) -> None:
    x, out = element.normal(RNG, 9, hidden), poison(len(rows), hidden)
    x[[row for row in range(9) if row not in rows]] = poison(hidden)
    index = np.array(rows, dtype=np.int32)
    grid = (len(rows), -(-hidden // 2048))
    device.run(STEM, f"select_rows_{element.name}", grid, 256, [x, index, out, hidden], tier=tier)
    assert np.array_equal(out, x[rows])
