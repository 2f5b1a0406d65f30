"""benchmarks/tune.py: what it tries, and what it takes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from benchmarks.tune import CHOICES, Case, WrongOutput, chosen, mean_of, tuned
from rvllm.backend.cuda.tuning import TUNED, Tuning

PRESENT = Tuning()


def test_every_figure_is_tried_and_so_is_what_is_committed() -> None:
    for tuning in TUNED.values():
        assert all(getattr(tuning, figure) in choices for figure, choices in CHOICES.items())


@pytest.mark.parametrize(
    ("means", "best"), [({1: 1.0, 2: 0.9, 3: 0.95}, 2), ({1: 1.0, 2: 0.999}, 1), ({1: 1.0, 2: 1.2}, 1)]
)
def test_a_choice_is_taken_where_it_gains_enough(means: dict[int, float], best: int) -> None:
    assert chosen(means, 1) == best


def test_a_mean_of_ratios_is_geometric() -> None:
    assert mean_of([0.5, 2.0]) == pytest.approx(1.0)


class Steps:
    """A step's times by what is chosen: those who take more tokens by rings are faster, low tiles are wrong."""

    name = "a step"

    def ratio(self, tuning: Tuning, present: Tuning) -> float:
        if tuning.low_tile_tokens > 1:
            raise WrongOutput("other logits")
        return (10 - tuning.ring_tokens) / (10 - present.ring_tokens)


def steps() -> Sequence[Case]:
    return cast(Any, [Steps()])


def test_the_next_figure_is_tried_with_what_was_found_before() -> None:
    begin = replace(PRESENT, ring_tokens=1)
    assert tuned(steps(), begin, ["ring_tokens", "ring_bytes"]) == replace(begin, ring_tokens=8)


def test_a_choice_that_makes_other_logits_ends_it() -> None:
    with pytest.raises(WrongOutput):
        tuned(steps(), PRESENT, ["low_tile_tokens"])
