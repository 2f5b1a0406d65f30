"""What an engine asks of whatever computes its steps. Knows steps and rows; no request and no device."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Protocol

from rvllm.program.program import Program, Step
from rvllm.sampling.sampler import Sampled, SamplingRow


class Model(Protocol):
    """A program on a device, with its weights and caches. What `start` gives is for `finish` alone."""

    @property
    def program(self) -> Program: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be started that follows one not yet finished; the model then counts what its rows draw."""
        ...

    def start(self, step: Step, rows: Items[SamplingRow], *, follows: bool = False) -> Any:
        """Start a step and the drawing of a token for each of its rows, which may name one place several times.

        follows: its ids are the tokens being drawn by the step started before, for the same rows in the same order.
        Once this returns, the rows' positions and the step's arrays, but for the block tables, are counted on for the
        next one.
        """
        ...

    def finish(self, started: Any) -> list[Sampled]:
        """The tokens that were drawn, in the order of the rows."""
        ...

    def copy_blocks(self, pairs: Items[tuple[int, int]]) -> None:
        """Copy cache blocks (from, to) in every layer: after the steps started so far, before the next."""
        ...
