"""The step loop: admit, plan, run, sample, retire. Knows token ids; the front end knows text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rvllm.engine.block_pool import BlockPool, blocks_for
from rvllm.engine.request import Request, Sequence, TokenEvent
from rvllm.engine.scheduler import schedule
from rvllm.engine.step import build_step
from rvllm.errors import PromptTooLong
from rvllm.program.program import Program, Step
from rvllm.sampling.sampler import Sampled, SamplingRow


class Model(Protocol):
    """A program on a device, with its weights and caches."""

    @property
    def program(self) -> Program: ...

    def run(self, step: Step, rows: Items[SamplingRow]) -> list[Sampled]:
        """Compute a step and draw a token for each of its rows."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine holds to. `vocab_limit`: ids from it on are padding and never drawn."""

    max_model_len: int
    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    vocab_limit: int
    eos_ids: frozenset[int]


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, model: Model, limits: Limits) -> None:
        assert limits.blocks >= blocks_for(limits.max_model_len, limits.block_size), limits
        self._model = model
        self.limits = limits
        self._pools = tuple(BlockPool(limits.blocks) for _ in model.program.cache_groups)
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each cache group."""
        return tuple(pool.free for pool in self._pools)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong when its prompt leaves no room for a token; ids must be in range."""
        length, limit = len(request.prompt_ids), self.limits.max_model_len
        assert request.prompt_ids and request.params.max_tokens != 0, request
        if length >= limit:
            raise PromptTooLong(
                f"the prompt has {length:,} tokens, the context is {limit:,} with at least one token of output",
                param="prompt",
                hint="shorten the prompt, or raise --max-model-len where the model allows it",
            )
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request in any state; unknown ids are ignored, since it may just have ended."""
        self._waiting = deque(request for request in self._waiting if request.id != request_id)
        for sequence in [sequence for sequence in self._running if sequence.request.id == request_id]:
            self._retire(sequence)

    def step(self) -> list[TokenEvent]:
        """Run one step; the new tokens of the sequences that got one."""
        self._admit()
        limits = self.limits
        chunks = schedule(self._running, prefill_chunk=limits.prefill_chunk, max_tokens=limits.max_num_batched_tokens)
        if not chunks:
            return []
        finished = [chunk.sequence for chunk in chunks if chunk.finishes]
        rows = [self._sampling_row(sequence) for sequence in finished]
        drawn = self._model.run(build_step(chunks, limits.block_size), rows)
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
        return [self._accept(*pair) for pair in zip(finished, drawn)]

    def _admit(self) -> None:
        """Start waiting requests in order, while there is a place and blocks for all they may ever need."""
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting[0]
            most = request.params.max_tokens
            length = len(request.prompt_ids)
            limit = self.limits.max_model_len if most is None else min(length + most, self.limits.max_model_len)
            # The last token is drawn but never cached.
            needed = blocks_for(limit - 1, self.limits.block_size)
            if any(pool.free < needed for pool in self._pools):
                return
            self._waiting.popleft()
            blocks = tuple(np.array(pool.take(needed), dtype=np.int32) for pool in self._pools)
            self._running.append(Sequence(request, limit, blocks, list(request.prompt_ids)))

    def _retire(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        for pool, blocks in zip(self._pools, sequence.blocks):
            pool.give_back(blocks.tolist())

    def _stop_ids(self, request: Request) -> frozenset[int]:
        own = frozenset(request.params.stop_token_ids)
        return own if request.params.ignore_eos else own | self.limits.eos_ids

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        request = sequence.request
        early = len(sequence.token_ids) - len(request.prompt_ids) < request.params.min_tokens
        return SamplingRow(
            request.params,
            request.seed,
            len(sequence.token_ids),
            request.prompt_ids,
            sequence.output_counts,
            tuple(self._stop_ids(request)) if early else (),
        )

    def _accept(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        """Append the drawn token and end the sequence where it ends."""
        request = sequence.request
        sequence.token_ids.append(sampled.token_id)
        sequence.output_counts[sampled.token_id] += 1
        stopped = sampled.token_id in self._stop_ids(request)
        finish = "stop" if stopped else "length" if len(sequence.token_ids) >= sequence.limit else None
        if finish:
            self._retire(sequence)
        stop_id = sampled.token_id if stopped else None
        return TokenEvent(request.id, sampled.token_id, sampled.logprob, sampled.top_logprobs, finish, stop_id)
