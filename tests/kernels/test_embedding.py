"""embedding against its definition: a copy, so every bit counts."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.backend import definitions as define
from tests.kernels.device import Device
from tests.kernels.elements import Element, poison

STEM = "embedding"
RNG = np.random.default_rng(1)


@pytest.mark.parametrize("hidden", [8, 36, 40, 576, 896, 1111, 2056, 8192])
def test_rows_are_copied_bit_for_bit(device: Device, element: Element, tier: str, hidden: int) -> None:
    table = element.normal(RNG, 11, hidden)
    ids = np.array([10, 0, 3, 3, 7, 10, 1, 9, 0], dtype=np.int32)
    out = poison(len(ids), hidden)
    device.run(
        STEM, f"embedding_{element.name}", (len(ids), -(-hidden // 2048)), 256, [ids, table, out, hidden], tier=tier
    )
    assert np.array_equal(out, table[ids])
    assert np.array_equal(element.decode(out), define.embedding(ids, element.decode(table), element.dtype))


def test_nothing_but_the_named_rows_is_read(device: Device, element: Element) -> None:
    table = poison(5, 40)
    table[2] = element.normal(RNG, 40)
    out = poison(1, 40)
    device.run(STEM, f"embedding_{element.name}", (1, 1), 256, [np.array([2], dtype=np.int32), table, out, 40])
    assert np.array_equal(out[0], table[2])
