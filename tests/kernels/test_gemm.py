"""gemm and its kinds, for many tokens: exact on integers, near float64 else, and the same bits from both tiles."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.device import Device
from tests.kernels.elements import Element
from tests.kernels.layers import (
    ACTIVATIONS,
    KINDS,
    Layer,
    Output,
    blank,
    eighths,
    gated_alike,
    half_place,
    integers,
    normal,
    untouched,
    with_poison,
)

STEM = "gemm"
RNG = np.random.default_rng(11)
BLOCK = 128


def run(
    device: Device,
    layer: Layer,
    tier: str,
    kind: str = "",
    *,
    side: int = 64,
    activation: str = "silu",
    in_place: bool = False,
) -> Output:
    """What the kernel with tiles of `side` gives."""
    width = layer.rows // 2 if kind == "_act_mul" else layer.rows
    residual = with_poison(layer.residual)
    out = residual if in_place else blank(kind, layer.tokens + 3, width)
    operands = [with_poison(layer.x), with_poison(layer.weight), 0 if layer.bias is None else layer.bias]
    between = [residual] if kind == "_add" else []
    behind = [ACTIVATIONS.index(activation)] if kind == "_act_mul" else []
    args = [*operands, *between, out, layer.tokens, width, layer.depth, *behind]
    grid = (-(-layer.tokens // side), -(-layer.rows // side))
    entry = f"gemm{kind}_{layer.element.name}_tile{side}"
    device.run(f"gemm{kind}", entry, grid, BLOCK, args, 49152 if tier == "t80" else 0, tier=tier)
    assert untouched(out[layer.tokens :])
    return out[: layer.tokens]


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("tokens", [65, 100, 130])
def test_integers_give_the_exact_product(device: Device, element: Element, tier: str, tokens: int, side: int) -> None:
    layer = integers(element, RNG, tokens, rows=40, depth=72)
    assert np.array_equal(run(device, layer, tier, side=side), layer.expected(""))


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize(("rows", "depth"), [(1, 8), (64, 32), (131, 40), (30, 264), (17, 1), (70, 100)])
def test_no_size_needs_to_be_a_multiple_of_anything(
    device: Device, element: Element, tier: str, rows: int, depth: int, side: int
) -> None:
    """Depths of less than the stages, of more, and of rows that start anywhere; odd rows, stored one by one."""
    layer = integers(element, RNG, 33, rows, depth)
    assert np.array_equal(run(device, layer, tier, side=side), layer.expected(""))


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["_add", "_f32"])
def test_every_kind_is_exact_on_integers(
    device: Device, element: Element, tier: str, kind: str, bias: bool, side: int
) -> None:
    layer = integers(element, RNG, 66, rows=52, depth=40, bias=bias)
    assert np.array_equal(run(device, layer, tier, kind, side=side), layer.expected(kind))


def test_a_sum_may_be_written_over_the_residual(device: Device, element: Element, tier: str) -> None:
    layer = integers(element, RNG, 70, rows=36, depth=64)
    assert np.array_equal(run(device, layer, tier, "_add", in_place=True), layer.expected("_add"))


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("width", "depth"), [(72, 40), (13, 33)])
def test_gate_and_up_are_paired(
    device: Device, element: Element, tier: str, activation: str, width: int, depth: int, side: int
) -> None:
    layer = eighths(integers(element, RNG, 66, 2 * width, depth, most=4))
    assert gated_alike(run(device, layer, tier, "_act_mul", activation=activation, side=side), layer, activation)


def test_sums_are_as_near_to_the_truth_as_floats_allow(device: Device, element: Element, tier: str) -> None:
    layer = normal(element, RNG, 66, rows=24, depth=520)
    truth, bound = layer.exact()
    assert np.all(np.abs(run(device, layer, tier, "_f32") - truth) <= bound)
    out = element.decode(run(device, layer, tier))
    assert np.all(np.abs(out - truth) <= 1.01 * (bound + half_place(element, truth)))


@pytest.mark.parametrize("kind", KINDS)
def test_both_tiles_give_the_same(device: Device, element: Element, tier: str, kind: str) -> None:
    layer = normal(element, RNG, 67, rows=40, depth=104)
    assert np.array_equal(run(device, layer, tier, kind), run(device, layer, tier, kind, side=128))


def test_a_token_has_the_same_bits_alone_and_in_every_batch(device: Device, element: Element, tier: str) -> None:
    """Seen in the sums themselves: rounding to X would hide most differences."""
    layer = normal(element, RNG, 67, rows=40, depth=264)
    whole = run(device, layer, tier, "_f32")
    for first, count, side in ((0, 1, 64), (66, 1, 128), (5, 62, 64), (0, 67, 128)):
        some = run(device, layer.some(first, count), tier, "_f32", side=side)
        assert np.array_equal(some, whole[first : first + count])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_is_act_mul_after_gemm(device: Device, element: Element, tier: str, activation: str) -> None:
    """Bit for bit: a fused kernel keeps the rounding points of those that it replaces."""
    layer = normal(element, RNG, 6, rows=48, depth=72)
    plain, out = run(device, layer, tier), blank("", 6, 24)
    entry, code = f"act_mul_{element.name}", ACTIVATIONS.index(activation)
    device.run("act_mul", entry, (6, 1), 256, [plain, out, 24, code], tier=tier)
    assert np.array_equal(run(device, layer, tier, "_act_mul", activation=activation), out)


def test_added_is_add_after_gemm(device: Device, element: Element, tier: str) -> None:
    layer = normal(element, RNG, 6, rows=40, depth=72)
    plain, out = run(device, layer, tier), blank("", 6, 40)
    device.run("add", f"add_{element.name}", (1,), 256, [layer.residual, plain, out, out.size], tier=tier)
    assert np.array_equal(run(device, layer, tier, "_add"), out)
