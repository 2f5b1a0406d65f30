"""Chat templates: what they see, what they may do, and what is said when they cannot."""

from __future__ import annotations

import datetime
import json
import resource
import time
from pathlib import Path

import pytest

from rvllm.errors import BadRequest, TokenizerError
from rvllm.text.chat_template import ChatTemplate
from rvllm.text.messages import normalise

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JOINED = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def render(source: str, messages: object = HI, **options: object) -> str:
    return ChatTemplate(source).render(messages, **options)  # type: ignore[arg-type]


def refusal(source: str, messages: object = HI, **options: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        render(source, messages, **options)
    assert caught.value.param == "messages"
    return caught.value


def test_a_conversation_is_written_as_the_template_says() -> None:
    turns = [{"role": "system", "content": "Be kind."}, *HI]
    assert render(CHATML, turns) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(("form", "seen"), [("string", "a\nb"), ("openai", "[a][b]"), ("auto", "a\nb")])
def test_contents_are_shown_as_it_is_said(form: str, seen: str) -> None:
    """The template hides that it loops over them, so that "auto" takes it for one of texts."""
    source = (
        "{% set parts = messages[0]['con' ~ 'tent'] %}{% if parts is string %}{{ parts }}"
        "{% else %}{% for p in parts %}[{{ p.text }}]{% endfor %}{% endif %}"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(source, parts, content_format=form) == seen
    assert render(PARTS, parts, content_format="string") == "[][][]"


def test_blocks_leave_no_blank_lines_behind() -> None:
    assert render("{% if true %}\n  {% for m in messages %}\nx\n  {% endfor %}\n{% endif %}\n") == "x\n"


def test_special_tokens_and_further_names_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ thinking }}", tokens={"bos_token": "<s>"}
    )
    assert template.render(HI, kwargs={"thinking": False}) == "<s>|||False"


def test_further_names_cannot_replace_the_messages() -> None:
    with pytest.raises(BadRequest, match="must not set messages") as caught:
        render(JOINED, kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_raise_exception_refuses_with_the_templates_message() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    error = refusal(source, [{"role": "system", "content": "x"}, *HI])
    assert error.message == "System role not supported"
    assert render(source) == "ok"


def test_strftime_now_gives_todays_date() -> None:
    before = datetime.date.today()
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert before <= datetime.date.fromisoformat(shown) <= datetime.date.today()


def test_tools_that_were_not_given_are_undefined_and_none_and_false() -> None:
    probes = ["tools is defined", "tools is not none", "tools != none", "tools"]
    source = " ".join(f"{{{{ 'yes' if {probe} else 'no' }}}}" for probe in probes)
    assert render(source) == "no no no no"
    assert render(source, tools=[]) == "no no no no"
    assert render(source, tools=[{"type": "function"}]) == "yes yes yes yes"
    assert render("{{ tools | tojson }}") == "null"


def test_other_undefined_names_are_not_none() -> None:
    assert render("{{ nothing is none }} {{ nothing is defined }} {{ none is none }}") == "False False True"


def test_tools_must_be_a_list_of_objects() -> None:
    for wrong in ("x", {"a": 1}, ["x"]):
        with pytest.raises(BadRequest, match="tools must be a list of objects") as caught:
            render(JOINED, tools=wrong)
        assert caught.value.param == "tools"


def test_tojson_writes_plain_json() -> None:
    value = {"b": "<é & 'x'>", "a": [1, None]}
    assert render("{{ v | tojson }}", kwargs={"v": value}) == json.dumps(value, ensure_ascii=False)
    shown = render("{{ v | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}", kwargs={"v": value})
    assert shown == json.dumps(value, indent=2, sort_keys=True)
    assert render("{{ v | tojson(separators=(',', ':')) }}", kwargs={"v": [1, 2]}) == "[1,2]"


def test_generation_blocks_and_loop_controls_are_understood() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": c} for c in "abc"]) == "ab"


def test_a_template_that_does_not_parse_names_its_file_and_line() -> None:
    with pytest.raises(TokenizerError, match=r"model/chat_template\.jinja, line 2: .*endfor.*--chat-template"):
        ChatTemplate("a\n{% if x %}{% endfor %}", origin="model/chat_template.jinja")


@pytest.mark.parametrize(
    "source", ["{{ x | nosuchfilter }}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% include 'x' %}"]
)
def test_what_cannot_be_compiled_or_loaded_never_escapes_as_another_error(source: str) -> None:
    with pytest.raises((TokenizerError, BadRequest)):
        render(source)


# What the sandbox refuses.

ESCAPES = [
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}{{ raise_exception.__globals__ }}",
    "{{ ('' | attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__class__.x.y }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{% for f in [range] %}{{ f.__self__.budget.spend(1) }}{% endfor %}",
]
BOMBS = [
    "{% set x = [0 - 10**18] | map(' text') | list %}{{ ('x' * 10**9) | length }}",
    "{% set s = 'x' * 20000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "{% set s = 'x' * 1000000 %}{% for a in s if " + "a == 'y' or " * 99 + "false %}{% endfor %}",
    "{{ ('x' * 10**9) | length }}",
    "{{ ([1] * 10**8) | length }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set n = range(90000) | list %}{% for i in n %}{% set x = n | sum %}{% endfor %}",
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'x' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 10**10 * ['x'] }}",
    "{{ 9**9**9**9 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x.items() }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '%s' % ns.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n = namespace(a=n, b=n) %}{% endfor %}{{ namespace(a=n) }}",
    "{% set s = 'x' * 1000000 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "{% set s = 'x' * 1000000 %}{{ s.replace('x', 'y' * 1000) | length }}",
    "{% set s = 'x' * 1000000 %}{{ s | replace('x', 'y' * 1000) | length }}",
    "{% set s = 'x' * 1000000 %}{{ s.replace('x', s) }}",
    "{% set s = 'x' * 1000000 %}{{ s | replace('', s) }}",
    "{% set s = 'x' * 1000000 %}{{ ([s] * 1000) | join | length }}",
    "{% set s = 'x' * 10000 %}{{ s.join(range(90000) | map('string')) | length }}",
    "{% set s = 'x' * 10000 %}{{ range(90000) | join(s) | length }}",
    "{% set s = 'x\\n' * 100000 %}{{ s | indent(9999) | length }}",
    "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}{{ 'x'.zfill(10**9) }}",
    "{{ 'x\t'.expandtabs(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ lipsum(n=10**7) }}",
    "{{ (('<!--' * 100000) | safe).striptags() }}",
    "{% for i in range(99999) %}" + "padding " * 500 + "{% endfor %}",
    "{% for i in range(99999) %}{% set x %}" + "padding " * 500 + "{% endset %}{% endfor %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_gets_out_of_the_sandbox(source: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    refusal(source.replace("MARK", str(mark)), [dict(HI[0])])
    assert not mark.exists()


def test_what_a_template_does_to_its_messages_stays_with_it() -> None:
    messages = [{"role": "user", "content": "hi", "tags": ["a"]}]
    refusal("{{ messages[0].tags.append('b') }}", messages)
    assert messages == [{"role": "user", "content": "hi", "tags": ["a"]}]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_can_use_up_neither_time_nor_memory(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.thread_time()  # others may have the core meanwhile
    refusal(source)
    assert time.thread_time() - start_s < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_long_conversation_is_within_the_budget() -> None:
    source = (
        "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- set content = m.content | trim -%}"
        "{%- if loop.index0 < messages | length and '<' not in content[:10] -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
        "{{- '<|im_start|>' ~ m.role + '\n' + content.split('</think>')[-1].lstrip('\n') + '<|im_end|>' + '\n' -}}{%- endfor -%}"
    )
    turns = [{"role": "user" if n % 2 else "assistant", "content": f"{n} " + "word " * 200} for n in range(4000)]
    text = render(source, turns)
    assert text.count("<|im_start|>") == 4000
    assert text.endswith("word<|im_end|>\n")


# Messages.


def test_an_assistants_call_without_content_has_empty_content() -> None:
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
    source = (
        JOINED
        + "{{ messages[1].tool_calls[0].function.name }} {{ messages[1].tool_calls[0].function.arguments.a + 1 }}"
    )
    assert render(source, turns) == "user=hi;assistant=;tool=7;add 2"


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_are_like_no_such_key(calls: object) -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls | length != 1 %}"
        "{{ raise_exception('wrong') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [{"role": "assistant", "content": "a", "tool_calls": calls}]) == "a"


def test_text_parts_become_one_text_for_templates_that_print_content() -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "AAA"}, {"type": "text", "text": "BBB"}]}]
    assert render(JOINED, turns) == "user=AAA\nBBB;"


@pytest.mark.parametrize(
    "source",
    [
        PARTS,
        PARTS.replace("m.content", "m['content']"),
        "{% for m in messages %}{% set c = m.content %}{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}",
        "{% macro show(content) %}{% for part in content %}[{{ part.text }}]{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    ],
)
def test_text_parts_stay_parts_for_templates_that_loop_over_them(source: str) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    assert render(source, turns) == "[A][B]"
    assert render(source) == "[hi]"


def test_a_text_stays_a_text_for_templates_that_ask_which_it_is() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        + PARTS
        + "{% endif %}{% endfor %}"
    )
    assert render(source) == "hi"


def test_images_are_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    for source in (JOINED, PARTS):
        error = refusal(source, [{"role": "user", "content": [image]}])
        assert "images are not supported" in error.message


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    turns = [{"role": "developer", "content": "x"}]
    assert render(JOINED, turns) == "system=x;"
    assert render("{# developer #}" + JOINED, turns) == "developer=x;"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hi", "messages must be a list, it is a text"),
        (None, "messages must be a list, it is null"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role must be one of .*it is null"),
        ([{"role": "wizard", "content": "x"}], r"role must be one of .*it is 'wizard'"),
        ([{"role": ["user"], "content": "x"}], r"role must be one of .*it is a list"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": None}], r"content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"content is missing"),
        ([{"role": "user", "content": 5}], r"content must be a text or a list of parts, it is a number"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a text"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\].type is 'audio'"),
        ([{"role": "assistant", "content": "x", "tool_calls": "x"}], r"tool_calls must be a list"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], r"tool_calls\[0\] must be an object"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": 1}}]}], r"name must be a text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], r"not valid JSON"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            r"must hold a JSON object",
        ),
    ],
)
def test_messages_in_a_wrong_shape_are_refused_with_their_place(messages: object, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        normalise(messages)
    assert caught.value.param == "messages"


def test_normalising_twice_changes_nothing_more_and_never_its_input() -> None:
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "a", "x": 1}], "tool_calls": [CALL]}]
    before = json.dumps(turns)
    once = normalise(turns)
    assert normalise(once) == once
    assert json.dumps(turns) == before


# Continuing the last message.


@pytest.mark.parametrize("trim", ["", " | trim"])
@pytest.mark.parametrize("prefill", ["OK!", "OK!\n", "OK! ", "OK!\t", ""])
def test_a_continued_message_ends_the_prompt_as_it_was_sent(trim: str, prefill: str) -> None:
    source = CHATML.replace("message.content", f"(message.content{trim})")
    turns = [*HI, {"role": "assistant", "content": prefill}]
    text = render(source, turns, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + prefill


def test_a_text_that_occurs_earlier_too_is_continued_at_its_last_place() -> None:
    turns = [{"role": "user", "content": "OK!"}, {"role": "assistant", "content": "OK!"}]
    text = render(JOINED, turns, add_generation_prompt=False, continue_final_message=True)
    assert text == "user=OK!;assistant=OK!"


def test_a_text_that_a_template_writes_twice_is_continued_at_the_second() -> None:
    source = "{{ messages[-1].content }}|{{ messages[-1].content }}!"
    assert render(source, HI, add_generation_prompt=False, continue_final_message=True) == "hi|hi"


def test_the_last_of_several_parts_is_continued() -> None:
    turns = [{"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B "}]}]
    assert render(PARTS, turns, add_generation_prompt=False, continue_final_message=True) == "[A][B "
    assert render(JOINED, turns, add_generation_prompt=False, continue_final_message=True) == "assistant=A\nB "


def test_continuing_and_a_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(BadRequest, match="are both true"):
        render(CHATML, continue_final_message=True)


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(BadRequest, match="leaves the last message's text out"):
        render("x", add_generation_prompt=False, continue_final_message=True)
