"""Blocks of the key/value cache: who holds which, and which still hold a prefix that somebody may ask for again.

One pool serves every cache group: block b of a sequence is block b of each group's tensors, since all groups have as
many blocks and grow together. Integers and hashes only; never touches a device.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b

from rvllm.program.program import CacheGroup

KEY_BYTES = 32


def root_key(salt: str | None) -> bytes:
    """Where the chain of a prompt's keys begins. Prompts with different salts never share a block."""
    data = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=KEY_BYTES, person=b"rvllm root").digest()


def block_key(parent: bytes, ids: Items[int]) -> bytes:
    """The key of a full block: a 256-bit hash of its tokens and, through the key before it, of all before them."""
    return blake2b(parent + array("i", ids).tobytes(), digest_size=KEY_BYTES, person=b"rvllm block").digest()


class BlockPool:
    """`blocks` blocks by number. A block is free, held (by one sequence or several), or kept: held by nobody, with a
    registered content, until its room is wanted. The kept block that was given back first goes first.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # Popped from the end, so that low numbers go first and a small run touches little memory.
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._by_key: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Those of them that hold a registered content."""
        return len(self._kept)

    def holders(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks that nobody holds, each with one holder then; kept contents go, the oldest first."""
        assert count <= self.available, f"{count} blocks wanted, {self.available} available"
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for blocks that are held or kept."""
        for block in blocks:
            if not self._holders[block]:
                assert self._keys[block] is not None, f"block {block} is free"
                del self._kept[block]
            self._holders[block] += 1

    def give_back(self, blocks: Items[int]) -> None:
        """One holder less for each. Given from the first token on: later blocks go before those that they follow."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is given back and nobody holds it"
            self._holders[block] -= 1
            if not self._holders[block]:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._kept[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Say what a held block holds. Where another one holds the same already, this one stays unknown."""
        assert self._holders[block] > 0 and self._keys[block] in (None, key), block
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of keys, from the first on, whose contents are here."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def forget(self) -> None:
        """Drop every registered content. What is held stays held."""
        self._free.extend(reversed(self._kept))
        self._kept.clear()
        self._by_key.clear()
        self._keys = [None] * self.blocks

    def check(self, held: Iterable[Items[int]] = ()) -> None:
        """Assert that blocks are held as `held`, the lists of all holders, says, and every other is free or kept."""
        expected = [0] * self.blocks
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        assert self._holders == expected, (self._holders, expected)
        idle = [*self._free, *self._kept]
        assert sorted(idle) == [block for block, count in enumerate(expected) if not count], (idle, expected)
        assert all(self._keys[block] is None for block in self._free)
        assert all(self._keys[block] is not None for block in self._kept)
        assert self._by_key == {key: block for block, key in enumerate(self._keys) if key is not None}

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        return block


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def block_bytes(groups: tuple[CacheGroup, ...], block_size: int) -> int:
    """Bytes of one block in the tensors of all groups."""
    return block_size * sum(group.token_bytes() for group in groups)


def pool_blocks(groups: tuple[CacheGroup, ...], block_size: int, nbytes: int) -> int:
    """Blocks that `nbytes` bytes of memory hold."""
    return nbytes // block_bytes(groups, block_size)
