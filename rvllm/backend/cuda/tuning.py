"""Which kernel a product gets and how its tiles are cut, where that was measured: benchmarks/tune.py, by class of GPU.

Nothing is tuned at a user's start. A figure here decides speed, never what is right; bits follow from it only where
there are more than 64 tokens. benchmarks/LOG.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices for t90a, the only class that has been measured; other tiers have fewer kernels to choose from."""

    ring_tokens: int = 8
    """Up to so many tokens stream by the copy engine, which linear_t90a.cu does for 8 at most."""
    ring_bytes: int = 96 << 10
    """The same of the bytes that they keep in shared memory."""
    ring_stages: int = 7
    """Of its rings, if they fit. With more, blocks of decode attention find no room beside them."""
    low_tile_tokens: int = 1
    """Up to so many tokens its tiles are as low as gives every multiprocessor as many rows."""
    wide_tokens: int = 32
    """With more tokens warpgroups multiply (gemm_t90a.cu)."""
    wide_tokens_large: int = 16
    """The same where the weight has `large_bytes` or more."""
    large_bytes: int = 24 << 20
    slot_tile_depth: int = 1200
    """A tile of 192 slots takes so many elements of depth longer than its depth alone."""
    token_tile_depth: int = 500
    """The same of a tile of 144."""
    most_parts_of_256: int = 4
    """Where tiles of 256 tokens would be cut into more, those of 128 are taken."""


UNTUNED = Tuning()
TUNED = {"t90a": Tuning()}
"""By tier. t90a: measured on an H200."""
