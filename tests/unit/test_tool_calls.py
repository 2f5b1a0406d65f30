"""Calls and thoughts in what a model writes: each family's format, cut anywhere, broken anyhow."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.text.reasoning import REASONING, Thinking, ThoughtReader
from rvllm.text.tool_calls import Bare, Call, CallReader, More, Part, calls_in, joined
from rvllm.text.tool_formats import READERS, reader_for

SCHEMAS: dict[str, Any] = {
    "get_w": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}},
    "no-args": {"properties": {}},
}


def read(kind: type[CallReader], *pieces: str) -> list[Part]:
    """All of it, neighbouring texts and arguments joined."""
    reader = kind(SCHEMAS)
    return joined([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def calls(parts: list[Part]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls_in(parts)]


def text(parts: list[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


ONE, TWO = ("get_w", {"city": "Rome"}), ("no-args", {})
TRICKY = ("get_w", {"city": '</tool_call> ]}"\\ é\n<tool_call>', "days": 3, "deep": {"a": [1, {"b": None}]}})
FORMATS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "get_w", "arguments": {"city": "Rome"}}\n</tool_call>', "", [ONE]),
    ("hermes", 'Well.\n\n<tool_call>{"name": "no-args", "arguments": {}}</tool_call>\n<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_w"}\n</tool_call>\n', "Well.", [TWO, ONE]),
    ("hermes", f'<tool_call>{json.dumps({"name": TRICKY[0], "arguments": TRICKY[1]})}</tool_call> Done <b>', " Done <b>", [TRICKY]),
    ("hermes", '<tool_call>{"name": "no-args"}</tool_call>', "", [TWO]),
    ("hermes", '<tool_call>{"name": "get_w", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>[{"name": "no-args"}, {"name": "get_w", "arguments": {"city": "Rome"}}]</tool_call>', "", [TWO, ONE]),
    ("llama3_json", '{"name": "get_w", "parameters": {"city": "Rome"}}', "", [ONE]),
    ("llama3_json", '<|python_tag|>{"name": "get_w", "parameters": {"city": "Rome"}}; {"name": "no-args", "parameters": {}}', "", [ONE, TWO]),
    ("llama3_json", ' {"name": "get_w", "arguments": {"city": "Rome"}}\n', "", [ONE]),
    ("mistral", '[TOOL_CALLS] [{"name": "get_w", "arguments": {"city": "Rome"}}, {"name": "no-args", "arguments": {}}]', "", [ONE, TWO]),
    ("mistral", 'Hm [TOOL_CALLS]get_w{"city": "Rome"}[TOOL_CALLS]no-args{}', "Hm", [ONE, TWO]),
    ("mistral", '[TOOL_CALLS]get_w[CALL_ID]a1b2[ARGS]{"city": "Rome"}[TOOL_CALLS]no-args[ARGS]{}', "", [ONE, TWO]),
    ("pythonic", '[get_w(city="Rome")]', "", [ONE]),
    ("pythonic", "[get_w(city='a)]\\'', days=-1, deep={'x': [true, null, 1.5]}), f.g()]", "", [("get_w", {"city": "a)]'", "days": -1, "deep": {"x": [True, None, 1.5]}}), ("f.g", {})]),
    ("llama4_pythonic", '<|python_start|>[get_w(city="Rome")]<|python_end|>', "", [ONE]),
    ("qwen3_coder", "Sure.\n<tool_call>\n<function=get_w>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>", "Sure.", [("get_w", {"city": "12", "days": 3, "deep": {"a": 1}})]),
    ("qwen3_xml", "<tool_call><function=no-args></function></tool_call>\n<tool_call><function=get_w><parameter=city>a\nb</parameter></function></tool_call>", "", [TWO, ("get_w", {"city": "a\nb"})]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_w\n```json\n{\"city\": \"Rome\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>no-args\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [ONE, TWO]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_w<｜tool▁sep｜>{\"city\": \"Rome\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [ONE]),
    ("glm45", "Ok\n<tool_call>get_w\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>no-args\n</tool_call>", "Ok", [("get_w", {"city": "Rome", "days": 2}), TWO]),
    ("glm47", "<tool_call>get_w<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>", "", [ONE]),
    ("granite4", '<tool_call>\n{"name": "get_w", "arguments": {"city": "Rome"}}\n</tool_call>', "", [ONE]),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_w:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.no-args:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>', "", [ONE, TWO]),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_w:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>', "", [ONE]),
    ("minimax_m2", 'Hm\n<minimax:tool_call>\n<invoke name="get_w">\n<parameter name="city">Rome</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>', "Hm", [("get_w", {"city": "Rome", "days": 2})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_w">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>', "", [ONE]),
    ("seed_oss", "<seed:tool_call>\n<function=get_w>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>", "", [ONE]),
    ("granite", '<|tool_call|>[{"name": "get_w", "arguments": {"city": "Rome"}}]', "", [ONE]),
    ("phi4_mini_json", 'functools[{"name": "get_w", "arguments": {"city": "Rome"}}]', "", [ONE]),
    ("jamba", '<tool_calls>[\n{"name": "get_w", "arguments": {"city": "Rome"}}\n]</tool_calls>', "", [ONE]),
    ("olmo3", 'Hm\n<function_calls>\nget_w(city="a\\nb", days=2)\nf.g(deep={"a": [true, null]})\n</function_calls>', "Hm", [("get_w", {"city": "a\nb", "days": 2}), ("f.g", {"deep": {"a": [True, None]}})]),
    ("olmo3", '<function_calls>get_w(city="Rome")</function_calls>', "", [ONE]),
    ("functiongemma", "<start_function_call>call:get_w{city:<escape>Rome<escape>}<end_function_call>", "", [ONE]),
    ("functiongemma", 'Ok <start_function_call>call:get_w{city:<escape>{12}, "é"<escape>,days:<escape>3<escape>,deep:{a:[1,<escape>x:y<escape>,true]}}<end_function_call><start_function_call>call:no-args{}<end_function_call>', "Ok", [("get_w", {"city": '{12}, "é"', "days": 3, "deep": {"a": [1, "x:y", True]}}), TWO]),
    ("functiongemma", "<start_function_call>call:get_w{city:<escape>Rome<escape>days:<escape>2<escape>}<end_function_call>", "", [("get_w", {"city": "Rome", "days": 2})]),
    ("xlam", '[{"name": "get_w", "arguments": {"city": "Rome"}}, {"name": "no-args", "arguments": {}}]', "", [ONE, TWO]),
    ("xlam", '[{"name": "get_w", "arguments": {"city": "Rome"}}]', "", [ONE]),
    ("xlam", '<think>I [will].</think>\n[{"name": "get_w", "arguments": {"city": "Rome"}}]', "<think>I [will].</think>", [ONE]),
    ("xlam", 'Sure.\n```json\n[{"name": "get_w", "arguments": {"city": "Rome"}}]\n```', "Sure.", [ONE]),
    ("xlam", 'Sure.[TOOL_CALLS][{"name": "get_w", "arguments": {"city": "Rome"}}]', "Sure.", [ONE]),
    ("xlam", 'Sure.<tool_call>[{"name": "get_w", "arguments": {"city": "Rome"}}]</tool_call>', "Sure.", [ONE]),
    ("internlm", 'Hm<|action_start|><|plugin|>{"name": "get_w", "parameters": {"city": "Rome"}}<|action_end|>', "Hm", [ONE]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "written", "said", "called"), FORMATS)
def test_calls_are_read_and_text_beside_them_is_kept(
    name: str, written: str, said: str, called: list[tuple[str, Any]]
) -> None:
    parts = read(READERS[name], written)
    assert calls(parts) == called
    assert text(parts).strip() == said.strip()


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(FORMATS), st.data())
def test_however_a_text_is_cut_it_reads_the_same(
    format: tuple[str, str, str, list[tuple[str, Any]]], data: st.DataObject
) -> None:
    name, written, *_ = format
    end = data.draw(st.integers(0, len(written)))  # also a text that is cut off
    written = written[:end] + data.draw(st.sampled_from(["", " ", "<tool", "[TOOL_", "{", "}", " and so on"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(written)])]
    whole = read(READERS[name], written)
    assert read(READERS[name], *pieces) == read(READERS[name], *written) == whole


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(READERS)),
    st.lists(
        st.sampled_from(
            [
                *(
                    "<tool_call>",
                    "</tool_call>",
                    "{",
                    "}",
                    '"',
                    "[",
                    "]",
                    "get_w",
                    " ",
                    "\n",
                    "x",
                    "[TOOL_CALLS]",
                    ";",
                    ",",
                ),
                *(
                    '{"name": "get_w"}',
                    '{"name": 1}',
                    "<function=",
                    "</function>",
                    "<|python_tag|>",
                    "functools",
                    "[ARGS]",
                ),
                *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "(", ")", "<", "get_w()", "'"),
            ]
        ),
        max_size=12,
    ),
)
def test_whatever_is_written_nothing_is_lost_but_what_frames_calls(name: str, pieces: list[str]) -> None:
    written = "".join(pieces)
    parts = read(READERS[name], *pieces)
    assert parts == read(READERS[name], written)
    if not calls_in(parts):
        skips = READERS[name].skips
        kept, expected = text(parts), written
        for skip in skips:
            kept, expected = kept.replace(skip, ""), expected.replace(skip, "")
        assert "".join(kept.split()) == "".join(expected.split())
    if all(piece in (" ", "\n", "x", ",", "}", ")") for piece in pieces):
        assert parts == ([written] if written else [])


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", "nothing to call <tool_cal"),
        ("hermes", '<tool_call>{"name": "get_w", "argu'),  # cut off
        ("hermes", "<tool_call>none</tool_call>"),
        ("hermes", '<tool_call>{"name": "get_w", "arguments": [1]}</tool_call>'),
        ("llama3_json", '{"answer": 42}'),  # an answer in JSON is no call
        ("llama3_json", '{"name": "Ann", "parameters": {}}'),
        ("llama3_json", 'as in {"name": "get_w", "parameters": {}}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[get_w('Rome')]"),
        ("pythonic", "[get_w(city=open('x'))]"),
        ("mistral", "[TOOL_CALLS]well, no"),
        ("olmo3", "<function_calls>get_w(city='Rome')\nand so on</function_calls>"),
        ("functiongemma", "<start_function_call>call:get_w{city:<escape>Rome}<end_function_call>"),
        ("xlam", "[1, 2, 3]"),
        ("xlam", '```json\n{"name": "Ann", "arguments": {}}\n```'),
        ("xlam", 'as in [{"name": "get_w", "arguments": {}}]'),
        ("qwen3_coder", "<function=get_w><parameter=city>Ro"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>"),
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, written: str) -> None:
    assert read(READERS[name], written) == [written]


def test_a_call_comes_out_as_soon_as_it_is_complete() -> None:
    reader = READERS["hermes"](SCHEMAS)
    assert reader.push("Hi <") == ["Hi"]
    assert reader.push('tool_call>{"name": "no-args"') == []
    assert reader.push("}") == [Call("no-args", "{}")]
    assert reader.push("</tool_call>\n") == [] and reader.finish() == []


def test_arguments_come_as_they_are_written_once_the_name_is_certain() -> None:
    reader = READERS["hermes"](SCHEMAS)
    assert reader.push('<tool_call>{"name": "get_w", "arguments": ') == []
    assert reader.push('{"ci') == [Call("get_w", ""), More('{"ci')]
    assert reader.push('ty": "} x') == [More('ty": "} x')]
    assert reader.push('"}}</tool_c') == [More('"}')] and reader.finish() == []
    other = READERS["mistral"](SCHEMAS)
    assert other.push('[TOOL_CALLS]get_w{"city"') == [Call("get_w", ""), More('{"city"')]


def test_a_list_that_a_grammar_made_is_read_call_by_call() -> None:
    reader = Bare(SCHEMAS)
    assert reader.push('[{"name": "get_w", "arguments": {"city"') == [Call("get_w", ""), More('{"city"')]
    assert reader.push(': "Rome"}}') == [More(': "Rome"}')]
    assert reader.push(', {"name": "no-args", "arguments": {}}]') == [Call("no-args", ""), More("{}")]
    assert reader.finish() == []


@pytest.mark.parametrize(("name", "written", "said", "called"), [case for case in FORMATS if case[3] == [ONE]])
def test_what_a_template_writes_finds_its_reader(
    name: str, written: str, said: str, called: list[tuple[str, Any]]
) -> None:
    sample = written.replace("get_w", "get_weather").replace("Rome", "Paris")
    kind = reader_for(sample + "<|im_end|>\n")
    assert kind is not None
    reader = kind({"get_weather": {}})
    parts = reader.push(sample) + reader.finish()
    assert calls(parts) == [("get_weather", {"city": "Paris"})] and text(parts).strip() == said


def test_a_template_that_writes_no_call_has_no_reader() -> None:
    assert reader_for("\n<|im_end|>") is None and reader_for("None") is None


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder"])
@pytest.mark.parametrize("flood", [" ", "[AAA", '{"x":', "<parameter=a>", "{},"])
def test_a_flood_of_anything_takes_time_by_its_length(name: str, flood: str) -> None:
    kind = READERS[name]
    begin_s = time.monotonic()
    read(kind, kind.begins[0] + "x" + flood * 10_000 + "</function>!")
    read(kind, kind.begins[0] + flood * 10_000 + "!")
    assert time.monotonic() - begin_s < 5  # measured 0.1; where it goes by the square, 30 and more


# --- Thoughts


def thoughts(thinking: Thinking, opened: bool, *pieces: str) -> tuple[str, str]:
    reader = ThoughtReader(thinking, opened)
    found = [reader.push(piece) for piece in pieces] + [reader.finish()]
    return "".join(one for one, _ in found), "".join(other for _, other in found)


THINK = REASONING["qwen3"]


@pytest.mark.parametrize(
    ("opened", "written", "expected"),
    [
        (False, "<think>\nA b.\n\n</think>\n\nYes.", ("A b.", "Yes.")),
        (False, "\n<think>A</think>B\n", ("A", "B\n")),
        (True, "A b.\n</think>\n\nYes.", ("A b.", "Yes.")),
        (True, "<think>\nA</think>Yes.", ("A", "Yes.")),  # the marker once more
        (True, "A <think> b</think>c", ("A <think> b", "c")),
        (True, "A </thin b</think></think>c", ("A </thin b", "</think>c")),
        (True, "never ends </th", ("never ends </th", "")),
        (False, "Yes. <think>no</think>", ("", "Yes. <think>no</think>")),
        (False, " <thin", ("", " <thin")),
        (False, "", ("", "")),
        (True, "</think>Yes.", ("", "Yes.")),
        (True, "  \n</think> \n ", ("", "")),
    ],
)
def test_thoughts_are_told_apart_however_they_are_cut(opened: bool, written: str, expected: tuple[str, str]) -> None:
    assert thoughts(THINK, opened, written) == expected
    assert thoughts(THINK, opened, *written) == expected
    for cut in range(len(written)):
        assert thoughts(THINK, opened, written[:cut], written[cut:]) == expected


def test_the_prompt_says_whether_thoughts_are_open() -> None:
    r1, qwen = REASONING["deepseek_r1"], REASONING["qwen3"]
    assert qwen.open_after("<|im_start|>assistant\n<think>\n")
    assert not qwen.open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not qwen.open_after("<|im_start|>assistant\n") and r1.open_after("<|Assistant|>")
    assert not r1.open_after("<|Assistant|><think>\n</think>\n")
