"""Philox words against the published vectors and a second implementation in plain integers."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.sampling.philox import RowBits, fresh_seed, offset_seed, philox4x64, uniform, uniform_bits, unit_float

ONES = 2**64 - 1

# Random123's kat_vectors, philox4x64 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
]


def integer_philox(counter, key):
    """The paper's round on Python integers."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * a, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c, 2**64)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
    return a, b, c, d


def words(values):
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, result):
    assert tuple(int(word[0]) for word in philox4x64(words(counter), words(key))) == result
    assert integer_philox(counter, key) == result


def test_many_counters_at_once_give_the_words_of_each_alone():
    random = np.random.default_rng(1)
    counters = [random.integers(0, ONES, 100, np.uint64, endpoint=True) for _ in range(4)]
    keys = [random.integers(0, ONES, 100, np.uint64, endpoint=True) for _ in range(2)]
    before = [array.copy() for array in counters]
    together = np.stack(philox4x64(tuple(counters), tuple(keys)), axis=1)
    alone = [integer_philox(*pair) for pair in zip(np.stack(counters, 1).tolist(), np.stack(keys, 1).tolist())]
    assert together.tolist() == [list(four) for four in alone]
    assert all(np.array_equal(array, old) for array, old in zip(counters, before)), "the counters were overwritten"


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 7, 2**32 - 1])
def test_uniform_reads_the_word_that_its_docstring_names(seed, position):
    ids = [0, 1, 7, 8, 15, 16, 1021, 131_071]
    bits = []
    for token in ids:
        halves = []
        for part in (0, 1):
            words = integer_philox((token // 16 + 1, position, part, 0), (seed % 2**64, 0))
            halves.append(words[token % 16 // 4] >> 16 * (token % 4) & 0xFFFF)
        bits.append(halves[0] << 16 | halves[1])
    expected = unit_float(np.array(bits, np.uint32))
    assert uniform(seed, position, np.array(ids)).tolist() == expected.tolist()


def test_uniform_takes_a_seed_and_a_position_for_each_token():
    seeds, positions, ids = np.array([5, -6, 5]), np.array([1, 2, 3]), np.array([9, 9, 2])
    alone = [uniform(*each, np.array([token]))[0] for *each, token in zip(seeds, positions, ids)]
    assert uniform(seeds, positions, ids).tolist() == [float(number) for number in alone]


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 4001])
def test_a_whole_row_gets_the_bits_that_its_ids_get(size):
    row = RowBits()
    for seed in (-3, 5, 2**63 - 1, -(2**63)):
        bits = uniform_bits(seed, 11, np.arange(size))
        assert np.array_equal(row.high(seed, 11, size), bits >> 16)
        assert np.array_equal(row.both(seed, 11, size), bits)
        assert row.low(seed, 11, size - 1) == bits[-1] & 0xFFFF


def test_numpys_generator_of_that_name_gives_the_same_words():
    random = np.random.default_rng(4)
    for _ in range(20):
        counter, key = random.integers(1, ONES, 4, np.uint64), random.integers(0, ONES, 2, np.uint64)
        before = counter - np.array([1, 0, 0, 0], np.uint64)  # numpy counts before it draws
        ours = philox4x64(tuple(counter[:, None]), tuple(key[:, None]))
        assert np.random.Philox(counter=before, key=key).random_raw(4).tolist() == [int(word[0]) for word in ours]


def test_unit_floats_stay_inside_zero_and_one_and_keep_all_bits_near_zero():
    bits = np.array([0, 1, 2, 2**31, 2**32 - 129, 2**32 - 1], np.uint32)
    expected = [2.0**-33, 3 * 2.0**-33, 5 * 2.0**-33, 0.5, 1 - 2.0**-24, 1 - 2.0**-24]
    assert unit_float(bits).tolist() == expected
    assert unit_float(bits).dtype == np.float32


def test_unit_floats_are_rounded_as_the_fused_cuda_form_rounds_them():
    bits = np.random.default_rng(2).integers(0, 2**32, 10_000, np.uint32)
    # float32(bits) * 2**-32 + 2**-33 is exact in float64, so one rounding to float32 is what a fused form does.
    fused = (bits.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(np.float32)
    assert np.array_equal(unit_float(bits), np.minimum(fused, np.float32(1 - 2.0**-24)))


def test_numbers_of_neighbouring_seeds_positions_and_ids_are_uncorrelated():
    count = 100_000
    ids = np.arange(count)
    base = uniform(1, 1, ids)
    others = [uniform(2, 1, ids), uniform(1, 2, ids), np.roll(base, 1), uniform(1 + 2**32, 1, ids)]
    for other in others:
        # The correlation of n independent pairs has deviation n**-0.5; six of them: chance 2e-9 each.
        assert abs(np.corrcoef(base, other)[0, 1]) < 6 * count**-0.5
    assert abs(base.mean() - 0.5) < 6 * (12 * count) ** -0.5


def test_seeds_wrap_within_int64():
    assert offset_seed(2**63 - 1, 1) == -(2**63)
    assert offset_seed(-1, 1) == 0
    assert offset_seed(5, 0) == 5


def test_fresh_seeds_are_int64_and_differ():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
