"""begin_step: what it makes of a message is what numpy makes of the same sequences; without one, they go on by a token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.kernels.device import Argument, Device
from tests.kernels.paged import SMALLEST, Int32, decode_item, decode_items, prefill_items, splits_of, token_items

STEM = "begin_step"
RNG = np.random.default_rng(21)

MOST_TOKENS, MOST_SEQUENCES, MOST_BLOCKS, BLOCK = 600, 70, 40, 16
PIECES, ROOM = 48, MOST_TOKENS // 64 + MOST_SEQUENCES
WINDOWS = (0, 100)
UNSET = -77


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of a step: the last `counts` tokens of each are new; those that bring one come first."""

    kv_lengths: list[int]
    counts: list[int]
    prompts: list[int]
    tables: tuple[Int32, ...]

    @property
    def decodes(self) -> int:
        return sum(count == 1 for count in self.counts)

    @property
    def starts(self) -> Int32:
        return np.cumsum([0, *self.counts]).astype(np.int32)

    @property
    def positions(self) -> Int32:
        ranges = [np.arange(length - count, length) for length, count in zip(self.kv_lengths, self.counts)]
        return np.concatenate(ranges).astype(np.int32)

    @property
    def lengths(self) -> Int32:
        return np.maximum(self.positions + 1, np.repeat(self.prompts, self.counts)).astype(np.int32)

    def slots(self, group: int) -> Int32:
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        pages = self.tables[group][owners, self.positions // BLOCK]
        return (pages * BLOCK + self.positions % BLOCK).astype(np.int32)

    def next(self, tables: tuple[Int32, ...]) -> Sequences:
        return Sequences([length + 1 for length in self.kv_lengths], [1] * len(self.counts), self.prompts, tables)


def sequences(decodes: int, prompts: list[int], longest: int = (MOST_BLOCKS - 3) * BLOCK) -> Sequences:
    kv_lengths = RNG.integers(1, longest, decodes).tolist()
    counts = [1] * decodes
    for count in prompts:
        counts.append(count)
        kv_lengths.append(count + int(RNG.integers(0, longest - count)))
    whole = [length + int(RNG.integers(-3, 9)) if RNG.integers(2) else length // 2 for length in kv_lengths]
    columns = min(max(kv_lengths) // BLOCK + 2, MOST_BLOCKS)
    tables = tuple(RNG.integers(0, 1 << 20, (len(counts), columns)).astype(np.int32) for _ in WINDOWS)
    return Sequences(kv_lengths, counts, whole, tables)


@dataclass(frozen=True, slots=True)
class State:
    """What begin_step leaves on the device; at first, nothing."""

    message: Int32
    shared: dict[str, Int32] = field(default_factory=dict)
    slots: list[Int32] = field(default_factory=list)
    tables: list[Int32] = field(default_factory=list)
    decode_work: list[Int32] = field(default_factory=list)
    room: int = ROOM

    @staticmethod
    def empty(room: int = ROOM) -> State:
        def unset(*shape: int) -> Int32:
            return np.full(shape, UNSET, dtype=np.int32)

        tokens = ("ids", "positions", "lengths")
        shared = {name: unset(MOST_TOKENS) for name in tokens}
        shared |= {"kv_lengths": unset(MOST_SEQUENCES), "floors": unset(MOST_SEQUENCES)}
        shared |= {"query_starts": unset(MOST_SEQUENCES + 1), "rows": unset(MOST_SEQUENCES)}
        shared["prefill_work"] = unset(1 + 2 * room, 4)
        groups = range(len(WINDOWS))
        return State(
            unset(8 + 4 * MOST_SEQUENCES + MOST_TOKENS + len(WINDOWS) * MOST_SEQUENCES * MOST_BLOCKS),
            shared,
            [unset(MOST_TOKENS) for _ in groups],
            [unset(MOST_SEQUENCES, MOST_BLOCKS) for _ in groups],
            [unset(1 + PIECES + (MOST_SEQUENCES if room else MOST_TOKENS), 4) for _ in groups],
            room,
        )

    def send(self, parts: list[Int32 | list[int]]) -> None:
        words = np.concatenate([np.asarray(part, dtype=np.int32).reshape(-1) for part in parts])
        self.message[: len(words)] = words

    def send_fresh(self, step: Sequences, ids: Int32, rows: Int32) -> None:
        columns = step.tables[0].shape[1]
        head = [1, len(step.counts), step.decodes, len(ids), len(rows), columns, 0, 0]
        floors = np.repeat(0, len(step.counts)) + step.prompts
        self.send([head, step.kv_lengths, floors, step.starts, rows, ids, *step.tables])

    def send_tables(self, step: Sequences) -> None:
        self.send([[0, len(step.counts), 0, 0, 0, step.tables[0].shape[1], 0, 0], *step.tables])

    def begin(self, device: Device, tokens: int, block: int = 128) -> None:
        for group, window in enumerate(WINDOWS):
            args: list[Argument] = [self.message, *self.shared.values()]
            args += [self.slots[group], self.tables[group], self.decode_work[group], group, len(WINDOWS), window]
            args += [tokens, MOST_SEQUENCES, MOST_BLOCKS, BLOCK, PIECES, self.room]
            device.run(STEM, "begin_step_i32", (1,), block, args)

    def check(self, step: Sequences, rows: Int32, bucket: int) -> None:
        """All that may be read is right, and padding is inert."""
        tokens, padding = sum(step.counts), bucket - sum(step.counts)
        expected = {"positions": step.positions, "lengths": step.lengths}
        for name, values in expected.items():
            assert self.shared[name][:bucket].tolist() == [*values.tolist(), *[0] * padding], name
        assert self.shared["ids"][tokens:bucket].tolist() == [0] * padding
        assert self.shared["rows"].tolist() == [*rows.tolist(), *[0] * (MOST_SEQUENCES - len(rows))]
        for group, window in enumerate(WINDOWS):
            assert self.slots[group][:bucket].tolist() == [*step.slots(group).tolist(), *[-1] * padding]
            held = step.tables[group]
            assert np.array_equal(self.tables[group][: len(held), : held.shape[1]], held)
            self.check_decodes(step, group, window)
        if self.room == 0:
            assert np.all(self.shared["prefill_work"] == UNSET)
            return
        found = listed(self.shared["prefill_work"])
        assert sorted(found) == sorted(prefill_items(step.kv_lengths, step.counts, step.decodes))
        keys = [position + rows for _, rows, position, _ in found]
        assert keys == sorted(keys, reverse=True)

    def check_decodes(self, step: Sequences, group: int, window: int) -> None:
        """Every split of every sequence once, in about PIECES items; each sequence's last behind all others."""
        found = listed(self.decode_work[group])
        if self.room == 0:
            tokens = token_items(step.kv_lengths, step.counts, window)
            first = len(found) - len(tokens)
            assert sorted(found[first:]) == tokens
            for sequence in range(len(step.counts)):  # those that take long begin first
                seen = [length for _, owner, length, _ in found[first:] if owner == sequence]
                assert seen == sorted(seen, reverse=True)
            found = found[:first]
        lengths = step.kv_lengths[: step.decodes]
        smallest = chunk_of_many(lengths, window) if step.decodes > 64 and self.room else SMALLEST
        assert self.decode_work[group][0, 1] == smallest
        ranges = [(splits & 0x3F, splits >> 6 & 0x3F) for _, _, _, splits in found]
        single = [
            decode_item(row, sequence, length, split, split + 1)
            for (row, sequence, length, _), (first, end) in zip(found, ranges)
            for split in range(first, end)
        ]
        assert sorted(single) == sorted(decode_items(lengths, window, smallest=smallest))
        counts = [splits_of(length, window, smallest) for length in lengths]
        seen = [min(length, window) if window else length for length in lengths]
        items = [max(1, min(splits, keys * PIECES // sum(seen))) for splits, keys in zip(counts, seen)]
        for sequence, (splits, own) in enumerate(zip(counts, items)):
            cuts = [splits * item // own for item in range(own + 1)]
            given = [limits for (_, owner, _, _), limits in zip(found, ranges) if owner == sequence]
            assert given == list(zip(cuts, cuts[1:]))
        lasts = [sequence for (_, sequence, _, _), (_, end) in zip(found, ranges) if end == counts[sequence]]
        assert lasts == list(range(step.decodes))
        assert [sequence for _, sequence, _, _ in found[len(found) - len(lasts) :]] == lasts


def chunk_of_many(lengths: list[int], window: int) -> int:
    """Keys of a split where whole splits fill a GPU once, and an eighth more, in multiples of 64."""
    share = sum(min(length, window) if window else length for length in lengths) // PIECES
    return max(SMALLEST, -(-(share + share // 8) // 64) * 64)


def listed(work: Int32) -> list[tuple[int, ...]]:
    return [tuple(item) for item in work[1 : 1 + work[0, 0]].tolist()]


def random_ids(tokens: int) -> Int32:
    return RNG.integers(0, 1 << 17, tokens).astype(np.int32)


@pytest.mark.parametrize(
    ("decodes", "prompts", "bucket", "block"),
    [(1, [], 1, 32), (5, [], 8, 64), (70, [], 70, 32), (0, [300], 384, 1024), (2, [2, 64, 65, 200], 512, 128)],
)
def test_a_fresh_step_is_laid_out_and_its_work_is_listed(
    device: Device, decodes: int, prompts: list[int], bucket: int, block: int
) -> None:
    step, state = sequences(decodes, prompts), State.empty()
    ids = random_ids(sum(step.counts))
    rows = step.starts[1::2] - 1
    state.send_fresh(step, ids, rows)
    state.begin(device, bucket, block)
    state.check(step, rows, bucket)
    assert np.array_equal(state.shared["ids"][: len(ids)], ids)
    assert state.message[0] == 0 and state.message[5] == 0


@pytest.mark.parametrize(("decodes", "prompts"), [(0, [300]), (2, [2, 64, 65, 200]), (20, [3])])
def test_without_room_for_prompts_their_tokens_are_work_of_decoding(
    device: Device, decodes: int, prompts: list[int]
) -> None:
    step, state = sequences(decodes, prompts), State.empty(room=0)
    rows = step.starts[1:] - 1
    state.send_fresh(step, random_ids(sum(step.counts)), rows)
    state.begin(device, 512, 64)
    state.check(step, rows, 512)
    state.begin(device, 96)
    state.check(step.next(step.tables), np.arange(len(step.counts), dtype=np.int32), 96)


def test_many_prompts_of_equal_length_are_listed_in_their_order(device: Device) -> None:
    step, state = sequences(0, [2] * 60, longest=9), State.empty()
    state.send_fresh(step, random_ids(120), step.starts[1:] - 1)
    state.begin(device, 128, 32)  # more sequences than threads
    state.check(step, step.starts[1:] - 1, 128)
    items = listed(state.shared["prefill_work"])
    assert items == sorted(items, key=lambda item: (-item[1] - item[2], item[3]))


@pytest.mark.parametrize("prompts", [[], [3, 70]], ids=["decodes", "prompts"])
def test_a_step_that_follows_is_the_one_before_moved_on_by_a_token(device: Device, prompts: list[int]) -> None:
    step, state = sequences(4, prompts), State.empty()
    count, bucket = len(step.counts), 8
    state.send_fresh(step, random_ids(sum(step.counts)), step.starts[1:] - 1)
    state.begin(device, 96 if prompts else bucket)
    for _ in range(BLOCK + 1):  # over the border of a block
        state.shared["ids"][:count] = random_ids(count)
        drawn = state.shared["ids"][:count].copy()
        step = step.next(step.tables)
        state.begin(device, bucket)
        state.check(step, np.arange(count, dtype=np.int32), bucket)
        assert np.array_equal(state.shared["ids"][:count], drawn)


def test_a_step_that_follows_may_bring_new_tables(device: Device) -> None:
    step, state = sequences(3, []), State.empty()
    state.send_fresh(step, random_ids(3), step.starts[1:] - 1)
    state.begin(device, 4)
    wider = tuple(
        RNG.integers(0, 1 << 20, (3, table.shape[1] + 1)).astype(np.int32)[:, :MOST_BLOCKS] for table in step.tables
    )
    step = step.next(wider)
    state.send_tables(step)
    state.begin(device, 4)
    state.check(step, np.arange(3, dtype=np.int32), 4)
    step = step.next(wider)
    state.begin(device, 4)
    state.check(step, np.arange(3, dtype=np.int32), 4)
