"""The least time that a device needs for a step, or for a whole run. Knows costs and cards; measures nothing.

Both are bounds from below: what is measured may only be slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rvllm.program.cost import Device, Load, cost
from rvllm.program.program import Program


@dataclass(frozen=True, slots=True)
class Limits:
    """A program, as the device runs it, on a card."""

    program: Program
    card: Device

    def decode_tokens_per_s(self, sequences: int, contexts: tuple[int, int]) -> float:
        """The most tokens/s of `sequences` that decode from the one to the other context: ops wait for one another.

        A step's time grows with the context by a straight line, which windows bend downwards: so the mean of the two
        ends is its mean, or below it.
        """
        return sequences / (sum(self._decode_seconds(sequences, context) for context in contexts) / 2)

    def _decode_seconds(self, sequences: int, context: int) -> float:
        ops = cost(self.program, Load(sequences, sequences, context))
        return sum(self.card.seconds(op.nbytes, op.flops) for op in ops)

    def run_seconds(self, work: Work) -> float:
        """The least time of a whole run, in which a step may read prompts and decode at once.

        Then the bytes of some ops pass while others compute, so bytes and operations are bounds each by itself: the
        weights are read once a step, and there are no fewer steps than tokens of the longest output, nor than all
        tokens over the sequences that run at once. What reading a prompt costs is convex in its length: a prompt of the
        mean length costs no more than the mean.
        """
        weights = sum(op.weight_bytes for op in cost(self.program, Load(1, 1, 1)))
        prompt = self._besides_weights(Load(work.mean_computed, 1, work.mean_input))
        token = self._decoded_token(work)
        nbytes = work.steps * weights + work.prompts * prompt[0] + work.decoded * token[0]
        flops = work.prompts * prompt[1] + work.decoded * token[1]
        return max(nbytes / self.card.bytes_per_s, flops / self.card.flops_per_s)

    def _decoded_token(self, work: Work) -> tuple[float, float]:
        """(bytes without weights, operations) of a decoded token at the mean context: on the chord, as above."""
        if not work.decoded:
            return 0.0, 0.0
        least, mean, most = work.contexts
        share = (mean - least) / (most - least) if most > least else 0.0
        ends = [self._besides_weights(Load(1, 1, context)) for context in (least, most)]
        nbytes, flops = (one + share * (other - one) for one, other in zip(*ends))
        return nbytes, flops

    def _besides_weights(self, load: Load) -> tuple[int, int]:
        """(bytes without weights, operations) of a step."""
        ops = cost(self.program, load)
        return sum(op.nbytes - op.weight_bytes for op in ops), sum(op.flops for op in ops)


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences that all wait from the beginning. `at_once` of them run together at the most.

    prompts   that are sure to be read: fewer than there are sequences where several go on from the same one
    reused    tokens at the front of each prompt that need not be computed, being in the cache from another
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    at_once: int
    prompts: int
    reused: int = 0

    @property
    def sequences(self) -> int:
        return len(self.inputs)

    @property
    def steps(self) -> int:
        """Steps that there are at the least."""
        return max(math.ceil(sum(self.outputs) / min(self.at_once, self.sequences)), *self.outputs, 1)

    @property
    def decoded(self) -> int:
        """Tokens drawn after a sequence's first, each by a forward pass of its own."""
        return sum(self.outputs) - self.sequences

    @property
    def mean_input(self) -> int:
        return sum(self.inputs) // self.sequences

    @property
    def mean_computed(self) -> int:
        return max(1, self.mean_input - self.reused)

    @property
    def contexts(self) -> tuple[int, float, int]:
        """(least, mean, most) length of its sequence at a decoded token, itself included."""
        decoding = [(length, output - 1) for length, output in zip(self.inputs, self.outputs) if output > 1]
        total = sum((length + (count + 1) / 2) * count for length, count in decoding)
        most = max(length + count for length, count in decoding)
        return min(length for length, _ in decoding) + 1, total / self.decoded, most
