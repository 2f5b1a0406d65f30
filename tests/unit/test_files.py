"""Where a model's files are looked for, and what is said when they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rvllm.errors import CheckpointError, ConfigError, ModelNotFound
from rvllm.model.files import ModelFiles, hub_cache, is_lfs_pointer, locate, read_json

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "rvllm"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def find(name: str | Path) -> ModelFiles:
    return locate(str(name), offline=True, progress=None)


def snapshot(cache: Path, name: str = "org/small", commit: str = "abc123") -> Path:
    """A model in the Hugging Face cache's layout: the snapshot holds relative links into blobs."""
    model = cache / ("models--" + name.replace("/", "--"))
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (model / part).mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "blobs" / "0f0f").write_text('{"model_type": "llama"}')
    (model / "snapshots" / commit / "config.json").symlink_to("../../blobs/0f0f")
    return model / "snapshots" / commit


def test_a_folder_is_its_own_root(tmp_path: Path) -> None:
    folder = tmp_path / "modèle à moi"
    folder.mkdir()
    files = find(folder)
    assert files == ModelFiles(str(folder), folder)
    assert not files.is_gguf


def test_a_gguf_file_is_its_own_root(tmp_path: Path) -> None:
    file = tmp_path / "small.Q4_1.GGUF"
    file.touch()
    assert find(file) == ModelFiles(str(file), file)
    assert find(file).is_gguf


def test_a_folder_that_holds_only_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    (tmp_path / "small.gguf").touch()
    assert find(tmp_path).root == tmp_path / "small.gguf"


def test_a_folder_of_safetensors_is_not_taken_for_the_gguf_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "small.gguf").touch()
    assert find(tmp_path).root == tmp_path


def test_two_gguf_files_in_a_folder_are_named_and_one_must_be_chosen(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"2 GGUF files: q4\.gguf, q8\.gguf"):
        find(tmp_path)


def test_a_weight_file_in_place_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match=r"is a file, but not a .gguf file. hint: give the folder"):
        find(tmp_path / "model.safetensors")


def test_a_hub_name_is_found_in_the_hugging_face_cache_through_its_ref(tmp_path: Path) -> None:
    root = snapshot(tmp_path / "hf" / "hub")
    assert find("org/small").root == root
    assert read_json(find("org/small").root / "config.json") == {"model_type": "llama"}


def test_a_snapshot_path_a_link_to_it_and_a_path_with_a_space_and_an_accent_all_work(tmp_path: Path) -> None:
    root = snapshot(tmp_path / "mes modèles")
    link = tmp_path / "link"
    link.symlink_to(root)
    for path in (root, link):
        assert read_json(find(path).root / "config.json") == {"model_type": "llama"}


def test_a_broken_link_in_the_hub_cache_is_named_with_its_missing_target(tmp_path: Path) -> None:
    root = snapshot(tmp_path / "hf" / "hub")
    (root.parents[1] / "blobs" / "0f0f").unlink()
    with pytest.raises(ConfigError) as caught:
        read_json(find("org/small").root / "config.json")
    assert f"{root}/config.json is a link to ../../blobs/0f0f, which does not exist" in str(caught.value)


def test_a_broken_link_given_as_the_model_is_named_with_its_missing_target(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(ModelNotFound, match="model is a link to gone, which does not exist"):
        find(tmp_path / "model")


def test_a_broken_link_to_the_only_gguf_file_is_named_with_its_missing_target(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").symlink_to("../../blobs/gone")
    with pytest.raises(ModelNotFound, match=r"small\.gguf is a link to \.\./\.\./blobs/gone, which does not exist"):
        find(tmp_path)


def test_a_snapshot_without_a_ref_is_used_only_when_it_is_the_only_one(tmp_path: Path) -> None:
    root = snapshot(tmp_path / "hf" / "hub")
    (root.parents[1] / "refs" / "main").unlink()
    assert find("org/small").root == root
    (root.parent / "def456").mkdir()
    with pytest.raises(ModelNotFound, match="has no refs/main and 2 snapshots"):
        find("org/small")


def test_a_ref_to_a_missing_snapshot_is_refused_by_name(tmp_path: Path) -> None:
    root = snapshot(tmp_path / "hf" / "hub")
    (root.parents[1] / "refs" / "main").write_text("def456")
    with pytest.raises(ModelNotFound, match="snapshots/def456, which does not exist"):
        find("org/small")


def test_the_hub_cache_is_found_as_huggingface_hub_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/a")
    assert hub_cache() == Path("/a/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/b")
    assert hub_cache() == Path("/b")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    assert hub_cache() == Path.home() / ".cache" / "huggingface" / "hub"


def test_an_unknown_hub_name_is_not_downloaded_and_every_place_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        locate("org/absent", offline=False, progress=None)
    text = str(caught.value)
    for part in (str(tmp_path / "here"), str(tmp_path / "hf" / "hub"), "models--org--absent", "hf download", "smollm2"):
        assert part in text


@pytest.mark.parametrize("name", ["", "./absent", "/no/such/folder", "absent.gguf", "a/b/c", "a\0b"])
def test_what_cannot_be_a_hub_name_is_called_a_missing_path(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no folder or GGUF file|cannot be a model's name"):
        find(name)


def test_a_git_lfs_pointer_is_called_that_and_not_broken_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(LFS_POINTER)
    assert is_lfs_pointer(path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a Git-LFS pointer.*git lfs pull"):
        read_json(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1', "is not valid JSON"),
        (b"\xff\xfe\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "must hold a JSON object, it holds a list"),
    ],
)
def test_broken_json_is_refused_with_the_file_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json {message}"):
        read_json(path)


def test_a_missing_file_raises_the_callers_kind_of_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent.json does not exist"):
        read_json(tmp_path / "absent.json", CheckpointError)
    assert not is_lfs_pointer(tmp_path / "absent.json")
