"""Steps as graphs: what they are padded with changes no bits, and the device goes on by itself as the host would."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np
import pytest

from rvllm.backend.cuda import model as module
from rvllm.backend.cuda import step_block
from rvllm.backend.cuda.model import CudaModel, step_bytes
from rvllm.backend.cuda.step_block import padded_sequences, padded_tokens
from rvllm.backend.cuda.weights import aligned, sizes
from rvllm.engine.request import Sequence
from rvllm.engine.scheduler import Chunk
from rvllm.engine.step import build_step
from rvllm.program.dtype import BF16, E4M3, F16, DType, Float32, load
from rvllm.program.program import Int32, Step
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow
from tests.gpu.running import BLOCK, BOTH, REFERENCE, Backend, cuda_model, forward, opened, sequence
from tests.kernels.host_device import HostDevice

PLAIN, SLIDING = "llama-gqa-tied-llama3-rope", "qwen2-upper-layers-slide"
LENGTH = 128
RNG = np.random.default_rng(31)
TOKENS = RNG.integers(5, 90, 400).tolist()
GREEDY = SamplingParams(temperature=0)
DRAWS = SamplingParams(temperature=0.8, top_p=0.95)

both = pytest.mark.parametrize("backend", BOTH, indirect=True)


def step_of(model: CudaModel, rows: Items[Sequence], counts: Items[int]) -> Step:
    """The next `counts` tokens of the rows; where one's prompt ends, it goes on with some token."""
    chunks = [Chunk(row, count) for row, count in zip(rows, counts)]
    step = build_step(chunks, BLOCK, len(model.program.cache_groups))
    for chunk in chunks:
        chunk.sequence.computed += chunk.tokens
        if not chunk.sequence.pending:
            chunk.sequence.token_ids.append(7)
    return step


def mixed_steps(model: CudaModel) -> Iterator[Step]:
    """Few tokens and many, prompts in pieces beside sequences that decode, one that ends none, and decoding alone."""
    lengths = (1, 20, 69, 90)
    rows = [sequence(model.program, TOKENS[place:][:size], place, LENGTH) for place, size in enumerate(lengths)]
    yield step_of(model, rows[:3], [1, 20, 40])
    yield step_of(model, rows[:3], [1, 1, 29])
    yield step_of(model, rows, [1, 1, 1, 63])  # 66 tokens, beyond what the streaming kernels take
    yield step_of(model, rows[3:], [5])
    yield step_of(model, rows, [1, 1, 1, 22])
    yield step_of(model, rows, [1, 1, 1, 1])


def results(model: CudaModel) -> list[Float32]:
    """Logits of the steps and what is in the caches after each."""
    found = []
    for step in mixed_steps(model):
        found.append(model.forward(step))
        found += [load(model.read(cache, step)) for cache in model.program.caches.values()]
    return found


@both
@pytest.mark.parametrize(
    ("case", "dtype", "kv_dtype"), [(PLAIN, BF16, BF16), (SLIDING, F16, F16), (SLIDING, BF16, E4M3)], ids=str
)
def test_padded_graphs_give_the_bits_of_single_launches_at_exact_sizes(
    case: str, dtype: DType, kv_dtype: DType, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(REFERENCE / case)
    padded = results(cuda_model(source, dtype, backend.device, LENGTH, kv_dtype=kv_dtype))
    monkeypatch.setattr(module, "padded_tokens", lambda count, most: count)
    monkeypatch.setattr(module, "padded_sequences", lambda count, most: count)
    exact = results(cuda_model(source, dtype, backend.device, LENGTH, eager=True, kv_dtype=kv_dtype))
    for place, (one, other) in enumerate(zip(padded, exact, strict=True)):
        assert np.array_equal(one, other), place
        assert np.isfinite(one).all()


@both
def test_a_row_alone_has_the_bits_that_it_has_among_forty(backend: Backend) -> None:
    source, places = opened(REFERENCE / PLAIN), 64
    model = cuda_model(source, BF16, backend.device, places=places)
    rows = [sequence(model.program, [5 + place], place, places=places) for place in range(40)]
    for row in rows[::3]:  # others are longer
        row.token_ids += [9, 30]
        forward(model, row)
        row.token_ids.append(11)
    together = model.forward(step_of(model, rows, [1] * 40))
    for place in (0, 1, 21, 39):
        rows[place].computed -= 1
        rows[place].token_ids.pop()
        assert np.array_equal(model.forward(step_of(model, [rows[place]], [1]))[0], together[place]), place


@both
def test_a_step_that_wants_no_logits_computes_none(backend: Backend) -> None:
    model = cuda_model(opened(REFERENCE / PLAIN), BF16, backend.device)
    row = sequence(model.program, TOKENS[:20])
    assert model.forward(step_of(model, [row], [12])).shape == (0, model.program.output.sizes({"rows": 1})[1])
    if isinstance(backend.device, HostDevice):
        assert not [entry for entry in backend.device.launched if "f32_bf16" in entry]


def draw(model: CudaModel, counts: list[int], params: SamplingParams, ahead: str) -> list[list[int]]:
    """Tokens drawn for prompts of those lengths, and then four times. ahead: what the steps that follow are given."""
    rows = [sequence(model.program, TOKENS[place:][:count], place, LENGTH) for place, count in enumerate(counts)]
    found: list[list[int]] = []
    flying = []
    for turn in range(5):
        asked = [SamplingRow(params, 11 + place, len(row.token_ids) + turn) for place, row in enumerate(rows)]
        follows = turn > 0 and ahead != ""
        step = build_step([Chunk(row, row.pending) for row in rows], BLOCK, len(model.program.cache_groups))
        flying.append(model.start(None if follows and ahead == "nothing" else step, asked, follows=follows))
        if not ahead or turn > 0:
            found.append([one.token_id for one in model.finish(flying.pop(0))])
        for place, row in enumerate(rows):
            row.computed = len(row.token_ids)
            row.token_ids.append(0 if ahead else found[-1][place])
    return found + [[one.token_id for one in model.finish(started)] for started in flying]


@both
@pytest.mark.parametrize("case", [PLAIN, SLIDING])
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 15, 33]], ids=["decodes", "prompts"])
def test_steps_that_follow_draw_what_rebuilt_steps_draw(case: str, counts: list[int], backend: Backend) -> None:
    model = cuda_model(opened(REFERENCE / case), BF16, backend.device, LENGTH)
    rebuilt = draw(model, counts, DRAWS, "")
    assert draw(model, counts, DRAWS, "steps") == rebuilt
    assert draw(model, counts, DRAWS, "nothing") == rebuilt
    assert len({tuple(tokens) for tokens in rebuilt}) > 1


@both
def test_block_tables_that_have_grown_are_sent_with_a_step_that_follows(backend: Backend) -> None:
    """A sequence gets its second block while it runs ahead, in another place of the pool than a stale table says."""
    model = cuda_model(opened(REFERENCE / SLIDING), BF16, backend.device, LENGTH)

    def drawn(grows: bool) -> list[int]:
        row = sequence(model.program, TOKENS[: BLOCK - 2], 0, LENGTH)
        whole = row.blocks
        found = []
        for turn in range(5):
            blocks = row.computed // BLOCK + 1 if row.computed else 1
            row.blocks = whole[:blocks] if grows else whole
            step = build_step([Chunk(row, row.pending)], BLOCK, len(model.program.cache_groups))
            asked = [SamplingRow(GREEDY, 0, len(row.token_ids))]
            found.append(model.finish(model.start(step, asked, follows=grows and turn > 0))[0].token_id)
            row.computed = len(row.token_ids)
            row.token_ids.append(found[-1])
        return found

    assert drawn(grows=True) == drawn(grows=False)


@both
def test_columns_of_the_block_tables_are_sent_when_they_are_needed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cuda_model(opened(REFERENCE / SLIDING), BF16, backend.device, LENGTH)
    counts = [3, BLOCK - 3]  # the second one goes over the border of its first block, and nobody says so
    monkeypatch.setattr(step_block, "SPARE_COLUMNS", 0)
    copies: list[int] = []
    original = CudaModel._copy_in

    def copy_in(self: CudaModel, host: Int32, words: int) -> None:
        copies.append(words)
        original(self, host, words)

    monkeypatch.setattr(CudaModel, "_copy_in", copy_in)
    rebuilt = draw(model, counts, GREEDY, "")
    copies.clear()
    assert draw(model, counts, GREEDY, "nothing") == rebuilt
    groups, rows = 2, len(counts)
    assert copies == [8 + 4 * rows + 1 + sum(counts) + groups * rows, 8 + groups * rows * 2]


def test_a_step_that_follows_is_not_copied() -> None:
    host = HostDevice("t80")
    model = cuda_model(opened(REFERENCE / PLAIN), BF16, host)
    rows = [sequence(model.program, [5 + place], place) for place in range(3)]

    def start(follows: bool) -> int:
        """Bytes that were copied to the device."""
        before = host.copied_bytes
        step = build_step([Chunk(row, 1) for row in rows], BLOCK, len(model.program.cache_groups))
        asked = [SamplingRow(GREEDY, 0, len(row.token_ids)) for row in rows]
        model.finish(model.start(step, asked, follows=follows))
        for row in rows:
            row.computed += 1
            row.token_ids.append(0)
        return host.copied_bytes - before

    first = start(False)
    assert start(True) == start(True) == 0 < first
    for row in rows:
        row.blocks = row.blocks[::-1]  # elsewhere
    tables = sum(len(row.blocks) for row in rows)
    assert start(True) == 4 * (8 + tables)
    assert start(True) == 0 and start(False) > 0


def test_a_graph_is_captured_once_for_each_bucket() -> None:
    host = HostDevice("t80")
    model = cuda_model(opened(REFERENCE / PLAIN), BF16, host, LENGTH)
    model.prepare()
    assert host.captured == len({padded_sequences(count, 8) for count in range(1, 9)}) == 4
    row, other = (sequence(model.program, TOKENS, place, LENGTH) for place in range(2))
    for count, captured in ((17, 5), (30, 5), (20, 5), (33, 6)):  # 32, 32, 32, 64 tokens; no rows
        model.forward(step_of(model, [row], [count]))
        assert host.captured == captured
    model.forward(step_of(model, [sequence(model.program, TOKENS[:20], 2, LENGTH)], [20]))
    assert host.captured == 7  # the logits of one row
    model.forward(step_of(model, [sequence(model.program, TOKENS[:40], 3, LENGTH), other], [40, 3]))
    assert host.captured == 7


def test_a_step_can_only_follow_one_that_drew_for_all() -> None:
    model = cuda_model(opened(REFERENCE / PLAIN), BF16, HostDevice("t80"), LENGTH)
    row = sequence(model.program, TOKENS[:20], 0, LENGTH)
    model.forward(step_of(model, [row], [20]))
    with pytest.raises(AssertionError, match="can only follow"):
        model.start(None, [SamplingRow(GREEDY, 0, 21)], follows=True)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
def test_the_memory_that_is_reported_is_what_is_allocated(kv_dtype: DType) -> None:
    host = HostDevice("t80")
    model = cuda_model(opened(REFERENCE / SLIDING), BF16, host, LENGTH, kv_dtype=kv_dtype)
    blocks = {f"blocks.{group}": count for group, count in enumerate(model._blocks)} | {"block": BLOCK}
    caches = sum(tensor.dtype.nbytes(int(np.prod(tensor.sizes(blocks)))) for tensor in model.program.caches.values())
    weights = sum(map(aligned, sizes(model.program, BF16).values()))
    spare = weights + step_bytes(model.program, model._limits, host.tier) - (host.allocated_bytes - caches)
    assert 0 <= spare < 1.5 * 2**20


@pytest.mark.parametrize("most", [1, 5, 40, 64, 256, 700])
def test_every_count_has_a_graph_that_is_large_enough_and_not_much_larger(most: int) -> None:
    for padded, doubled, slack in ((padded_sequences, 16, 1.5), (padded_tokens, 256, 1.5)):
        sizes = [padded(count, most) for count in range(1, most + 1)]
        assert sizes == sorted(sizes) and sizes[-1] == most and len(set(sizes)) <= 24
        for count, size in enumerate(sizes, 1):
            assert count <= size <= max(16, count * (2 if size <= doubled else slack)), (count, size)
