"""The cache folder follows the environment, and its absence is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rvllm.cache import cache_folder
from rvllm.cli import machine
from rvllm.errors import StartError


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user whom the system does not know, without HOME: `env -i` in a container."""

    def unknown(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVLLM_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("RVLLM_CACHE")
    assert cache_folder() == Path("/b/rvllm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "rvllm"


def test_a_user_without_a_home_folder_is_told_to_name_one(homeless: None) -> None:
    with pytest.raises(StartError, match="HOME is not set") as refusal:
        cache_folder()
    assert "RVLLM_CACHE" in str(refusal.value.hint)


def test_doctor_shows_a_missing_home_folder_and_goes_on(homeless: None) -> None:
    assert not machine.cache()["writable"] and "HOME is not set" in machine.cache()["folder"]
    assert "HOME is not set" in machine.default_model()["problem"]
