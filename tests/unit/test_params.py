"""Sampling parameters: what is refused, under which name, and what is stored."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from rvllm.errors import BadRequest
from rvllm.sampling.params import SamplingParams

NAN, INFINITY = float("nan"), float("inf")

REFUSED = [
    *[("temperature", value) for value in (-1, -1e-9, NAN, INFINITY, 1e39, 10**400, "hot", True, None, [1])],
    *[("top_p", value) for value in (-1, 1.5, NAN, "0.5", False)],
    *[("top_k", value) for value in (-2, 1.5, 5.0, "5", True, None, 2**63)],
    *[("min_p", value) for value in (-0.1, 1.5, NAN)],
    *[("repetition_penalty", value) for value in (0, -1, NAN, INFINITY, 1e-46)],
    *[("presence_penalty", value) for value in (99, -2.01, NAN)],
    *[("frequency_penalty", value) for value in (2.5, -INFINITY)],
    *[("seed", value) for value in (2**64, 2**63, -(2**63) - 1, 1.0, "1", True)],
    *[("n", value) for value in (0, -1, 1.5, True, None)],
    *[("max_tokens", value) for value in (-1, 1.5, True)],
    *[("min_tokens", value) for value in (-1, None, 17)],
    *[("logprobs", value) for value in (-1, True, 1.5)],
    *[("prompt_logprobs", value) for value in (-1, True, 1.5)],
    *[("bad_words", value) for value in ("", [""], 5, [1], [None])],
    *[("bad_words_token_ids", value) for value in ([[]], [5], [[-1]], [["a"]], "ab", 5, [[1], []])],
    *[("stop", value) for value in ("", [""], ["", "z"], 5, [1], b"x", {"a": 1}, [None])],
    *[("stop_token_ids", value) for value in ([-1], [True], [1.5], "12", 5, [2**63])],
    *[("allowed_token_ids", value) for value in ([], [-1], ["a"], 7)],
    *[("logit_bias", {key: 5}) for key in (-1, "-1", "abc", "", "6 5", "１", 1.0, True, None, "9" * 5000, "9" * 19)],
    *[("logit_bias", {65: value}) for value in ("x", 101, -100.5, NAN, INFINITY, True, None)],
    *[("logit_bias", value) for value in ([1], "65", 5, {"65": 1, 65: 2}, {"65": 1, "065": 2})],
    *[(name, 1) for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_under_its_own_name(name, value):
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.param == name
    assert name in refusal.value.message
    assert len(refusal.value.message) < 200, "a hostile value must not fill the log"


ACCEPTED = [
    *[("temperature", value) for value in (0, 1e-45, 1e-4, 2, 1e9)],
    *[("top_p", value) for value in (0, 1e-9, 1)],
    *[("min_p", value) for value in (0, 1)],
    *[("top_k", value) for value in (0, 1, 10**9)],
    *[("seed", value) for value in (-(2**63), -2, 0, 2**63 - 1)],
    *[("presence_penalty", value) for value in (-2, 2)],
    *[("max_tokens", value) for value in (None, 0, 10**12)],
    *[("logprobs", value) for value in (None, 0, 20)],
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_a_value_at_the_edge_of_its_range_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.allowed_token_ids) == ((), (), None, None)
    assert (params.detokenize, params.skip_special_tokens) == (True, True)
    assert (params.ignore_eos, params.include_stop_str_in_output) == (False, False)


@pytest.mark.parametrize("value", [0, 1e-45, 5e-324, 9.9e-6])
def test_a_temperature_under_the_bound_is_greedy(value):
    assert SamplingParams(temperature=value).greedy


def test_only_what_leaves_no_chance_is_greedy():
    assert SamplingParams(top_p=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams(top_p=1e-9, top_k=2, min_p=1).greedy


def test_minus_one_means_off_for_top_k_and_none_for_seed():
    params = SamplingParams(top_k=-1, seed=-1)
    assert (params.top_k, params.seed) == (0, None)


@pytest.mark.parametrize(
    ("given", "stored"), [(None, ()), ([], ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))]
)
def test_stop_is_stored_as_a_tuple_of_strings(given, stored):
    assert SamplingParams(stop=given).stop == stored


def test_logit_bias_keys_may_be_decimal_strings():
    assert SamplingParams(logit_bias={"65": 100, 7: -100.0}).logit_bias == {65: 100.0, 7: -100.0}


def test_logit_bias_does_not_follow_later_changes_of_the_given_object():
    given = {1: 5.0}
    params = SamplingParams(logit_bias=given)
    given[2] = 7.0
    assert params.logit_bias == {1: 5.0}


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2]))
    assert (params.temperature, params.top_k, params.stop_token_ids) == (0.5, 3, (1, 2))
    assert type(params.temperature) is float
    assert type(params.top_k) is int


def test_min_tokens_may_reach_but_not_pass_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=99, max_tokens=None).min_tokens == 99
    with pytest.raises(BadRequest, match=r"min_tokens is 9, the limit is max_tokens, which is 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_bad_words_are_stored_as_tuples():
    params = SamplingParams(bad_words=["ab", "c"], bad_words_token_ids=[[1, 2], np.array([3])])
    assert (params.bad_words, params.bad_words_token_ids) == (("ab", "c"), ((1, 2), (3,)))
    assert SamplingParams(bad_words=None, bad_words_token_ids=None).bad_words_token_ids == ()


def test_stop_strings_without_text_are_refused():
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(stop="x", detokenize=False)
    assert refusal.value.param == "stop"
    assert SamplingParams(stop_token_ids=[3], detokenize=False).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("logit_bias", {"299": 1}, {"300": 1}),
        ("stop_token_ids", [0, 299], [0, 300]),
        ("allowed_token_ids", [299], [299, 2**62]),
        ("bad_words_token_ids", [[299], [5, 6]], [[5, 300]]),
    ],
)
def test_token_ids_must_be_in_the_vocabulary(name, inside, outside):
    SamplingParams(**{name: inside}).check_vocabulary(300)
    with pytest.raises(BadRequest, match=r"the limit is 299") as refusal:
        SamplingParams(**{name: outside}).check_vocabulary(300)
    assert refusal.value.param == name


def test_params_survive_copying_pickling_and_replacing():
    params = SamplingParams(logit_bias={"5": 1}, stop="x", seed=-1, top_k=-1)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == replace(params) == params
