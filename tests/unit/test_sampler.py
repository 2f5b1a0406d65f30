"""One token a row: greedy, extremes, rows beside each other. The filters, the draw and the rules have files of their own."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.errors import EngineError
from rvllm.sampling.draw import keep
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow, sample_rows
from tests.fixtures.sampling import INFINITY, f32, slow_order, token_of, tokens_of


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_a_tie():
    row = SamplingRow(SamplingParams(temperature=0), 1, 0)
    assert token_of([1, 7, 3, 7], row) == 1
    assert token_of([-INFINITY, -INFINITY, -5, -5], row) == 2


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-8, 1e-45, 5e-324])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_tiny_temperatures_equal_temperature_zero(temperature, top_p):
    random = np.random.default_rng(0)
    flat = random.normal(0, 3, (50, 400)).astype(np.float32)
    gap = f32([[90.0 if i == row else 0.0 for i in range(400)] for row in range(50)])
    # At 1e-4 two logits closer than 26e-4 may still change places: no noise exceeds 26.
    top_two = np.sort(flat, axis=1)[:, -2:]
    flat = flat[top_two[:, 1] - top_two[:, 0] > 26e-4]
    for logits in (flat, gap):
        rows = [SamplingRow(SamplingParams(temperature=temperature, top_p=top_p), 5, i) for i in range(len(logits))]
        assert [one.token_id for one in sample_rows(logits, rows, 400)] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("asked", [{"top_p": 0}, {"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(asked):
    logits = np.random.default_rng(1).normal(0, 1, 100)
    assert set(tokens_of(logits, SamplingParams(temperature=2, **asked), count=50)) == {int(f32(logits).argmax())}


def test_a_token_depends_on_its_own_row_alone():
    random = np.random.default_rng(8)
    choices = [
        {"temperature": 0.8},
        {"temperature": 0},
        {"top_k": 20},
        {"top_p": 0.7, "repetition_penalty": 1.3},
        {"logit_bias": {3: 5}, "min_p": 0.1},
    ]
    rows = [
        SamplingRow(SamplingParams(**choices[i % 5], logprobs=2), int(random.integers(2**40)), i, [i, 5], {7: i})
        for i in range(40)
    ]
    logits = random.normal(0, 2, (40, 3000)).astype(np.float32)
    together = sample_rows(logits, rows, 2999)
    alone = [sample_rows(logits[i : i + 1], [rows[i]], 2999)[0] for i in range(40)]
    order = random.permutation(40)
    shuffled = sample_rows(logits[order], [rows[i] for i in order], 2999)
    assert together == alone
    assert [together[i] for i in order] == shuffled
    assert len({one.token_id for one in together}) > 20, "the rows should not all agree"


def test_logits_are_left_unchanged():
    logits = np.random.default_rng(9).normal(0, 1, (1, 50)).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(logit_bias={1: 3}, presence_penalty=1, allowed_token_ids=[1, 2], top_p=0.5)
    sample_rows(logits, [SamplingRow(params, 1, 0, [2], {1: 2}, (2,))], 50)
    assert np.array_equal(logits, before)


def test_a_gap_of_ninety_leaves_no_chance_and_no_nan():
    logits = [0.0] * 100
    logits[37] = 90.0
    for asked in ({}, {"top_p": 0.5}, {"temperature": 2.0, "min_p": 0.1}):
        assert set(tokens_of(logits, SamplingParams(**asked), count=200)) == {37}


@pytest.mark.parametrize("asked", [{}, {"top_p": 0.6}, {"top_k": 2}, {"min_p": 0.5}, {"temperature": 0}])
def test_infinite_logits_share_all_the_chance(asked):
    logits = [0.0, INFINITY, -INFINITY, 3e38, INFINITY, -3e38]
    tokens = set(tokens_of(logits, SamplingParams(**asked), count=100))
    assert tokens == ({1} if asked.get("temperature") == 0 else {1, 4})


def test_impossible_tokens_are_not_kept_even_where_the_min_p_floor_overflows():
    assert list(keep(f32([0, -INFINITY, -5]), SamplingParams(temperature=3e38, min_p=1e-30)).ids) == [0, 2]


def test_the_widest_float32_gap_neither_warns_nor_fails():
    logits = [-3.4e38, 3.4e38, 0.0]
    for asked in ({}, {"top_p": 0.9}, {"temperature": 3e38, "min_p": 1e-30}, {"repetition_penalty": 1e-37}):
        row = SamplingRow(SamplingParams(**asked, logprobs=3), 1, 0, [0, 1, 2], {})
        assert token_of(logits, row) in (0, 1, 2)


@pytest.mark.parametrize(("bad", "what"), [(float("nan"), "NaN"), (-INFINITY, "nothing but -inf")])
def test_logits_that_leave_no_choice_are_an_engine_error_that_names_the_row(bad, what):
    logits = np.zeros((3, 4), np.float32)
    logits[1] = bad
    for temperature in (0, 1):
        rows = [SamplingRow(SamplingParams(temperature=temperature), 1, 0)] * 3
        with pytest.raises(EngineError, match=f"row 1 of 3 hold {what}"):
            sample_rows(logits, rows, 4)


def test_one_nan_among_good_logits_is_an_engine_error():
    with pytest.raises(EngineError, match="NaN"):
        token_of([1.0, float("nan"), 5.0], SamplingRow(SamplingParams(temperature=0), 1, 0))


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 2, "repetition_penalty": 1.1},
        {"top_k": 5, "presence_penalty": 1},
        {"top_p": 0.9, "frequency_penalty": 1},
    ],
)
def test_ids_beyond_the_vocabulary_limit_are_never_drawn_nor_listed(asked):
    logits = np.random.default_rng(4).normal(0, 1, (200, 512)).astype(np.float32)
    logits[:, 300:] += 50
    logits[:, 511] = np.nan
    rows = [SamplingRow(SamplingParams(**asked, logprobs=5), 9, i, [400], {450: 1}, (511,)) for i in range(200)]
    for sampled, line in zip(sample_rows(logits, rows, 300), logits):
        assert sampled.token_id < 300
        assert sampled.token_id == line[:300].argmax() or asked != {"temperature": 0}
        assert [token for token, _ in sampled.top_logprobs] == slow_order(line[:300])[:5]


def test_no_rows_give_no_tokens():
    assert sample_rows(np.zeros((0, 5), np.float32), [], 5) == []
