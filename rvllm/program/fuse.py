"""Join neighbouring ops into the kernels a device has. Changes where values live, never what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from rvllm.program.ops import ActMul, Add, Linear, Norm, Op, Plain, RopeKV, Tensor, reads
from rvllm.program.ops import Fused as FusedOp
from rvllm.program.program import Program, unfused


@dataclass(frozen=True, slots=True)
class Fusion:
    """A chain of op types that one kernel does. `kept`: places in the chain whose output the kernel also writes out."""

    kernel: str
    chain: tuple[type, ...]
    kept: frozenset[int] = frozenset()


FUSIONS = (
    Fusion("norm_linear_rope_kv", (Norm, Linear, RopeKV)),
    Fusion("norm_linear_act_mul", (Norm, Linear, ActMul)),
    Fusion("norm_linear", (Norm, Linear)),
    Fusion("linear_act_mul", (Linear, ActMul)),
    Fusion("linear_add", (Linear, Add)),
    Fusion("add_norm", (Add, Norm), kept=frozenset({0})),  # the sum is the residual stream: read again later
)
ALL_KERNELS = frozenset(fusion.kernel for fusion in FUSIONS)


def fuse(program: Program, kernels: Collection[str]) -> Program:
    """Replace chains by the fused `kernels` that exist for the device, dtype and batch: greedy, the longest first."""
    flat = unfused(program)
    ops: list[Plain] = [op for op in flat.ops if not isinstance(op, FusedOp)]
    uses = Counter(tensor.name for op in ops for tensor in set(reads(op)))
    wanted = [fusion for fusion in FUSIONS if fusion.kernel in kernels]
    wanted.sort(key=lambda fusion: -len(fusion.chain))
    result: list[Op] = []
    place = 0
    while place < len(ops):
        for fusion in wanted:
            chain = tuple(ops[place : place + len(fusion.chain)])
            if _matches(fusion, chain, uses, flat.output):
                result.append(FusedOp(fusion.kernel, chain))
                place += len(chain)
                break
        else:
            result.append(ops[place])
            place += 1
    return Program(tuple(result), flat.output, flat.constants, flat.cache_groups)


def _matches(fusion: Fusion, chain: tuple[Plain, ...], uses: Counter[str], output: Tensor) -> bool:
    """Whether `chain` has the fusion's types, feeds straight through, and hides only what nobody else reads."""
    if tuple(type(op) for op in chain) != fusion.chain:
        return False
    for place, (op, following) in enumerate(zip(chain, chain[1:])):
        if op.out not in set(reads(following)):
            return False
        if place not in fusion.kept and (uses[op.out.name] > 1 or op.out == output):
            return False
    return True


def hidden(program: Program) -> frozenset[str]:
    """Names of activations that never leave a fused op, and so need no memory of the arena."""
    read_outside = {tensor.name for op in program.ops for tensor in reads(op)} | {program.output.name}
    made = {part.out.name for op in program.ops if isinstance(op, FusedOp) for part in op.parts}
    return frozenset(made - read_outside)
