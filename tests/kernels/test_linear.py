"""linear and its kinds, for up to 64 tokens: exact on integers, near float64 else, and the same bits in every batch."""

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

STEM = "linear"
RNG = np.random.default_rng(10)
BLOCK = 256


def entry_tokens(tokens: int) -> int:
    """The tokens of the smallest entry that takes so many."""
    return next(most for most in (8, 16, 32, 64) if tokens <= most)


def shared_bytes(tier: str, tiles: int, most: int) -> int:
    if tier == "t70":
        return 64 * tiles * most
    pieces = 2 * tiles + most // 8
    return 4096 * pieces * min(6, 24 // pieces)


def run(
    device: Device,
    layer: Layer,
    tier: str,
    kind: str = "",
    *,
    most: int | None = None,
    tiles: int = 1,
    split: int = 1,
    activation: str = "silu",
    in_place: bool = False,
) -> Output:
    """What the kernel gives; `most`, `tiles` and `split` are T, R and S of linear.cu."""
    most = most or entry_tokens(layer.tokens)
    width = layer.rows // 2 if kind == "_act_mul" else layer.rows
    slots = -(-width // 8) * 16 if kind == "_act_mul" else layer.rows
    blocks = -(-slots // (16 * tiles))
    residual = with_poison(layer.residual)
    out = residual if in_place else blank(kind, layer.tokens + 3, width)
    workspace = np.full(blocks * split * tiles * most * 16 if split > 1 else 1, np.nan, dtype=np.float32)
    counters = np.zeros(blocks, dtype=np.uint32)
    operands = [with_poison(layer.x), with_poison(layer.weight), 0 if layer.bias is None else layer.bias]
    between = [residual] if kind == "_add" else []
    behind = [ACTIVATIONS.index(activation)] if kind == "_act_mul" else []
    args = [*operands, *between, out, layer.tokens, width, layer.depth, *behind, workspace, counters]
    stem = f"linear{kind}"
    entry = f"{stem}_{layer.element.name}_m{most}"
    device.run(stem, entry, (blocks, split), BLOCK, args, shared_bytes(tier, tiles, most), tier=tier)
    assert untouched(out[layer.tokens :])
    assert not counters.any()
    return out[: layer.tokens]


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 33, 64])
def test_integers_give_the_exact_product(device: Device, element: Element, tier: str, tokens: int) -> None:
    layer = integers(element, RNG, tokens, rows=40, depth=200)
    assert np.array_equal(run(device, layer, tier), layer.expected(""))


@pytest.mark.parametrize(("rows", "depth"), [(1, 8), (16, 40), (389, 72), (24, 1000), (17, 1), (10, 100), (31, 523)])
def test_no_size_needs_to_be_a_multiple_of_anything(
    device: Device, element: Element, tier: str, rows: int, depth: int
) -> None:
    layer = integers(element, RNG, 3, rows, depth)
    assert np.array_equal(run(device, layer, tier), layer.expected(""))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("kind", ["", "_add", "_f32"])
def test_every_kind_is_exact_on_integers(
    device: Device, element: Element, tier: str, kind: str, tokens: int, bias: bool
) -> None:
    layer = integers(element, RNG, tokens, rows=21, depth=136, bias=bias)
    assert np.array_equal(run(device, layer, tier, kind), layer.expected(kind))


def test_a_sum_may_be_written_over_the_residual(device: Device, element: Element, tier: str) -> None:
    layer = integers(element, RNG, 5, rows=21, depth=64)
    assert np.array_equal(run(device, layer, tier, "_add", in_place=True), layer.expected("_add"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width", "depth"), [(1, 24, 64), (9, 13, 72), (3, 8, 33)])
def test_gate_and_up_are_paired(
    device: Device, element: Element, tier: str, activation: str, tokens: int, width: int, depth: int
) -> None:
    layer = eighths(integers(element, RNG, tokens, 2 * width, depth, most=4))
    assert gated_alike(run(device, layer, tier, "_act_mul", activation=activation), layer, activation)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("tokens", "depth"), [(1, 1536), (9, 520)])
def test_sums_are_as_near_to_the_truth_as_floats_allow(
    device: Device, element: Element, tier: str, tokens: int, depth: int, split: int
) -> None:
    layer = normal(element, RNG, tokens, rows=24, depth=depth)
    truth, bound = layer.exact()
    logits = run(device, layer, tier, "_f32", split=split)
    assert np.all(np.abs(logits - truth) <= bound)
    out = element.decode(run(device, layer, tier, split=split))
    assert np.all(np.abs(out - truth) <= 1.01 * (bound + half_place(element, truth)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [2, 5])
def test_parts_of_the_depth_meet_in_the_last_block(
    device: Device, element: Element, tier: str, kind: str, split: int
) -> None:
    """Also where some parts are empty: 3 lines of 64 elements are shared by up to 40 warps."""
    layer = integers(element, RNG, 9, rows=48, depth=168)
    together = run(device, layer, tier, kind, split=split)
    assert np.array_equal(together, run(device, layer, tier, kind, tiles=2, split=split))
    if kind == "_act_mul":
        assert np.array_equal(together, run(device, layer, tier, kind))
    else:
        assert np.array_equal(together, layer.expected(kind))


@pytest.mark.parametrize(("depth", "split"), [(712, 1), (136, 2), (130, 1)])
def test_a_token_has_the_same_bits_alone_and_in_every_batch(
    device: Device, element: Element, tier: str, depth: int, split: int
) -> None:
    """Seen in the sums themselves: rounding to X would hide most differences."""
    layer = normal(element, RNG, 64, rows=24, depth=depth)
    whole = run(device, layer, tier, "_f32", split=split)
    for first, count, tiles in ((0, 64, 2), (0, 1, 1), (63, 1, 2), (5, 8, 1), (30, 16, 2), (11, 27, 1)):
        some = run(device, layer.some(first, count), tier, "_f32", split=split, tiles=tiles)
        assert np.array_equal(some, whole[first : first + count])
    assert np.array_equal(run(device, layer.some(0, 2), tier, "_f32", split=split, most=64), whole[:2])


@pytest.mark.parametrize(("tokens", "kind"), [(3, ""), (20, "_add"), (3, "_act_mul"), (1, "_f32")])
def test_two_tiles_a_block_are_the_same_as_one(
    device: Device, element: Element, tier: str, tokens: int, kind: str
) -> None:
    layer = normal(element, RNG, tokens, rows=70, depth=72)
    assert np.array_equal(run(device, layer, tier, kind), run(device, layer, tier, kind, tiles=2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_is_act_mul_after_linear(device: Device, element: Element, tier: str, activation: str) -> None:
    """Bit for bit: a fused kernel keeps the rounding points of those that it replaces."""
    layer = normal(element, RNG, 6, rows=48, depth=72)
    plain, out = run(device, layer, tier), blank("", 6, 24)
    entry, code = f"act_mul_{element.name}", ACTIVATIONS.index(activation)
    device.run("act_mul", entry, (6, 1), 256, [plain, out, 24, code], tier=tier)
    assert np.array_equal(run(device, layer, tier, "_act_mul", activation=activation), out)


def test_added_is_add_after_linear(device: Device, element: Element, tier: str) -> None:
    layer = normal(element, RNG, 6, rows=40, depth=72)
    plain, out = run(device, layer, tier), blank("", 6, 40)
    device.run("add", f"add_{element.name}", (1,), 256, [layer.residual, plain, out, out.size], tier=tier)
    assert np.array_equal(run(device, layer, tier, "_add"), out)
