"""What is said about weights that do not fit the model, and whose head is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rvllm.errors import CheckpointError
from rvllm.model.checkpoint import FileCheckpoint, check, head_is_tied, open_checkpoint, rotary_row_order
from rvllm.model.files import ModelFiles

EMBEDDING = np.arange(12, dtype=np.float32).reshape(4, 3)


def saved(folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> FileCheckpoint:
    safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    return open_checkpoint(ModelFiles("small", folder))


def with_head(folder: Path, head: np.ndarray[Any, Any] | None) -> FileCheckpoint:
    tensors = {"model.embed_tokens.weight": EMBEDDING}
    return saved(folder, tensors if head is None else tensors | {"lm_head.weight": head})


def test_tensors_that_fit_are_accepted_and_others_may_be_there_too(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": EMBEDDING, "rotary_emb.inv_freq": np.ones(2, np.float32)})
    check(checkpoint, {"a": (4, 3)})


def test_missing_mismatched_and_unsupported_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": EMBEDDING, "b": EMBEDDING, "c": np.ones(2, np.int64)})
    with pytest.raises(CheckpointError) as caught:
        check(checkpoint, {"a": (4, 3), "b": (3, 4), "c": (2,), "d": (1,)})
    text = str(caught.value)
    assert f"{tmp_path}: 3 of 4 tensors do not fit the model" in text
    assert "tensor b has shape [4, 3], the model needs [3, 4]" in text
    assert "tensor c has dtype I64, which is not supported" in text
    assert "tensor d is missing" in text


def test_only_the_first_few_of_many_missing_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": EMBEDDING})
    with pytest.raises(CheckpointError, match=r"9 of 9 tensors .*tensor w3 is missing; and 5 more") as caught:
        check(checkpoint, {f"w{number}": (1,) for number in range(9)})
    assert "w4" not in caught.value.message


def test_no_head_under_a_true_tie_flag_is_tied_without_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert head_is_tied(with_head(tmp_path, None), True, warnings.append)
    assert not warnings


def test_a_head_equal_to_the_embedding_under_a_true_tie_flag_is_tied_without_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert head_is_tied(with_head(tmp_path, EMBEDDING.copy()), True, warnings.append)
    assert not warnings


@pytest.mark.parametrize("head", [EMBEDDING + 1, EMBEDDING.astype(np.float16), EMBEDDING[:2]], ids=str)
def test_a_different_head_under_a_true_tie_flag_is_used_and_not_dropped(
    tmp_path: Path, head: np.ndarray[Any, Any]
) -> None:
    warnings: list[str] = []
    assert not head_is_tied(with_head(tmp_path, head), True, warnings.append)
    assert len(warnings) == 1
    assert "lm_head.weight of its own, yet tie_word_embeddings is true" in warnings[0]


def test_heads_that_differ_only_in_their_last_byte_differ(tmp_path: Path) -> None:
    embedding = np.zeros((5000, 1000), np.float32)  # more than one piece of the comparison
    head = embedding.copy()
    head[-1, -1] = 1
    checkpoint = saved(tmp_path, {"model.embed_tokens.weight": embedding, "lm_head.weight": head})
    assert not head_is_tied(checkpoint, True, lambda text: None)


def test_no_head_under_a_false_tie_flag_is_tied_with_a_warning_and_never_random(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert head_is_tied(with_head(tmp_path, None), False, warnings.append)
    assert len(warnings) == 1
    assert "no lm_head.weight, yet tie_word_embeddings is false" in warnings[0]


def test_a_head_under_a_false_tie_flag_is_used_without_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert not head_is_tied(with_head(tmp_path, EMBEDDING.copy()), False, warnings.append)
    assert not warnings


def test_a_head_of_an_unsupported_dtype_under_a_true_tie_flag_is_refused(tmp_path: Path) -> None:
    checkpoint = with_head(tmp_path, np.ones((4, 3), np.int8))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight has dtype I8, which is not supported"):
        head_is_tied(checkpoint, True, lambda text: None)


def test_rotary_row_order_undoes_the_interleaving_of_each_head() -> None:
    # Two heads of four rows. The file has pairs (0, 2), (1, 3) of a head next to each other.
    assert rotary_row_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = np.arange(24)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(24)  # how the converter makes it
    np.testing.assert_array_equal(stored[rotary_row_order(24, 3)], rows)


def test_a_tensor_that_is_not_in_the_file_is_missing_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        with_head(tmp_path, None).raw("lm_head.weight")
