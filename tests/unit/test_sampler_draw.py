"""The filters against a slow, sorted reference; the draw's distribution against the softmax that it must follow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.sampling.draw import draw, keep
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import RowBits, uniform
from rvllm.sampling.sampler import SamplingRow, sample_rows
from tests.fixtures.sampling import DRAWS, INFINITY, assert_follows, draws_of, f32, slow_keep, softmax

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 2.5, 1e9]),
    top_k=st.sampled_from([0, 0, 2, 3, 7, 10**9]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)
TIED_LOGITS = st.sampled_from([-INFINITY, -90.0, -2.0, -1.0, 0.0, 0.5, 1.0, 1.0000001, 3.0])
LOGITS = st.lists(st.one_of(TIED_LOGITS, st.floats(-30, 30, width=32)), min_size=1, max_size=40).filter(
    lambda logits: max(logits) > -INFINITY
)


@settings(max_examples=250, deadline=None)
@given(logits=LOGITS, params=PARAMS)
def test_the_kept_set_is_that_of_a_sorted_reference(logits, params):
    kept = keep(f32(logits), params)
    assert list(kept.ids) == slow_keep(f32(logits), params)
    assert kept.x.max() == 0
    assert np.array_equal(kept.logits, f32(logits)[list(kept.ids)])


@pytest.mark.parametrize(
    "asked", [{}, {"top_k": 50}, {"top_k": 600}, {"top_k": 3000}, {"min_p": 0.2}, {"top_k": 15_000, "min_p": 1e-4}]
)
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.99, 0.9999999, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_large_nuclei_are_those_of_a_sorted_reference(spread, top_p, asked):
    # One decimal gives hundreds of ties; nuclei of 1 to 20,000 tokens pass every size that is sorted first.
    logits = f32(np.random.default_rng(3).normal(0, spread, 20_000).round(1))
    params = SamplingParams(top_p=top_p, **asked)
    assert list(keep(logits, params).ids) == slow_keep(logits, params)


def test_top_k_is_exact_and_the_lowest_ids_of_a_tie_win():
    assert list(keep(f32([5, 1, 3, 3, 3, 0]), SamplingParams(top_k=3)).ids) == [0, 2, 3]


def test_top_p_keeps_the_token_that_crosses_and_no_more():
    logits = f32(np.log([0.4, 0.3, 0.2, 0.1]))
    sizes = [keep(logits, SamplingParams(top_p=top_p)).x.size for top_p in (0.39, 0.41, 0.69, 0.71, 0.89, 0.91)]
    assert sizes == [1, 2, 2, 3, 3, 4]


def test_top_p_counts_mass_after_top_k_and_temperature():
    logits = f32(np.log([0.4, 0.3, 0.2, 0.1]))
    # Of the first two the first has 4/7 = 0.571; at temperature 0.5 weights are squared: 16/30 = 0.533 of all.
    assert list(keep(logits, SamplingParams(top_k=2, top_p=0.57)).ids) == [0]
    assert list(keep(logits, SamplingParams(top_k=2, top_p=0.58)).ids) == [0, 1]
    assert list(keep(logits, SamplingParams(temperature=0.5, top_p=0.53)).ids) == [0]


def test_min_p_is_relative_to_the_best_after_temperature():
    logits = f32(np.log([0.4, 0.3, 0.2, 0.1]))
    assert list(keep(logits, SamplingParams(min_p=0.49)).ids) == [0, 1, 2]
    assert list(keep(logits, SamplingParams(min_p=0.51)).ids) == [0, 1]
    # Squared weights: 9/16 and 4/16 of the best.
    assert list(keep(logits, SamplingParams(min_p=0.26, temperature=0.5)).ids) == [0, 1]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_draws_at_successive_positions_follow_the_softmax(temperature):
    logits = [0.0, 1.0, 2.0, 0.5, 1.5, -0.5, 2.0, 1.0, 0.2, 0.9]
    tokens = draws_of(logits, SamplingParams(temperature=temperature))
    assert_follows(tokens, softmax(logits, temperature))


def test_draws_of_successive_seeds_follow_the_softmax():
    logits = [0.0, 1.0, 2.0, 0.5, 1.5, -0.5, 2.0]
    assert_follows(draws_of(logits, SamplingParams(), list(range(-DRAWS // 2, DRAWS // 2))), softmax(logits))


def test_draws_at_neighbouring_positions_are_independent():
    logits = [0.0, 1.0, 0.5]
    tokens = np.array(draws_of(logits, SamplingParams())).reshape(-1, 2)
    assert_follows(tokens[:, 0] * 3 + tokens[:, 1], np.outer(softmax(logits), softmax(logits)).ravel())


def test_filtered_draws_follow_the_softmax_of_what_is_kept():
    logits = [2.0, 1.0, 1.5, 0.0, -1.0, 1.2]
    params = SamplingParams(temperature=0.9, top_k=4, top_p=0.95, min_p=0.05)
    chances = softmax(logits, 0.9)
    chances[[i for i in range(6) if i not in slow_keep(f32(logits), params)]] = 0
    assert 0 < np.count_nonzero(chances) < 6
    assert_follows(draws_of(logits, params), chances / chances.sum())


def test_a_long_row_follows_the_softmax():
    # 20,000 equal tokens in 20 cells of 1,000: the way of rows whose blocks are made whole.
    rows = [SamplingRow(SamplingParams(), 77, position) for position in range(500)]
    sampled = sample_rows(np.zeros((500, 20_000), np.float32), rows, 20_000)
    assert_follows(np.array([one.token_id for one in sampled]) // 1000, np.full(20, 0.05))


@settings(max_examples=150, deadline=None)
@given(logits=LOGITS, params=PARAMS, seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**32 - 1))
def test_the_drawn_token_has_the_best_score_over_the_whole_vocabulary(logits, params, seed, position):
    numbers = uniform(seed, position, np.arange(len(logits))).astype(np.float64)
    noise = -np.log(-np.log1p(-numbers))
    x = (f32(logits) - max(f32(logits))) / np.float32(params.temperature)
    scores = np.where(np.isin(np.arange(len(logits)), slow_keep(f32(logits), params)), x + noise, -INFINITY)
    [(kept, place)] = draw([keep(f32(logits), params)], [seed], [position])
    # log1p and log(1 - v) may differ in the last place of a float64.
    assert scores[kept.ids[place]] >= scores.max() - 1e-12


def test_rows_long_enough_to_be_drawn_alone_draw_by_the_same_rule():
    random = np.random.default_rng(12)
    logits = random.normal(0, 2, (12, 9000)).astype(np.float32)
    for asked in ({}, {"top_k": 8000}, {"top_k": 1500}, {"temperature": 4, "top_p": 0.9}):
        kept = [keep(line, SamplingParams(**asked)) for line in logits]
        assert min(row.x.size for row in kept) > 1024, "too short to be drawn alone"
        for position, (row, place) in enumerate(draw(kept, [-9] * 12, range(12))):
            ids = np.asarray(row.ids)
            scores = row.x - np.log(-np.log1p(-uniform(-9, position, ids).astype(np.float64)))
            assert place == scores.argmax()


def test_the_better_bound_does_not_win_over_the_better_score():
    # Two likely tokens in a long row: where both numbers are near 1, the bound that picks candidates misleads.
    logits = f32([-100.0] * 1500)
    logits[3], logits[1400] = 0.0, -0.5
    misled = 0
    for position, (row, place) in enumerate(draw([keep(logits, SamplingParams())] * 300, [6] * 300, range(300))):
        numbers = uniform(6, position, np.arange(1500)).astype(np.float64)
        assert place == (row.x - np.log(-np.log1p(-numbers))).argmax()
        misled += place != (row.x - np.log(numbers)).argmax()
    assert misled > 10


def test_the_rarest_numbers_win_long_rows_as_they_should():
    # Where a number's upper half is 0, the bound by which others are left out says nothing.
    row, checked, won = RowBits(), 0, 0
    for position in range(400):
        for token in np.flatnonzero(row.high(11, position, 4000) == 0):
            logits = f32(np.random.default_rng(position).normal(0, 1, 4000))
            for below in (6.0, 9.0, 12.0, 15.0):
                logits[token] = logits.max() - below
                [(kept, place)] = draw([keep(logits, SamplingParams())], [11], [position])
                numbers = uniform(11, position, np.arange(4000)).astype(np.float64)
                assert place == (kept.x - np.log(-np.log1p(-numbers))).argmax()
                checked, won = checked + 1, won + (place == token)
    assert 0 < won < checked
