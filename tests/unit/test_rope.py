"""Rope tables against the formulas written out in float64."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.model.rope import RopeScaling, rope_table

DIM, THETA = 16, 10000.0
PLAIN = THETA ** (-np.arange(0, DIM, 2) / DIM)
ROUNDING = 4 * 2.0**-24  # a power and a quotient in float32


def table(scaling: RopeScaling, length: int = 64) -> np.ndarray:
    return rope_table(THETA, DIM, scaling, length).inv_freq


def test_the_plain_table_is_powers_of_theta() -> None:
    assert table(RopeScaling()) == pytest.approx(PLAIN[None], rel=ROUNDING)


def test_linear_scaling_divides_every_frequency() -> None:
    assert table(RopeScaling("linear", 4.0)) == pytest.approx(PLAIN[None] / 4, rel=ROUNDING)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    scaling = RopeScaling("llama3", 8.0, original_length=64, low_freq_factor=1.0, high_freq_factor=4.0)
    waves = 2 * np.pi / PLAIN
    found = table(scaling)[0]
    assert found[waves < 16] == pytest.approx(PLAIN[waves < 16], rel=ROUNDING)
    assert found[waves > 64] == pytest.approx(PLAIN[waves > 64] / 8, rel=ROUNDING)
    between = (waves >= 16) & (waves <= 64)
    assert between.any()
    share = (64 / waves[between] - 1) / 3
    assert found[between] == pytest.approx(PLAIN[between] * ((1 - share) / 8 + share), rel=1e-6)


def test_dynamic_scaling_has_a_row_a_length_and_the_plain_one_first() -> None:
    rope = rope_table(THETA, DIM, RopeScaling("dynamic", 2.0, original_length=32), 40)
    assert rope.inv_freq.shape == (9, DIM // 2) and rope.threshold == 32
    assert rope.inv_freq[0] == pytest.approx(PLAIN, rel=ROUNDING)
    base = THETA * (2.0 * 40 / 32 - 1) ** (DIM / (DIM - 2))
    assert rope.inv_freq[-1] == pytest.approx(base ** (-np.arange(0, DIM, 2) / DIM), rel=1e-6)


def test_yarn_keeps_the_fastest_and_divides_the_slowest_pair() -> None:
    scaling = RopeScaling("yarn", 8.0, original_length=4096, attention_factor=1.2)
    rope = rope_table(THETA, 128, scaling, 64)
    plain = THETA ** (-np.arange(0, 128, 2) / 128)
    assert rope.inv_freq[0, 0] == pytest.approx(plain[0], rel=ROUNDING)
    assert rope.inv_freq[0, -1] == pytest.approx(plain[-1] / 8, rel=ROUNDING)
    assert (np.diff(rope.inv_freq[0] / plain) <= 1e-6).all() and rope.scale == 1.2


def test_given_frequency_factors_divide_pair_by_pair() -> None:
    factors = tuple(float(i) for i in range(1, DIM // 2 + 1))
    found = table(RopeScaling(frequency_factors=factors))
    assert found == pytest.approx(PLAIN[None] / np.array(factors), rel=ROUNDING)
