"""rope_angles against its definition and against float64, for angles up to a million and beyond."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.backend import definitions as define
from tests.kernels.device import Device

STEM = "rope_angles"
RNG = np.random.default_rng(7)


def run(
    device: Device,
    positions: np.ndarray,
    lengths: np.ndarray,
    inv_freq: np.ndarray,
    threshold: int = 0,
    scale: float = 1.0,
    tier: str | None = None,
) -> np.ndarray:
    variants, half = inv_freq.shape
    out = np.full((len(positions), 2, half), np.nan, dtype=np.float32)
    args = [positions, lengths, inv_freq, out, len(positions), half, variants, threshold, scale]
    device.run(STEM, "rope_angles_f32", (-(-len(positions) * half // 256),), 256, args, tier=tier)
    return out


def frequencies(half: int, theta: float = 10000.0) -> np.ndarray:
    return (1.0 / theta ** (np.arange(half) / half)).astype(np.float32)[None, :]


@pytest.mark.parametrize("half", [1, 5, 32, 64])
def test_angles_are_those_of_the_definition(device: Device, tier: str, half: int) -> None:
    positions = np.array([0, 1, 2, 77, 4095, 131071, 999_999], dtype=np.int32)
    inv_freq = frequencies(half)
    out = run(device, positions, positions + 1, inv_freq, scale=1.25, tier=tier)
    expected = define.rope_angles(positions, positions + 1, inv_freq, 0, 1.25)
    # numpy's float32 sine and cosine are up to 1.5 ulp off; values are at most 1.25.
    assert np.abs(out - expected).max() <= 2.5 * 2.0**-24 * 1.25


@pytest.mark.parametrize("largest", [4, 1e3, 1e6, 2.0**30])
def test_sine_and_cosine_are_rounded_correctly_but_for_ties(device: Device, tier: str, largest: float) -> None:
    """Within 0.501 ulp of the truth, which float64 holds to 2^-28 ulp for these angles."""
    inv_freq = np.sort(RNG.uniform(-largest, largest, (1, 4096))).astype(np.float32)
    ones = np.ones(1, dtype=np.int32)
    out = run(device, ones, ones, inv_freq, tier=tier)
    angle = inv_freq[0].astype(np.float64)
    for found, exact in ((out[0, 0], np.cos(angle)), (out[0, 1], np.sin(angle))):
        assert (np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max() <= 0.501


def test_the_angles_next_to_a_multiple_of_a_right_angle_keep_their_places(device: Device, tier: str) -> None:
    quarters = np.arange(1, 600_001, 97, dtype=np.float64)
    nearest = (quarters * (np.pi / 2)).astype(np.float32)
    ones = np.ones(1, dtype=np.int32)
    out = run(device, ones, ones, nearest[None, :], tier=tier)
    angle = nearest.astype(np.float64)
    for found, exact in ((out[0, 0], np.cos(angle)), (out[0, 1], np.sin(angle))):
        assert (np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max() <= 0.501


def test_position_zero_turns_nothing(device: Device, tier: str) -> None:
    zero = np.zeros(3, dtype=np.int32)
    out = run(device, zero, zero + 1, frequencies(32), tier=tier)
    assert np.all(out[:, 0] == 1)
    assert np.all(out[:, 1] == 0)


def test_the_length_chooses_the_variant(device: Device, tier: str) -> None:
    table = RNG.uniform(0, 1, (4, 5)).astype(np.float32)
    lengths = np.array([0, 9, 10, 11, 12, 13, 14, 1000], dtype=np.int32)
    positions = np.arange(8, dtype=np.int32) + 3
    out = run(device, positions, lengths, table, threshold=10, tier=tier)
    chosen = table[[0, 0, 0, 1, 2, 3, 3, 3]]
    exact = positions[:, None].astype(np.float32) * chosen
    assert np.array_equal(out[:, 0], np.cos(exact.astype(np.float64)).astype(np.float32))
