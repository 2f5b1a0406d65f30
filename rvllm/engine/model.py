"""What an engine asks of whatever computes its steps. Knows steps and rows; no request and no device."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Protocol

from rvllm.program.program import Program, Step
from rvllm.sampling.lookup import Guessing
from rvllm.sampling.sampler import Sampled, SamplingRow


class Model(Protocol):
    """A program on a device, with its weights and caches. What `start` gives is for `finish` alone."""

    @property
    def program(self) -> Program: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be started that follows one not yet finished; the model then counts what its rows draw."""
        ...

    @property
    def guesses(self) -> bool:
        """Whether a step that verifies guesses may be followed by one with guesses of the model's own."""
        ...

    def start(
        self, step: Step, rows: Items[SamplingRow], *, follows: bool = False, guessing: Guessing | None = None
    ) -> Any:
        """Start a step and the drawing of a token for each of its rows, which may name one place several times.

        follows: its ids are the tokens being drawn by the step started before, for the same rows in the same order.
        guessing: each sequence of the step is rows of one token, as `guessing` counts them, and so it is in the steps
        that follow: the model then takes the guesses that were right, and puts its next ones in their rows.
        Once this returns, the rows' positions and the step's arrays, but for the block tables, are counted on for the
        next one.
        """
        ...

    def finish(self, started: Any) -> list[Sampled]:
        """The tokens that were drawn, in the order of the rows."""
        ...

    def guessed(self, started: Any) -> list[list[int]]:
        """Each sequence's guesses in the step that follows `started`, which is finished and goes on with guesses."""
        ...

    def copy_blocks(self, pairs: Items[tuple[int, int]]) -> None:
        """Copy cache blocks (from, to) in every layer: after the steps started so far, before the next."""
        ...
