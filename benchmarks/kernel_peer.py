"""What torch, and vLLM where it is installed, takes for the cases of kernels.py: their kernels in chains like ours.

Started by kernels.py with the cases as JSON on stdin; writes one line of JSON a case to stdout: "us" of an op and "how"
it was done, or an "error". Imports nothing of ours but what outputs are held to (exact.py), so that it runs wherever
torch does. Each op has weights or cached tokens of its own here too, and takes its turn in one CUDA graph.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks import exact

WARM_UP = 3
PAGE = 16  # tokens of a block of vLLM's cache, by default
CHECKED_TOKENS, CHECKED_ROWS, CHECKED_SEQUENCES, CHECKED_QUERIES = 64, 256, 3, 6
QUERY_SPREAD = 2.0
EPSILON = 1e-6


@dataclass(frozen=True)
class Way:
    """One way to do a case: an op of each set, which gives its output, and how far an output is off."""

    how: str
    ops: list[Callable[[], torch.Tensor]]
    wrong: Callable[[int, torch.Tensor], float]


def normal(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.randn(*shape, dtype=dtype, device="cuda")
    return made.mul_(spread) if spread != 1 else made


def blank(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")


def host(tensor: torch.Tensor) -> Any:
    return tensor.float().cpu().numpy()


def some(count: int, most: int) -> torch.Tensor:
    """Up to `most` places of `count`, the first and the last among them."""
    places = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
    return torch.from_numpy(places).cuda()


def products(case: dict[str, Any]) -> Iterator[Way]:
    """x W^T, and for gate and up what follows it; an addend is left out, and so is float32 of logits."""
    depth, rows = case["shape"]
    tokens, gated = case["sequences"], case["stem"] == "linear_act_mul"
    x = normal(tokens, depth, spread=2.0 ** round(-0.5 * math.log2(depth)))
    weights = [normal((1 + gated) * rows, depth) for _ in range(case["sets"])]
    outs = [blank(tokens, (1 + gated) * rows) for _ in weights]
    acted = [blank(tokens, rows) for _ in weights] if gated else []
    chosen, wanted = some(tokens, CHECKED_TOKENS), some(rows, CHECKED_ROWS)
    check = exact.linear_act_mul if gated else exact.linear

    def wrong(index: int, out: torch.Tensor) -> float:
        places = torch.cat([wanted, rows + wanted]) if gated else wanted
        return check(host(out[chosen][:, wanted]), host(x[chosen]), host(weights[index][places]), rough=True)

    def product(index: int) -> torch.Tensor:
        return torch.matmul(x, weights[index].t(), out=outs[index])

    def by_torch(index: int) -> torch.Tensor:
        gate, up = product(index).chunk(2, dim=1)
        return torch.mul(F.silu(gate), up, out=acted[index])

    def by_vllm(index: int) -> torch.Tensor:
        torch.ops._C.silu_and_mul(acted[index], product(index))
        return acted[index]

    if not gated:
        yield Way("torch.matmul", each(product, case), wrong)
        return
    if vllm_has("silu_and_mul"):
        yield Way("torch.matmul and vLLM's silu_and_mul", each(by_vllm, case), wrong)
    yield Way("torch.matmul, silu and mul", each(by_torch, case), wrong)


def norms(case: dict[str, Any]) -> Iterator[Way]:
    (hidden,), tokens, sets = case["shape"], case["sequences"], case["sets"]
    x, weights = [normal(tokens, hidden) for _ in range(sets)], [normal(hidden) for _ in range(sets)]
    outs, chosen = [blank(tokens, hidden) for _ in range(sets)], some(tokens, CHECKED_TOKENS)

    def wrong(index: int, out: torch.Tensor) -> float:
        return exact.norm(host(out[chosen]), host(x[index][chosen]), host(weights[index]), EPSILON)

    def by_vllm(index: int) -> torch.Tensor:
        torch.ops._C.rms_norm(outs[index], x[index], weights[index], EPSILON)
        return outs[index]

    if vllm_has("rms_norm"):
        yield Way("vLLM's rms_norm", each(by_vllm, case), wrong)
    yield Way("torch's rms_norm", each(lambda i: F.rms_norm(x[i], (hidden,), weights[i], EPSILON), case), wrong)


def samplings(case: dict[str, Any]) -> Iterator[Way]:
    (vocabulary,), rows = case["shape"], case["sequences"]
    logits = [normal(rows, vocabulary, dtype=torch.float32) for _ in range(case["sets"])]

    def wrong(index: int, out: torch.Tensor) -> float:
        return exact.argmax(out.cpu().numpy(), host(logits[index]))

    yield Way("torch.argmax", each(lambda index: logits[index].argmax(dim=1), case), wrong)


def attentions(case: dict[str, Any]) -> Iterator[Way]:
    """FlashAttention-3 over pages, with splits found by itself, and as vLLM plans them once for all layers."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    heads, kv_heads, dim = case["shape"]
    count, new, context, scale = case["sequences"], case["new"], case["context"], dim**-0.5
    columns = math.ceil(context / PAGE)
    q = normal(count * new, heads, dim, spread=QUERY_SPREAD)
    caches = [normal(2, count * columns, PAGE, kv_heads, dim) for _ in range(case["sets"])]
    outs = [blank(count * new, heads, dim) for _ in caches]
    tables = torch.randperm(count * columns, device="cuda").to(torch.int32).reshape(count, columns)
    lengths = torch.full((count,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, (count + 1) * new, new, dtype=torch.int32, device="cuda")

    def wrong(index: int, out: torch.Tensor) -> float:
        shares = []
        for sequence in some(count, CHECKED_SEQUENCES).tolist():
            queries = some(new, CHECKED_QUERIES)
            rows = sequence * new + queries
            pages = caches[index][:, tables[sequence].long()].reshape(2, -1, kv_heads, dim)[:, :context]
            positions = (context - new + queries).cpu().numpy()
            shares.append(exact.attention(host(out[rows]), host(q[rows]), *host(pages), positions, scale))
        return float(np.max(shares))

    def attend(index: int, plan: torch.Tensor | None) -> torch.Tensor:
        keys, values = caches[index]
        flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            out=outs[index],
            cu_seqlens_q=starts,
            max_seqlen_q=new,
            seqused_k=lengths,
            max_seqlen_k=context,
            softmax_scale=scale,
            causal=True,
            block_table=tables,
            scheduler_metadata=plan,
            fa_version=3,
        )
        return outs[index]

    yield Way("FlashAttention-3", each(lambda index: attend(index, None), case), wrong)
    plan = get_scheduler_metadata(
        batch_size=count,
        max_seqlen_q=new,
        max_seqlen_k=context,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        headdim=dim,
        cache_seqlens=lengths,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=PAGE,
        causal=True,
    )
    yield Way("FlashAttention-3, planned before", each(lambda index: attend(index, plan), case), wrong)


def each(op: Callable[[int], torch.Tensor], case: dict[str, Any]) -> list[Callable[[], torch.Tensor]]:
    return [lambda index=index: op(index) for index in range(case["sets"])]


def vllm_has(name: str) -> bool:
    """Whether vLLM's kernel of that name can be called."""
    try:
        import vllm._custom_ops  # noqa: F401  # registers them
    except Exception as reason:
        print(f"without vLLM's kernels: {reason!r}", file=sys.stderr)
        return False
    return hasattr(torch.ops._C, name)


def microseconds(way: Way, turns: int, repeats: int) -> float:
    """The median time of an op, by events around a graph of `turns`. Raises ArithmeticError for a wrong output."""
    sets, stream = len(way.ops), torch.cuda.Stream()
    torch.cuda.synchronize()  # the data have been drawn on another stream
    with torch.cuda.stream(stream):  # what libraries set up at a first call is none of the graph's
        for op in way.ops[:2]:
            op()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = [way.ops[turn % sets]() for turn in range(turns)][-sets:]
    for _ in range(WARM_UP):
        graph.replay()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1000 * first.elapsed_time(last) / turns)
    worst = float(np.max([way.wrong(index, out) for index, out in enumerate(outs)]))
    if not worst <= 1:  # NaN is wrong
        raise ArithmeticError(f"{way.how}: an output is off by {worst:.3g} times what is allowed")
    return statistics.median(times)


def measured(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """The fastest way that there is; the errors of ways that fail are told on stderr."""
    kinds = {"norm": norms, "sample": samplings, "attention_decode": attentions, "attention_prefill": attentions}
    found: list[tuple[float, str]] = []
    error = "there is no way"
    try:
        for way in kinds.get(case["stem"], products)(case):
            try:
                found.append((microseconds(way, case["turns"], repeats), way.how))
            except Exception as reason:
                error = f"{way.how}: {reason!r}"
                print(error, file=sys.stderr)
    except Exception as reason:
        error = repr(reason)
        print(error, file=sys.stderr)
    return dict(zip(("us", "how"), min(found))) if found else {"error": error}


def main() -> None:
    # What libraries print goes to stderr: stdout is for the figures.
    figures = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json.load(sys.stdin)
    torch.manual_seed(0)
    for case in given["cases"]:
        print(json.dumps(measured(case, given["repeats"])), file=figures, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
