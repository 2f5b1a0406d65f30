"""What generate refuses: broken models, prompts and settings that cannot be. Few lines that name what is wrong."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.commands import assert_refused, rvllm
from tests.fixtures.models import EOS, Options, chain_model, edit_json, loop_model, random_model

pytestmark = pytest.mark.slow

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 1234\n"
ANSWER = ["The", " capital", " of France", " is", " Paris", ".", EOS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def paris(models: Path) -> Path:
    """Answers any prompt that ends in ? or x, and any chat, with: The capital of France is Paris."""
    return chain_model(models / "paris", ANSWER, prompt_end=("?", "x", "\n")).folder


@pytest.mark.parametrize(
    ("stdin", "said"),
    [(b"", "standard input is empty"), (b"\n", "standard input is empty"), (b"caf\xe9", "byte 3 is 0xe9")],
)
def test_an_unusable_prompt_is_refused(stdin: bytes, said: str, paris: Path) -> None:
    assert_refused(rvllm("generate", "--model", paris, stdin=stdin), said)


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(models: Path) -> None:
    model = loop_model(models / "narrow", "a", Options(max_positions=64)).folder
    assert_refused(rvllm("generate", "x" * 64, "--raw", "--model", model), "64 tokens", "--max-model-len")
    assert rvllm("generate", "x" * 63, "--raw", "--model", model, "-q").stdout == "a\n"


def test_a_token_id_beyond_the_vocabulary_is_refused(paris: Path) -> None:
    assert_refused(rvllm("generate", "x", "--model", paris, "--stop-token-ids", "99999"), "99999", "stop_token_ids")


def broken_shard(folder: Path) -> None:
    random_model(folder, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncated(folder: Path) -> None:
    file = random_model(folder).folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 4096)


def trailing(folder: Path) -> None:
    with (random_model(folder).folder / "model.safetensors").open("ab") as file:
        file.write(b"1234")


def replaced(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (random_model(folder).folder / name).write_text(text, encoding="utf-8")

    return make


def removed(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (random_model(folder).folder / name).unlink()

    return make


def configured(**changes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        edit_json(random_model(folder).folder / "config.json", changes)

    return make


def halved_tokenizer(folder: Path) -> None:
    file = random_model(folder).folder / "tokenizer.json"
    os.truncate(file, file.stat().st_size // 2)


def broken_link(folder: Path) -> None:
    file = random_model(folder).folder / "model.safetensors"
    file.unlink()
    file.symlink_to("../blobs/gone")


class Attack:
    """A pickle that leaves a file behind where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.mark,)


def pickled(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        random_model(folder)
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Attack(folder / "attacked")))

    return make


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing shard": (broken_shard, ("model-00002-of-00002.safetensors", "model.safetensors.index.json")),
    "truncated": (truncated, ("model.safetensors",)),
    "trailing bytes": (trailing, ("model.safetensors",)),
    "empty": (replaced("model.safetensors", ""), ("model.safetensors",)),
    "lfs weights": (replaced("model.safetensors", LFS_POINTER), ("model.safetensors", "LFS")),
    "lfs tokenizer": (replaced("tokenizer.json", LFS_POINTER), ("tokenizer.json", "LFS")),
    "lfs config": (replaced("config.json", LFS_POINTER), ("config.json", "LFS")),
    "pickle": (pickled("pytorch_model.bin"), ("pytorch_model.bin", "pickle")),
    "pickle in disguise": (pickled("model.safetensors"), ("model.safetensors",)),
    "no weights": (removed("model.safetensors"), ("safetensors",)),
    "no config": (removed("config.json"), ("config.json",)),
    "no tokenizer": (removed("tokenizer.json"), ("tokenizer",)),
    "half a tokenizer": (halved_tokenizer, ("tokenizer.json",)),
    "broken json": (replaced("config.json", "{"), ("config.json",)),
    "broken link": (broken_link, ("model.safetensors", "../blobs/gone")),
    "unknown architecture": (configured(architectures=["Mamba"]), ("Mamba",)),
    "unknown rope": (configured(rope_scaling={"type": "foo", "factor": 2}), ("foo",)),
    "too few vocabulary rows": (configured(vocab_size=100), ("tokenizer.json", "99")),
    "wrong shape": (configured(intermediate_size=128), ("model.layers.0.mlp", "128")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_by_the_file_that_is_broken(case: str, tmp_path: Path) -> None:
    make, said = BROKEN[case]
    make(tmp_path / "model")
    assert_refused(rvllm("generate", "x", "--model", tmp_path / "model"), *said)
    assert not (tmp_path / "model" / "attacked").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cuda"), ("CUDA_VISIBLE_DEVICES=''", "libcuda.so.1")),
        (("--device", "cpu", "--dtype", "bfloat16"), ("--dtype bfloat16",)),
        (("--load-format", "gguf"), ("--load-format is gguf", "safetensors")),
        (("--max-model-len", "4K"), ("4,096", "2,048")),
        (("--max-model-len", "2k", "--kv-cache-memory-bytes", "64KiB"), ("2,000", "--kv-cache-memory-bytes")),
        # B100
        (("--max-model-len", "2k", "--num-gpu-blocks-override", "8"), ("2,000", "8 blocks", "to at most 256")),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "63"), ("63", "--max-num-seqs 64", "at least")),
        (("--generation-config", "nowhere"), ("nowhere/generation_config.json",)),
        (("--chat-template", "{% for %}"), ("template",)),
    ],
)
def test_settings_that_cannot_be_are_refused(
    arguments: tuple[str, ...], said: tuple[str, ...], paris: Path, tmp_path: Path
) -> None:
    done = rvllm("generate", "x", "--model", paris, *arguments, cwd=tmp_path)
    if arguments == ("--device", "cuda"):  # with a driver, the variable that hides the GPU; without, its library
        assert any(part in done.stderr for part in said)
        said = ("error: ",)
    assert_refused(done, *said)


def test_an_unknown_model_is_refused_with_every_place_that_was_looked_in(tmp_path: Path) -> None:
    done = rvllm("generate", "x", "--model", "someone/some-model", HF_HOME=str(tmp_path), cwd=tmp_path)
    assert_refused(done, "someone/some-model", str(tmp_path / "hub"))
    assert_refused(rvllm("generate", "x", "--model", "./nothing", cwd=tmp_path), "./nothing")


def test_offline_refuses_a_default_model_that_is_not_here(tmp_path: Path) -> None:
    done = rvllm("generate", "x", "--offline", RVLLM_CACHE=str(tmp_path), PYTHONNOUSERSITE="1")
    if done.returncode == 0:
        pytest.skip("the default model's package is installed")
    assert_refused(done, "smollm2", "offline")
