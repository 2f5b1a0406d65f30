"""The sampling kernels against rvllm.sampling: the tokens that may be drawn, the one that is, its log-probability.

What may be drawn is compared exactly, except for tokens whose mass lies within 2**-20 of top_p: there exp decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rvllm.errors import EngineError
from rvllm.program.dtype import Float32
from rvllm.sampling.draw import keep
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import UNIT_MAX, uniform
from rvllm.sampling.sampler import Sampled, SamplingRow, process_logits, sample_rows
from tests.kernels.device import Device
from tests.kernels.sample_batch import FLAT, FULL, LONG_LIST, SMALL, UNIT, Drawn, kept_ids, run, workspace

RNG = np.random.default_rng(21)
LOGPROB_ERROR = 1e-5  # exp and ln of float are 2 ulp off, a sum of masses 2**-40 a token


def sizes_near(logits: Float32, params: SamplingParams) -> list[int]:
    """How many tokens may be drawn, for a top_p that is 2**-20 less and more."""
    if params.top_p == 1:
        return [len(keep(logits, params).ids)] * 2
    near = [params.top_p - 2.0**-20, min(1.0, params.top_p + 2.0**-20)]
    return [len(keep(logits, replace(params, top_p=top_p)).ids) for top_p in near]


def check(
    device: Device,
    logits: Float32,
    rows: Sequence[SamplingRow],
    limit: int,
    threads: tuple[int, int] = FULL,
    blocks: tuple[int, int] | None = None,
) -> list[Sampled]:
    """Everything that the kernels say of a batch, against the definition; gives the definition's words."""
    got, expected = run(device, logits, rows, limit, threads, blocks=blocks), sample_rows(logits, rows, limit)
    differ = 0
    for index, (row, want) in enumerate(zip(rows, expected)):
        if not row.params.greedy and row.given_id is None:
            processed = process_logits(logits[index, :limit], row)
            kept, allowed = kept_ids(processed, int(got.cuts[index, 1])), np.asarray(keep(processed, row.params).ids)
            if not np.array_equal(kept, allowed):
                fewest, most = sizes_near(processed, row.params)
                assert fewest <= len(kept) <= most, (index, row.params, len(kept), len(allowed))
                differ += 1
                continue
        assert got.tokens[index] == want.token_id, (index, row.params)
        check_logprobs(got, index, row, want)
    assert np.array_equal(got.tokens, got.next_ids)
    check_counts(got, rows)
    assert differ <= 1 + len(rows) // 50
    return expected


def check_logprobs(got: Drawn, index: int, row: SamplingRow, want: Sampled) -> None:
    count = row.logprobs or 0
    listed = len(want.top_logprobs)
    if row.logprobs is None:
        assert np.isnan(got.logprobs[index])
    else:
        assert got.logprobs[index] == pytest.approx(want.logprob, abs=LOGPROB_ERROR)
    assert got.top_ids[index, :listed].tolist() == [token for token, _ in want.top_logprobs]
    assert got.top_logprobs[index, :listed].tolist() == pytest.approx(
        [logprob for _, logprob in want.top_logprobs], abs=LOGPROB_ERROR
    )
    assert np.all(got.top_ids[index, listed:count] == -1)
    assert np.all(got.top_logprobs[index, listed:count] == -np.inf)
    assert np.all(got.top_ids[index, count:] == -77)
    assert np.all(np.isnan(got.top_logprobs[index, count:]))


def check_counts(got: Drawn, rows: Sequence[SamplingRow]) -> None:
    """What the slots of rows with penalties hold after the draw: the output, and the token."""
    for index, row in enumerate(rows):
        if not row.params.penalises or row.given_id is not None:
            continue
        counts = Counter(row.output_counts)
        counts[int(got.tokens[index])] += 1
        bits = np.unpackbits(got.output_bits[index].view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == sorted(counts)
        assert got.counts[index, sorted(counts)].tolist() == [counts[token] for token in sorted(counts)]


def some(*choices: Any) -> Any:
    return choices[RNG.integers(len(choices))]


def random_row(limit: int, vocab: int) -> SamplingRow:
    """Any of the rules, each off half of the time."""
    ids = RNG.permutation(limit)
    bias = {int(token): float(RNG.uniform(-5, 5)) for token in ids[: RNG.integers(1, 6)]}
    allowed = tuple(RNG.permutation(limit)[: RNG.integers(1, limit + 1)].tolist())
    params = SamplingParams(
        temperature=some(1.0, 0.0, 0.7, 1e-5, 0.1, 3.0, 50.0),
        top_p=some(1.0, 0.95, 0.5, 0.1, 0.999),
        top_k=some(0, 0, 1, 2, 5, 40, limit, limit - 1, limit + 1),
        min_p=some(0.0, 0.0, 0.05, 0.5, 1.0, 1e-6),
        repetition_penalty=some(1.0, 1.0, 1.3, 0.8),
        presence_penalty=some(0.0, 0.5, -1.5),
        frequency_penalty=some(0.0, 0.3, -0.7),
        logprobs=some(None, None, 0, 1, 5, 20),
        logit_bias=some(None, bias),
        allowed_token_ids=some(None, None, allowed),
        bad_words_token_ids=some((), ((int(ids[1 % limit]),), (int(ids[2 % limit]),))),
        prompt_logprobs=some(None, 0, 4),
    )
    return SamplingRow(
        params,
        seed=int(RNG.integers(-(2**63), 2**63)),
        position=int(RNG.integers(0, 2**32)),
        prompt_ids=RNG.integers(0, limit + 3, 12).tolist(),
        output_counts={int(token): int(RNG.integers(1, 9)) for token in RNG.integers(0, limit, 6)},
        forbidden_ids=some((), (int(ids[0]),), tuple(RNG.integers(0, limit, 3).tolist())),
        given_id=some(*[None] * 9, int(ids[-1])),
        mask=some(None, None, RNG.integers(0, 2**32, -(-vocab // 32), np.uint32)),
    )


def random_logits(rows: int, vocab: int) -> Float32:
    """Rows of every kind: wide and narrow, with ties, with -inf, with extreme values."""
    logits = (RNG.standard_normal((rows, vocab)) * RNG.choice([0.1, 1, 3, 10], (rows, 1))).astype(np.float32)
    kinds = RNG.integers(0, 6, rows)
    logits[kinds == 1] = np.round(logits[kinds == 1] * 2) / 2
    logits[kinds == 2] = np.where(RNG.random((int((kinds == 2).sum()), vocab)) < 0.4, -np.inf, logits[kinds == 2])
    logits[kinds == 3] = np.clip(logits[kinds == 3], -30, 30) * np.float32(1e37)
    logits[kinds == 4] = np.float32(0.0) * np.sign(logits[kinds == 4])  # both zeros
    return logits


def possible(logits: Float32, row: SamplingRow) -> bool:
    """Whether the definition draws at all: it refuses a row that has nothing above -inf."""
    try:
        process_logits(logits, row)
    except EngineError:
        return False
    return bool(logits.max() > -np.inf)


@pytest.mark.parametrize("vocab", [1, 3, 30, 61, 128, 250, 1000])
@pytest.mark.parametrize("limited", [False, True])
def test_hundreds_of_rows_under_all_rules_together(device: Device, vocab: int, limited: bool) -> None:
    limit = max(1, vocab - 2) if limited else vocab
    count = 60 if vocab == 1000 else 150
    logits = random_logits(count, vocab)
    rows = [random_row(limit, vocab) for _ in range(count)]
    fine = [index for index in range(count) if possible(logits[index, :limit], rows[index])]
    logits[:, limit:] = RNG.choice([np.nan, np.inf, 99], vocab - limit)
    check(device, logits[fine], [rows[index] for index in fine], limit, SMALL)


RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {3: 4.5, 11: -100.0}},
    "allowed": {"allowed_token_ids": (2, 31, 32, 63, 64, 99)},
    "greedy": {"temperature": 0.0},
    "greedy repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "bad words": {"bad_words_token_ids": tuple((token,) for token in range(0, 100, 2))},
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_alone(device: Device, rule: str) -> None:
    logits = (RNG.standard_normal((40, 100)) * 2).astype(np.float32)
    params = SamplingParams(**RULES[rule], logprobs=3)
    rows = [SamplingRow(params, index - 20, index, range(30), {5: 2, 40: 1, 99: 7}) for index in range(40)]
    check(device, logits, rows, 100, SMALL)


def test_forbidden_ids_are_not_drawn(device: Device) -> None:
    logits = RNG.standard_normal((30, 50)).astype(np.float32)
    logits[:, 7] = 30
    rows = [
        SamplingRow(SamplingParams(temperature=some(0.0, 1.0), top_k=some(0, 4)), 1, index, forbidden_ids=(7, 8, 300))
        for index in range(30)
    ]
    assert all(sampled.token_id != 7 for sampled in check(device, logits, rows, 50, SMALL))


def test_a_given_token_is_not_drawn_and_its_log_probability_is_told(device: Device) -> None:
    vocab = 3 * UNIT + 17
    logits = (RNG.standard_normal((4, vocab)) * 3).astype(np.float32)
    logits[3, 2500] = -np.inf
    params = SamplingParams(temperature=1.7, top_p=0.5, prompt_logprobs=5, repetition_penalty=2.0)
    rows = [SamplingRow(params, 1, place, (), {5: 1}, given_id=token) for place, token in enumerate((7, 0, vocab - 1))]
    rows.append(SamplingRow(params, 1, 3, given_id=2500))
    told = check(device, logits, rows, vocab)
    assert [sampled.token_id for sampled in told] == [7, 0, vocab - 1, 2500] and told[3].logprob == -np.inf


def test_a_mask_leaves_only_its_ids(device: Device) -> None:
    vocab = 70
    logits = RNG.standard_normal((20, vocab)).astype(np.float32)
    mask = np.array([1 << 5 | 1 << 9, 1, 0], np.uint32)  # 5, 9 and 32
    rows = [
        SamplingRow(SamplingParams(temperature=some(0.0, 1.0), allowed_token_ids=(5, 32, 60)), 3, i, mask=mask)
        for i in range(20)
    ]
    assert {sampled.token_id for sampled in check(device, logits, rows, vocab, SMALL)} <= {5, 32}


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_forbidden_ids_may_be_drawn_where_nothing_else_remains(device: Device, top_p: float) -> None:
    vocab, allowed = 4 * UNIT + 60, (5, 9, 4 * UNIT + 12)
    logits = RNG.standard_normal((6, vocab)).astype(np.float32)
    rows = [
        SamplingRow(
            SamplingParams(
                temperature=temperature, top_p=top_p, allowed_token_ids=allowed, logit_bias={9: 1.5}, presence_penalty=1
            ),
            seed,
            3,
            output_counts={5: 1},
            forbidden_ids=allowed,
        )
        for temperature in (0.0, 1.0)
        for seed in range(3)
    ]
    assert all(sampled.token_id in allowed for sampled in check(device, logits, rows, vocab, (64, 64)))


BIG_RULES: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7, "logprobs": 20},
    {"top_k": 5000, "top_p": 0.7},  # what is left is too much for a list
    {"top_k": 2500, "top_p": 0.9, "temperature": 4.0},  # and here for one that a block holds
    {"temperature": 0.0, "logprobs": 5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "temperature": 2.0, "top_p": 0.97},
]


@pytest.mark.parametrize("vocab", [32000, 32003])
@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_a_large_vocabulary(device: Device, vocab: int, spread: float) -> None:
    logits = (RNG.standard_normal((len(BIG_RULES), vocab)) * spread).astype(np.float32)
    rows = [
        SamplingRow(
            SamplingParams(**rule), 5, 2, RNG.integers(0, vocab, 300).tolist(), {int(RNG.integers(vocab)): 3}, (17,)
        )
        for rule in BIG_RULES
    ]
    check(device, logits, rows, vocab - 1)


EDITED_RULES: list[dict[str, Any]] = [
    {"top_k": 20},
    {"top_p": 0.7, "temperature": 0.8},
    {},
    {"min_p": 0.05},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("edited", [2048, 2049, 5000])
def test_a_block_sees_more_edits_than_it_lists(device: Device, edited: int) -> None:
    """Of two tokens that matter and are the last of their block's to be listed, one is much likelier than all others."""
    vocab = 9000
    logits = RNG.standard_normal((len(EDITED_RULES), vocab)).astype(np.float32)
    bias = {vocab - 1 - token: 0.25 for token in range(edited)} | {vocab - 1: 14.0, vocab - edited: 13.0}
    rows = [SamplingRow(SamplingParams(**rule, logit_bias=bias), 3, place) for place, rule in enumerate(EDITED_RULES)]
    told = check(device, logits, rows, vocab, blocks=(1, 1))
    assert {sampled.token_id for sampled in told} <= {vocab - 1, vocab - edited}


def test_a_block_sees_edits_beyond_those_that_it_shares_at_once(device: Device) -> None:
    """Two parts of 32,768 ids and some: both ends of each are raised, and what is best without is forbidden or masked."""
    vocab = 2 * 32768 + 1000
    raised = (0, 32767, 32768, 65535, 65536, vocab - 1)
    logits = RNG.standard_normal((len(EDITED_RULES) * len(raised), vocab)).astype(np.float32)
    logits[:, [40, 32800, 65570]] = 40
    mask = np.full(-(-vocab // 32), 2**32 - 1, np.uint32)
    mask[[32800 // 32, 65570 // 32]] &= ~np.array([1 << 32800 % 32, 1 << 65570 % 32], np.uint32)
    rows = [
        SamplingRow(
            SamplingParams(**rule, logit_bias={token: 20.0}, presence_penalty=0.5),
            5,
            token,
            (),
            {32767: 2, 65536: 1},
            (40,),
            mask=mask,
        )
        for rule in EDITED_RULES
        for token in raised
    ]
    told = check(device, logits, rows, vocab, blocks=(1, 2))
    assert [sampled.token_id for sampled in told] == [token for _ in EDITED_RULES for token in raised]


def test_a_short_list_holds_what_can_matter(device: Device) -> None:
    """Not a matter of right or wrong: what the list lacks is looked for in the whole row, by one block."""
    vocab = 32_000
    logits = (RNG.standard_normal((4, vocab)) * 3.5).astype(np.float32)
    asked: list[dict[str, Any]] = [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 400}]
    rows = [SamplingRow(SamplingParams(**one, logprobs=20, presence_penalty=0.1), 1, 1) for one in asked]
    work = workspace(4, vocab)
    run(device, logits, rows, vocab, work=work)
    states = work[: 4 * 80].reshape(4, 80)
    cuts, bounds = states[:, 8:16].copy().view(np.uint64), states[:, 16:32].copy().view(np.uint64)
    listed, modes = states[:, 48:56].copy().view(np.uint32), states[:, 60:64].copy().view(np.uint32)
    for index, row in enumerate(rows):
        assert not modes[index, 0] & FLAT and bounds[index, 0] <= cuts[index, 0]
        assert len(keep(logits[index], row.params).ids) <= listed[index, 0] <= LONG_LIST
        assert 20 <= listed[index, 1] <= 40


EQUAL_RULES: list[dict[str, Any]] = [
    {"top_k": 1700},
    {"top_p": 0.30003},
    {"top_k": 2600, "top_p": 0.50003},
    {"logprobs": 20},
    {},
]


@pytest.mark.parametrize("rule", EQUAL_RULES)
def test_equal_logits_are_ordered_by_id(device: Device, rule: dict[str, Any]) -> None:
    logits = np.full((2, 9000), 2.5, np.float32)
    logits[1, ::3] = 2.75
    check(device, logits, [SamplingRow(SamplingParams(**rule), 9, 4)] * 2, 9000, (256, 256))


def test_a_top_p_just_below_one_keeps_every_token_that_has_a_mass(device: Device) -> None:
    logits = np.array([[-20, 0, -27, -28, -1, -40]], np.float32)  # 2**40 exp(-27) is 2.07, of -28 it is 0.76
    params = SamplingParams(top_p=1 - 2.0**-53)
    got = run(device, logits, [SamplingRow(params, 3, 1)], 6, SMALL)
    assert kept_ids(logits[0], int(got.cuts[0, 1])).tolist() == [0, 1, 2, 4]
    assert kept_ids(logits[0], int(got.cuts[0, 1])).tolist() == list(keep(logits[0], params).ids)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.5 + 2.0**-45, 2), (0.75, 3), (0.75 + 2.0**-50, 4)])
def test_the_mass_that_is_wanted_is_rounded_up(device: Device, top_p: float, kept: int) -> None:
    logits = np.zeros((1, 2 if top_p < 0.75 else 4), np.float32)
    got = run(device, logits, [SamplingRow(SamplingParams(top_p=top_p), 3, 1)], logits.size, SMALL)
    assert (
        len(kept_ids(logits[0], int(got.cuts[0, 1]))) == kept == len(keep(logits[0], SamplingParams(top_p=top_p)).ids)
    )


def test_the_rarest_random_numbers_are_those_of_the_definition(device: Device) -> None:
    # Found by search: under seed 7 id 21098 has the bits 26 at position 6609, and id 8220 0xfffffffb at 10178.
    seed, vocab, rare, common = 7, 21140, 21098, 8220
    number = float(uniform(seed, 6609, np.array([rare]))[0])
    assert number == 26.5 * 2.0**-32
    assert uniform(seed, 10178, np.array([common]))[0] == np.float32(UNIT_MAX)
    noise = [-np.log(-np.log1p(-float(one))) for one in (number, uniform(seed, 6609, np.array([0]))[0])]
    logits = np.zeros((3, vocab), np.float32)
    logits[:2, 0] = noise[0] - noise[1] + np.array([-0.005, 0.005])
    rows = [SamplingRow(SamplingParams(allowed_token_ids=(0, rare)), seed, 6609)] * 2
    rows.append(SamplingRow(SamplingParams(allowed_token_ids=(common,)), seed, 10178))
    assert [sampled.token_id for sampled in check(device, logits, rows, vocab)] == [rare, 0, common]


def test_infinite_logits_share_the_chance(device: Device) -> None:
    logits = RNG.standard_normal((8, 40)).astype(np.float32)
    logits[:, [4, 20, 33]] = np.inf
    params = [SamplingParams(logprobs=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.3), SamplingParams(top_k=2)]
    rows = [SamplingRow(params[index % 4], index, index) for index in range(8)]
    assert {sampled.token_id for sampled in check(device, logits, rows, 40, SMALL)} <= {4, 20, 33}


@pytest.mark.parametrize("vocab", [40, 41, 2 * UNIT + 5])
def test_greedy_rows_without_log_probabilities_need_one_kernel(device: Device, vocab: int) -> None:
    logits = np.round(RNG.standard_normal((5, vocab)) * 2).astype(np.float32)  # ties
    rows = [
        SamplingRow(SamplingParams(temperature=0.0, presence_penalty=float(index % 2)), 0, 0, (), {3: 1})
        for index in range(5)
    ]
    got, expected = run(device, logits, rows, vocab, chain="greedy"), sample_rows(logits, rows, vocab)
    assert got.tokens.tolist() == [sampled.token_id for sampled in expected]
    for index, (row, want) in enumerate(zip(rows, expected)):
        check_logprobs(got, index, row, want)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9, "logprobs": 3}, {"allowed_token_ids": (1, 2)}])
def test_nan_and_nothing_are_told(device: Device, params: dict[str, Any]) -> None:
    vocab = UNIT + 70
    logits = RNG.standard_normal((5, vocab)).astype(np.float32)
    logits[0, UNIT + 5] = np.nan
    logits[1] = -np.inf
    logits[2, 1:3] = -np.inf  # nothing, if only those are allowed
    logits[3, vocab - 1] = np.nan  # no id
    got = run(device, logits, [SamplingRow(SamplingParams(**params), 1, 1)] * 5, vocab - 1, (64, 64))
    assert got.tokens[:2].tolist() == [-1, -2]
    assert got.tokens[2] == -2 if "allowed_token_ids" in params else got.tokens[2] >= 0
    assert np.all(got.tokens[3:] >= 0)
    assert np.array_equal(got.next_ids, np.maximum(got.tokens, 0))


def test_an_id_that_its_penalty_leaves_nothing_keeps_the_others_forbidden(device: Device) -> None:
    logits = np.full((2, 40), -3e38, np.float32)
    rows = [
        SamplingRow(
            SamplingParams(temperature=temperature, allowed_token_ids=(3, 4), repetition_penalty=2.0),
            1,
            1,
            (3,),
            {},
            (4,),
        )
        for temperature in (0.0, 1.0)
    ]
    with pytest.raises(EngineError, match="of every allowed token"):
        sample_rows(logits, rows, 40)
    assert run(device, logits, rows, 40, SMALL).tokens.tolist() == [-2, -2]


def test_a_token_depends_on_seed_and_position_alone(device: Device) -> None:
    logits = np.repeat(RNG.standard_normal((1, 300)).astype(np.float32), 40, axis=0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 12345, 2**40]
    positions = [0, 1, 2**31, 2**32 - 1, 77]
    rows = [SamplingRow(SamplingParams(temperature=1.5), seed, position) for seed in seeds for position in positions]
    tokens = [sampled.token_id for sampled in check(device, logits, rows, 300, SMALL)]
    assert len(set(tokens)) > 20


def test_the_number_of_threads_blocks_and_rows_changes_no_bit(device: Device) -> None:
    vocab, limit = 4 * UNIT + 400, 4 * UNIT + 399
    logits = random_logits(5, vocab)
    asked: list[dict[str, Any]] = [{"top_p": 0.9, "top_k": 300}, {"top_p": 0.9}, {"top_k": 9}, {}, {"min_p": 0.1}]
    rows = [SamplingRow(SamplingParams(**one, logprobs=20), index, 0, (), {1: 1}) for index, one in enumerate(asked)]
    together = run(device, logits, rows, limit)
    fewer = run(device, logits, rows, limit, (128, 64), blocks=(1, 2))
    alone = run(device, logits[2:3], rows[2:3], limit, blocks=(3, 5))
    for name in ("tokens", "next_ids", "logprobs", "top_ids", "top_logprobs", "cuts"):
        whole = getattr(together, name)
        if name != "cuts":  # a cut between two tokens may be any rank there
            assert whole.tobytes() == getattr(fewer, name).tobytes()
            assert whole[2:3].tobytes() == getattr(alone, name).tobytes()
    for index, line in enumerate(logits[:, :limit]):
        kept = [kept_ids(line, int(one.cuts[index, 1])).tolist() for one in (together, fewer)]
        assert kept[0] == kept[1]


def test_a_workspace_serves_again_and_again(device: Device) -> None:
    work = workspace(6, 200)
    for _ in range(3):
        logits = random_logits(6, 200)
        logits[np.isneginf(logits)] = -9
        rows = [random_row(200, 200) for _ in range(6)]
        got = run(device, logits, rows, 200, SMALL, work=work)
        again = run(device, logits, rows, 200, SMALL)
        assert got.tokens.tolist() == again.tokens.tolist()
        assert got.top_ids.tolist() == again.top_ids.tolist()
