"""Every op's definition against its formula in float64, and the promises about bits."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from rvllm.backend import definitions as define
from rvllm.program.dtype import BF16, F16, F32, STORED, DType, f32_to_bf16, f32_to_e4m3, load, round_to

RNG = np.random.default_rng(7)
FLOAT32 = 2.0**-22  # a few roundings of float32


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 2**-8 + 2**-16, 1 + 3 * 2**-8, np.inf, -np.inf, 3.4e38], dtype=np.float32)
    expected = np.array([1.0, 1.0, 1 + 2**-7, 1 + 2**-6, np.inf, -np.inf, np.inf], dtype=np.float32)
    assert np.array_equal(round_to(values, BF16), expected)
    assert np.isnan(round_to(np.array([np.nan], dtype=np.float32), BF16)).all()
    assert f32_to_bf16(np.float32(-0.0)) == 0x8000


def test_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = normal(5, 96), normal(96)
    x64 = x.astype(np.float64)
    expected = weight * x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5)
    assert define.norm(x, weight, 1e-5, F32) == pytest.approx(expected, rel=FLOAT32, abs=1e-6)


def test_norm_rounds_before_and_after_the_weight() -> None:
    x, weight = normal(3, 64), round_to(normal(64), BF16)
    exact = define.norm(x, np.ones(64, dtype=np.float32), 1e-5, F32)
    assert np.array_equal(define.norm(x, weight, 1e-5, BF16), round_to(round_to(exact, BF16) * weight, BF16))


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 70])
@pytest.mark.parametrize("decode", [0, 1])
def test_linear_is_a_matrix_product_and_a_bias(rows: int, decode: int) -> None:
    x, weight, bias = normal(rows, 72), normal(100, 72), normal(100)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    assert define.linear(x, weight, bias, decode, F32) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("size", [(960, 576), (389, 72), (60, 100), (3072, 576), (576, 1536), (151, 40)])
def test_a_row_of_linear_has_the_same_bits_alone_and_among_others(size: tuple[int, int]) -> None:
    weight = normal(*size)
    x = normal(45, size[1])
    for decode in (0, len(x)):
        together = define.linear(x, weight, None, decode, F32)
        shuffled = RNG.permutation(len(x))
        assert np.array_equal(define.linear(x[shuffled], weight, None, decode, F32), together[shuffled])
        for row in (0, 1, 31, 32, 44):
            alone = define.linear(x[row : row + 1], weight, None, min(decode, 1), F32)
            assert np.array_equal(alone[0], together[row]), (size, decode, row)


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    positions = np.array([0, 3, 1000], dtype=np.int32)
    inv_freq = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)[None]
    angles = define.rope_angles(positions, positions + 1, inv_freq, 0, 1.0)
    x = normal(3, 2, 16)
    turned = define.rotate(x, angles)
    for token, position in enumerate(positions):
        theta = (np.float32(position) * inv_freq[0]).astype(np.float64)
        complex_x = x[token, :, :8].astype(np.float64) + 1j * x[token, :, 8:]
        expected = complex_x * np.exp(1j * theta)
        assert turned[token, :, :8] == pytest.approx(expected.real, abs=2e-6)
        assert turned[token, :, 8:] == pytest.approx(expected.imag, abs=2e-6)


def test_dimensions_beyond_the_rotary_ones_pass_through() -> None:
    x = normal(2, 3, 16)
    angles = define.rope_angles(
        np.array([5, 6], np.int32), np.array([6, 7], np.int32), np.ones((1, 4), np.float32), 0, 1.0
    )
    assert np.array_equal(define.rotate(x, angles)[..., 8:], x[..., 8:])


def test_rope_takes_the_row_of_the_tokens_length_and_clamps_it() -> None:
    table = np.arange(1, 5, dtype=np.float32)[:, None]  # variants 0..3 have frequency 1..4
    lengths = np.array([1, 10, 11, 13, 99], dtype=np.int32)
    angles = define.rope_angles(np.ones(5, dtype=np.int32), lengths, table, 10, 2.0)
    assert angles[:, 0, 0] == pytest.approx(2 * np.cos([1, 1, 2, 4, 4]), rel=FLOAT32)


def paged(keys: np.ndarray, values: np.ndarray, table: list[int], blocks: int, block: int) -> np.ndarray:
    """A cache with keys and values (tokens, kv_heads, dim) in the table's blocks, and NaN wherever nobody may look."""
    cache = np.full((2, blocks, keys.shape[1], block, keys.shape[2]), np.nan, dtype=np.float32)
    for token in range(len(keys)):
        cache[0, table[token // block], :, token % block] = keys[token]
        cache[1, table[token // block], :, token % block] = values[token]
    return cache


def naive_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, window: int | None
) -> np.ndarray:
    """One sequence in float64, query by query and head by head."""
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out = np.zeros((tokens, heads, dim))
    for i in range(tokens):
        position = len(keys) - tokens + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            k = keys[first : position + 1, head * kv_heads // heads].astype(np.float64)
            v = values[first : position + 1, head * kv_heads // heads]
            scores = np.exp(k @ q[i, head] * scale - (k @ q[i, head] * scale).max())
            out[i, head] = scores / scores.sum() @ v
    return out.reshape(tokens, -1)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 400])
@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 40), (7, 1), (63, 2), (300, 300), (16, 16)])
def test_attention_sees_its_own_past_and_nothing_else(window: int | None, cached: int, new: int) -> None:
    block, heads, kv_heads, dim = 16, 6, 2, 8
    total = cached + new
    keys, values = normal(total, kv_heads, dim), normal(total, kv_heads, dim)
    table = RNG.permutation(60)[: -(-total // block)].tolist()
    cache = paged(keys, values, table, 60, block)
    q = normal(new, heads * dim)
    found = define.attention(
        q,
        cache,
        np.array([table], dtype=np.int32),
        np.array([0, new], dtype=np.int32),
        np.array([total], dtype=np.int32),
        heads,
        1 / math.sqrt(dim),
        window,
        F32,
    )
    expected = naive_attention(q.reshape(new, heads, dim), keys, values, 1 / math.sqrt(dim), window)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_sequence_attends_with_the_same_bits_alone_and_in_a_batch() -> None:
    block, heads, dim = 16, 4, 8
    lengths, news = [5, 40, 33], [1, 1, 20]
    tables = [[0], [1, 2, 3], [4, 5, 6]]
    cache = normal(2, 7, 2, block, dim)
    q = normal(sum(news), heads * dim)
    starts = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
    table = np.array([t + [0] * (3 - len(t)) for t in tables], dtype=np.int32)
    arguments = (heads, 0.3, None, F32)
    together = define.attention(q, cache, table, starts, np.array(lengths, dtype=np.int32), *arguments)
    for i, new in enumerate(news):
        own = q[starts[i] : starts[i + 1]]
        span, length = np.array([0, new], dtype=np.int32), np.array(lengths[i : i + 1], dtype=np.int32)
        alone = define.attention(own, cache, table[i : i + 1], span, length, *arguments)
        assert np.array_equal(alone, together[starts[i] : starts[i + 1]])


def test_a_negative_slot_writes_nothing() -> None:
    cache = np.zeros((2, 2, 1, 4, 8), dtype=np.float32)
    angles = define.rope_angles(np.zeros(3, np.int32), np.ones(3, np.int32), np.ones((1, 4), np.float32), 0, 1.0)
    define.rope_kv(normal(3, 3 * 8), angles, np.array([5, -1, 2], np.int32), cache, 1, F32)
    written = np.argwhere(np.abs(cache).sum(axis=(0, 2, 4)) > 0)
    assert written.tolist() == [[0, 2], [1, 1]]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_cache_is_rounded_to_its_own_dtype(dtype: DType) -> None:
    angles = define.rope_angles(np.ones(1, np.int32), np.ones(1, np.int32), np.ones((1, 4), np.float32), 0, 1.0)
    qkv, slots = normal(1, 3 * 8), np.array([0], np.int32)
    exact, cache = (np.zeros((2, 1, 1, 4, 8), dtype=STORED[kind]) for kind in (F32, dtype))
    for held in (exact, cache):
        define.rope_kv(qkv, angles, slots, held, 1, F32)
    assert cache.itemsize == 2 and np.array_equal(load(cache), round_to(exact, dtype)) and np.abs(exact).sum() > 0


# ---- A cache of E4M3 codes

VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""What each code stands for, by ml_dtypes."""


def test_codes_stand_for_what_ml_dtypes_says() -> None:
    assert np.array_equal(load(np.arange(256, dtype=np.uint8)), VALUES, equal_nan=True)
    finite = ~np.isnan(VALUES)
    assert np.array_equal(f32_to_e4m3(VALUES)[finite], np.arange(256)[finite])


def test_codes_are_the_nearest_ties_to_even_at_most_448_and_of_nan_nan() -> None:
    """Around every value, every midpoint between two, and everywhere else; ml_dtypes does not saturate."""
    positive = VALUES[:127]
    edges = np.concatenate([positive, (positive[1:] + positive[:-1]) / 2])
    drawn = RNG.uniform(-1, 1, 200_000) * 2.0 ** RNG.integers(-14, 9, 200_000)
    values = np.concatenate([edges, np.nextafter(edges, -1), np.nextafter(edges, 1000), drawn]).astype(np.float32)
    values = np.concatenate([values, -values])
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(f32_to_e4m3(values), expected)
    odd = np.array([448.01, 464, 480, 3e38, np.inf, -np.inf, np.nan, -np.nan, -0.0, 1e-45], dtype=np.float32)
    assert f32_to_e4m3(odd).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x80, 0]


def test_a_row_stands_for_itself_within_half_a_place_of_e4m3() -> None:
    spread = 2.0 ** RNG.integers(-60, 60, (200, 1))
    rows = (normal(200, 64) * spread).astype(np.float32)
    codes, scales = define.encode(rows)
    assert codes.dtype == np.uint8 and scales.shape == (200,)
    assert np.array_equal(np.abs(VALUES[codes]).max(axis=1), np.full(200, 448))
    off = np.abs(VALUES[codes].astype(np.float64) * scales[:, None] - rows)
    # Half a place of three bits, of subnormals half of 2^-9; and the roundings of scale and quotient.
    assert np.all(off <= np.maximum(np.abs(rows) * 2.0**-4, scales[:, None] * 2.0**-10) * (1 + 2.0**-18))


def test_rows_of_nothing_of_next_to_nothing_and_of_no_numbers() -> None:
    rows = np.zeros((6, 4), dtype=np.float32)
    rows[0, 1] = -0.0
    rows[1] = [1e-45, 0, -1e-45, 0]  # largest / 448 is 0
    rows[2] = [1e-43, -3e-42, 0, 0]  # the scale is subnormal
    rows[3, 2], rows[4, 0], rows[5, 1:3] = np.nan, -np.inf, (np.inf, np.nan)
    codes, scales = define.encode(rows)
    assert not codes[:2].any() and not scales[:2].any()
    assert np.abs(VALUES[codes[2]] * scales[2] - rows[2]).max() <= np.float32(2e-43)
    assert np.isnan(scales[3:]).all() and (codes[3:] == 0x7F).all()


def test_a_written_row_is_its_codes_and_scale_and_nothing_else_is_written() -> None:
    cache, scales = np.full((2, 3, 2, 4, 8), 0xAA, dtype=np.uint8), np.full((2, 3, 2, 4), -1, dtype=np.float32)
    angles = define.rope_angles(np.arange(3, dtype=np.int32), np.ones(3, np.int32), np.ones((1, 4), np.float32), 0, 1.0)
    qkv = normal(3, 6 * 8)
    define.rope_kv(qkv, angles, np.array([9, -1, 2], np.int32), cache, 2, F32, scales)
    k, v = define.rotate(qkv[:, 16:32].reshape(3, 2, 8), angles), qkv[:, 32:].reshape(3, 2, 8)
    for token, (block, place) in ((0, (2, 1)), (2, (0, 2))):
        for kind, rows in enumerate((k, v)):
            codes, units = define.encode(rows[token])
            assert np.array_equal(cache[kind, block, :, place], codes)
            assert np.array_equal(scales[kind, block, :, place], units)
    assert (cache != 0xAA).any(axis=-1).sum() == (scales != -1).sum() == 2 * 2 * 2


def coded(keys: np.ndarray, values: np.ndarray, table: list[int], block: int) -> tuple[np.ndarray, ...]:
    """Cache, scales, and what the keys and values in them stand for; NaN wherever nobody may look."""
    cache = np.full((2, 60, keys.shape[1], block, keys.shape[2]), 0x7F, dtype=np.uint8)
    scales = np.full(cache.shape[:-1], np.nan, dtype=np.float32)
    stand_for = []
    for kind, rows in enumerate((keys, values)):
        codes, units = define.encode(rows)
        for token in range(len(rows)):
            cache[kind, table[token // block], :, token % block] = codes[token]
            scales[kind, table[token // block], :, token % block] = units[token]
        stand_for.append(VALUES[codes] * units[..., None].astype(np.float64))
    return cache, scales, *stand_for


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 40), (7, 1), (63, 2), (16, 16)])
def test_attention_over_codes_is_that_over_what_they_stand_for(window: int | None, cached: int, new: int) -> None:
    block, heads, dim, total = 16, 6, 8, cached + new
    table = RNG.permutation(60)[: -(-total // block)].tolist()
    spread = 2.0 ** RNG.integers(-3, 3, (2, total, 2, 1))
    cache, scales, keys, values = coded(*(normal(2, total, 2, dim) * spread).astype(np.float32), table, block)
    q = normal(new, heads * dim)
    arrays = [np.array(x, dtype=np.int32) for x in ([table], [0, new], [total])]
    found = define.attention(q, cache, *arrays, heads, 1 / math.sqrt(dim), window, F32, scales)
    expected = naive_attention(q.reshape(new, heads, dim), keys, values, 1 / math.sqrt(dim), window)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_over_codes_weights_times_scales_are_rounded_to_bf16_and_the_result_to_its_dtype(dtype: DType) -> None:
    """Scales so small that half would make one number of all such products."""
    keys, values = normal(40, 1, 8), normal(40, 1, 8) * np.float32(1e-4)
    cache, scales, *_ = coded(keys, values, [0, 1, 2], 16)
    q = normal(1, 8)
    arrays = [np.array(x, dtype=np.int32) for x in ([[0, 1, 2]], [0, 1], [40])]
    found, exact = (define.attention(q, cache, *arrays, 1, 0.3, None, kind, scales) for kind in (dtype, F32))
    k, v = (load(cache[kind]).reshape(-1, 8)[:40] for kind in (0, 1))
    units = scales.reshape(2, -1)[:, :40]
    scores = (k @ q[0]) * np.float32(0.3) * units[0]
    weights = np.exp(scores - scores.max())
    weights = round_to(weights / weights.sum() * units[1], BF16)
    assert found[0] == pytest.approx(round_to(weights @ v, dtype), rel=2.0**-7, abs=2.0**-24)
    assert np.abs(found - exact).max() <= np.abs(values).max() * 2.0**-7


@pytest.mark.parametrize("activation", sorted(define.ACTIVATIONS))
def test_activations_equal_their_formulas(activation: str) -> None:
    x = np.concatenate([normal(500) * 3, [-100, -20, 0, 20, 100]]).astype(np.float32)
    x64 = x.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = {
            "silu": x64 / (1 + np.exp(-x64)),
            "gelu": np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x64]),
            "gelu_tanh": 0.5 * x64 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x64 + 0.044715 * x64**3))),
        }[activation]
    assert define.ACTIVATIONS[activation](x) == pytest.approx(expected, rel=1e-5, abs=3e-7)


def test_act_mul_rounds_after_the_activation_and_after_the_product() -> None:
    x = normal(4, 32)
    gate, up = x[:, :16], x[:, 16:]
    expected = round_to(round_to(define.silu(gate), BF16) * up, BF16)
    assert np.array_equal(define.act_mul(x, "silu", BF16), expected)
