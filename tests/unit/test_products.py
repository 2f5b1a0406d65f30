"""Which kernel a product with a weight gets, by its size and the GPU's tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rvllm.backend.cuda.launch import Bucket, Launch, Target
from rvllm.backend.cuda.products import products
from rvllm.program.dtype import BF16
from rvllm.program.ops import ActMul, Kind, Linear, Tensor

MULTIPROCESSORS, SHARED_BYTES = 132, 228 << 10  # of an H200
TARGET = Target(
    address=lambda name: 1 << 20,
    bucket=Bucket(1, 1, 1, False),
    max_blocks=1,
    blocks=(1,),
    block_size=16,
    workspace=0,
    counters=0,
    multiprocessors=MULTIPROCESSORS,
    tier="t90a",
    matrix_map=lambda address, rows, columns, box_rows: 2 << 20,
)


def launch(tokens: int, depth: int, rows: int, *, gated: bool = False, tier: str = "t90a") -> Launch:
    def activation(name: str, width: int) -> Tensor:
        return Tensor(name, ("tokens", width), BF16, Kind.ACTIVATION)

    out = activation("out", rows)
    op = Linear(activation("x", depth), (Tensor("w", (rows, depth), BF16, Kind.WEIGHT),), (), out)
    after = ActMul(out, "silu", activation("gated", rows // 2)) if gated else None
    target = replace(TARGET, bucket=Bucket(tokens, tokens, tokens, False), tier=tier)
    (found,) = products(op, after, target)
    return found


@pytest.mark.parametrize(
    ("tokens", "depth", "rows", "entry"),
    [
        (1, 1536, 2048, "linear_t90a_bf16"),
        (8, 1536, 1536, "linear_t90a_bf16"),
        (8, 18944, 3584, "linear_bf16_m8"),  # its tokens leave no room for rings
        (1, 1540, 1536, "linear_bf16_m8"),  # rows of no whole 16 bytes
        (1, 4096, 512, "linear_bf16_m8"),  # parts of the depth meet in the workspace
        (9, 1536, 2048, "linear_bf16_m16"),
        (16, 18944, 3584, "linear_bf16_m16"),
        (24, 18944, 3584, "gemm_t90a_bf16_n32"),
        (24, 1536, 1536, "linear_bf16_m32"),
        (33, 1536, 1536, "gemm_t90a_bf16_n64"),
        (100, 1536, 1536, "gemm_t90a_bf16_n128"),
    ],
)
def test_the_kernel_follows_from_tokens_and_weight(tokens: int, depth: int, rows: int, entry: str) -> None:
    assert launch(tokens, depth, rows).entry == entry


@pytest.mark.parametrize(
    ("rows", "tall", "blocks"), [(1536, 12, 128), (2048, 16, 128), (3584, 14, 132), (4608, 12, 132)]
)
def test_tiles_are_as_high_as_lets_all_multiprocessors_have_as_many(rows: int, tall: int, blocks: int) -> None:
    found = launch(1, 3584, rows)
    assert (found.values[-2], found.grid) == (tall, (blocks,))


@pytest.mark.parametrize("tier", ["t80", "t90"])
def test_other_tiers_have_no_rings(tier: str) -> None:
    assert launch(1, 1536, 2048, tier=tier).entry == "linear_bf16_m8"


@pytest.mark.parametrize(
    ("tokens", "depth", "rows", "gated"),
    [
        (1, 1536, 17920, True),
        (8, 1536, 17920, True),
        (5, 3584, 3584, False),
        (8, 3584, 37888, True),
        (1, 8960, 1536, False),
        (4, 8960, 1536, False),
        (1, 18944, 3584, False),
    ],
)
def test_two_blocks_with_rings_never_share_a_multiprocessor(tokens: int, depth: int, rows: int, gated: bool) -> None:
    found = launch(tokens, depth, rows, gated=gated)
    assert found.stem.endswith("_t90a")
    assert 2 * found.shared_bytes > SHARED_BYTES and found.grid[0] <= MULTIPROCESSORS
