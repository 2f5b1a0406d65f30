"""linear_t90a and its kinds, whose weights come through rings of the copy engine: exact on integers, linear's bits else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import test_linear
from tests.kernels.device import Boxes, Device
from tests.kernels.elements import Element
from tests.kernels.layers import (
    ACTIVATIONS,
    KINDS,
    Layer,
    Output,
    blank,
    eighths,
    gated_alike,
    integers,
    normal,
    untouched,
    with_poison,
)

STEM = "linear_t90a"
RNG = np.random.default_rng(14)


def run(
    device: Device,
    layer: Layer,
    kind: str = "",
    *,
    blocks: int = 2,
    stages: int = 3,
    tall: int = 16,
    activation: str = "silu",
    in_place: bool = False,
) -> Output:
    width = layer.rows // 2 if kind == "_act_mul" else layer.rows
    slots = -(-width // 8) * 16 if kind == "_act_mul" else layer.rows
    residual = with_poison(layer.residual)
    out = residual if in_place else blank(kind, layer.tokens + 3, width)
    weight = Boxes(with_poison(layer.weight), layer.rows, 8 if kind == "_act_mul" else tall)
    operands = [with_poison(layer.x), weight, 0 if layer.bias is None else layer.bias]
    between = [residual] if kind == "_add" else []
    behind = [ACTIVATIONS.index(activation)] if kind == "_act_mul" else [tall]
    args = [*operands, *between, out, layer.tokens, width, layer.depth, *behind, stages]
    stem = f"linear{kind}_t90a"
    shared = 9216 + 16384 * stages + layer.tokens * (128 * -(-layer.depth // 64) + 16)
    grid = (min(blocks, -(-slots // tall)),)
    device.run(stem, f"{stem}_{layer.element.name}", grid, 256, args, shared, tier="t90a")
    assert untouched(out[layer.tokens :])
    return out[: layer.tokens]


@pytest.mark.parametrize("tokens", range(1, 9))
def test_integers_give_the_exact_product(device: Device, element: Element, tokens: int) -> None:
    layer = integers(element, RNG, tokens, rows=40, depth=1000)
    assert np.array_equal(run(device, layer), layer.expected(""))


@pytest.mark.parametrize(("rows", "depth"), [(1, 8), (16, 40), (389, 72), (24, 1000), (17, 512), (10, 520), (31, 2056)])
def test_no_size_needs_to_be_a_multiple_of_more_than_eight(
    device: Device, element: Element, rows: int, depth: int
) -> None:
    layer = integers(element, RNG, 3, rows, depth)
    assert np.array_equal(run(device, layer), layer.expected(""))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["", "_add", "_f32"])
def test_every_kind_is_exact_on_integers(device: Device, element: Element, kind: str, bias: bool) -> None:
    layer = integers(element, RNG, 2, rows=21, depth=136, bias=bias)
    assert np.array_equal(run(device, layer, kind), layer.expected(kind))


def test_a_sum_may_be_written_over_the_residual(device: Device, element: Element) -> None:
    layer = integers(element, RNG, 5, rows=21, depth=64)
    assert np.array_equal(run(device, layer, "_add", in_place=True), layer.expected("_add"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width", "depth"), [(1, 24, 64), (7, 13, 72), (3, 8, 1544)])
def test_gate_and_up_are_paired(
    device: Device, element: Element, activation: str, tokens: int, width: int, depth: int
) -> None:
    layer = eighths(integers(element, RNG, tokens, 2 * width, depth, most=4))
    assert gated_alike(run(device, layer, "_act_mul", activation=activation), layer, activation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(1, 96, 1536), (8, 40, 712), (5, 70, 3584)])
def test_the_bits_are_those_of_linear(
    device: Device, element: Element, kind: str, tokens: int, rows: int, depth: int
) -> None:
    """In any number of blocks, in tiles of any height, and through rings of any length, also of more than comes through."""
    layer = normal(element, RNG, tokens, rows, depth)
    expected = test_linear.run(device, layer, "t90", kind)
    for blocks, stages, tall in ((1, 2, 16), (2, 5, 16), (3, 10, 16), (99, 4, 16), (2, 3, 14), (99, 3, 9), (5, 2, 7)):
        tall = 16 if kind == "_act_mul" else tall
        found = run(device, layer, kind, blocks=blocks, stages=stages, tall=tall)
        assert np.array_equal(found, expected), (blocks, stages, tall)
