"""The fixture models do what they say: scripts, gaps, tokenizers, files, and the forward pass written as their oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from safetensors import deserialize

from tests.fixtures.models import (
    BOS,
    CHATML,
    EOS,
    GAP,
    IM_END,
    TOOL,
    Options,
    Shape,
    TinyModel,
    chain_model,
    edit_json,
    loop_model,
    probe,
    random_model,
    read_weights,
    reference_logits,
    two_model,
    uniform_model,
    write_weights,
)
from tests.fixtures.weight_files import Float32, round_to_bf16

CHILI = "\U0001f336".encode()
REFERENCE = Path(__file__).parents[1] / "reference"


def greedy(model: TinyModel, prompt: list[int], tokens: int) -> list[int]:
    """Greedy ids by the oracle; each step must win by GAP."""
    ids = list(prompt)
    for _ in range(tokens):
        logits = np.sort(reference_logits(model.folder, ids)[-1])
        assert logits[-1] - logits[-2] == pytest.approx(GAP, rel=1e-6)
        ids.append(int(reference_logits(model.folder, ids)[-1].argmax()))
    return ids[len(prompt) :]


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


# --- scripted models


def test_a_chain_says_its_script_by_the_stated_gap_and_then_repeats_eos(tmp_path: Path) -> None:
    model = chain_model(tmp_path, [CHILI, " ok", EOS])
    assert model.script == (0xF0, 0x9F, 0x8C, 0xB6, 256, model.id(EOS))
    assert greedy(model, model.encode("say x"), 7) == [*model.script, model.id(EOS)]
    assert model.tokenizer.load().decode(model.script) == "🌶 ok"


def test_a_rendered_chat_ends_in_a_prompt_end(tmp_path: Path) -> None:
    model = chain_model(tmp_path, ["hi", EOS])
    template = read_json(tmp_path / "tokenizer_config.json")["chat_template"]
    chat = jinja2.Template(template).render(messages=[{"role": "user", "content": "hello"}], add_generation_prompt=True)
    prompt = model.tokenizer.load().encode(chat, add_special_tokens=False).ids
    assert prompt[:5] == [model.id("<|im_start|>"), *b"user"]
    assert greedy(model, prompt, 2) == list(model.script)


def test_further_chains_start_after_their_own_token(tmp_path: Path) -> None:
    model = chain_model(tmp_path, ["right", EOS], prompt_end="!", also={"\n": ["wrong", EOS], 140: [182]})
    assert greedy(model, model.encode("OK!"), 1) == [model.id("right")]
    assert greedy(model, model.encode("OK!\n"), 1) == [model.id("wrong")]
    assert greedy(model, [72, 240, 159, 140], 1) == [182]


def test_a_script_that_would_need_two_successors_of_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="two successors"):
        chain_model(tmp_path, ["a", "b", "a", "c"])
    with pytest.raises(AssertionError, match="in a circle"):
        chain_model(tmp_path, ["a", "b", "a"])


def test_an_unknown_word_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'unheard' is no token"):
        chain_model(tmp_path, ["hi"]).id("unheard")


def test_a_loop_never_ends(tmp_path: Path) -> None:
    model = loop_model(tmp_path)
    assert greedy(model, model.encode("x"), 5) == [ord("a")] * 5


def test_two_successors_have_exactly_the_chosen_logits_after_each_of_them(tmp_path: Path) -> None:
    model = two_model(tmp_path)
    for prompt in ("X Q", "Q", "QX", "QY"):
        logits = reference_logits(tmp_path, model.encode(prompt))[-1]
        expected = np.zeros(model.vocabulary, np.float32)
        expected[[ord("X"), ord("Y")]] = 10.0, 9.0
        np.testing.assert_allclose(logits, expected, rtol=1e-6)  # the norm's epsilon is 1e-9 in a mean of 1/256


def test_uniform_successors_are_equally_likely_for_ever(tmp_path: Path) -> None:
    model = uniform_model(tmp_path)
    assert len(set(model.script)) == 64
    for last in (ord("x"), model.script[0], model.script[-1]):
        logits = reference_logits(tmp_path, [last])[-1]
        assert np.array_equal(np.flatnonzero(logits > 1), sorted(model.script))
        assert len(set(logits[list(model.script)])) == 1


def test_padded_rows_beat_every_token_and_are_not_in_the_tokenizer(tmp_path: Path) -> None:
    model = chain_model(tmp_path, ["hi", EOS], Options(padded_rows=200))
    tokens = model.tokenizer.load().get_vocab_size()
    assert model.vocabulary == tokens + 200 == read_json(tmp_path / "config.json")["vocab_size"]
    logits = reference_logits(tmp_path, model.encode("x"))[-1]
    assert logits.argmax() >= tokens
    assert logits[:tokens].argmax() == model.id("hi")


# --- tokenizers


def test_byte_level_ids_are_bytes_then_words_then_specials(tmp_path: Path) -> None:
    model = chain_model(tmp_path, [" café", IM_END], Options(words=("zebra",)))
    tokenizer = model.tokenizer.load()
    text = "".join(map(chr, [*range(0x800), 0x9F98, 0x1F336]))
    assert tokenizer.encode(text).ids == list(text.encode())
    assert [model.id(token) for token in ("zebra", " café", BOS, EOS, TOOL)] == [256, 257, 258, 259, 262]
    assert tokenizer.decode([257, 262, 261]) == " café<tool>"  # <tool> is added, yet not special
    assert tokenizer.encode(f"a{TOOL}b{IM_END}").ids == [97, 262, 98, 261]


def test_sentencepiece_style_keeps_spaces_in_pieces_and_falls_back_to_bytes(tmp_path: Path) -> None:
    model = chain_model(tmp_path, ["▁Hello", " world", "!", EOS], Options(tokenizer="spm"), prompt_end="a")
    tokenizer = model.tokenizer.load()
    prompt = model.encode("a")
    assert greedy(model, prompt, 4) == list(model.script)
    assert tokenizer.decode(prompt + list(model.script)) == "a Hello world!"
    assert len(tokenizer.encode("a龘b").ids) == 1 + 1 + 3 + 1  # a leading U+2581, then a, three bytes, b
    assert tokenizer.decode(tokenizer.encode("a龘b").ids) == "a龘b"
    assert model.ids("\n", CHILI) == [3 + 10, 3 + 0xF0, 3 + 0x9F, 3 + 0x8C, 3 + 0xB6]


@pytest.mark.parametrize("kind", ["bytelevel", "spm"])
def test_a_bos_is_put_first_when_asked_for(tmp_path: Path, kind: str) -> None:
    model = chain_model(tmp_path, ["hi"], Options(tokenizer=kind, add_bos=True))
    assert model.encode("x")[0] == model.id(BOS)
    assert model.tokenizer.load().encode("x", add_special_tokens=False).ids[0] != model.id(BOS)


# --- folders


def test_generation_config_lists_every_eos_and_config_the_first(tmp_path: Path) -> None:
    model = chain_model(tmp_path, ["hi", IM_END], Options(eos=(EOS, IM_END, BOS)))
    listed = read_json(tmp_path / "generation_config.json")["eos_token_id"]
    assert listed == [model.id(EOS), model.id(IM_END), model.id(BOS)]
    assert read_json(tmp_path / "config.json")["eos_token_id"] == model.id(EOS)


def test_the_template_is_as_asked_for(tmp_path: Path) -> None:
    assert read_json(chain_folder(tmp_path / "a", CHATML))["chat_template"] == CHATML
    assert "chat_template" not in read_json(chain_folder(tmp_path / "b", None))
    asked = probe("messages | length")
    assert read_json(chain_folder(tmp_path / "c", asked))["chat_template"] == asked


def chain_folder(folder: Path, template: str | None) -> Path:
    chain_model(folder, ["hi"], Options(template=template))
    return folder / "tokenizer_config.json"


def test_a_probe_shows_what_the_template_saw() -> None:
    def raise_exception(message: str) -> None:
        raise ValueError(message)

    template = jinja2.Template(probe("messages[0].role ~ '/' ~ (tools is defined)"))
    with pytest.raises(ValueError, match=r"^PROBE:user/False$"):
        template.render(messages=[{"role": "user"}], raise_exception=raise_exception)


def test_edit_json_sets_nulls_and_removes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1, "b": 2}')
    edit_json(file, {"a": None, "c": 3}, remove=("b",))
    assert read_json(file) == {"a": None, "c": 3}


# --- weights


def library_reads(data: bytes) -> dict[str, dict[str, Any]]:
    """Tensors by name, as the safetensors library takes the file apart: dtype, shape, data."""
    return dict(deserialize(data))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_safetensors_library_reads_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    tensors: dict[str, Float32] = {
        "b": np.linspace(-2, 2, 15, dtype=np.float32).reshape(3, 5),
        "a": np.ones(7, np.float32),
    }
    write_weights(tmp_path, tensors, dtype=dtype)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0, "the format keeps tensor data aligned to 8 bytes"
    entries = library_reads(data)
    assert {name: entry["dtype"] for name, entry in entries.items()} == {"a": dtype, "b": dtype}
    assert entries["b"]["shape"] == [3, 5]
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    stored = round_to_bf16(tensors["b"]) if dtype == "BF16" else tensors["b"].astype(kinds[dtype])
    assert bytes(entries["b"]["data"]) == stored.tobytes()
    ulps = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8}[dtype]  # half a unit of the last place, to the nearest
    np.testing.assert_allclose(read_weights(tmp_path)["b"], tensors["b"], rtol=ulps)


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00000000]
    values = np.array(bits, np.uint32).view(np.float32)
    assert round_to_bf16(values).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x0000]


def test_shards_cover_all_tensors_as_their_index_says(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    random_model(whole)
    random_model(parts, shards=3)
    index = read_json(parts / "model.safetensors.index.json")
    for name, file in index["weight_map"].items():
        assert name in library_reads((parts / file).read_bytes())
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert index["metadata"]["total_size"] == sum(2 * tensor.size for tensor in read_weights(whole).values())
    assert_same_weights(read_weights(whole), read_weights(parts))


def test_writing_again_leaves_no_old_weights(tmp_path: Path) -> None:
    random_model(tmp_path, shards=2)
    write_weights(tmp_path, read_weights(tmp_path))
    assert sorted(file.name for file in tmp_path.glob("*safetensors*")) == ["model.safetensors"]


def assert_same_weights(left: dict[str, Float32], right: dict[str, Float32]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert np.array_equal(tensor, right[name]), name


# --- random models


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        random_model(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_every_earlier_token_counts_in_a_random_model(tmp_path: Path) -> None:
    random_model(tmp_path)
    last = reference_logits(tmp_path, [5, 6, 7, 8])[-1]
    for changed in ([9, 6, 7, 8], [5, 9, 7, 8], [6, 5, 7, 8]):
        assert np.abs(reference_logits(tmp_path, changed)[-1] - last).max() > 1e-2


def test_a_random_model_takes_its_sizes_from_its_shape(tmp_path: Path) -> None:
    shape = Shape(hidden=320, heads=4, kv_heads=2, head_dim=128, tied=True, dtype="F32")
    model = random_model(tmp_path, shape, Options(padded_rows=3))
    weights = read_weights(tmp_path)
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (512, 320)
    assert weights["model.layers.1.self_attn.v_proj.weight"].shape == (256, 320)
    assert "lm_head.weight" not in weights
    assert reference_logits(tmp_path, [1, 2]).shape == (2, model.vocabulary)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_scaling_changes_a_random_model(tmp_path: Path, scaling: dict[str, Any]) -> None:
    random_model(tmp_path / "plain")
    random_model(tmp_path / "scaled", Shape(rope_scaling=scaling))
    ids = list(range(40))
    plain, scaled = (reference_logits(tmp_path / name, ids) for name in ("plain", "scaled"))
    assert np.abs(plain - scaled).max() > 1e-2


# --- the oracle itself, and the reference set it is judged by


@pytest.mark.parametrize(
    "case",
    [
        "llama-mha",
        "llama-no-kv-key",
        "llama-gqa-tied-llama3-rope",
        "llama-linear-rope-bias",
        "llama-odd-sizes-sharded",
        "mistral-sliding-window",
        "mistral-nemo",
        "qwen2-tied",
        "qwen2-odd-heads",
        "qwen2-upper-layers-slide",
    ],
)
def test_the_oracle_agrees_with_transformers(case: str) -> None:
    with np.load(REFERENCE / case / "reference.npz") as stored:
        for index in range(sum(name.startswith("prompt_") for name in stored)):
            logits = reference_logits(REFERENCE / case, stored[f"prompt_{index}"].tolist())
            # float32 sums in another order, over two or three layers
            np.testing.assert_allclose(
                logits[stored[f"positions_{index}"]], stored[f"logits_{index}"], rtol=0, atol=2e-5
            )


def test_every_reference_folder_is_complete_and_the_set_stays_small() -> None:
    folders = sorted(file.parent for file in REFERENCE.glob("*/reference.npz"))
    assert len(folders) == 16
    for folder in folders:
        names = {file.name for file in folder.iterdir()}
        assert {"config.json", "config.v5.json", "generation_config.json", "reference.json"} <= names
        assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 2_500_000


def test_reference_continuations_are_clear_cut_and_belong_to_their_logits() -> None:
    for file in sorted(REFERENCE.glob("*/reference.npz")):
        with np.load(file) as stored:
            for index in range(sum(name.startswith("prompt_") for name in stored)):
                last = stored[f"logits_{index}"][-1]
                assert stored[f"positions_{index}"][-1] == len(stored[f"prompt_{index}"]) - 1
                assert stored[f"greedy_{index}"].shape == stored[f"gap_{index}"].shape == (16,)
                assert stored[f"greedy_{index}"][0] == last.argmax(), (file.parent.name, index)
                assert stored[f"gap_{index}"].min() > 0.015
