"""Dummy weights: the documented integers, exact in every format, and of a size that keeps activations sane."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from rvllm.errors import CheckpointError
from rvllm.model.dummy import DummyCheckpoint, recipe, values_at
from rvllm.model.quants import dequantise
from rvllm.program.dtype import BF16, F16, F32, DType

SHAPES = {
    "model.layers.0.mlp.down_proj.weight": (96, 200),
    "model.embed_tokens.weight": (1200, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.layers.0.self_attn.q_proj.bias": (256,),
}


def documented(name: str, index: int, centre: float, bits: int, unit: float) -> float:
    """The module docstring's formula in Python's whole numbers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    key = mix((zlib.crc32(name.encode()) + (index >> 32)) & 0xFFFFFFFF)
    hashed = mix(key ^ (index & 0xFFFFFFFF))
    return centre + (2 * (hashed >> (32 - bits)) - (2**bits - 1)) * unit


@pytest.mark.parametrize(
    ("name", "centre", "bits", "unit"),
    [
        ("model.layers.0.mlp.down_proj.weight", 0.0, 7, 2.0**-10),  # 73.9 * 2**-10 = 0.072, 1/sqrt(200) = 0.071
        ("model.layers.0.input_layernorm.weight", 1.0, 4, 2.0**-7),
        ("model.layers.0.self_attn.q_proj.bias", 0.0, 7, 2.0**-12),
    ],
)
def test_each_element_is_the_documented_function_of_name_and_index(
    name: str, centre: float, bits: int, unit: float
) -> None:
    shape = SHAPES[name]
    values = DummyCheckpoint(SHAPES, F32).read(name).reshape(-1)
    for index in (0, 1, 2, values.size // 2, values.size - 1):
        assert values[index] == documented(name, index, centre, bits, unit)
    beyond = np.array([2**32, 2**32 + 1, 2**40 + 5], np.uint64)
    expected = [documented(name, int(index), centre, bits, unit) for index in beyond]
    assert values_at(recipe(name, shape), beyond).tolist() == expected


def test_a_tensor_of_several_chunks_continues_the_count() -> None:
    name = "model.embed_tokens.weight"
    values = DummyCheckpoint(SHAPES, F32).read(name).reshape(-1)
    assert values.size > 1 << 18
    for index in ((1 << 18) - 1, 1 << 18, values.size - 1):
        assert values[index] == documented(name, index, 0.0, 7, 2.0**-10)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_every_value_is_exact_in_every_format(dtype: DType, name: str) -> None:
    checkpoint = DummyCheckpoint(SHAPES, dtype)
    raw = checkpoint.raw(name)
    assert raw.nbytes == checkpoint.tensors[name].nbytes and not raw.flags.writeable
    np.testing.assert_array_equal(dequantise(raw, dtype).reshape(SHAPES[name]), DummyCheckpoint(SHAPES, F32).read(name))


@pytest.mark.parametrize("width", [64, 96, 576, 3584, 18944, 1 << 20])
def test_matrices_have_the_deviation_that_keeps_a_unit_activation(width: int) -> None:
    values = DummyCheckpoint({"w.weight": (max(1, (1 << 18) // width), width)}, F16).read("w.weight")
    ratio = values.std() * math.sqrt(width)
    # The unit is a power of two, so the ratio is within sqrt(2) of 1; 1 % is left for a sample of 2**18.
    assert 1 / math.sqrt(2) / 1.01 < ratio < math.sqrt(2) * 1.01


def test_norm_weights_lie_near_one_and_biases_near_zero() -> None:
    checkpoint = DummyCheckpoint({"a.norm.weight": (4096,), "a.bias": (4096,)}, BF16)
    norm, bias = checkpoint.read("a.norm.weight"), checkpoint.read("a.bias")
    assert 0.05 < norm.std() < 0.1 and abs(norm - 1).max() < 0.12
    assert 0.01 < bias.std() < 0.03 and abs(bias).max() < 0.04


def test_activations_stay_sane_through_eighty_layers_of_dummy_weights() -> None:
    width, layers = 128, 80
    shapes = {f"layers.{layer}.{part}.weight": (width, width) for layer in range(layers) for part in ("up", "down")}
    checkpoint = DummyCheckpoint(shapes, BF16)
    x = np.random.default_rng(0).standard_normal(width).astype(np.float32)
    for layer in range(layers):
        normed = x / np.sqrt(np.mean(x**2))
        hidden = np.maximum(checkpoint.read(f"layers.{layer}.up.weight") @ normed, 0)
        x = x + checkpoint.read(f"layers.{layer}.down.weight") @ hidden
    assert 1 < x.std() < 50


def test_two_tensors_and_two_elements_differ() -> None:
    checkpoint = DummyCheckpoint({"a.weight": (64, 64), "b.weight": (64, 64)}, F32)
    a, b = checkpoint.read("a.weight"), checkpoint.read("b.weight")
    assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 0.06  # 4 / sqrt(4096)
    assert len(np.unique(a)) == 128


def test_a_tensor_that_was_not_asked_for_is_missing() -> None:
    with pytest.raises(CheckpointError, match="dummy weights: tensor absent is missing"):
        DummyCheckpoint(SHAPES, F16).read("absent")
