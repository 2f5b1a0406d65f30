"""The wheel, built from a copy of the checkout and installed where nothing of the checkout can be seen."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from rvllm.version import VERSION
from tests.fixtures.models import EOS, chain_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by pip, which may fetch the build backend; from a copy, as setuptools writes into the source folder."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("rvllm", "kernels_ptx"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(out), str(copy)]
    subprocess.run(command, check=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment: our wheel, and the libraries of the running one by way of a .pth file."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "install", "--no-deps", str(wheel)]
    subprocess.run(command, check=True)
    return folder / "bin"


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_is_for_every_python_and_platform(wheel: Path) -> None:
    assert wheel.name == f"rvllm-{VERSION}-py3-none-any.whl"


def test_the_wheel_holds_every_module_and_every_kernel(wheel: Path) -> None:
    held = names(wheel)
    wanted = [*ROOT.glob("rvllm/**/*.py"), ROOT / "rvllm" / "py.typed", *ROOT.glob("kernels_ptx/**/*.py")]
    wanted += [*ROOT.glob("kernels_ptx/manifest.json"), *ROOT.glob("kernels_ptx/ptx/**/*.ptx")]
    wanted += [path for path in ROOT.glob("kernels_ptx/src/*") if path.is_file()]
    assert {path.relative_to(ROOT).as_posix() for path in wanted} - held == set()
    assert f"rvllm-{VERSION}.dist-info/licenses/LICENSE" in held


def test_the_wheel_holds_nothing_but_our_two_packages(wheel: Path) -> None:
    assert {name.partition("/")[0] for name in names(wheel)} == {"rvllm", "kernels_ptx", f"rvllm-{VERSION}.dist-info"}


def test_the_one_file_ships_what_the_wheel_ships_without_what_builds_the_kernels(wheel: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_zipapp", ROOT / "build_zipapp.py")
    assert spec and spec.loader
    build_zipapp = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = build_zipapp  # its dataclass looks its module up
    spec.loader.exec_module(build_zipapp)
    packaged = {name for name in names(wheel) if not name.startswith("rvllm-")}
    builders = {f"kernels_ptx/{name}.py" for name in ("assemble", "build", "source", "tiers")}
    builders |= {name for name in packaged if name.startswith("kernels_ptx/src/")}
    assert builders < packaged and set(build_zipapp.own_files(ROOT)) == packaged - builders


def test_the_installed_command_and_module_run_from_another_folder(environment: Path, tmp_path: Path) -> None:
    for command in ([environment / "rvllm"], [environment / "python", "-I", "-m", "rvllm"]):
        result = subprocess.run([*map(str, command), "--version"], cwd=tmp_path, capture_output=True, encoding="utf-8")
        assert (result.returncode, result.stdout, result.stderr) == (0, f"rvllm {VERSION}\n", "")


def test_the_installed_package_runs_an_engine_process(environment: Path, tmp_path: Path) -> None:
    model = chain_model(tmp_path / "model", ["Paris", ".", EOS])
    code = f"""
import rvllm
from rvllm.config import EngineConfig
from rvllm.engine.request import Request
from rvllm.link.client import EngineClient, Parent
from rvllm.link.process import EngineProcess
from rvllm.sampling.params import SamplingParams
config = EngineConfig(model={str(model.folder)!r}, device="cpu")
with EngineProcess() as child:
    child.load(config, vocab_limit={model.vocabulary}, eos_ids=frozenset())
    client = EngineClient(child.link, Parent(death=child.end))
    client.ready()
    request = Request("a", (ord("x"),), SamplingParams(temperature=0), 0)
    print(rvllm.__file__, *(event.token_id for event in client.stream(request)))
"""
    command = [str(environment / "python"), "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, encoding="utf-8")
    origin, *ids = result.stdout.split()
    assert origin.startswith(str(environment.parent)), result.stderr
    assert tuple(map(int, ids)) == model.script


def test_the_installed_kernels_can_be_read_as_package_data(environment: Path, tmp_path: Path) -> None:
    code = """
from importlib.resources import files
import kernels_ptx
print(kernels_ptx.__file__)
def walk(folder, prefix):
    for entry in folder.iterdir():
        if entry.is_dir():
            walk(entry, prefix + entry.name + "/")
        elif entry.name.endswith((".ptx", ".json")):
            print(prefix + entry.name, len(entry.read_bytes()))
walk(files("kernels_ptx"), "")
"""
    command = [str(environment / "python"), "-I", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    origin, *found = result.stdout.splitlines()
    assert origin.startswith(str(environment.parent))
    sources = [*ROOT.glob("kernels_ptx/ptx/**/*.ptx"), *ROOT.glob("kernels_ptx/manifest.json")]
    expected = [f"{path.relative_to(ROOT / 'kernels_ptx').as_posix()} {path.stat().st_size}" for path in sources]
    assert sorted(found) == sorted(expected)
