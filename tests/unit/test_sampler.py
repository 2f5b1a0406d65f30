"""The sampler against slow, sorted references; its distribution against the softmax it must follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.errors import BadRequest, EngineError
from rvllm.sampling.api import Sampler, sample_batch
from rvllm.sampling.draw import draw, keep
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import uniform
from rvllm.sampling.sampler import SamplingRow, process_logits, sample_rows

INFINITY = float("inf")
DRAWS = 20_000


def f32(values):
    return np.array(values, np.float32)


def token_of(logits, row, limit=None):
    logits = f32([logits])
    return sample_rows(logits, [row], limit or logits.shape[1])[0].token_id


def tokens_of(logits, params, count=100):
    """Tokens of `count` equal rows at positions of their own."""
    rows = [SamplingRow(params, 1234, position) for position in range(count)]
    batch = np.broadcast_to(f32(logits), (count, len(logits)))
    return [sampled.token_id for sampled in sample_rows(batch, rows, len(logits))]


def draws_of(logits, params, seeds=None):
    """DRAWS tokens from one row of logits: at a position each, or with a seed each."""
    kept = keep(f32(logits), params)
    drawn = draw([kept] * DRAWS, seeds or [1234] * DRAWS, [7] * DRAWS if seeds else range(DRAWS))
    return [int(kept.ids[place]) for _, place in drawn]


def slow_order(logits):
    """Ids by logit descending, then id ascending; -inf left out."""
    return sorted((i for i in range(len(logits)) if logits[i] > -INFINITY), key=lambda i: (-logits[i], i))


def slow_keep(logits, params):
    """The definition of min_p, top_k and top_p, by sorting everything and adding in Python integers."""
    order, best = slow_order(logits), max(logits)
    if params.min_p:
        floor = np.float32(float(best) + params.temperature * math.log(params.min_p))
        order = [i for i in order if logits[i] >= floor]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        x = (logits[order] - best) / np.float32(params.temperature)
        masses = [int(mass) for mass in np.exp(x) * np.float32(2**40)]
        reached = np.cumsum(masses, dtype=object)
        need = params.top_p * sum(masses)
        order = order[: 1 + next(i for i, mass in enumerate(reached) if mass >= need)]
    return sorted(order)


def softmax(logits, temperature=1.0):
    x = (np.array(logits, np.float64) - max(logits)) / temperature
    return np.exp(x) / np.exp(x).sum()


def assert_follows(tokens, chances):
    """Chi-square of the counts. Bound: Laurent and Massart 2000, lemma 1: exceeded with chance under 1e-6."""
    chances = np.asarray(chances)
    counts = np.bincount(tokens, minlength=chances.size)
    assert counts[chances == 0].sum() == 0, "a token without chance was drawn"
    expected = chances[chances > 0] * len(tokens)
    assert expected.min() >= 5, "cells too small for a chi-square test"
    statistic = ((counts[chances > 0] - expected) ** 2 / expected).sum()
    freedom, t = expected.size - 1, math.log(1e6)
    assert statistic < freedom + 2 * math.sqrt(freedom * t) + 2 * t


# Greedy


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


# Filters

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


@pytest.mark.parametrize("asked", [{}, {"top_k": 3000}, {"min_p": 0.2}, {"top_k": 15_000, "min_p": 1e-4}])
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


# The draw


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


# Extremes


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


# Bias, allowed ids, penalties


def row_with(prompt=(), output=(), forbidden=(), **asked):
    counts = {token: list(output).count(token) for token in output}
    return SamplingRow(SamplingParams(**asked), 1, 0, list(prompt), counts, tuple(forbidden))


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


# Log-probabilities


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


# The Python API


def test_the_article_examples_work():
    logits = np.random.default_rng(7).normal(0, 2, (3, 500))
    one = Sampler().sample(logits[0].tolist(), temperature=0.8, top_k=50, seed=3, logprobs=5)
    assert 0 <= one.token_id < 500
    assert len(one.top_logprobs) == 5
    assert len(sample_batch(logits, temperature=0.8, top_p=0.95, seed=42)) == 3


@pytest.mark.parametrize("seed", [0, -50, 2**63 - 2])
@pytest.mark.parametrize(
    "asked", [{"temperature": 0.7}, {"top_k": 9, "top_p": 0.8}, {"temperature": 0}, {"min_p": 0.1}]
)
def test_row_i_of_a_batch_is_a_sample_with_seed_plus_i(seed, asked):
    logits = np.random.default_rng(10).normal(0, 2, (6, 700))
    seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(6)]
    alone = [Sampler().sample(line, seed=each, **asked) for line, each in zip(logits, seeds)]
    assert sample_batch(logits, seed=seed, **asked) == alone
    assert sample_batch(logits.tolist(), seed=seed, **asked) == alone


def test_rows_of_a_batch_may_differ_in_length():
    assert [one.token_id for one in sample_batch([[1, 2], [3, 2, 1], [0]], temperature=0)] == [1, 0, 0]
    assert sample_batch([]) == []


def test_without_a_seed_draws_differ():
    assert len({Sampler().sample([0.0] * 1000).token_id for _ in range(20)}) > 10


def test_logprobs_of_the_api_are_of_the_distribution_drawn_from():
    logits = [2.0, 1.0, 1.5, 0.0, -1.0, 1.2]
    output = Sampler().sample(logits, temperature=0.5, top_k=3, seed=1, logprobs=6)
    kept = np.array([0, 2, 5])
    exact = np.log(softmax([logits[i] for i in kept], 0.5))
    assert [token for token, _ in output.top_logprobs] == kept.tolist()
    assert [value for _, value in output.top_logprobs] == pytest.approx(exact, abs=1e-6)
    assert output.logprob == dict(output.top_logprobs)[output.token_id]
    assert Sampler().sample(logits, top_k=1).logprob == 0


def test_greedy_logprobs_of_the_api_are_of_the_given_logits():
    logits = [2.0, 1.0, 1.5]
    output = Sampler().sample(logits, temperature=0, top_k=1, top_p=0.1, logprobs=2)
    assert output.token_id == 0
    assert output.logprob == pytest.approx(math.log(softmax(logits)[0]), abs=1e-6)
    assert [token for token, _ in output.top_logprobs] == [0, 2]


@pytest.mark.parametrize(
    "logits", [[], [[1.0]], 5.0, ["a"], [1.0, None], [1.0, float("nan")], [-INFINITY], [[1], [1, 2]]]
)
def test_what_is_no_row_of_logits_is_refused(logits):
    with pytest.raises(BadRequest) as refusal:
        Sampler().sample(logits)
    assert refusal.value.param == "logits"


@pytest.mark.parametrize(
    "asked", [{"temperature": -1}, {"top_p": 2}, {"top_k": -2}, {"min_p": 2}, {"seed": 2**64}, {"logprobs": -1}]
)
def test_a_parameter_out_of_range_is_refused_by_name(asked):
    with pytest.raises(BadRequest) as refusal:
        Sampler().sample([1.0, 2.0], **asked)
    assert [refusal.value.param] == list(asked)
