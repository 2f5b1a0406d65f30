"""prompt_lookup: what it takes over and guesses is what the definition accepts and looks up, for every sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rvllm.program.program import Int32
from rvllm.sampling.lookup import accepted, lookup
from tests.kernels.device import Device

STEM = "prompt_lookup"
RNG = np.random.default_rng(12)
UNSET = -77


def run(
    device: Device,
    pasts: list[Int32],
    rooms: list[int],
    steps: int,
    ends: tuple[int, int],
    block: int,
    likely: float,
    alphabet: int,
) -> int:
    """Some steps in a row, each checked; `likely`: how often a guess is right. How many guesses were accepted in all."""
    count, rows = len(pasts), sum(rooms) + len(rooms)
    firsts = np.cumsum([0, *(room + 1 for room in rooms[:-1])])
    room_for = max(map(len, pasts)) + steps * (max(rooms) + 1)
    order = RNG.permutation(count)  # a past may be in any place
    held = np.full((count, room_for), UNSET, dtype=np.int32)
    for place, past in zip(order, pasts):
        held[place, : len(past)] = past
    places = np.stack([firsts, rooms, order], axis=1).astype(np.int32)
    guesses = [RNG.integers(0, alphabet, room).astype(np.int32) for room in rooms]
    counts = [int(RNG.integers(0, room + 1)) for room in rooms]  # of a fresh step: any number of them counts
    state = np.array([[len(past), number] for past, number in zip(pasts, counts)], dtype=np.int32)
    ids = np.concatenate([[past[-1], *guess] for past, guess in zip(pasts, guesses)]).astype(np.int32)
    known, right_in_all = [past.tolist() for past in pasts], 0
    for _ in range(steps):
        drawn = RNG.integers(0, alphabet, rows).astype(np.int32)
        follows = np.append(ids[1:], 0)
        drawn = np.where(RNG.random(rows) < likely, follows, drawn).astype(np.int32)
        expected: dict[str, list[Any]] = {name: [] for name in ("ids", "kv_lengths", "positions", "state")}
        for one, (first, room) in enumerate(zip(firsts, rooms)):
            own = drawn[first : first + room + 1].tolist()
            right = accepted(ids[first + 1 : first + 1 + counts[one]].tolist(), own)
            right_in_all += right
            known[one] += own[: right + 1]
            length, last = len(known[one]), known[one][-1]
            found = lookup(np.array(known[one], dtype=np.int32), room, *ends).tolist() if room else []
            counts[one] = len(found)
            expected["ids"] += [last, *(found or [last] * room)]
            expected["kv_lengths"] += [length + at - 1 for at in range(room + 1)]
            expected["positions"] += [length + at for at in range(room + 1)]
            expected["state"].append([length, counts[one]])
        kv_lengths, positions = np.full(rows, UNSET, dtype=np.int32), np.zeros(rows, dtype=np.uint32)
        told = np.full(count + rows, UNSET, dtype=np.int32)
        args = [places, state, held, drawn, ids, kv_lengths, positions, told, count, room_for, *ends]
        device.run(STEM, "prompt_lookup_i32", (count,), block, args)
        assert ids.tolist() == expected["ids"] and state.tolist() == expected["state"]
        assert kv_lengths.tolist() == expected["kv_lengths"] and positions.tolist() == expected["positions"]
        assert told.tolist() == [*counts, *expected["ids"]]
        for one, (place, room) in enumerate(zip(order, rooms)):
            length = len(known[one]) if room else len(pasts[one])
            assert held[place, :length].tolist() == known[one][:length]
            assert (held[place, length:] == UNSET).all()
    return right_in_all


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("ends", [(1, 1), (2, 4), (3, 32)])
def test_steps_in_a_row_are_what_the_definition_makes_of_them(
    device: Device, ends: tuple[int, int], block: int
) -> None:
    pasts = [RNG.integers(0, 3, length).astype(np.int32) for length in (1, 2, 40, 300, 5)]
    assert run(device, pasts, [4, 31, 1, 7, 0], 4, ends, block, 0.7, 3) > 5


def test_of_equal_matches_the_last_counts_wherever_it_stands(device: Device) -> None:
    """A long past with the same few tokens in many places, more than a block looks at in one go."""
    piece = RNG.integers(10, 90, 6).astype(np.int32)
    past = RNG.integers(100, 900, 1200).astype(np.int32)
    for place in (0, 31, 500, 911, 1100):
        past[place : place + 6] = piece
    past[-5:] = piece[:5]
    run(device, [past], [6], 2, (2, 5), 64, 1.0, 900)


def test_text_that_does_not_repeat_gives_no_guess_that_counts(device: Device) -> None:
    past = RNG.permutation(400).astype(np.int32)
    assert run(device, [past], [5], 2, (3, 5), 128, 0.0, 1 << 20) == 0
