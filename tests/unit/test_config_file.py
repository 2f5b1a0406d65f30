"""A file of options reads as a YAML library reads it, or is refused with its line."""

from __future__ import annotations

import random
import textwrap
from typing import Any

import pytest
import yaml

from rvllm.cli.vllm.config_file import read

PIECES = [
    "a", "b-c", ": ", ":", "\n", "\n  ", "\n- ", "\n  - ", " ", "#", " # c", "'", '"', "[", "]", "{", "}", ",", ", ", "1", "0.5", "true",
    "no", "null", "~", "1e3", "-", "\\n", "key: v", "x: 1", "|", ">", "&a", "*a", "!", "%", "@", "0123", "1_0", "12:30", ".5", "-1", "+3", "?",
    "`", "=", "é", "2020-01-01", "---", "...", "+", ".inf", "1.0e+3", "\\x41", "\\u0041", "\t", "\r\n", "\x0c", "\u2028", "\ufeff", "\xa0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("# nothing\n\n", {}),
        ("---\nmodel: /models/a b\n", {"model": "/models/a b"}),
        ("port: 8000\nshare: 0.90\nlen: 32k\nnone:\nalso: ~", {"port": 8000, "share": 0.9, "len": "32k", "none": None, "also": None}),
        ("a: true\nb: no\nc: 'true'\nd: On", {"a": True, "b": False, "c": "true", "d": True}),
        ("url: http://host:80/x#y # but this is a comment", {"url": "http://host:80/x#y"}),
        ('a: "x\\n\\u00e9 # \\"y\\""\nb: \'it\'\'s\'', {"a": 'x\né # "y"', "b": "it's"}),
        ("keys:\n- a\n- 'b c'  # two\n-\nnext: 1", {"keys": ["a", "b c", None], "next": 1}),
        ("keys:\n    - [1, 2]\n    - {x: 1}\n", {"keys": [[1, 2], {"x": 1}]}),
        ('spec: {"method": "ngram", "n": 7, "deep": {"a": [1, 2.5, null, true]}}', {"spec": {"method": "ngram", "n": 7, "deep": {"a": [1, 2.5, None, True]}}}),
        ("spec:\n  method: ngram\n  inner:\n    n: 7\n  list:\n  - 1\nlast: 1", {"spec": {"method": "ngram", "inner": {"n": 7}, "list": [1]}, "last": 1}),
        ("empty: []\nnone: {}\ntail: [1, 2, ]", {"empty": [], "none": {}, "tail": [1, 2]}),
        ("a: 1e3\nb: 1.0e+3\nc: -5\nd: .5\ne: 1.5.2", {"a": "1e3", "b": 1000.0, "c": -5, "d": 0.5, "e": "1.5.2"}),
        ("'quoted key': 1\na.b: 2", {"quoted key": 1, "a.b": 2}),
    ],
)  # fmt: skip
def test_what_is_read_is_what_yaml_says(text: str, found: dict[str, Any]) -> None:
    assert read(text) == found == (yaml.safe_load(text) or {})


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_of_anything_is_what_yaml_says(seed: int) -> None:
    draw = random.Random(seed)
    taken = 0
    for _ in range(6000):
        text = draw.choice(["k: ", "k: ", ""]) + "".join(draw.choices(PIECES, k=draw.randint(1, 7)))
        try:
            mine = read(text)
        except ValueError as cause:
            assert str(cause).startswith("line "), text
            continue
        taken += 1
        assert repr(mine) == repr(yaml.safe_load(text) or {}), text
    assert taken > 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n\n# c\nb", "line 4: 'b' is not `option: value`"),
        ("a: 1\n  b: 2", "line 2: this does not belong to the mapping before it"),
        ("a: |\n  text", "line 1: text of several lines is not read"),
        ("a: &x 1", "line 1: '&x 1' is YAML that is not read here"),
        ("a: b: c", "line 1: 'b: c' is YAML that is not read here"),
        ("a: 'b' c", "line 1: there is 'c' behind the value"),
        ("a: 'b", "line 1: a quotation does not end on its line"),
        ('a: "\\x41"', r"line 1: \x is no escape that is read here"),
        ("a: [1, 2", "line 1: a comma or ] is missing"),
        ("a: [1,", "line 1: ] is missing"),
        ("a: [1, , 2]", "line 1: a value is missing between brackets"),
        ("a: [1}", "line 1: a comma or ] is missing"),
        ("a: {b}", "line 1: 'b' in braces has no value"),
        ("a: {b: 1, b: 2}", "line 1: 'b' in braces has no value, is there twice"),
        ("a: 0123", "line 1: 0123 is not what it looks like in YAML"),
        ("a: 1_000", "line 1: 1_000 is not what"),
        ("a: 12:30", "line 1: 12:30 is not what"),
        ("a: 2020-01-01", "line 1: 2020-01-01 is not what"),
        ("a: 1\na: 2", "line 2: 'a' is there twice"),
        ("a:\t1", r"line 1: the character '\t' is not read here"),
        ("- a", "line 1: this does not belong"),
        ("1: a", "line 1: '1' is no name of an option"),
    ],
)
def test_what_is_not_read_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(textwrap.dedent(text))
    assert str(caught.value).startswith(said)
