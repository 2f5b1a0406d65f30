"""The Python API over scripted models: what streams, what stops, what is refused. Cases from public bug reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM, SamplingParams
from rvllm.errors import BadRequest, PromptTooLong, StartError
from tests.fixtures.models import (
    CHATML,
    EOS,
    IM_END,
    Options,
    Shape,
    TinyModel,
    chain_model,
    loop_model,
    probe,
    random_model,
    two_model,
    uniform_model,
)

CHILI = "🌶".encode()


LOADED: list[LLM] = []


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    LOADED.clear()
    yield
    for llm in LOADED:
        llm._engine.check()
        assert llm._engine.busy or llm._engine.free_blocks == llm._engine.limits.blocks


def load(model: TinyModel, **settings: Any) -> LLM:
    LOADED.append(LLM(str(model.folder), device="cpu", warn=lambda message: None, **settings))
    return LOADED[-1]


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": None} | params)


def both_ways(llm: LLM, prompt: str | list[int], params: SamplingParams) -> tuple[str, str | None, int, list[str]]:
    """(text, finish reason, completion tokens, deltas), the same streamed and whole."""
    ids = llm.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    deltas = list(llm.stream(ids, params))
    whole = llm.generate([ids], params)[0].outputs[0]
    text = "".join(delta.text for delta in deltas)
    assert (text, deltas[-1].finish_reason, sum(len(d.token_ids) for d in deltas), deltas[-1].stop_reason) == (
        whole.text,
        whole.finish_reason,
        len(whole.token_ids),
        whole.stop_reason,
    )
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert llm._engine.free_blocks == llm._engine.limits.blocks and not llm._engine.busy
    return text, whole.finish_reason, len(whole.token_ids), [delta.text for delta in deltas]


def test_a_prompt_that_ends_inside_a_character_does_not_come_out_again(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, [0x8C, 0xB6, "!", EOS], prompt_end=0x9F, also={140: ["?"]} if False else None))
    text, reason, _, _ = both_ways(llm, [*b"Hello \xf0\x9f"], greedy(max_tokens=4))
    assert text in ("\ufffd!", "🌶!") and reason == "stop"


def test_a_character_streams_whole_or_not_at_all(tmp_path: Path) -> None:
    text, _, _, deltas = both_ways(load(chain_model(tmp_path, [CHILI, " ok", EOS])), "x", greedy())
    assert text == "🌶 ok" and not any("\ufffd" in delta for delta in deltas)


def test_bytes_still_held_when_generation_ends_are_flushed(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, [CHILI, "z"]))
    assert both_ways(llm, "x", greedy(max_tokens=3))[:3] == ("\ufffd", "length", 3)
    assert both_ways(llm, "x", greedy(max_tokens=4))[:3] == ("🌶", "length", 4)


@pytest.mark.parametrize("space", ["", " "])
def test_invalid_bytes_neither_raise_nor_swallow_what_follows(tmp_path: Path, space: str) -> None:
    script = [0xE5, 0x8F, f"{space}A", 0xC3, "B", " end", EOS]
    text, reason, _, _ = both_ways(load(chain_model(tmp_path, script)), "x", greedy())
    assert text == f"\ufffd{space}A\ufffdB end" and reason == "stop"


@pytest.mark.parametrize("skip", [True, False])
def test_sentencepiece_keeps_the_space_before_the_first_word(tmp_path: Path, skip: bool) -> None:
    options = Options(tokenizer="spm")
    llm = load(chain_model(tmp_path, [" Hello", " world", "!", EOS], options, prompt_end="a"))
    text = both_ways(llm, "a", greedy(skip_special_tokens=skip))[0]
    assert text == " Hello world!" and "▁" not in text


def test_nothing_of_a_stop_string_is_streamed_before_it_is_complete(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["DEF", "G", "HI", "J", "K"]))
    text, reason, tokens, _ = both_ways(llm, "x", greedy(stop=["DEFGHIJ"], max_tokens=9))
    assert (text, reason, tokens) == ("", "stop", 4)
    assert llm.generate("x", greedy(stop=["DEFGHIJ"]))[0].outputs[0].stop_reason == "DEFGHIJ"


def test_a_stop_string_is_found_across_tokens(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, [" alpha", " be", "ta gam", "ma", " delta"]))
    assert both_ways(llm, "x", greedy(stop="beta gamma", max_tokens=9))[:2] == (" alpha ", "stop")
    included = greedy(stop="beta gamma", max_tokens=9, include_stop_str_in_output=True)
    assert both_ways(llm, "x", included)[0] == " alpha beta gamma"


def test_text_before_a_stop_string_in_the_same_token_is_kept(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["Mars", "?\n", "X"]))
    assert both_ways(llm, "x", greedy(stop=["\n"], max_tokens=9))[0] == "Mars?"


def test_a_long_stop_string_delays_no_token(tmp_path: Path) -> None:
    letters = [*"abcdefghijklmnop"]
    llm = load(chain_model(tmp_path, [*letters, EOS]))
    stop = "<|a_very_long_stop_marker_of_40_characters|>"
    deltas = both_ways(llm, "x", greedy(stop=stop))[3]
    assert deltas[: len(letters)] == letters


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_eos_of_a_list_ends_the_answer(tmp_path: Path, which: int) -> None:
    ends = (EOS, IM_END, "<|bos|>")
    llm = load(chain_model(tmp_path, ["hi", ends[which]], Options(eos=ends)))
    assert both_ways(llm, "x", greedy(max_tokens=20))[:3] == ("hi", "stop", 2)


def test_ignore_eos_covers_every_eos_and_leaves_stop_strings_alone(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["hi", IM_END, "a", "b", "c"], Options(eos=(EOS, IM_END))))
    assert both_ways(llm, "x", greedy(ignore_eos=True, max_tokens=5))[1:3] == ("length", 5)
    assert both_ways(llm, "x", greedy(ignore_eos=True, max_tokens=5, stop=["b"]))[:2] == ("hia", "stop")


def test_a_stop_string_that_is_a_special_token_fires_although_it_is_hidden(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["hi", IM_END, "X"]))
    assert both_ways(llm, "x", greedy(stop=[IM_END], max_tokens=9))[:3] == ("hi", "stop", 2)


def test_chat_and_completion_end_alike(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["yes", EOS]))
    answer = llm.chat([{"role": "user", "content": "?"}], greedy())[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("yes", "stop")


def test_a_missing_limit_runs_to_the_end_of_the_context(tmp_path: Path) -> None:
    """B053, B063."""
    llm = load(loop_model(tmp_path), max_model_len=64)
    text, reason, tokens, _ = both_ways(llm, "x", greedy())
    assert (reason, tokens + 1, text) == ("length", 64, "a" * 63)
    assert both_ways(llm, "x", greedy(max_tokens=65535))[2] == 63


def test_a_prompt_that_fills_the_context_is_refused_and_the_next_one_served(tmp_path: Path) -> None:
    llm = load(loop_model(tmp_path), max_model_len=64)
    with pytest.raises(PromptTooLong, match="64 tokens, the context is 64"):
        llm.generate(["x", "y" * 64], greedy(max_tokens=1))
    assert both_ways(llm, "x", greedy(max_tokens=3))[0] == "aaa"


@pytest.mark.parametrize("ids", [[], [-1], [10**6], [5279552648203111001], [1.5], [True], ["a"]])
def test_ids_that_are_no_tokens_are_refused(tmp_path: Path, ids: list[Any]) -> None:
    """B046."""
    llm = load(loop_model(tmp_path))
    with pytest.raises(BadRequest) as refused:
        llm.generate([ids], greedy(max_tokens=1))
    assert refused.value.param == "prompt"
    assert both_ways(llm, "x", greedy(max_tokens=1))[0] == "a"


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [9999999]), ("logit_bias", {9999999: 5}), ("allowed_token_ids", [511])],
)
def test_ids_beyond_the_vocabulary_in_parameters_are_refused(tmp_path: Path, field: str, value: object) -> None:
    """B023, B045."""
    llm = load(loop_model(tmp_path))
    with pytest.raises(BadRequest) as refused:
        llm.generate("x", greedy(max_tokens=1, **{field: value}))
    assert refused.value.param == field


def test_logit_bias_forces_and_forbids(tmp_path: Path) -> None:
    """B045: valid biases; invalid ones are refused with the parameters."""
    llm = load(loop_model(tmp_path))
    assert both_ways(llm, "x", greedy(max_tokens=3, logit_bias={65: 100}))[0] == "AAA"
    assert "a" not in both_ways(llm, "x", greedy(max_tokens=3, logit_bias={ord("a"): -100}))[0]


def test_padded_rows_are_never_drawn(tmp_path: Path) -> None:
    """B062."""
    model = loop_model(tmp_path, options=Options(padded_rows=64))
    llm = load(model)
    for temperature in (0.0, 2.0):
        params = greedy(temperature=temperature, max_tokens=20, seed=1, logprobs=5)
        output = llm.generate("x", params)[0].outputs[0]
        listed = {token for entry in output.logprobs or () for token in entry}
        assert max(listed | set(output.token_ids)) < model.vocabulary - 64
    assert both_ways(llm, "x", greedy(max_tokens=2))[0] == "aa"


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-45, 5e-324])
def test_a_tiny_temperature_is_greedy(tmp_path: Path, temperature: float) -> None:
    """B043."""
    llm = load(random_model(tmp_path))
    params = greedy(temperature=temperature, top_p=0.5, max_tokens=8, ignore_eos=True)
    assert both_ways(llm, "hello", params) == both_ways(llm, "hello", greedy(max_tokens=8, ignore_eos=True))


def test_penalties_count_what_they_are_defined_to_count(tmp_path: Path) -> None:
    """B057."""
    llm = load(two_model(tmp_path))
    found = {
        name: both_ways(llm, "XQ", greedy(max_tokens=1, **{name: value}))[0]
        for name, value in [("repetition_penalty", 1.2), ("presence_penalty", 2), ("frequency_penalty", 2)]
    }
    assert found == {"repetition_penalty": "Y", "presence_penalty": "X", "frequency_penalty": "X"}


def test_a_seeded_request_draws_the_same_tokens_whoever_is_beside_it(tmp_path: Path) -> None:
    """B055. Alone, beside 1 to 15 unseeded requests, and beside them and another seeded one."""
    llm = load(random_model(tmp_path), seed=None)
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    alone = llm.generate("prompt", seeded)[0].outputs[0].token_ids
    loose = set()
    for others in range(1, 16):
        prompts = [("prompt", seeded), *((f"other {i}", SamplingParams(max_tokens=4)) for i in range(others))]
        prompts += [("prompt", replace(seeded, seed=7))] * (others % 2)
        requests = [llm._request(llm.encode_prompt(text), params) for text, params in prompts]
        for request in requests:
            llm._engine.add(request)
        drawn: dict[str, list[int]] = {request.id: [] for request in requests}
        while llm._engine.busy:
            for event in llm._engine.step():
                drawn[event.request_id].append(event.token_id)
        assert tuple(drawn[requests[0].id]) == alone
        loose.add(tuple(drawn[requests[1].id]))
    assert len(loose) > 1


def test_n_completions_differ_and_are_repeatable(tmp_path: Path) -> None:
    llm = load(uniform_model(tmp_path))
    params = SamplingParams(n=3, seed=5, max_tokens=12, logprobs=1)
    first, again = (llm.generate("x", params)[0].outputs for _ in range(2))
    assert first == again and len({output.text for output in first}) == 3
    assert [output.index for output in first] == [0, 1, 2]
    assert all(o.cumulative_logprob == pytest.approx(12 * -4.1589, abs=0.01) for o in first)  # ln 64 each


def test_scoring_a_prompt_without_output_generates_nothing(tmp_path: Path) -> None:
    llm = load(loop_model(tmp_path))
    output = llm.generate("x", greedy(max_tokens=0))[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", (), "length")
    assert [d.finish_reason for d in llm.stream(llm.encode_prompt("x"), greedy(max_tokens=0))] == ["length"]


def test_closing_a_stream_frees_its_blocks(tmp_path: Path) -> None:
    llm = load(loop_model(tmp_path))
    stream = llm.stream(llm.encode_prompt("x"), greedy())
    next(stream)
    stream.close()
    assert llm._engine.free_blocks == llm._engine.limits.blocks and not llm._engine.busy


def test_two_streams_may_run_at_once(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, [*"abcdef", EOS], also={"y": [*"uvw", EOS]}))
    one, two = (llm.stream(llm.encode_prompt(p), greedy()) for p in "xy")
    texts = ["", ""]
    for i, stream in ((0, one), (1, two), (0, one), (0, one), (1, two)):
        texts[i] += next(stream).text
    texts[0] += "".join(d.text for d in one)
    texts[1] += "".join(d.text for d in two)
    assert texts == ["abcdef", "uvw"]


def test_generation_defaults_of_the_model_apply_unless_told_otherwise(tmp_path: Path) -> None:
    from tests.fixtures.models import edit_json

    model = loop_model(tmp_path)
    edit_json(tmp_path / "generation_config.json", {"temperature": 0.3, "top_k": 7, "max_new_tokens": 5})
    assert load(model).default_params == {"temperature": 0.3, "top_k": 7, "max_tokens": 5}
    assert load(model, generation_config="vllm").default_params == {}
    assert load(model, generation_config=str(tmp_path)).get_default_sampling_params().top_k == 7


def test_a_model_without_a_template_refuses_chats_and_completes(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["ok", EOS], Options(template=None)))
    with pytest.raises(BadRequest, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert both_ways(llm, "x", greedy())[0] == "ok"
    with_template = load(chain_model(tmp_path / "b", ["ok", EOS], Options(template=None)), chat_template=CHATML)
    assert with_template.chat([{"role": "user", "content": "hi"}], greedy())[0].outputs[0].text == "ok"


def test_a_template_that_refuses_is_a_bad_request_with_its_words(tmp_path: Path) -> None:
    llm = load(loop_model(tmp_path, options=Options(template=probe("messages[0].role"))))
    with pytest.raises(BadRequest, match="PROBE:user"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_odd_head_sizes_equal_the_independent_forward(tmp_path: Path) -> None:
    from tests.fixtures.models import reference_logits

    for number, shape in enumerate(
        (
            Shape(hidden=320, heads=4, kv_heads=2, head_dim=128),
            Shape(hidden=160, heads=2, kv_heads=1),
            Shape(head_dim=80),
        )
    ):
        model = random_model(tmp_path / str(number), shape)
        llm = load(model)
        ids = llm.encode_prompt("The quick brown fox")
        output = llm.generate([ids], greedy(max_tokens=6, ignore_eos=True, logprobs=0))[0].outputs[0]
        logits = reference_logits(model.folder, [*ids, *output.token_ids])[len(ids) - 1 : -1]
        expected = logits - logits.max(axis=1, keepdims=True)
        for row, token, entry in zip(expected, output.token_ids, output.logprobs or ()):
            log_softmax = row[token] - __import__("numpy").log(__import__("numpy").exp(row).sum())
            assert entry[token] == pytest.approx(float(log_softmax), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("asked", [5000, 10**9])
def test_a_context_beyond_the_models_is_refused_with_both_numbers(tmp_path: Path, asked: int) -> None:
    with pytest.raises(StartError, match=f"{asked:,} is more than the model's context of 2,048"):
        load(loop_model(tmp_path), max_model_len=asked)


def test_a_context_that_does_not_fit_the_cache_is_refused_or_shortened(tmp_path: Path) -> None:
    model = loop_model(tmp_path)
    token = 2 * 64 * 4 * 2  # k and v, head_dim, float32, layers
    with pytest.raises(StartError, match="set --max-model-len to at most 320"):
        load(model, max_model_len=1024, kv_cache_memory_bytes=330 * token)
    said: list[str] = []
    llm = LLM(str(model.folder), device="cpu", warn=said.append, kv_cache_memory_bytes=330 * token)
    assert llm.max_model_len == 320 and "shortened from 2,048 to 320" in said[0]


def test_dummy_weights_need_only_the_configuration_and_the_tokenizer(tmp_path: Path) -> None:
    model = random_model(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(StartError):
        load(model)
    outputs = [
        load(model, load_format="dummy").generate("x", greedy(max_tokens=5, ignore_eos=True))[0].outputs[0]
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1] and len(outputs[0].token_ids) == 5


def test_bad_words_are_not_written(tmp_path: Path) -> None:
    model = chain_model(tmp_path / "chain", [" alpha", " be", "ta", " gamma", EOS])
    llm, word = load(model), [model.id(" be"), model.id("ta")]
    assert both_ways(llm, "x", greedy(max_tokens=4))[0] == " alpha beta gamma"
    text = both_ways(llm, "x", greedy(max_tokens=4, bad_words_token_ids=[word]))[0]
    assert text.startswith(" alpha be") and "beta" not in text
    assert "beta" in both_ways(llm, "x", greedy(max_tokens=4, bad_words_token_ids=[[5, *word]]))[0]
    llm = load(loop_model(tmp_path / "loop"))
    assert both_ways(llm, "x", greedy(max_tokens=4))[0] == "aaaa"
    for words in (["a"], ["b", "a"]):
        assert "a" not in both_ways(llm, "x", greedy(max_tokens=4, bad_words=words))[0]
    assert both_ways(llm, "x", greedy(max_tokens=4, bad_words=["aa"]))[0].startswith("a")
    assert "aa" not in both_ways(llm, "x", greedy(max_tokens=4, bad_words=["aa"]))[0]
    with pytest.raises(BadRequest) as refusal:
        llm.generate("x", greedy(bad_words=[" "]))
    assert refusal.value.param == "bad_words"


def test_a_cache_of_codes_holds_almost_twice_the_tokens_in_the_memory_it_is_given(tmp_path: Path) -> None:
    model, memory = random_model(tmp_path, Shape(hidden=64, intermediate=64, heads=1, kv_heads=1)), 1 << 20
    tokens = {}
    for name in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3"):
        llm = load(model, kv_cache_dtype=name, kv_cache_memory_bytes=memory, max_num_seqs=512)
        held = sum(cache.nbytes for cache in llm._engine._model._caches.values())  # type: ignore[attr-defined]
        assert held <= memory < held * 1.02
        tokens[name] = llm._engine.limits.blocks * 32
        assert llm.generate("Hello", greedy(max_tokens=3))[0].outputs[0].token_ids
    assert tokens["auto"] * 2 == tokens["float16"] == tokens["bfloat16"]
    assert tokens["fp8"] == tokens["fp8_e4m3"] == pytest.approx(tokens["float16"] * 128 / 68, rel=0.01)
