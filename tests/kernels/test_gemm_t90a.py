"""gemm_t90a and its kinds, on warpgroup products: exact on integers, near float64 else, whole tiles and cut ones.

Entries for 32 and 64 tokens a tile give the bits of linear.
"""

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
    half_place,
    integers,
    normal,
    untouched,
    with_poison,
)

STEM = "gemm_t90a"
RNG = np.random.default_rng(12)
SHARED_BYTES = {32: 103424, 64: 99328, 128: 197632, 144: 209920, 192: 230400}  # of 32 or 64 tokens, or by slots


def run(
    device: Device,
    layer: Layer,
    kind: str = "",
    *,
    most: int = 128,
    whole: int = 0,
    parts: int = 1,
    splits: int = 1,
    rows: str = "n",
    activation: str = "silu",
    in_place: bool = False,
) -> Output:
    """What the kernel with tiles of `most` tokens gives, those from `whole` on cut into `parts`.

    With 32 or 64 tokens, `splits` is S of linear.cu. rows: the products' rows are slots (n) or tokens (t).
    """
    width = layer.rows // 2 if kind == "_act_mul" else layer.rows
    slots = 128 if kind in ("", "_add") or most <= 64 else 192 if rows == "n" else 144
    tiles = -(-layer.tokens // most) * (-(-width // (slots // 2)) if kind == "_act_mul" else -(-layer.rows // slots))
    residual = with_poison(layer.residual)
    out = residual if in_place else blank(kind, layer.tokens + 3, width)
    left = 8 * splits if most <= 64 else parts  # a tile's sums in the workspace
    workspace = np.full((tiles - whole) * left * most * slots, np.nan, dtype=np.float32)
    counters = np.zeros(tiles, dtype=np.uint32)
    x = Boxes(with_poison(layer.x), layer.tokens, most)
    operands = [x, Boxes(with_poison(layer.weight), layer.rows, slots // 2), 0 if layer.bias is None else layer.bias]
    between = [residual] if kind == "_add" else []
    behind = [ACTIVATIONS.index(activation)] if kind == "_act_mul" else []
    behind += [splits] if most <= 64 else []
    args = [*operands, *between, out, layer.tokens, width, layer.depth, *behind, whole, parts, workspace, counters]
    stem = f"gemm{kind}_t90a"
    entry = f"{stem}_{layer.element.name}_{rows}{most}"
    device.run(
        stem,
        entry,
        (whole + (tiles - whole) * parts,),
        2 * (slots if rows == "n" else most),
        args,
        SHARED_BYTES[most if most <= 64 else slots],
        tier="t90a",
    )
    assert untouched(out[layer.tokens :])
    assert not counters.any()
    return out[: layer.tokens]


@pytest.mark.parametrize(
    ("tokens", "most"), [(7, 32), (40, 32), (7, 64), (130, 64), (1, 128), (130, 128), (200, 256), (300, 256)]
)
def test_integers_give_the_exact_product(device: Device, element: Element, tokens: int, most: int) -> None:
    layer = integers(element, RNG, tokens, rows=136, depth=392)
    assert np.array_equal(run(device, layer, most=most), layer.expected(""))


@pytest.mark.parametrize(("rows", "depth"), [(1, 8), (128, 64), (131, 40), (30, 520)])
@pytest.mark.parametrize("most", [128, 256])
def test_rows_and_depth_need_no_multiple_of_a_tile(
    device: Device, element: Element, rows: int, depth: int, most: int
) -> None:
    """Depths of less than the stages, and of more; odd rows, stored one by one."""
    layer = integers(element, RNG, 33, rows, depth)
    assert np.array_equal(run(device, layer, most=most), layer.expected(""))


@pytest.mark.parametrize(("whole", "parts"), [(0, 3), (1, 2)])
@pytest.mark.parametrize(("kind", "rows"), [("", "n"), ("_add", "n"), ("_f32", "n"), ("_f32", "t")])
@pytest.mark.parametrize("most", [128, 256])
def test_every_kind_is_exact_on_integers_also_where_tiles_are_cut(
    device: Device, element: Element, kind: str, rows: str, whole: int, parts: int, most: int
) -> None:
    layer = integers(element, RNG, 66, rows=200 if kind == "_f32" else 140, depth=264, bias=whole == 0)
    found = run(device, layer, kind, most=most, whole=whole, parts=parts, rows=rows)
    assert np.array_equal(found, layer.expected(kind))


def test_a_sum_may_be_written_over_the_residual(device: Device, element: Element) -> None:
    layer = integers(element, RNG, 70, rows=36, depth=64)
    assert np.array_equal(run(device, layer, "_add", in_place=True), layer.expected("_add"))


@pytest.mark.parametrize(("activation", "width", "parts"), [("silu", 72, 1), ("gelu_tanh", 13, 2), ("gelu", 130, 1)])
@pytest.mark.parametrize("most", [128, 256])
@pytest.mark.parametrize("rows", ["n", "t"])
def test_gate_and_up_are_paired(
    device: Device, element: Element, activation: str, width: int, parts: int, most: int, rows: str
) -> None:
    layer = eighths(integers(element, RNG, 66, 2 * width, depth=136, most=4))
    found = run(device, layer, "_act_mul", most=most, parts=parts, activation=activation, rows=rows)
    assert gated_alike(found, layer, activation)


@pytest.mark.parametrize("parts", [1, 3])
def test_sums_are_as_near_to_the_truth_as_floats_allow(device: Device, element: Element, parts: int) -> None:
    layer = normal(element, RNG, 66, rows=24, depth=520)
    truth, bound = layer.exact()
    assert np.all(np.abs(run(device, layer, "_f32", parts=parts) - truth) <= bound)
    out = element.decode(run(device, layer, parts=parts))
    assert np.all(np.abs(out - truth) <= 1.01 * (bound + half_place(element, truth)))


def test_all_widths_and_every_place_in_a_tile_give_the_same_bits(device: Device, element: Element) -> None:
    layer = normal(element, RNG, 140, rows=40, depth=264)
    whole = run(device, layer, "_f32", parts=2)
    assert np.array_equal(run(device, layer, "_f32", most=256, parts=2), whole)
    assert np.array_equal(run(device, layer, "_f32", parts=2, rows="t"), whole)
    assert np.array_equal(run(device, layer, "_f32", most=256, parts=2, rows="t"), whole)
    for first, count in ((0, 1), (139, 1), (5, 100)):
        assert np.array_equal(run(device, layer.some(first, count), "_f32", parts=2), whole[first : first + count])


def test_added_and_gated_are_what_follows_the_plain_product(device: Device, element: Element) -> None:
    """Bit for bit: a fused kernel keeps the rounding points of those that it replaces."""
    layer = normal(element, RNG, 6, rows=48, depth=72)
    plain, out, gated = run(device, layer), blank("", 6, 48), blank("", 6, 24)
    device.run("add", f"add_{element.name}", (1,), 256, [layer.residual, plain, out, out.size], tier="t80")
    assert np.array_equal(run(device, layer, "_add"), out)
    device.run("act_mul", f"act_mul_{element.name}", (6, 1), 256, [plain, gated, 24, 0], tier="t80")
    assert np.array_equal(run(device, layer, "_act_mul"), gated)
    assert np.array_equal(run(device, layer, "_act_mul", rows="t"), gated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [32, 64])
@pytest.mark.parametrize(("depth", "splits", "parts"), [(840, 1, 1), (136, 1, 4), (1048, 2, 8), (1048, 2, 2)])
def test_32_and_64_tokens_a_tile_have_the_bits_of_linear(
    device: Device, element: Element, kind: str, most: int, depth: int, splits: int, parts: int
) -> None:
    """Also where some parts are empty, and in a second tile of tokens. On the host, sums of sixteen are rounded once."""
    layer = normal(element, RNG, most + 6, rows=140, depth=depth)
    found = run(device, layer, kind, most=most, splits=splits, parts=parts)
    for first, count in ((0, 3), (most - 2, 8)):
        few = test_linear.run(device, layer.some(first, count), "t90", kind, split=splits)
        assert np.array_equal(found[first : first + count], few)
