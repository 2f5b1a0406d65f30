"""What an engine is busy with and has done: for those who watch it. Counts; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from rvllm.engine.block_pool import BlockPool
from rvllm.engine.speculation import Drafted


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is busy with now, and has done since it began. Kept blocks hold prefixes and are free to take.

    drafts: times a sequence had tokens guessed; draft_tokens: so many; accepted_tokens: of them, those that were right.
    """

    running: int
    waiting: int
    blocks: int
    used_blocks: int
    kept_blocks: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Counts:
    """Since the engine began."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    arrivals: int = 0

    def load(self, running: int, waiting: int, pool: BlockPool, drafted: Drafted) -> Load:
        """These counts beside what there is now."""
        return Load(
            running=running,
            waiting=waiting,
            blocks=pool.blocks,
            used_blocks=pool.blocks - pool.available,
            kept_blocks=pool.kept,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            drafts=drafted.drafts,
            draft_tokens=drafted.tokens,
            accepted_tokens=drafted.accepted,
        )
