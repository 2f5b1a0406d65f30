"""What sequences hold while they run: a slot each, blocks of the cache, and keys by which others find those blocks.

Carries out what a plan says of blocks; decides nothing and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from rvllm.engine.block_pool import BlockPool, block_key, blocks_for, root_key
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import Chunk, Limits


class Holdings:
    """The pool, the slots and the block table of every slot, `tables` (slots, blocks) i32.

    longest_shared: blocks of longer prompts, and blocks beyond, are for their own sequence alone; None: no such limit.
    """

    def __init__(self, limits: Limits, longest_shared: int | None = None) -> None:
        self._limits = limits
        self._longest_shared = limits.max_model_len if longest_shared is None else longest_shared
        self.pool = BlockPool(limits.blocks)
        most = min(blocks_for(limits.max_model_len, limits.block_size), limits.blocks)
        self.tables = np.zeros((limits.max_num_seqs, most), dtype=np.int32)
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    def prompt_keys(self, request: Request) -> list[bytes]:
        """Keys of the prompt's full blocks; none where there is no prefix cache."""
        if not self._limits.prefix_caching or len(request.prompt_ids) > self._longest_shared:
            return []
        size, key, keys = self._limits.block_size, root_key(request.cache_salt), []
        for begin in range(0, len(request.prompt_ids) - size + 1, size):
            key = block_key(key, request.prompt_ids[begin : begin + size])
            keys.append(key)
        return keys

    def begin(self, sequence: Sequence, shared: Items[int]) -> None:
        """Give a sequence a slot, and blocks with its first tokens that are in the cache."""
        sequence.slot = self._free_slots.pop()
        self.pool.share(shared)
        self.hold(sequence, shared)
        sequence.registered = len(shared)
        sequence.computed = len(shared) * self._limits.block_size

    def fork(self, sibling: Sequence, leader: Sequence) -> None:
        """Give a sequence a slot and all that its leader has in the cache, or soon will have."""
        self.begin(sibling, leader.blocks)
        sibling.computed = leader.computed
        sibling.registered = leader.computed // self._limits.block_size  # by the leader

    def hold(self, sequence: Sequence, blocks: Items[int]) -> None:
        """Put blocks behind those that the sequence has."""
        begin = len(sequence.blocks)
        sequence.blocks += blocks
        self.tables[sequence.slot, begin : len(sequence.blocks)] = blocks

    def grow(self, chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
        """Blocks for every chunk's tokens; (from, to) of blocks to copy, since others hold what is to be written."""
        size, pool = self._limits.block_size, self.pool
        copies = []
        for chunk in chunks:
            sequence = chunk.sequence
            page, place = divmod(sequence.computed, size)
            if place:
                block = sequence.blocks[page]
                if pool.holders(block) > 1:
                    (own,) = pool.take(1)
                    copies.append((block, own))
                    pool.give_back([block])
                    sequence.blocks[page] = self.tables[sequence.slot, page] = own
            if place + chunk.tokens > size or not place:
                missing = blocks_for(sequence.computed + chunk.tokens, size) - len(sequence.blocks)
                self.hold(sequence, pool.take(missing))
        return copies

    def reserve(self, wants: Iterable[tuple[Sequence, int]]) -> bool:
        """Blocks for so many tokens of each behind those computed, or, where there are not enough, for none of them."""
        size = self._limits.block_size
        missing = [(one, blocks_for(one.computed + tokens, size) - len(one.blocks)) for one, tokens in wants]
        if sum(max(count, 0) for _, count in missing) > self.pool.available:
            return False
        for sequence, count in missing:
            if count > 0:
                self.hold(sequence, self.pool.take(count))
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens that its blocks still hold behind those computed."""
        return len(sequence.blocks) * self._limits.block_size - sequence.computed

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks behind the computed tokens: what was reserved for drafts that were wrong."""
        needed = blocks_for(sequence.computed, self._limits.block_size)
        if needed < len(sequence.blocks):
            self.pool.give_back(sequence.blocks[needed:])
            del sequence.blocks[needed:]

    def register(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the sequence's full blocks among its first `tokens` tokens, all of them accepted."""
        if len(sequence.request.prompt_ids) > self._longest_shared:
            return
        size, keys = self._limits.block_size, sequence.keys
        tokens = min(tokens, self._longest_shared)
        for page in range(sequence.registered, tokens // size):
            if page == len(keys):
                parent = keys[-1] if keys else root_key(sequence.request.cache_salt)
                keys.append(block_key(parent, sequence.token_ids[page * size : (page + 1) * size]))
            self.pool.register(sequence.blocks[page], keys[page])
        sequence.registered = tokens // size

    def release(self, sequence: Sequence) -> None:
        """Take back slot and blocks. Those with registered contents stay in the cache until their room is wanted."""
        assert sequence.slot is not None
        self.pool.give_back(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], None
        sequence.computed = sequence.registered = 0

    def check(self, holders: Items[Sequence]) -> None:
        """Assert that slots and blocks are held by these and nobody else."""
        self.pool.check(sequence.blocks for sequence in holders)
        taken = [sequence.slot for sequence in holders if sequence.slot is not None]
        assert len(taken) == len(holders)
        assert sorted([*self._free_slots, *taken]) == list(range(self._limits.max_num_seqs)), taken
        for sequence in holders:
            assert self.tables[sequence.slot, : len(sequence.blocks)].tolist() == sequence.blocks
