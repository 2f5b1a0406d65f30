"""attention_decode against attention in float64; its bits against itself, alone, in batches, with other lists of work.

The bound is rigorous but for the sums: every weight is rounded to X once (or never), and so is the result.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.device import Argument, Device
from tests.kernels.elements import Bits, Element, poison
from tests.kernels.paged import (
    NO_BLOCK,
    SMALLEST,
    Paged,
    Shape,
    bound,
    decode_items,
    paged,
    ring_bytes,
    splits_of,
    token_items,
    work_list,
)

STEM = "attention_decode"
RNG = np.random.default_rng(11)

SPLITS = 32
WIDTHS = (64, 128, 256)
SHAPES = [
    Shape(4, 4, 64),
    Shape(3, 1, 80, block=32),
    Shape(8, 2, 96, block=64),
    Shape(7, 1, 128),
    Shape(8, 1, 256),
    Shape(12, 1, 64),  # more queries than a block takes
    Shape(16, 1, 128, block=32),
    Shape(2, 2, 8),
    Shape(4, 2, 16),
    Shape(2, 1, 32, block=64),
    Shape(3, 1, 20),  # rows that do not start on 16 bytes
    Shape(9, 1, 10, block=32),
    Shape(2, 1, 254),
]


def entry(stem: str, element: Element, shape: Shape) -> str:
    width = next(width for width in WIDTHS if shape.head_dim <= width)
    return f"{stem}_{'any' if shape.head_dim % 8 else f'd{width}'}_{element.name}"


def scratch(shape: Shape, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """The workspace, as somebody else left it, and the counters."""
    workspace = np.full(sequences * shape.heads * SPLITS * (shape.head_dim + 2), np.nan, dtype=np.float32)
    return workspace, np.zeros(sequences * packs(shape), dtype=np.uint32)


def packs(shape: Shape) -> int:
    return shape.kv_heads * -(-shape.heads // shape.kv_heads // 8)


def run(
    device: Device,
    element: Element,
    q: Bits,
    held: Paged,
    window: int = 0,
    tier: str | None = None,
    lent: tuple[np.ndarray, np.ndarray] | None = None,
    most: int = 1,
    spare: int = 1,
    smallest: int = SMALLEST,
) -> Bits:
    """`most` splits an item; the items are in no order that means anything, and `spare` blocks find none."""
    shape, sequences = held.shape, len(held.lengths)
    workspace, counters = lent or scratch(shape, sequences)
    out = poison(sequences, shape.heads * shape.head_dim)
    stem = held.over(STEM)
    items = decode_items(held.lengths.tolist(), window, most, smallest)
    blocks = max(1, len(items) + spare)
    work = work_list([items[place] for place in RNG.permutation(len(items))], blocks, smallest)
    args: list[Argument] = [q, *held.cached, held.tables, work, out, workspace, counters]
    args += [*held.arguments, shape.scale, window]
    shared = ring_bytes(shape, tier or "", codes=held.scales is not None)
    device.run(stem, entry(stem, element, shape), (blocks, packs(shape)), 128, args, shared, tier=tier)
    assert not counters.any()
    return out


def queries(element: Element, shape: Shape, sequences: int) -> Bits:
    return element.normal(RNG, sequences, shape.heads * shape.head_dim, spread=2.0)


def check(element: Element, q: Bits, held: Paged, window: int, out: Bits) -> None:
    shape = held.shape
    for sequence, length in enumerate(held.lengths.tolist()):
        row = element.decode(q[sequence]).reshape(1, shape.heads, shape.head_dim)
        truth, mass = held.attend(sequence, row, np.array([length - 1]), window)
        found = element.decode(out[sequence]).reshape(truth.shape)
        assert np.all(np.abs(found - truth) <= bound(element, truth, mass, codes=held.scales is not None)), (
            f"sequence of {length}"
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_query_attends_to_its_own_sequence(device: Device, element: Element, tier: str, shape: Shape) -> None:
    held = paged(RNG, element, shape, [1, shape.block - 1, shape.block, shape.block + 1, 141])
    q = queries(element, shape, 5)
    check(element, q, held, 0, run(device, element, q, held, tier=tier))


@pytest.mark.parametrize("window", [1, 5, 16, 130, 1000])
def test_a_window_hides_all_but_the_last_positions(device: Device, element: Element, tier: str, window: int) -> None:
    shape, lengths = Shape(3, 1, 16), [1, 15, 17, 128, 133, 270]
    held = paged(RNG, element, shape, lengths, [max(0, length - window) for length in lengths])
    q = queries(element, shape, len(lengths))
    check(element, q, held, window, run(device, element, q, held, window, tier=tier))


@pytest.mark.parametrize(("length", "window"), [(31 * 128 + 1, 0), (4200, 4090)])
def test_a_long_sequence_has_larger_splits(
    device: Device, element: Element, tier: str, length: int, window: int
) -> None:
    held = paged(RNG, element, Shape(1, 1, 8), [length])
    q = queries(element, held.shape, 1)
    assert splits_of(length, window) <= SPLITS
    out = run(device, element, q, held, window, tier=tier)
    check(element, q, held, window, out)
    assert np.array_equal(run(device, element, q, held, window, tier=tier, most=SPLITS), out)


@pytest.mark.parametrize("shape", [Shape(12, 1, 64), Shape(3, 1, 20), Shape(2, 1, 256)], ids=str)
def test_how_splits_are_dealt_out_changes_no_bits(device: Device, element: Element, tier: str, shape: Shape) -> None:
    held = paged(RNG, element, shape, [300, 129])
    q = queries(element, shape, 2)
    first = run(device, element, q, held, tier=tier, spare=0)
    for most in (2, 3):
        assert np.array_equal(run(device, element, q, held, tier=tier, most=most), first), most


@pytest.mark.parametrize(("shape", "window"), [(Shape(3, 1, 64, block=32), 0), (Shape(2, 1, 128), 900)], ids=str)
@pytest.mark.parametrize("smallest", [192, 576, 4160])
def test_splits_of_a_step_of_many_sequences_have_more_keys(
    device: Device, element: Element, tier: str, shape: Shape, window: int, smallest: int
) -> None:
    lengths = [17, 576, 1000, 577, 640]
    held = paged(RNG, element, shape, lengths)
    q = queries(element, shape, len(lengths))
    first = run(device, element, q, held, window, tier=tier, smallest=smallest)
    check(element, q, held, window, first)
    assert np.array_equal(run(device, element, q, held, window, tier=tier, smallest=smallest, most=3), first)


def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(device: Device, element: Element, tier: str) -> None:
    shape, lengths = Shape(7, 1, 64), [300, 5, 0, 129]
    held = paged(RNG, element, shape, lengths)
    q = queries(element, shape, len(lengths))
    together = run(device, element, q, held, tier=tier)
    for row in (0, 1, 3):
        one = Paged(shape, held.lengths[row : row + 1], held.cache, held.tables[row : row + 1], [], [])
        assert np.array_equal(run(device, element, q[row : row + 1], one, tier=tier)[0], together[row])


@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_a_token_of_a_prompt_has_the_bits_that_it_has_when_its_sequence_ends_with_it(
    device: Device, element: Element, tier: str, codes: bool
) -> None:
    """What follows it in the cache, which is more than it may see, changes nothing."""
    shape, lengths, counts = Shape(7, 1, 64), [260, 200], [1, 3]
    held = paged(RNG, element, shape, lengths, codes=codes)
    q = queries(element, shape, 4)
    workspace, counters = scratch(shape, 2)
    out = poison(*q.shape)
    items = decode_items(lengths[:1]) + token_items(lengths, counts)
    work = work_list([items[place] for place in RNG.permutation(len(items))], len(items))
    args: list[Argument] = [q, *held.cached, held.tables, work, out, workspace, counters, *held.arguments]
    stem = held.over(STEM)
    grid = (len(items), packs(shape))
    shared = ring_bytes(shape, tier, codes=codes)
    device.run(stem, entry(stem, element, shape), grid, 128, [*args, shape.scale, 0], shared, tier=tier)
    for row, (sequence, length) in enumerate([(0, 260), (1, 198), (1, 199), (1, 200)]):
        one = replace(held, lengths=np.array([length], dtype=np.int32), tables=held.tables[sequence : sequence + 1])
        assert np.array_equal(run(device, element, q[row : row + 1], one, tier=tier)[0], out[row]), row


def test_the_same_workspace_and_counters_serve_again_and_again(device: Device, element: Element, tier: str) -> None:
    shape = Shape(12, 1, 16)
    lent = scratch(shape, 3)
    for lengths, most in (([300, 1, 200], 1), ([1, 300, 129], 2), ([300, 1, 200], 1)):
        held = paged(RNG, element, shape, lengths)
        q = queries(element, shape, 3)
        check(element, q, held, 0, run(device, element, q, held, tier=tier, lent=lent, most=most))


def test_a_sequence_without_items_is_left_alone(device: Device, element: Element, tier: str) -> None:
    shape = Shape(12, 1, 64)
    held = paged(RNG, element, shape, [0, 20, 0])
    held.tables[[0, 2]] = NO_BLOCK
    q = queries(element, shape, 3)
    q[[0, 2]] = 0xFFFF
    out = run(device, element, q, held, tier=tier)
    assert np.all(out[[0, 2]] == 0xFFFF)
    assert np.all(out[1] != 0xFFFF)
    held.lengths[1] = 0
    assert np.all(run(device, element, q, held, tier=tier) == 0xFFFF)


@pytest.mark.parametrize("spoilt", [0, 17, 139])
def test_a_key_that_is_no_number_is_not_hidden(device: Device, element: Element, tier: str, spoilt: int) -> None:
    shape = Shape(2, 1, 16)
    held = paged(RNG, element, shape, [140])
    held.cache[0, held.tables[0, spoilt // 16], :, spoilt % 16] = 0xFFFF
    out = run(device, element, queries(element, shape, 1), held, tier=tier)
    assert np.all(np.isnan(element.decode(out)))


# ---- Over codes. What is not read is poison: codes that are NaN, and scales.


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[4], SHAPES[5], SHAPES[10]], ids=str)
def test_codes_stand_for_values_with_their_scales(device: Device, element: Element, tier: str, shape: Shape) -> None:
    held = paged(RNG, element, shape, [1, shape.block - 1, shape.block + 1, 141], codes=True)
    q = queries(element, shape, 4)
    check(element, q, held, 0, run(device, element, q, held, tier=tier))


@pytest.mark.parametrize("window", [5, 130])
def test_a_window_hides_codes_and_scales(device: Device, element: Element, tier: str, window: int) -> None:
    shape, lengths = Shape(3, 1, 16), [1, 15, 17, 133, 270]
    held = paged(RNG, element, shape, lengths, [max(0, length - window) for length in lengths], codes=True)
    q = queries(element, shape, len(lengths))
    check(element, q, held, window, run(device, element, q, held, window, tier=tier))


def test_over_codes_the_list_and_the_batch_change_no_bits(device: Device, element: Element, tier: str) -> None:
    shape = Shape(12, 1, 64)
    held = paged(RNG, element, shape, [300, 5, 129], codes=True)
    q = queries(element, shape, 3)
    first = run(device, element, q, held, tier=tier)
    check(element, q, held, 0, first)
    for most in (2, 3):
        assert np.array_equal(run(device, element, q, held, tier=tier, most=most), first), most
    one = replace(held, lengths=held.lengths[:1], tables=held.tables[:1])
    assert np.array_equal(run(device, element, q[:1], one, tier=tier)[0], first[0])


@pytest.mark.parametrize("part", [0, 1])
def test_a_scale_that_is_no_number_is_not_hidden(device: Device, element: Element, tier: str, part: int) -> None:
    held = paged(RNG, element, Shape(2, 1, 16), [140], codes=True)
    assert held.scales is not None
    held.scales[part, held.tables[0, 1], :, 3] = np.nan
    out = run(device, element, queries(element, held.shape, 1), held, tier=tier)
    assert np.all(np.isnan(element.decode(out)))
