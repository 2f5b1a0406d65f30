"""Stop strings: found wherever tokens cut them, and nothing held back that need not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.errors import BadRequest
from rvllm.text.hf_tokenizer import TokenizerParts
from rvllm.text.stop import LONGEST_STOP, MOST_STOPS, StopMatcher, TextStream, parse_stop
from rvllm.text.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizers import EOS, IM_END, Token, tiny_tokenizer

WORDS = ("DEF", "HI", " alpha", " be", "ta gam", "ma", " delta", "Mars", "?\n", "hi", "Xa", "word", " ok")


def stream(
    *script: Token, stop: tuple[str, ...] = (), include: bool = False, skip: bool = True
) -> tuple[TextStream, list[int]]:
    tiny = tiny_tokenizer("bytelevel", WORDS)
    tokenizer = Tokenizer(TokenizerParts(tiny.load(), "test", {}, {}, add_bos=None))
    text = TextStream(tokenizer, tiny.ids(["x"]), stop=stop, include_stop=include, skip_special_tokens=skip)
    return text, tiny.ids(script)


def run(*script: Token, stop: tuple[str, ...] = (), include: bool = False) -> tuple[list[str], str | None, int]:
    """The texts token by token and at the end, the stop string, and the ids consumed."""
    text, ids = stream(*script, stop=stop, include=include)
    pieces = [text.take(token_id) for token_id in ids if text.stopped is None]
    return [*pieces, text.finish()], text.stopped, text.consumed


def test_the_start_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assert run("DEF", "G", "HI", "J", "K", stop=("DEFGHIJ",)) == (["", "", "", "", ""], "DEFGHIJ", 4)


def test_a_stop_string_across_tokens_is_found() -> None:
    pieces, stopped, consumed = run(" alpha", " be", "ta gam", "ma", " delta", stop=("beta gamma",))
    assert "".join(pieces) == " alpha "
    assert (stopped, consumed) == ("beta gamma", 4)


def test_text_before_the_stop_string_in_the_same_token_comes_out() -> None:
    assert run("Mars", "?\n", "X", stop=("\n",)) == (["Mars", "?", ""], "\n", 2)


def test_a_long_stop_string_delays_nothing_that_cannot_begin_it() -> None:
    letters = [chr(code) for code in range(ord("a"), ord("u"))]
    pieces, stopped, _ = run(*letters, stop=("<|a_very_long_stop_marker_of_40_characters|>",))
    assert pieces == [*letters, ""]
    assert stopped is None


def test_a_held_back_start_comes_out_when_it_turns_out_to_be_none() -> None:
    assert run("a", "<", "b", stop=("<|x|>",))[0] == ["a", "", "<b", ""]
    assert run("a", "<", stop=("<|x|>",))[0] == ["a", "", "<"]


def test_the_stop_string_can_be_included() -> None:
    pieces, stopped, _ = run("Mars", "?\n", "X", stop=("s?",), include=True)
    assert "".join(pieces) == "Mars?"
    assert stopped == "s?"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    for cut in (["abcd"], list("abcd")):
        matcher = StopMatcher(("abcd", "bc"), include=False)
        assert "".join(matcher.push(text) for text in cut) == "a"
        assert matcher.matched == "bc"


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    matcher = StopMatcher(("c", "bc"), include=False)
    assert matcher.push("abc") == "a"
    assert matcher.matched == "bc"


def test_nothing_comes_out_behind_a_match() -> None:
    matcher = StopMatcher(("b",), include=False)
    assert [matcher.push("abc"), matcher.push("d"), matcher.flush()] == ["a", "", ""]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_how_text_is_cut_never_changes_what_comes_out(text: str, stops: list[str], data: st.DataObject) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    end, start, stop = min(ends, default=(0, len(text), None))
    for include in (False, True):
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
        matcher = StopMatcher(tuple(stops), include=include)
        shown = "".join(matcher.push(text[a:b]) for a, b in zip(cuts, cuts[1:])) + matcher.flush()
        assert matcher.matched == stop
        assert shown == (text[:end] if include and stop else text[:start])


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=6))
def test_only_an_end_that_could_begin_the_stop_string_is_held_back(text: str, stop: str) -> None:
    matcher = StopMatcher((stop,), include=False)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        longest = next(n for n in range(len(stop) - 1, -1, -1) if text.endswith(stop[:n]))
        assert held == stop[:longest]


def test_a_stop_string_that_is_a_special_token_fires_although_the_token_is_hidden() -> None:
    assert run("hi", IM_END, "Xa", stop=(IM_END,)) == (["hi", "", ""], IM_END, 2)
    pieces, _, _ = run("hi", IM_END, "Xa", stop=(IM_END,), include=True)
    assert "".join(pieces) == "hi" + IM_END


def test_a_special_token_that_is_shown_stops_too() -> None:
    text, ids = stream("hi", IM_END, "Xa", stop=(IM_END,), skip=False)
    assert text.push(ids) == "hi"
    assert (text.stopped, text.consumed) == (IM_END, 2)


def test_text_held_back_comes_out_before_a_special_stop_token() -> None:
    pieces, stopped, _ = run("a", "<", IM_END, "Xa", stop=("<|x|>", IM_END))
    assert ("".join(pieces), stopped) == ("a<", IM_END)


def test_a_text_stop_string_completed_by_what_was_held_back_wins_over_the_special_token() -> None:
    pieces, stopped, _ = run("a", b"\xf0\x9f", IM_END, stop=("\ufffd", IM_END))
    assert ("".join(pieces), stopped) == ("a", "\ufffd")


def test_without_stop_strings_special_tokens_do_not_stop() -> None:
    assert run("hi", EOS, "Xa")[:2] == (["hi", "", "Xa", ""], None)


def test_ids_behind_a_stop_in_one_push_are_not_consumed() -> None:
    text, ids = stream("Mars", "?\n", "Xa", "hi", stop=("\n",))
    assert text.push(ids) == "Mars?"
    assert (text.stopped, text.consumed) == ("\n", 2)
    assert text.push(ids) == text.finish() == ""
    assert text.consumed == 2


def test_one_push_of_all_ids_gives_the_same_as_one_push_each() -> None:
    text, ids = stream("word", b"\xf0\x9f\x8c\xb6", " ok", IM_END, "hi")
    assert text.push(ids) + text.finish() == "word🌶 okhi"
    assert text.consumed == len(ids)


def test_an_incomplete_character_comes_out_at_the_end() -> None:
    assert run(b"\xf0\x9f\x8c", stop=("zz",))[0] == ["", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("value", "stops"),
    [
        (None, ()),
        ([], ()),
        ("a", ("a",)),
        (["a", "b", "a"], ("a", "b")),
        (list("abcde"), tuple("abcde")),
        (("a",), ("a",)),
    ],
)
def test_stop_is_nothing_a_text_or_a_list(value: object, stops: tuple[str, ...]) -> None:
    assert parse_stop(value) == stops


@pytest.mark.parametrize(
    "value", ["", [""], ["", "z"], 5, [1], [None], {"a": 1}, True, ["a"] * (MOST_STOPS + 1), "x" * (LONGEST_STOP + 1)]
)
def test_a_wrong_stop_is_refused(value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_stop(value)
    assert caught.value.param == "stop"
