"""The sampler as a Python API: rows in, tokens out, penalties for what came before, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rvllm.errors import BadRequest
from rvllm.sampling.api import Sampler, sample_batch
from rvllm.sampling.sampler import process_logits
from tests.fixtures.sampling import INFINITY, row_with, softmax


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


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3},
    ],
)
def test_penalties_of_the_api_are_those_of_the_engine(asked):
    logits = np.random.default_rng(3).normal(0, 2, (5, 60)).astype(np.float32)
    past = [[], [7], [7, 7, 7, 9], list(range(60)), [59, 0, 59]]
    outputs = sample_batch(logits, temperature=0, past_ids=past, **asked)
    for line, ids, output in zip(logits, past, outputs):
        processed = process_logits(line, row_with((), ids, **asked))
        assert output.token_id == processed.argmax()
        assert output.logprob == pytest.approx(np.log(softmax(processed)[output.token_id]), abs=2e-6)
        assert Sampler().sample(line, 0, past_ids=np.array(ids, np.int64), **asked) == output
    drawn = sample_batch(logits, seed=3, top_k=5, past_ids=past, **asked)
    assert drawn == [
        Sampler().sample(line, seed=3 + i, top_k=5, past_ids=past[i], **asked) for i, line in enumerate(logits)
    ]


@pytest.mark.parametrize("past", [[[1], [2]], [[3]], [[-1]], [["a"]], [[1.0]], [[[1]]]])
def test_past_ids_that_are_none_of_the_rows_are_refused(past):
    with pytest.raises(BadRequest) as refusal:
        sample_batch([[1.0, 2.0, 3.0]], presence_penalty=1, past_ids=past)
    assert refusal.value.param == "past_ids"
