"""Prompt lookup against a search token by token, and what its setting takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.config import Speculation
from rvllm.errors import StartError
from rvllm.sampling.lookup import Past, accepted, lookup


def searched(tokens: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The longest first, and of those the last: every place is compared whole, and what follows is copied one by one."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                grown = list(tokens)
                for place in range(count):
                    grown.append(grown[end + place])
                return grown[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 4), st.integers(0, 4))
def test_drafts_follow_the_last_of_the_longest_matches(tokens: list[int], count: int, shortest: int, more: int) -> None:
    found = lookup(np.array(tokens, dtype=np.int32), count, shortest, shortest + more)
    assert found.tolist() == searched(tokens, count, shortest, shortest + more)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([7, 8, 9, 1, 5, 8, 9, 2, 6, 7, 8, 9], [1, 5, 8, 9]),  # three tokens beat the two that stand later
        ([8, 9, 1, 0, 0, 8, 9, 2, 0, 0, 8, 9], [2, 0, 0, 8]),  # of equals the later
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),  # beyond the end it goes on with itself
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 4, 2], []),  # one token is too few
        ([5], []),
    ],
)
def test_what_is_drafted_in_cases_that_a_reader_can_check(tokens: list[int], drafts: list[int]) -> None:
    assert lookup(np.array(tokens, dtype=np.int32), 4, 2, 3).tolist() == drafts


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12), st.integers(1, 4))
def test_whether_anything_is_found_is_known_without_looking(parts: list[list[int]], shortest: int) -> None:
    past, tokens = Past(np.empty(64, dtype=np.int32)), [1]
    past.extend(tokens)
    for part in parts:
        tokens += part
        past.extend(tokens)
        found = lookup(np.array(tokens, dtype=np.int32), 3, shortest, shortest + 2)
        assert past.tokens.tolist() == tokens and past.recurs(shortest) == (len(found) > 0)


def test_after_wrong_guesses_there_is_a_rest_that_doubles() -> None:
    past = Past(np.empty(4096, dtype=np.int32))
    past.extend([0] * 10)
    rests = []
    for accepted_ones in (0, 0, 0, 2, 0, *[0] * 9):
        past.learn(accepted_ones)
        rests.append(past.rests_until - past.length)
        past.extend([0] * max(past.rests_until, past.length))
    assert rests == [2, 4, 8, 0, 2, 4, 8, 16, 32, 64, 64, 64, 64, 64]


def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn() -> None:
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accepted([1, 2, 3], [1, 5, 3, 4]) == 1
    assert accepted([1], [2, 1]) == accepted([], [2]) == 0


def test_the_setting_is_vllms() -> None:
    assert Speculation.parse({"method": "ngram", "num_speculative_tokens": 4}) == Speculation(4, 3, 5)
    one = Speculation.parse({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4})
    assert one == Speculation(4, 4, 4)
    both = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    assert Speculation.parse(both) == Speculation(1, 2, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "eagle", "num_speculative_tokens": 4}, "method is 'eagle'"),
        ({"num_speculative_tokens": 4}, "method is None"),
        ({"method": "ngram"}, "no num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_max is 4, it has to be a whole number from 5",
        ),
        ({"method": "ngram", "num_speculative_tokens": 4, "model": "x"}, "'model', which is not done"),
    ],
)
def test_a_setting_that_is_not_done_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(StartError, match=said):
        Speculation.parse(given)
