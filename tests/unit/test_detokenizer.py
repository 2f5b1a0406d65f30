"""Incremental text equals whole text, comes as early as it can, and costs little whatever the bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.text.detokenizer import Detokenizer
from rvllm.text.hf_tokenizer import TokenizerParts
from rvllm.text.tokenizer import Tokenizer
from tests.fixtures.pip_tokenizers import NAMES, pip_tokenizer
from tests.fixtures.tiny_tokenizers import BOS, IM_END, TOOL, Token, tiny_tokenizer

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "detok_cases.json").read_text(encoding="utf-8"))
WORDS = (" ok", " end", " A", "z", " Hello", " world")
PEPPER = b"\xf0\x9f\x8c\xb6"
MARKED = [pytest.param(name, marks=pytest.mark.model) if name == "smollm2" else name for name in NAMES]

TINY = {kind: tiny_tokenizer(kind, WORDS) for kind in ("bytelevel", "spm")}
TOKENIZERS = {kind: Tokenizer(TokenizerParts(tiny.load(), kind, {}, {}, add_bos=None)) for kind, tiny in TINY.items()}


def pieces(kind: str, prompt: Sequence[Token], script: Sequence[Token], *, skip: bool = True) -> list[str]:
    """Texts token by token, and the flushed rest."""
    ids = TINY[kind].ids(script)
    detokenizer = Detokenizer(TOKENIZERS[kind], TINY[kind].ids(prompt), skip_special_tokens=skip)
    return [*(detokenizer.take(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", MARKED)
def test_joined_pieces_equal_the_whole_text_for_real_tokenizers(name: str) -> None:
    tokenizer = pip_tokenizer(name)
    assert len(CASES[name]) == 46
    for case in CASES[name]:
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
        for skip in (False, True):
            detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
            shown = [detokenizer.take(token_id) for token_id in case["ids"]]
            assert "".join(shown) + detokenizer.flush() == tokenizer.decode(case["ids"], skip_special_tokens=skip)


@pytest.mark.parametrize("name", MARKED)
def test_a_prompt_and_its_output_join_to_the_text_of_both_for_real_tokenizers(name: str) -> None:
    tokenizer = pip_tokenizer(name)
    for case in CASES[name][:26]:  # those from real texts, where a cut between characters can be told
        ids = case["ids"]
        for cut in range(1, len(ids)):
            prompt = tokenizer.decode(ids[:cut], skip_special_tokens=False)
            if prompt.endswith("\ufffd") or not case["text"].startswith(prompt):
                continue
            detokenizer = Detokenizer(tokenizer, ids[:cut], skip_special_tokens=False)
            assert prompt + detokenizer.push(ids[cut:]) + detokenizer.flush() == case["text"]


def test_a_prompt_that_ends_inside_a_character_does_not_come_out_again() -> None:
    assert "".join(pieces("bytelevel", [b"Hello \xf0\x9f\x8c"], [b"\xb6!"])) == "🌶!"
    assert "".join(pieces("bytelevel", [b"Hello \xf0\x9f\x8c"], ["!"])) == "!"


def test_characters_come_out_whole() -> None:
    assert pieces("bytelevel", ["x"], [PEPPER, " ok"]) == ["", "", "", "🌶", " ok", ""]
    assert pieces("spm", ["x"], [PEPPER, " ok"]) == ["", "", "", "🌶", " ok", ""]


def test_bytes_still_held_at_the_end_become_one_replacement_character() -> None:
    assert pieces("bytelevel", ["x"], [PEPPER[:3]]) == ["", "", "", "\ufffd"]
    assert pieces("bytelevel", ["x"], [PEPPER]) == ["", "", "", "🌶", ""]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([b"\xe5\x8f", "A", b"\xc3", "B", " end"], "\ufffdA\ufffdB end"),
        ([b"\xe5\x8f", " A", b"\xc3", "B"], "\ufffd A\ufffdB"),
        (["\ufffd".encode(), "A"], "\ufffdA"),
    ],
)
def test_broken_characters_do_not_end_the_text(script: list[Token], text: str) -> None:
    assert "".join(pieces("bytelevel", ["x"], script)) == text


def test_sentencepiece_words_keep_their_blanks() -> None:
    assert pieces("spm", ["a"], [" Hello", " world", "!"]) == [" Hello", " world", "!", ""]
    assert pieces("spm", [], [" Hello", " world", "!"]) == ["Hello", " world", "!", ""]


def test_blanks_are_kept_where_only_hidden_tokens_stand_before() -> None:
    assert "".join(pieces("spm", ["a", *[IM_END] * 10], [" Hello"])) == " Hello"
    assert "".join(pieces("spm", [BOS], [" Hello"])) == "Hello"
    assert "".join(pieces("spm", ["a"], [IM_END, " Hello", IM_END, IM_END, " world"])) == " Hello world"


def test_no_blank_marks_reach_the_text_when_special_tokens_are_shown() -> None:
    shown = "".join(pieces("spm", ["a"], [" Hello", IM_END, " world"], skip=False))
    assert shown == f" Hello{IM_END} world"


def test_special_tokens_are_hidden_and_other_added_tokens_are_not() -> None:
    assert "".join(pieces("bytelevel", ["x"], ["z", IM_END, TOOL, BOS, " ok"])) == f"z{TOOL} ok"
    assert "".join(pieces("bytelevel", ["x"], ["z", IM_END], skip=False)) == f"z{IM_END}"


def test_a_prompts_long_run_of_byte_tokens_is_kept_whole() -> None:
    assert "".join(pieces("spm", ["a", "龘龘龘龘".encode()[:-1]], ["龘".encode()[-1:], "z"])) == "龘z"


def test_text_that_came_out_stays_when_later_bytes_make_its_run_invalid() -> None:
    assert pieces("spm", ["x"], [PEPPER, b"\xf0", "z"]) == ["", "", "", "🌶", "", "\ufffdz", ""]


def test_ids_without_a_token_show_nothing() -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    detokenizer = Detokenizer(tokenizer, [ord("x")])
    assert detokenizer.take(tokenizer.vocab_size + 5) + detokenizer.take(ord("y")) + detokenizer.flush() == "y"


@given(st.lists(st.integers(0, len(TINY["bytelevel"].pieces) - 1), max_size=60), st.data())
def test_any_byte_level_ids_in_any_pushes_join_to_the_whole_text(ids: list[int], data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    detokenizer = Detokenizer(tokenizer, [])
    shown = "".join(detokenizer.push(ids[a:b]) for a, b in zip(cuts, cuts[1:])) + detokenizer.flush()
    assert shown == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytelevel", "spm"])
@given(data=st.data())
def test_ids_that_are_not_decoded_read_as_if_they_were(kind: str, data: st.DataObject) -> None:
    """Token by token, whatever stands before them."""
    some = st.lists(st.integers(0, len(TINY[kind].pieces) - 1) | st.sampled_from(TINY[kind].ids(list(WORDS))), max_size=30)  # fmt: skip
    prompt, ids, skip = data.draw(some), data.draw(some), data.draw(st.booleans())
    fast, slow = (Detokenizer(TOKENIZERS[kind], prompt, skip_special_tokens=skip) for _ in range(2))
    for token_id in ids:
        assert fast.take(token_id) == slow.push([token_id])
    assert fast.flush() == slow.flush()


@pytest.mark.parametrize("name", MARKED)
def test_most_tokens_of_real_tokenizers_need_no_decoding(name: str) -> None:
    """And each says what decoding it behind another one says."""
    tokenizer = pip_tokenizer(name)
    known = {number: text for number in range(0, tokenizer.vocab_size, 7) if (text := tokenizer.plain_texts[number])}
    assert len(known) > 0.9 * tokenizer.vocab_size / 7
    before = next(iter(known))
    for number, text in known.items():
        assert tokenizer.decode([before, number])[len(tokenizer.decode([before])) :] == text


@pytest.mark.parametrize("kind", ["bytelevel", "spm"])
@pytest.mark.parametrize("lead", [b"", b"\x80"])
@pytest.mark.parametrize("run", [b"\xff", b"\xf0\x9f", b"\xe5\x8f"])
def test_thousands_of_invalid_bytes_are_whole_and_cost_the_same_each(kind: str, run: bytes, lead: bytes) -> None:
    ids = TINY[kind].ids([lead, run * 4000])
    detokenizer = Detokenizer(TOKENIZERS[kind], TINY[kind].ids(["x"]))
    start = time.thread_time()
    half: list[str] = [detokenizer.take(token_id) for token_id in ids]
    assert time.thread_time() - start < 2.0  # about 0.1 s; decoding all of it each time takes minutes
    assert max(map(len, half)) < 100
    assert "".join(half) + detokenizer.flush() == TOKENIZERS[kind].decode([*TINY[kind].ids(["x"]), *ids])[1:]


def test_hidden_tokens_by_the_thousand_cost_nothing() -> None:
    ids = TINY["bytelevel"].ids([IM_END]) * 20_000
    start = time.thread_time()
    detokenizer = Detokenizer(TOKENIZERS["bytelevel"], ids)
    assert "".join(detokenizer.take(token_id) for token_id in ids) == ""
    assert time.thread_time() - start < 2.0
