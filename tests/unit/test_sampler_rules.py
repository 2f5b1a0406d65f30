"""What a request's history and wishes do to its logits, and what is told of them: bias, bans, penalties, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.errors import EngineError
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow, needs_last_token, process_logits, sample_rows
from tests.fixtures.sampling import INFINITY, f32, row_with, slow_order, token_of, tokens_of

X, Y, Q = 0, 1, 2


@pytest.mark.parametrize(
    ("asked", "output", "expected"),
    [
        ({}, [], X),
        ({"repetition_penalty": 1.2}, [], Y),
        ({"presence_penalty": 2}, [], X),
        ({"frequency_penalty": 2}, [], X),
        ({"presence_penalty": 2}, [X], Y),
        ({"frequency_penalty": 0.6}, [X], X),
        ({"frequency_penalty": 0.6}, [X, X], Y),
        ({"presence_penalty": 0.6}, [X, X], X),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_repetition_counts_the_prompt_and_the_other_two_the_output_only(asked, output, expected, batch):
    logits = f32([[10.0, 9.0, 0.0, 0.0]] * batch)
    rows = [row_with([X, Q], output, temperature=0, **asked)] * batch
    assert [sampled.token_id for sampled in sample_rows(logits, rows, 4)] == [expected] * batch


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once_per_token():
    logits = f32([6.0, -6.0, 0.0, 6.0])
    row = row_with([0, 0, 1, 1, 1, 2], [0, 1, 1], repetition_penalty=1.5)
    assert process_logits(logits, row).tolist() == [4.0, -9.0, 0.0, 6.0]


def test_penalties_apply_in_order_and_frequency_counts_every_occurrence():
    logits = f32([6.0, 5.0, 4.0])
    row = row_with([2], [0, 0, 0, 1], repetition_penalty=2, frequency_penalty=0.5, presence_penalty=-1)
    assert process_logits(logits, row).tolist() == [6 / 2 - 1.5 + 1, 5 / 2 - 0.5 + 1, 4 / 2]


def test_a_count_of_zero_is_no_occurrence():
    row = SamplingRow(SamplingParams(repetition_penalty=2, presence_penalty=1), 1, 0, (), {0: 0})
    assert process_logits(f32([6.0, 5.0]), row).tolist() == [6.0, 5.0]


def test_bias_comes_before_the_penalties():
    row = row_with([0], repetition_penalty=2, logit_bias={"0": 6, "1": -5})
    assert process_logits(f32([-2.0, 5.0]), row).tolist() == [2.0, 0.0]


def test_a_bias_of_one_hundred_forces_and_of_minus_one_hundred_forbids():
    logits = np.random.default_rng(5).normal(0, 3, 80)
    assert set(tokens_of(logits, SamplingParams(logit_bias={"65": 100}), count=200)) == {65}
    best = int(f32(logits).argmax())
    assert best not in tokens_of(logits, SamplingParams(logit_bias={best: -100}), count=200)


def test_only_allowed_ids_are_drawn_and_all_of_them():
    assert set(tokens_of([0.0] * 30, SamplingParams(allowed_token_ids=[3, 29, 3]), count=200)) == {3, 29}
    assert set(tokens_of([0.0] * 30, SamplingParams(allowed_token_ids=[4], temperature=0), count=5)) == {4}


def test_forbidden_ids_are_not_drawn_unless_nothing_else_is_allowed():
    assert token_of([1.0, 9.0, 2.0], row_with(forbidden=[1], temperature=0)) == 2
    assert token_of([1.0, 9.0, 2.0], row_with(forbidden=[1], allowed_token_ids=[0, 1], temperature=0)) == 0
    assert token_of([1.0, 9.0, 2.0], row_with(forbidden=[1], allowed_token_ids=[1], temperature=0)) == 1


def test_logprobs_are_of_the_raw_logits_whatever_the_request_does_to_them():
    logits = np.random.default_rng(6).normal(0, 4, 3000).astype(np.float32)
    wide = logits.astype(np.float64)
    exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    row = row_with([0], [5], temperature=2, top_k=10, logit_bias={9: 100}, presence_penalty=1, logprobs=4)
    sampled = sample_rows(logits[None], [row], 3000)[0]
    assert sampled.token_id == 9
    # float32 terms of the sum and the float32 difference to the best logit: a few parts in 2**24 of up to 30.
    assert sampled.logprob == pytest.approx(exact[9], abs=4e-6)
    assert [token for token, _ in sampled.top_logprobs] == slow_order(logits)[:4]
    assert [value for _, value in sampled.top_logprobs] == pytest.approx(np.sort(exact)[::-1][:4], abs=4e-6)


def test_listed_logprobs_break_ties_by_id_and_leave_impossible_tokens_out():
    row = row_with(temperature=0, logprobs=6)
    sampled = sample_rows(f32([[1.0, 2.0, -INFINITY, 2.0, 1.0]]), [row], 5)[0]
    assert [token for token, _ in sampled.top_logprobs] == [1, 3, 0, 4]
    assert sampled.logprob == sampled.top_logprobs[0][1]
    assert all(math.isfinite(value) for _, value in sampled.top_logprobs)


def test_logprobs_none_gives_none_and_zero_gives_only_the_chosen():
    for asked, listed in ((None, False), (0, True)):
        sampled = sample_rows(f32([[1.0, 2.0]]), [row_with(logprobs=asked)], 2)[0]
        assert (sampled.logprob is not None) == listed
        assert sampled.top_logprobs == ()


# Bad words


def after(output, *words, **asked):
    """The row that draws after `output`, where the words are bad."""
    params = SamplingParams(bad_words_token_ids=words, **asked)
    return SamplingRow(params, 1, 0, (), {}, (), output_ids=output)


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], 1), ([5], 1), ([4], 1), ([4, 3], 2), ([9, 4, 3], 2), ([4, 3, 9], 1), ([3], 1), ([3, 4], 1)],
)
def test_the_last_id_of_a_bad_word_is_barred_where_the_output_ends_with_the_others(output, expected):
    assert token_of([0.0, 9.0, 8.0], after(output, (4, 3, 1), temperature=0)) == expected


def test_a_bad_word_of_one_id_is_never_drawn_and_the_prompt_completes_none():
    assert 1 not in tokens_of([0.0, 9.0, 8.0], SamplingParams(bad_words_token_ids=[[1]]))
    row = SamplingRow(SamplingParams(temperature=0, bad_words_token_ids=[[7, 1]]), 1, 0, [7])
    assert token_of([0.0, 9.0, 8.0], row) == 1


def test_bad_words_that_leave_nothing_are_drawn_after_all():
    assert token_of([0.0, 9.0, 8.0], after([], (2,), allowed_token_ids=[2], temperature=0)) == 2
    row = row_with(forbidden=[1], allowed_token_ids=[1, 2], bad_words_token_ids=[[2]], temperature=0)
    assert token_of([0.0, 8.0, 9.0], row) == 2, "of two contradictions the better logit wins"


@settings(max_examples=100, deadline=None)
@given(
    output=st.lists(st.integers(0, 3), max_size=6),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
)
def test_bad_words_bar_what_would_complete_one(output, words):
    logits = np.arange(5, dtype=np.float32)[::-1].copy()
    out = process_logits(logits, after(output, *words))
    for token in range(5):
        would_end = any([*output, token][-len(word) :] == word for word in words if len(word) <= len(output) + 1)
        assert (out[token] == -INFINITY) == would_end


def test_only_long_bad_words_and_masks_need_the_last_token():
    assert not needs_last_token(row_with(repetition_penalty=2, logit_bias={1: 1}, bad_words_token_ids=[[4]]))
    assert needs_last_token(row_with(bad_words_token_ids=[[4], [4, 5]]))
    assert needs_last_token(SamplingRow(SamplingParams(), 1, 0, mask=np.zeros(1, np.uint32)))


# Masks


def test_a_mask_allows_the_ids_whose_bits_are_set():
    mask = np.zeros(3, np.uint32)
    for token in (0, 31, 32, 70):
        mask[token // 32] |= np.uint32(1 << token % 32)
    logits = np.random.default_rng(3).normal(0, 1, (200, 71)).astype(np.float32)
    rows = [SamplingRow(SamplingParams(), 5, place, mask=mask) for place in range(200)]
    assert {one.token_id for one in sample_rows(logits, rows, 71)} == {0, 31, 32, 70}
    rows = [SamplingRow(SamplingParams(allowed_token_ids=[5, 32]), 5, 0, mask=mask)]
    assert sample_rows(logits[:1], rows, 71)[0].token_id == 32


def test_a_mask_that_leaves_nothing_is_an_engine_error():
    with pytest.raises(EngineError, match="every allowed token"):
        token_of([1.0, 2.0], SamplingRow(SamplingParams(temperature=0), 1, 0, mask=np.zeros(1, np.uint32)))


# Given tokens


def test_a_given_token_is_kept_whatever_the_rules_and_told_by_prompt_logprobs():
    logits = np.random.default_rng(6).normal(0, 4, (2, 3000)).astype(np.float32)
    wide = logits[0].astype(np.float64)
    exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    params = SamplingParams(top_k=1, logprobs=1, prompt_logprobs=4, allowed_token_ids=[5], presence_penalty=2)
    told, drawn = sample_rows(
        logits, [SamplingRow(params, 1, 0, (), {9: 1}, (9,), given_id=9), SamplingRow(params, 1, 1)], 3000
    )
    assert told.token_id == 9 and drawn.token_id == 5
    assert told.logprob == pytest.approx(exact[9], abs=4e-6)
    assert [token for token, _ in told.top_logprobs] == slow_order(logits[0])[:4]
    assert [value for _, value in told.top_logprobs] == pytest.approx(np.sort(exact)[::-1][:4], abs=4e-6)
    assert len(drawn.top_logprobs) == 1
    silent = sample_rows(logits[:1], [SamplingRow(SamplingParams(logprobs=3), 1, 0, given_id=7)], 3000)[0]
    assert (silent.token_id, silent.logprob, silent.top_logprobs) == (7, None, ())
