"""Grammars in the engine: whatever else happens, a text has its form, token by token as one alone would have it.

The oracle knows no grammar: a token may come next where one of the allowed texts begins with all that there then is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.config import Speculation
from rvllm.engine.engine import Engine
from rvllm.engine.grammar import Grammars, Matcher, Vocabulary
from rvllm.engine.request import Request, TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.errors import BadRequest
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow, sample_rows
from rvllm.sampling.structured import StructuredOutputsParams
from tests.fixtures.recall_model import EOS, VOCAB, RecallModel, continuation, echoes, logits_after

BLOCK, LONGEST = 16, 160
LETTERS = "abcdef"
TOKENS = [letter.encode() for letter in LETTERS] + [(x + y).encode() for x in LETTERS for y in LETTERS]
TOKENS += [b""] * (EOS - len(TOKENS)) + [b"a"]  # that of EOS reads like a letter, and stands for none
VOCABULARY = Vocabulary(tuple(TOKENS), frozenset())

choices = st.lists(st.text(LETTERS, min_size=1, max_size=14), min_size=1, max_size=9).map(tuple)


def mask_of(ids: list[int]) -> np.ndarray:
    bits = np.zeros(VOCAB, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def allowed(text: str, asked: tuple[str, ...], ends: bool) -> list[int]:
    found = [
        token
        for token in range(VOCAB)
        if token != EOS and TOKENS[token] and any(one.startswith(text + TOKENS[token].decode()) for one in asked)
    ]
    return [*found, EOS] if text in asked and ends else found


def held_to(request: Request, asked: tuple[str, ...], after: Any = logits_after) -> list[int]:
    """What comes out of a request whose text is one of `asked`."""
    params, tokens, text = request.params, list(request.prompt_ids), ""
    counts: dict[int, int] = {}
    drawn: list[int] = []
    assert params.max_tokens is not None
    while len(drawn) < params.max_tokens:
        early = (EOS,) if len(drawn) < params.min_tokens and not params.ignore_eos else ()
        may = mask_of(allowed(text, asked, not params.ignore_eos))
        row = SamplingRow(params, request.seed, len(tokens), request.prompt_ids, counts, early, mask=may)
        token = sample_rows(after(np.array(tokens))[None], [row], VOCAB)[0].token_id
        tokens.append(token)
        drawn.append(token)
        counts[token] = counts.get(token, 0) + 1
        if token == EOS:
            break
        text += TOKENS[token].decode()
        if text in asked and not allowed(text, asked, False):
            break
    return drawn


def made(blocks: int = 40, ahead: bool = False, guesses: Speculation | None = None, **changes: Any) -> Engine:
    sizes: dict[str, Any] = {
        "max_model_len": LONGEST,
        "block_size": BLOCK,
        "blocks": blocks,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 32,
        "score_chunk": 8,
        "vocab_limit": VOCAB,
        "eos_ids": frozenset({EOS}),
        "speculation": guesses,
    }
    after = logits_after if guesses is None else echoes
    engine = Engine(RecallModel(blocks, BLOCK, runs_ahead=ahead, guesses=ahead, after=after), Limits(**sizes | changes))
    engine.learn(VOCABULARY)
    return engine


orders = st.lists(
    st.tuples(
        st.one_of(st.none(), choices),  # what its text may be; None: anything
        st.integers(1, 60),  # length of the prompt
        st.integers(1, 30),  # tokens
        st.sampled_from([0.0, 1.3]),
        st.integers(1, 3),  # completions
        st.sampled_from([0.0, 1.0]),  # presence penalty
        st.sampled_from([0, 0, 3]),  # min_tokens
        st.booleans(),  # ignore_eos
        st.integers(0, 15),  # step of its abort; later ones run to the end
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(1, 6), st.integers(11, 24), st.booleans(), st.sampled_from([None, Speculation(3, 1, 4)]))
def test_whatever_happens_every_text_has_its_form_and_the_others_are_their_own(
    asked: list[tuple[Any, ...]], seats: int, blocks: int, ahead: bool, guesses: Speculation | None
) -> None:
    engine = made(blocks, ahead, guesses, max_num_seqs=seats)
    after = logits_after if guesses is None else echoes
    groups = [group_of(number, *order[:-1]) for number, order in enumerate(asked)]
    expected = {
        request.id: continuation(request, LONGEST, after=after)
        if order[0] is None
        else held_to(request, order[0], after)
        for order, group in zip(asked, groups)
        for request in group
    }
    aborts = {group[0].id: order[-1] for order, group in zip(asked, groups)}
    events: dict[str, list[TokenEvent]] = {name: [] for name in expected}
    step = 0
    while groups or engine.busy:
        if groups and step % 2 == 0:
            engine.add(*groups[0])
            del groups[0]
        for name, when in aborts.items():
            if when < 8 and when == step:
                engine.abort(name)
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
        step += 1
        assert step < 2000
    for name, told in events.items():
        drawn = [event.token_id for event in told]
        if aborts.get(name, 99) >= 8:
            assert told[-1].finish_reason is not None
        assert drawn == expected[name][: len(drawn)]
        if told and told[-1].finish_reason is not None:
            assert drawn == expected[name] and all(event.finish_reason is None for event in told[:-1])
    assert engine.free_blocks == blocks


def group_of(
    number: int, form: Any, length: int, most: int, heat: float, count: int, penalty: float, least: int, ignore: bool
) -> list[Request]:
    params = SamplingParams(
        max_tokens=most,
        min_tokens=min(least, most),
        temperature=heat,
        presence_penalty=penalty,
        ignore_eos=ignore,
        structured_outputs=None if form is None else StructuredOutputsParams(choice=form),
    )
    prompt = tuple(np.random.default_rng(number % 2).integers(0, VOCAB, length).tolist())
    return [Request(f"{number}.{place}", prompt, params, place) for place in range(count)]


def test_a_finished_form_ends_its_text_at_once_though_nothing_else_would() -> None:
    engine = made()
    asked = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, structured_outputs={"choice": ["abc"]})  # type: ignore[arg-type]
    engine.add(Request("a", (1, 2, 3), asked, 0))
    told = []
    while engine.busy:
        told += engine.step()
    assert b"".join(TOKENS[event.token_id] for event in told) == b"abc"
    assert (told[-1].finish_reason, told[-1].stop_id) == ("stop", None)


# --- Grammars


def grammars(tokens: list[bytes], width: int | None = None, eos: frozenset[int] = frozenset()) -> Grammars:
    return Grammars(Vocabulary(tuple(tokens), frozenset()), width or -(-len(tokens) // 32), eos)


def bytes_and(*words: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in range(256)] + list(words)


def next_ids(made: Grammars, *matchers: Matcher) -> list[list[int]]:
    made.fill(matchers)
    return [np.flatnonzero(np.unpackbits(one.mask.view(np.uint8), bitorder="little")).tolist() for one in matchers]


@pytest.mark.parametrize("count", [300, 319, 320, 321])  # the bit behind the last id is in the last word, or beyond
def test_ids_that_end_a_text_are_allowed_exactly_where_it_may_end(count: int) -> None:
    eos = frozenset({count - 1, count - 7})
    made = grammars(bytes_and(*[b"zz%d" % number for number in range(count - 256)]), eos=eos)
    form = StructuredOutputsParams(regex="ab+")
    ends, never = made.matcher(form, ends=True), made.matcher(form, ends=False)
    for text, may, may_end in (("", "a", False), ("a", "b", False), ("b", "b", True), ("b", "b", True)):
        for matcher in (ends, never):
            for byte in text.encode():
                matcher.accept(byte)
        open_ids, closed_ids = next_ids(made, ends, never)
        assert closed_ids == [ord(may)]
        assert open_ids == [ord(may), *(sorted(eos) if may_end else ())]
        assert not ends.complete and next_ids(made, ends) == [open_ids]


def test_a_mask_is_as_wide_as_the_logits_and_padding_is_never_allowed() -> None:
    made = grammars(bytes_and(b"<|end|>"), width=20, eos=frozenset({256}))
    matcher = made.matcher(StructuredOutputsParams(regex="(.|\\n)*"), ends=True)
    assert matcher.mask.shape == (20,) and matcher.mask.dtype == np.uint32
    (ids,) = next_ids(made, matcher)
    assert max(ids) == 256 and len(ids) >= 128


def test_special_tokens_are_no_text() -> None:
    tokens = Vocabulary(tuple(bytes_and(b"abc", b"abc")), frozenset({257}))
    made = Grammars(tokens, 9, frozenset())
    (ids,) = next_ids(made, made.matcher(StructuredOutputsParams(choice=("abc",)), ends=True))
    assert ids == [ord("a"), 256]


def accepts(made: Grammars, form: StructuredOutputsParams, text: str) -> bool:
    """Whether a text has the form, to its end."""
    matcher = made.matcher(form, ends=True)
    for byte in text.encode():
        (ids,) = next_ids(made, matcher)
        if matcher.complete or byte not in ids:
            return False
        matcher.accept(byte)
    return matcher.complete or 256 in next_ids(made, matcher)[0]


TAG = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
OTHER = {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": ""}
IN_FORMAT = [
    {"type": "tag", "begin": one["begin"], "content": {"type": "json_schema", "json_schema": one["schema"]}, "end": one["end"]}
    for one in (TAG, OTHER)
]  # fmt: skip
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<f=a"], "tags": IN_FORMAT}


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "structural_tag", "structures": [TAG, OTHER], "triggers": ["<f"]},
        json.dumps({"structures": [TAG, OTHER], "triggers": ["<f"]}),
        {"type": "structural_tag", "format": TRIGGERED},
    ],
)
def test_a_text_is_free_but_within_its_tags(tag: Any) -> None:
    made = grammars(bytes_and(b"<|end|>", b" <f", b"<f=a>", b"x<f="), eos=frozenset({256}))
    form = StructuredOutputsParams.parse({"structural_tag": tag})
    assert replace(form, disable_any_whitespace=False) == form  # read again it is the same
    for text in ("", "any <b>\n", "<f=a>12</f>", "é <f=a>-3</f> and <f=b>true and more", "<<f=b>false<f=a>0</f>", "<"):
        assert accepts(made, form, text), text
    for text in ("<f", "<f=c>", "a <f=a>x</f>", "<f=a>1</f><f=b>1", "<f=a>1</g>", "<f=a>12"):
        assert not accepts(made, form, text), text
    matcher = made.matcher(form, ends=True)
    assert {257, 258, 259} < set(next_ids(made, matcher)[0])  # a token may go from free text into a tag
    matcher.accept(259)
    assert set(next_ids(made, matcher)[0]) == set(b"ab")


def test_a_text_may_end_with_its_first_tag() -> None:
    made = grammars(bytes_and(b"<|end|>"), eos=frozenset({256}))
    once = StructuredOutputsParams.parse({"structural_tag": {"format": TRIGGERED | {"stop_after_first": True}}})
    for text in ("free", "a <f=a>1</f>", "<f=b>true"):
        assert accepts(made, once, text), text
    for text in ("a <f=a>1</f> b", "<f=b>true<f=a>1</f>", "<f=b>"):
        assert not accepts(made, once, text), text


def test_tags_may_come_behind_thoughts() -> None:
    made = grammars(bytes_and(b"<|end|>"), eos=frozenset({256}))
    form = StructuredOutputsParams.parse({"structural_tag": {"format": TRIGGERED}, "after": "</think>"})
    assert accepts(made, form, "<f no </think> so <f=a>1</f>!") and not accepts(made, form, "no</think><f=a>b")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
PAD = {"type": "array", "items": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"json": SCHEMA}, ['{"name":"x"}', '{ "name" : "\\né", "age": 7 }', '{"name":"x","more":1}'], ['{"age":7}', "[]", '{"name":"x","age":-1}', '{"name":"x"} ']),
        ({"json": json.dumps(SCHEMA), "disable_additional_properties": True}, ['{"name":"x"}'], ['{"name":"x","more":1}']),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"name":"a b"}'], ['{ "name":"x"}']),
        ({"json": PAD, "whitespace_pattern": "\\t"}, ["[true,\tfalse]", "[]"], ["[true, false]", "[1]"]),
        ({"json": PAD}, ["[true,\n\t false]"], ["[true,\u00a0false]"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a":}']),
        ({"regex": r"a/\d{2}\n"}, ["a/12\n"], ["a/1\n", "a/12"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["maybe", "yess"]),
        ({"choice": ["yes", "yesno", 'né"x\\\n/']}, ["yes", "yesno", 'né"x\\\n/'], ["ye", "no"]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a1", "a123"], ["a", "1"]),
        ({"grammar": 'start: "a" INT\nINT: /[0-9]+/'}, ["a1", "a123"], ["a", "1"]),
    ],
)  # fmt: skip
def test_a_text_may_end_where_it_has_its_form_and_nowhere_else(
    form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    made = grammars(bytes_and(b"<|end|>"), eos=frozenset({256}))
    parsed = StructuredOutputsParams.parse(form)
    assert [text for text in right if not accepts(made, parsed, text)] == []
    assert [text for text in wrong if accepts(made, parsed, text)] == []


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"type": "object", "properties": 5}}, "properties"),
        ({"json": {"$ref": "#/nope"}}, "nope"),
        ({"json": {"$ref": "#"}}, ""),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": "{"}, "no schema"),
        ({"json": "[]"}, "schema"),
        ({"json": "[" * 100_000}, "no schema"),
        ({"regex": "("}, ""),
        ({"regex": ""}, "empty"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "junk"}, ""),
        ({"grammar": "start: start"}, ""),
        ({"grammar": "start: " + "(" * 5000}, ""),
        ({"choice": []}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"json_object": False}, "exactly one"),
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regexp": "a"}, "regexp"),
        ({"structural_tag": "a"}, "structural_tag"),
        ({"structural_tag": {"type": "structural_tag"}}, "structures"),
        ({"structural_tag": {"type": "tag", "structures": [TAG], "triggers": ["<f"]}}, "'tag'"),
        ({"structural_tag": {"format": TRIGGERED | {"stop_after_first": 1}}}, "true or false"),
        ({"structural_tag": {"format": TRIGGERED | {"tags": [IN_FORMAT[0] | {"type": "regex"}]}}}, "'regex'"),
        ({"structural_tag": {"structures": [TAG | {"schema": True}], "triggers": ["<f"]}}, "an object"),
        ({"structural_tag": {"format": {"type": "sequence"}}}, "sequence"),
        ({"structural_tag": {"structures": [TAG | {"begin": "[f]"}], "triggers": ["<f"]}}, "no trigger begins"),
        ({"structural_tag": {"structures": [TAG | {"schema": {"type": "x"}}], "triggers": ["<f"]}}, "x"),
        ({"structural_tag": {"structures": [TAG | {"more": 1}], "triggers": ["<f"]}}, "more"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["<f"]}, "regex": "a"}, "regex and structural_tag"),
        ({"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [], "at_least_one": True}}}, "at_least_one"),
        ("a", "object"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_held_to_is_refused_with_the_reason(form: Any, said: str) -> None:
    made = grammars(bytes_and(b"<|end|>"), eos=frozenset({256}))
    with pytest.raises(BadRequest) as caught:
        made.compile(StructuredOutputsParams.parse(form))
    assert caught.value.param == "structured_outputs"
    message = str(caught.value)
    assert said in message and len(message) < 600 and "%llguidance" not in message and "x-guidance" not in message


def test_deep_schemas_are_refused_or_followed_but_never_a_crash() -> None:
    made = grammars(bytes_and(b"<|end|>"), eos=frozenset({256}))
    for depth in (50, 100, 200, 900):
        text = '{"properties":{"a":' * depth + "{}" + "}}" * depth
        try:
            made.compile(StructuredOutputsParams(json=text))
        except BadRequest:
            continue
    assert accepts(made, StructuredOutputsParams(choice=("a",)), "a")


def test_a_form_and_a_list_of_ids_are_not_taken_together() -> None:
    with pytest.raises(BadRequest, match="structured_outputs"):
        SamplingParams(allowed_token_ids=(1,), structured_outputs=StructuredOutputsParams(regex="a"))


def test_one_that_cannot_go_on_ends_with_an_error_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    form = SamplingParams(temperature=0, max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[a-f]{8}"))
    engine.add(Request("bad", (1, 2), form, 0))
    engine.add(Request("good", (1, 2, 3), form, 0))
    told = engine.step() + engine.step()
    (sequence,) = [one for one in engine._running if one.request.id == "bad"]
    assert sequence.matcher is not None
    sequence.matcher.inner.consume_token(VOCAB - 2)  # no letter: from here on it is in error
    while engine.busy:
        told += engine.step()
        engine.check()
    bad = [event for event in told if event.request_id == "bad"]
    assert bad[-1].finish_reason == "error" and "cannot be followed" in (bad[-1].error or "")
    good = [event for event in told if event.request_id == "good"]
    assert good[-1].finish_reason == "stop" and len(b"".join(TOKENS[event.token_id] for event in good)) == 8
    assert bad[-1].logprob is None
