"""Every op's definition against its formula in float64, and the promises about bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rvllm.backend import definitions as define
from rvllm.program.dtype import BF16, F16, F32, f32_to_bf16, round_to

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
    define.rope_kv(normal(3, 3 * 8), angles, np.array([5, -1, 2], np.int32), cache, 1, F32, F32)
    written = np.argwhere(np.abs(cache).sum(axis=(0, 2, 4)) > 0)
    assert written.tolist() == [[0, 2], [1, 1]]


def test_the_cache_is_rounded_to_its_own_dtype() -> None:
    cache = np.zeros((2, 1, 1, 4, 8), dtype=np.float32)
    angles = define.rope_angles(np.ones(1, np.int32), np.ones(1, np.int32), np.ones((1, 4), np.float32), 0, 1.0)
    define.rope_kv(normal(1, 3 * 8), angles, np.array([0], np.int32), cache, 1, F32, F16)
    assert np.array_equal(cache, round_to(cache, F16)) and np.abs(cache).sum() > 0


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
