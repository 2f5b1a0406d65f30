"""How much of a GPU caches and steps may take. The numbers are a device's that is told here; the loading itself is tests/gpu's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rvllm.config import EngineConfig, Speculation
from rvllm.engine.load import SPARE_BYTES, left_for_caches, step_limits
from rvllm.engine.scheduler import Limits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "free", "graphs", "share", "expected"),
    [
        (80, 60, 1, 0.9, 72 - 20 - 1),  # 20 are in use, whoever uses them; the share is of the whole
        (80, 60, 1, 1.0, 80 - 20 - 1),
        (80, 10, 1, 0.5, 0),  # more than the share is in use
        (80, 0.5, 1, 1.0, 0),
    ],
)
def test_caches_take_what_the_share_leaves_beside_all_else(
    total: float, free: float, graphs: float, share: float, expected: float
) -> None:
    def rehearse(free_bytes: Callable[[], int]) -> int:
        assert free_bytes() == int(free * GIB)
        return int(graphs * GIB)

    found = left_for_caches(int(total * GIB), lambda: int(free * GIB), rehearse, share)
    assert found == max(0, int(expected * GIB) - SPARE_BYTES)


def test_memory_that_another_process_gives_back_meanwhile_is_counted_and_none_twice() -> None:
    """B103. What is free is asked once all else is in place."""
    free = [20 * GIB, 30 * GIB]

    def rehearse(free_bytes: Callable[[], int]) -> int:
        free.pop(0)
        return 0

    assert left_for_caches(40 * GIB, lambda: free[0], rehearse, 1.0) == 30 * GIB - SPARE_BYTES


@pytest.mark.parametrize("seats", [1, 4, 64, 256])
@pytest.mark.parametrize("chunk", [8, 512])
@pytest.mark.parametrize("drafts", [None, 1, 31])
def test_a_gpu_has_room_for_the_rows_that_the_engine_plans(seats: int, chunk: int, drafts: int | None) -> None:
    guesses = None if drafts is None else Speculation(drafts)
    config = EngineConfig(max_num_seqs=seats, prefill_chunk=chunk, speculative_config=guesses)
    limits = Limits(1024, 32, 64, seats, 2048, chunk, 100, frozenset(), speculation=guesses)
    room = step_limits(config, 1024)
    assert room.sequences == limits.max_rows <= room.tokens
    if drafts is not None and seats <= 32:  # everybody may have a guess
        assert limits.max_rows >= 2 * seats
