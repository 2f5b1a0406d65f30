"""What the sampler keeps on the device for each sequence that runs: what its tokens are penalised and edited by.

Written when a sequence comes to a slot; from there on the kernels count what they draw, so that no step waits for the
token before. Knows sample_edits.cuh's planes; the rules are rvllm.sampling's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.kernels import Device
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import Int64
from rvllm.sampling.sampler import Mask, SamplingRow, barred_ids, changes_logits, needs_last_token

PENALISED, BIASED, FORBIDDEN, BARRED = 1, 2, 4, 8
_IN_PROMPT, _IN_OUTPUT, _WITH_BIAS, _IS_FORBIDDEN, _IS_BARRED, _IS_ALLOWED = range(6)
_PLANES = 6  # the kernels find the last one as a row's mask


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's edits are: addresses, 0 for what it has none of, and which of them apply."""

    bits: int = 0
    counts: int = 0
    bias: int = 0
    mask: int = 0
    edits: int = 0


_NOWHERE = Place()


@dataclass(slots=True, eq=False)
class _Slot:
    """One place on the device, and what is known of it. Memory stays when its sequence goes."""

    bits: int = 0
    counts: int = 0
    bias: int = 0
    params: SamplingParams | None = None
    prompt_ids: Sequence[int] | Int64 = ()
    seed: int = 0
    position: int = -1  # of the token drawn last
    forbidden: frozenset[int] = frozenset()
    barred: frozenset[int] = frozenset()
    allowed: Mask | None = None
    place: Place = _NOWHERE
    forbidden_ids: tuple[int, ...] = ()  # that `place` is for

    def follows(self, row: SamplingRow) -> bool:
        """Whether the slot holds the row's sequence, with every token before the one to draw counted."""
        same = self.params is row.params and self.prompt_ids is row.prompt_ids and self.seed == row.seed
        return same and self.position + 1 == row.position


def slot_bytes(vocab: int) -> int:
    """Device memory that a slot takes at the most: its bitmaps, counts and biases."""
    return 4 * -(-vocab // 32) * _PLANES + 8 * vocab


class Slots:
    """Brings slots up to date with the rows of a step. Memory is taken when a sequence first needs it."""

    def __init__(self, device: Device, vocab: int) -> None:
        self._device, self._vocab, self.words = device, vocab, -(-vocab // 32)
        self._slots: dict[int, _Slot] = {}

    def place(self, row: SamplingRow) -> Place:
        """Where the row's edits are, after copying what the device does not know, in stream order."""
        if not changes_logits(row):
            return _NOWHERE
        slot = self._slots.setdefault(row.slot, _Slot())
        if not slot.follows(row):
            self._move_in(slot, row)
        elif slot.forbidden_ids == row.forbidden_ids and not needs_last_token(row):
            slot.position = row.position
            return slot.place
        slot.position, slot.forbidden_ids = row.position, row.forbidden_ids
        slot.place = self._new_place(slot, row)
        return slot.place

    def _new_place(self, slot: _Slot, row: SamplingRow) -> Place:
        """Where the edits of a slot's row are, its forbidden ids and bad words written where they have changed."""
        forbidden, barred = frozenset(row.forbidden_ids), frozenset(barred_ids(row))
        if forbidden and forbidden != slot.forbidden:
            self._write_plane(slot, _IS_FORBIDDEN, forbidden)
            slot.forbidden = forbidden
        if barred and barred != slot.barred:
            self._write_plane(slot, _IS_BARRED, barred)
            slot.barred = barred
        params = row.params
        asked = (params.penalises, bool(params.logit_bias), bool(forbidden), bool(barred))
        return Place(
            slot.bits,
            slot.counts,
            slot.bias,
            self._plane(slot, _IS_ALLOWED) if slot.allowed is not None else 0,
            sum(flag for flag, on in zip((PENALISED, BIASED, FORBIDDEN, BARRED), asked) if on),
        )

    def step_mask(self, row: SamplingRow) -> Mask:
        """What the row's mask leaves of its allowed ids; the row was placed."""
        assert row.mask is not None and row.mask.shape == (self.words,), (row.mask, self.words)
        allowed = self._slots[row.slot].allowed
        return row.mask if allowed is None else row.mask & allowed

    def _move_in(self, slot: _Slot, row: SamplingRow) -> None:
        params = row.params
        slot.params, slot.prompt_ids, slot.seed = params, row.prompt_ids, row.seed
        slot.forbidden, slot.barred = frozenset(row.forbidden_ids), frozenset(barred_ids(row))
        counts = {token: count for token, count in row.output_counts.items() if count} if params.penalises else {}
        biases = params.logit_bias or {}
        prompt = row.prompt_ids if params.repetition_penalty != 1 else ()
        allowed = params.allowed_token_ids
        slot.allowed = None if allowed is None else self._packed(allowed)
        planes = [self._packed(ids) for ids in (prompt, counts, biases, slot.forbidden, slot.barred, allowed or ())]
        slot.bits = slot.bits or self._device.allocate(4 * self.words * _PLANES)
        self._device.write(slot.bits, np.concatenate(planes))
        if params.penalises:
            slot.counts = slot.counts or self._device.allocate(4 * self._vocab)
            self._write_values(slot.counts, counts, np.uint32)
        if biases:
            slot.bias = slot.bias or self._device.allocate(4 * self._vocab)
            self._write_values(slot.bias, biases, np.float32)

    def _plane(self, slot: _Slot, plane: int) -> int:
        return slot.bits + 4 * self.words * plane

    def _write_plane(self, slot: _Slot, plane: int, ids: Iterable[int]) -> None:
        self._device.write(self._plane(slot, plane), self._packed(ids))

    def _write_values(self, address: int, values: Mapping[int, float], dtype: type[np.uint32 | np.float32]) -> None:
        """The values of some ids; what is written between them means nothing, since their bits are not set."""
        ids = np.fromiter(values, np.int64, len(values))
        if ids.size:
            first = int(ids.min())
            dense = np.zeros(int(ids.max()) - first + 1, dtype)
            dense[ids - first] = list(values.values())
            self._device.write(address + 4 * first, dense)

    def _packed(self, ids: Iterable[int] | Int64) -> Mask:
        array = np.fromiter(ids, np.int64)
        bits = np.zeros(32 * self.words, np.uint8)
        bits[array[array < self._vocab]] = 1
        packed: npt.NDArray[np.uint8] = np.packbits(bits, bitorder="little")
        return packed.view(np.uint32)
