"""Where a decode step's time goes: each op of all layers as one graph, so that weights come from memory, and the whole.

    python benchmarks/ops.py benchmarks/shapes/qwen2.5-1.5b [--n 1,64] [--context 512]

Microseconds by CUDA events, the median of 20 replays, dummy weights in bf16: of a kernel in a row of its like, and of
one in the whole, which is what the whole takes less without those of its kind. There kernels overlap, but find neither
their code nor what they read on the multiprocessor. Before, every op of a model of two such layers is held to its
definition.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rvllm.backend.cuda.kernels import Gpu
from rvllm.backend.cuda.launch import Bucket, Launch
from rvllm.backend.cuda.lower import FUSIONS, lower
from rvllm.backend.cuda.model import CudaModel, StepLimits
from rvllm.backend.cuda.step_block import padded_sequences
from rvllm.cli.measure import check_ops
from rvllm.config import EngineConfig
from rvllm.model.files import locate
from rvllm.model.source import Source, open_source, record, weights_for
from rvllm.program.dtype import BF16
from rvllm.program.fuse import fuse
from rvllm.program.program import Int32, Program, Step

BLOCK, REPLAYS, WARM_UP = 32, 20, 3


def step_of(sequences: int, context: int, new: int = 1, tables: Int32 | None = None) -> Step:
    """A step in which each of so many sequences brings its last `new` tokens of `context`.

    tables: (sequences, blocks), which lie in order where none are given.
    """
    if tables is None:
        blocks = -(-(context + 1) // BLOCK)
        tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
    starts = np.arange(0, (sequences + 1) * new, new, dtype=np.int32)
    places = np.arange(context - new, context, dtype=np.int32)
    return Step(
        ids=np.arange(1, sequences * new + 1, dtype=np.int32),
        positions=np.tile(places, sequences),
        lengths=np.full(sequences * new, context, dtype=np.int32),
        query_starts=starts,
        kv_lengths=np.full(sequences, context, dtype=np.int32),
        slots=((tables[:, places // BLOCK] * BLOCK + places % BLOCK).reshape(-1),),
        block_tables=(tables,),
        rows=starts[1:] - 1,
        decode_tokens=sequences if new == 1 else 0,
    )


def load(source: Source, gpu: Gpu, sequences: int, context: int) -> CudaModel:
    program = fuse(record(source, dtype=BF16, kv_dtype=BF16, max_length=context + 1), FUSIONS)
    blocks = -(-(context + 1) // BLOCK)
    limits = StepLimits(max(2048, sequences), sequences, blocks)
    weights = weights_for(source, program)
    return CudaModel(
        program, weights, gpu, limits=limits, blocks=(sequences * blocks,), block_size=BLOCK, vocab_limit=1000
    )


def microseconds(gpu: Gpu, launches: Sequence[Launch], replays: int = REPLAYS) -> float:
    """The median of so many replays, after some that bring the clocks up."""
    graph = gpu.capture(launches)
    for _ in range(WARM_UP):
        gpu.replay(graph)
    times = [1e6 * gpu.seconds(lambda: gpu.replay(graph)) for _ in range(replays)]
    gpu.forget(graph)
    return statistics.median(times)


def report(gpu: Gpu, model: CudaModel, program: Program, sequences: int, context: int) -> None:
    model.forward(step_of(sequences, context))
    size = padded_sequences(sequences, sequences)
    target = model._target(Bucket(size, size, size, False))
    launches = [launch for op in program.ops for launch in lower(op, target)]
    kinds: dict[tuple[str, tuple[int, ...]], list[Launch]] = {}
    for launch in launches:
        kinds.setdefault((launch.entry, launch.grid), []).append(launch)
    whole = microseconds(gpu, launches)
    print(f"\nN={sequences}, context {context}: forward {whole:,.1f} us{'a kernel in a row':>40}{'in the whole':>14}")
    for (entry, grid), same in kinds.items():
        others = [launch for launch in launches if launch not in same]
        alone, inside = microseconds(gpu, same), whole - microseconds(gpu, others)
        print(f"  {entry:36} {grid!s:12} {len(same):3} x {alone / len(same):12.2f} {inside / len(same):13.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=Path)
    parser.add_argument("--n", default="1")
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    counts = [int(count) for count in given.n.split(",")]
    gpu = Gpu(0, print)
    source = open_source(locate(str(given.shape), offline=True, progress=None), load_format="dummy", warn=print)
    worst = check_ops(source, EngineConfig(model=str(given.shape), dtype="bfloat16"), gpu, lambda *_: None)
    print(f"every op of two layers within {worst:.1f} roundings of its definition")
    model = load(source, gpu, max(counts), given.context)
    print(f"{gpu.gpu.name}, {gpu.tier}, {given.shape.name}")
    for count in counts:
        report(gpu, model, model.program, count, given.context)


if __name__ == "__main__":
    main()
