"""Guesses made on the device: sequences' pasts there, and the kernel behind the sampler that reads and adds to them.

Knows prompt_lookup.cu's head block; what a guess is, is rvllm.sampling.lookup's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.launch import Launch
from rvllm.program.program import Int32
from rvllm.sampling.lookup import MOST_ROWS, Guessing, Past

MOST_PASTS = MOST_ROWS // 2  # each has a row for a guess besides its last token's
BLOCK = 512  # threads for a past; its tokens are read four at a time by each


class Guesser:
    """Room for sequences of up to `longest` tokens. `drawn`: where the sampler is to put a step's tokens."""

    def __init__(self, device: Device, longest: int) -> None:
        self._device, self._longest = device, longest
        self._pasts = device.allocate(4 * MOST_PASTS * longest)
        self.drawn = device.allocate(4 * MOST_ROWS)
        self._held: list[tuple[Past, int] | None] = [
            None
        ] * MOST_PASTS  # whose, and how many tokens are sure to be there
        self._head = device.allocate(4 * 5 * MOST_ROWS)  # places, then state
        self._host = device.pinned(4 * 5 * MOST_ROWS).view(np.int32)
        # Two: one is read while the next step's is being written.
        self._told = tuple(device.pinned(4 * 2 * MOST_ROWS).view(np.int32) for _ in range(2))
        self._guessing: Guessing | None = None

    def load(self) -> None:
        """Launch the kernel once, so that no step has to wait for it to be loaded: of a sequence that has no room."""
        self._device.fill(self._head, 0, 4 * 5)
        nowhere, told = self.drawn, self._told[0].ctypes.data
        addresses = (self._head, self._head + 12, self._pasts, nowhere, nowhere, nowhere, nowhere, told)
        self._device.launch(Launch("prompt_lookup", "prompt_lookup_i32", (1,), BLOCK, 0, (*addresses, 1, 1, 1, 1)))
        self._device.synchronize()

    @property
    def most_ahead(self) -> int:
        """Tokens by which a sequence may be longer after a step."""
        assert self._guessing is not None
        return 1 + max(self._guessing.rooms)

    def send(self, guessing: Guessing) -> None:
        """Copy what the device does not know of the sequences, whose step is about to start; no other is under way."""
        count = len(guessing.rooms)
        assert count + sum(guessing.rooms) <= MOST_ROWS, guessing.rooms
        self._guessing = guessing
        places = self._host[: 3 * count].reshape(count, 3)
        state = self._host[3 * count : 5 * count].reshape(count, 2)
        rows = np.array(guessing.rooms) + 1
        places[:, 0], places[:, 1] = np.cumsum(rows) - rows, guessing.rooms
        places[:, 2] = self._seats(guessing)
        state[:, 0], state[:, 1] = [past.length for past in guessing.pasts], guessing.counts
        self._device.copy_in(self._head, self._host.ctypes.data, 4 * 5 * count)

    def _seats(self, guessing: Guessing) -> list[int]:
        """Where each sequence's past is, once its tokens are there; 0 for one that has no room."""
        wanted = [past for past, room in zip(guessing.pasts, guessing.rooms) if room]
        kept = {id(held[0]): seat for seat, held in enumerate(self._held) if held is not None}
        taken = {kept[id(past)] for past in wanted if id(past) in kept}
        free = iter([seat for seat in range(MOST_PASTS) if seat not in taken])
        seats = []
        for past, room in zip(guessing.pasts, guessing.rooms):
            if not room:
                seats.append(0)
                continue
            seat = kept[id(past)] if id(past) in kept else next(free)
            held = self._held[seat]
            known = held[1] if held is not None and held[0] is past else 0
            at = self._pasts + 4 * (seat * self._longest + known)
            self._device.write(at, np.ascontiguousarray(past.tokens[known:]))
            self._held[seat] = past, past.length
            seats.append(seat)
        return seats

    def launch(self, ids: int, kv_lengths: int, positions: int, turn: int) -> Launch:
        """Behind the sampler of a step: the next one's ids, lengths and positions."""
        guessing = self._guessing
        assert guessing is not None
        count = len(guessing.rooms)
        told = self._told[turn].ctypes.data
        addresses = (self._head, self._head + 12 * count, self._pasts, self.drawn, ids, kv_lengths, positions, told)
        values = (*addresses, count, self._longest, guessing.shortest, guessing.longest)
        return Launch("prompt_lookup", "prompt_lookup_i32", (count,), BLOCK, 0, values)

    def take(self, turn: int) -> list[list[int]]:
        """The guesses of each sequence for the next step, once the device is through with this one."""
        guessing, told = self._guessing, self._told[turn]
        assert guessing is not None
        return guesses_of(told, guessing.rooms)


def guesses_of(told: Int32, rooms: Sequence[int]) -> list[list[int]]:
    """What the kernel tells: counts, then ids by rows."""
    found, row = [], len(rooms)
    for count, room in zip(told.tolist(), rooms):
        found.append(told[row + 1 : row + 1 + count].tolist())
        row += 1 + room
    return found
