"""GGUF files: what the gguf package writes is read; broken files are refused; the config says what they say."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from rvllm.errors import CheckpointError, ConfigError
from rvllm.model.checkpoint import open_checkpoint
from rvllm.model.files import ModelFiles, locate
from rvllm.model.gguf import GgufFile
from rvllm.model.gguf_model import hf_config, open_gguf
from rvllm.program.dtype import F32, Q8_0

HIDDEN, HEADS, KV_HEADS, WIDE, VOCAB = 64, 4, 2, 96, 40
Array = np.ndarray[Any, Any]


def tensor(name: str, *shape: int) -> Array:
    seed = sum(name.encode())
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model_tensors() -> dict[str, Array]:
    """A one-layer model in Hugging Face's names and row order."""
    layer = "model.layers.0"
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (kv, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (kv, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.self_attn.q_proj.bias": (HIDDEN,),
        f"{layer}.mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDE),
    }
    return {name: tensor(name, *shape) for name, shape in shapes.items()}


GGUF_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers.0."):
        return f"blk.0.{GGUF_STEMS[stem.removeprefix('model.layers.0.')]}.{leaf}"
    return f"{GGUF_STEMS[stem]}.{leaf}"


def interleaved(rows: Array, heads: int) -> Array:
    """What llama.cpp's converter does to llama's query and key rows."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def written(
    path: Path,
    tensors: dict[str, Array],
    architecture: str = "llama",
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A GGUF file of `tensors` (GGUF's names), written by the gguf package."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    more(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small(path: Path, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    return written(path / "small.gguf", {"token_embd.weight": tensor("e", VOCAB, HIDDEN)}, more=more)


def config_of(path: Path) -> dict[str, object]:
    file = GgufFile.open(path)
    return hf_config(file.metadata, file.tensors)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_tensors_come_back_under_hugging_faces_names_shapes_and_row_order(tmp_path: Path, architecture: str) -> None:
    tensors = model_tensors()
    stored = {}
    for name, values in tensors.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored[gguf_name(name)] = interleaved(values, heads) if architecture == "llama" and heads else values
    stored["rope_freqs.weight"] = np.ones(8, np.float32)
    checkpoint = open_checkpoint(ModelFiles("small", written(tmp_path / "m.gguf", stored, architecture)))
    assert set(checkpoint.tensors) == set(tensors)
    for name, values in tensors.items():
        assert checkpoint.tensors[name].shape == values.shape
        np.testing.assert_array_equal(checkpoint.read(name), values)
    query = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert query.rotary_heads == (HEADS if architecture == "llama" else 0)


def test_quantised_rows_are_expanded_like_the_gguf_packages(tmp_path: Path) -> None:
    blocks = gguf.quantize(tensor("e", VOCAB, HIDDEN), gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_gguf(path)
    info = checkpoint.tensors["lm_head.weight"]
    assert (info.dtype, info.shape, info.nbytes) == (Q8_0, (VOCAB, HIDDEN), VOCAB * HIDDEN // 32 * 34)
    assert checkpoint.raw("lm_head.weight").tobytes() == blocks.tobytes()
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), expected)


def test_metadata_of_every_value_type_is_read(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("t.u8", 200)
        writer.add_int8("t.i8", -100)
        writer.add_uint16("t.u16", 60000)
        writer.add_int16("t.i16", -30000)
        writer.add_int32("t.i32", -(2**31))
        writer.add_uint64("t.u64", 2**64 - 1)
        writer.add_int64("t.i64", -(2**63))
        writer.add_float64("t.f64", 0.1)
        writer.add_bool("t.yes", True)
        writer.add_string("t.text", "héllo 🙂")
        writer.add_array("t.texts", ["a", "", "ü"])
        writer.add_array("t.numbers", [1, 2, 3])
        writer.add_array("t.scores", [0.5, -1.5])

    metadata = GgufFile.open(small(tmp_path, more)).metadata
    found = {key.removeprefix("t."): value for key, value in metadata.items() if key.startswith("t.")}
    assert found == {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 0.1,
        "yes": True,
        "text": "héllo 🙂",
        "texts": ["a", "", "ü"],
        "numbers": [1, 2, 3],
        "scores": [0.5, -1.5],
    }


def test_an_alignment_other_than_32_is_honoured(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(128)

    path = small(tmp_path, more)
    file = GgufFile.open(path)
    info = file.tensors["token_embd.weight"]
    assert info.offset % 128 == 0
    np.testing.assert_array_equal(open_gguf(path).read("model.embed_tokens.weight"), tensor("e", VOCAB, HIDDEN))


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = small(tmp_path, lambda writer: writer.add_array("t.texts", ["a", "bc"])).read_bytes()
    path = tmp_path / "cut.gguf"
    data_start = GgufFile.open(tmp_path / "small.gguf").tensors["token_embd.weight"].offset
    for length in [*range(data_start), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GgufFile.open(path)


def test_random_damage_to_the_head_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    whole = small(tmp_path, lambda writer: writer.add_array("t.texts", ["a", "bc"])).read_bytes()
    head = GgufFile.open(tmp_path / "small.gguf").tensors["token_embd.weight"].offset
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for position in rng.integers(0, head, 3):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            file = GgufFile.open(path)
        except CheckpointError as error:
            assert "damaged.gguf" in str(error)
            refused += 1
        else:
            for info in file.tensors.values():
                assert 0 <= info.offset <= info.offset + info.nbytes <= len(whole)
    assert 50 < refused < 500  # both ways were taken


def head(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


BROKEN = {
    "an empty file": (b"", "does not start with GGUF"),
    "another file": (b"PK\x03\x04" + bytes(60), "does not start with GGUF"),
    "a Git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git-LFS pointer"),
    "version 1": (head(version=1), "GGUF version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648 is not supported"),
    "too many tensors": (head(tensors=2**60), "1,152,921,504,606,846,976 entries"),
    "too many keys": (head(keys=2**63), "entries of at least 13 bytes"),
    "a text longer than the file": (head(keys=1) + struct.pack("<Q", 2**63) + bytes(32), "it needs"),
    "a text that is not UTF-8": (head(keys=1) + struct.pack("<Q", 1) + b"\xff" + bytes(20), "is not UTF-8"),
    "an unknown value type": (head(keys=1) + text("k") + struct.pack("<IQ", 99, 0), "unknown value type 99"),
    "an array longer than the file": (
        head(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**62),
        "entries of at least 4 bytes",
    ),
    "an array of arrays": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(16), "unknown array type 9"),
    "a key twice": (head(keys=2) + 2 * (text("key") + struct.pack("<IQ", 10, 1)), "'key' is there twice"),
    "an alignment of 0": (
        head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment must be a multiple of 8",
    ),
    "no dimensions": (head(tensors=1) + entry("t", [], 0, 0) + bytes(64), "tensor t has 0 dimensions"),
    "a size that overflows": (head(tensors=1) + entry("t", [2**40, 2**40], 0, 0) + bytes(64), "tensor t ends at"),
    "an offset past the end": (head(tensors=1) + entry("t", [8], 0, 2**62) + bytes(64), "tensor t ends at"),
    "a broken block": (head(tensors=1) + entry("t", [33], 8, 0) + bytes(64), "tensor t has rows of 33 elements"),
    "an offset off the alignment": (head(tensors=1) + entry("t", [4], 0, 4) + bytes(64), "tensor t starts at byte 4"),
    "two tensors in one place": (
        head(tensors=2) + entry("a", [8], 0, 0) + entry("b", [8], 0, 0) + bytes(96),
        "tensor b starts at byte 0 of the data, which is inside tensor a",
    ),
    "a tensor twice": (
        head(tensors=2) + entry("a", [8], 0, 0) + entry("a", [8], 0, 32) + bytes(96),
        "tensor a is there twice",
    ),
    "IQ2_XS": (head(tensors=1) + entry("blk.0.w", [256], 17, 0) + bytes(96), "tensor blk.0.w has type IQ2_XS"),
    "an unheard-of type": (head(tensors=1) + entry("t", [256], 999, 0) + bytes(96), "tensor t has type 999"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_or_unsupported_file_is_refused_with_the_reason(tmp_path: Path, fault: str) -> None:
    content, message = BROKEN[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        GgufFile.open(path)
    assert message in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_good_file_of_the_same_making_as_the_broken_ones_opens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head(tensors=2) + entry("a", [8], 0, 0) + entry("b", [2, 4], 0, 32) + bytes(96))
    tensors = GgufFile.open(path).tensors
    assert {name: (info.shape, info.dtype) for name, info in tensors.items()} == {"a": ((8,), F32), "b": ((4, 2), F32)}


def test_a_tensor_that_the_families_do_not_have_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"blk.0.attn_q_norm.weight": tensor("n", 16)})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q_norm\.weight is none that"):
        open_gguf(path)


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path, lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(CheckpointError, match=r"one of 3 parts of a split GGUF file.*llama-gguf-split --merge"):
        open_gguf(path)


def test_the_config_is_in_hugging_faces_spelling(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(500000.0)
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_rope_dimension_count(16)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    assert config_of(small(tmp_path, more)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-06,  # not 9.99999997e-07: the file's float32 is read back as its shortest decimal
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_a_head_in_the_file_a_head_dim_of_its_own_and_biases_are_told(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": tensor("e", VOCAB, HIDDEN),
        "output.weight": tensor("o", VOCAB, HIDDEN),
        "blk.0.attn_q.bias": tensor("q", HEADS * 32),
        "blk.0.ffn_gate.bias": tensor("g", WIDE),
    }

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_rope_dimension_count(16)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)

    config = config_of(written(tmp_path / "m.gguf", tensors, more=more))
    assert config["tie_word_embeddings"] is False
    assert (config["head_dim"], config["partial_rotary_factor"]) == (32, 0.5)
    assert config["attention_bias"] is True and config["mlp_bias"] is True
    assert config["eos_token_id"] == [2, 7]


def test_qwen2_is_told_by_name_and_bfloat16_files_by_dtype(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count([HEADS])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor(
        "token_embd.weight", np.zeros((VOCAB, 2 * HIDDEN), np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = config_of(path)
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, HEADS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    ],
)
def test_rope_scaling_is_told_and_not_ignored(tmp_path: Path, kind: str, expected: dict[str, object]) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(128)

    assert config_of(small(tmp_path, more))["rope_scaling"] == expected


def test_the_first_files_spelling_of_linear_scaling_is_told_too(tmp_path: Path) -> None:
    path = small(tmp_path, lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0))
    assert config_of(path)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_llama3s_frequency_divisors_are_given_out_whole(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 1.5, 4.25, 8, 8, 8], np.float32)
    tensors = {"token_embd.weight": tensor("e", VOCAB, HIDDEN), "rope_freqs.weight": factors}
    path = written(tmp_path / "m.gguf", tensors)
    assert config_of(path)["rope_factors"] == factors.tolist()
    path = written(tmp_path / "odd.gguf", tensors | {"rope_freqs.weight": factors[:5]})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight has shape \[5\] and dtype f32, not \[8\] and f32"):
        config_of(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "foo", "rope.scaling.factor must be a number, it is missing"),
        ("llama.expert_count", 8, "llama.expert_count = 8 is not supported"),
        ("llama.attention.sliding_window", 4096, "llama.attention.sliding_window = 4096 is not supported"),
        ("llama.attention.value_length", 8, "value_length differs from the key length 16"),
        ("llama.rope.freq_base", "many", "llama.rope.freq_base must be a number, it is 'many'"),
    ],
)
def test_what_changes_the_computation_in_a_way_we_do_not_know_is_refused(
    tmp_path: Path, key: str, value: str | int, message: str
) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)

    with pytest.raises(ConfigError) as caught:
        config_of(small(tmp_path, more))
    assert message in str(caught.value)


def test_an_unknown_kind_of_rope_scaling_is_refused_by_its_value(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "foo")
        writer.add_rope_scaling_factor(4.0)

    with pytest.raises(ConfigError, match=r"rope.scaling.type 'foo' is not supported"):
        config_of(small(tmp_path, more))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"token_embd.weight": tensor("e", VOCAB, HIDDEN)}, "gemma3")
    for ask in (config_of, open_gguf):
        with pytest.raises(ConfigError, match=r"general.architecture is 'gemma3', which is not supported"):
            ask(path)


def test_rows_that_are_no_pairs_for_the_heads_are_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"blk.0.attn_k.weight": tensor("k", 30, HIDDEN)})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_k\.weight has 30 rows, no pairs for 2 heads"):
        open_gguf(path)


@pytest.mark.model
def test_the_default_model_opens_in_half_a_second_and_says_what_it_is() -> None:
    root = locate("smollm2", offline=False, progress=None).root
    started_s = time.process_time()
    file = GgufFile.open(root)
    assert time.process_time() - started_s < 0.5
    config = hf_config(file.metadata, file.tensors)
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)
    checkpoint = open_gguf(root)
    assert len(checkpoint.tensors) == 272
    query = checkpoint.read("model.layers.29.self_attn.q_proj.weight")
    assert query.shape == (576, 576) and np.isfinite(query).all() and 0.01 < query.std() < 1
