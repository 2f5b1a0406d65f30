"""Blocks of the key/value cache: who holds which. Integers only; never touches a device."""

from __future__ import annotations

from rvllm.program.program import CacheGroup


class BlockPool:
    """`blocks` interchangeable blocks, handed out and taken back by number."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # Popped from the end, so that low numbers go first and a small run touches little memory.
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks that nobody holds."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Blocks that `take` gave, in the order it gave them."""
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.blocks, f"{len(self._free)} blocks free of {self.blocks}"


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def pool_blocks(groups: tuple[CacheGroup, ...], block_size: int, nbytes: int) -> int:
    """Blocks that each group gets when all share `nbytes` bytes of memory and hold the same tokens."""
    block_bytes = block_size * sum(group.token_bytes() for group in groups)
    return nbytes // block_bytes
