"""A file of options is YAML, read without surprises, or refused with its line."""

from __future__ import annotations

from typing import Any

import pytest

from rvllm.cli.vllm.config_file import read


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("# nothing\n\n", {}),
        ("---\nmodel: /models/a b\n", {"model": "/models/a b"}),
        ("port: 8000\nshare: 0.90\nlen: 32k\nnone:\nalso: ~", {"port": 8000, "share": 0.9, "len": "32k", "none": None, "also": None}),
        ("a: true\nb: no\nc: 'true'\nd: On", {"a": True, "b": False, "c": "true", "d": True}),
        ("url: http://host:80/x#y # but this is a comment", {"url": "http://host:80/x#y"}),
        ("keys:\n- a\n- 'b c'  # two\n-\nnext: 1", {"keys": ["a", "b c", None], "next": 1}),
        ('spec: {"method": "ngram", "n": 7, "deep": {"a": [1, 2.5, null, true]}}', {"spec": {"method": "ngram", "n": 7, "deep": {"a": [1, 2.5, None, True]}}}),
        ("spec:\n  method: ngram\n  inner:\n    n: 7\nlast: 1", {"spec": {"method": "ngram", "inner": {"n": 7}}, "last": 1}),
        ("template: |\n  two\n  lines\n", {"template": "two\nlines\n"}),
        ("day: 2026-11-30", {"day": "2026-11-30"}),
    ],
)  # fmt: skip
def test_options_are_read(text: str, found: dict[str, Any]) -> None:
    assert read(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n\n# c\nb", "line 4: could not find expected ':'"),
        ("a: 1\n  b: 2", "line 2: mapping values are not allowed here"),
        ("a: [1, 2", "line 1: expected ',' or ']'"),
        ("a: 1\nspec: {x: 1, x: 2}", "line 2: 'x' is there twice"),
        ("a: 1\na: 2", "line 2: 'a' is there twice"),
        ("a:\t1\n\tb: 2", "line 1: found character '\\t' that cannot start any token"),
        ("- a", "line 1: options are written as `name: value`"),
        ("word", "line 1: options are written as `name: value`"),
        ("1: a", "line 1: 1 is no name"),
        ("a: !!python/object:os.system x", "line 1: could not determine a constructor"),
        ("a: \x01", "unacceptable character #x0001"),
    ],
)
def test_what_is_no_such_file_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(text)
    assert str(caught.value).startswith(said)
