"""The one file, built once and run as people run it: anywhere, at once, killed, damaged, by the wrong Python."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rvllm.version import VERSION
from tests.fixtures.models import EOS, chain_model
from tests.fixtures.servers import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
QUICK = ("--preset", "0")
UNPACKS = ("generate", "--help")  # the smallest command that is not answered from text made at build time

# Unpacks through the archive's own code, then runs what follows with the build first on sys.path.
ENTER = """
import runpy, sys
archive = sys.argv[1]
boot = runpy.run_path(archive)
sys.argv, sys.path = [archive], [archive, *sys.path]
folder = boot["unpacked"](boot["__spec__"].loader.get_data)
boot["prefer"](folder)
"""


def build(output: Path, *options: str, root: Path = ROOT) -> Path:
    wheels = ROOT / ".cache" / "wheels"
    command = [
        sys.executable,
        str(root / "build_zipapp.py"),
        "--output",
        str(output),
        "--wheels",
        str(wheels),
        *options,
    ]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return output


@contextmanager
def shared(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder of all processes of this run, in the one that theirs are in; one at a time."""
    ours = factory.getbasetemp()
    folder = (ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours) / name
    folder.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def built_once(factory: pytest.TempPathFactory, name: str, *options: str) -> Path:
    """The first process that asks builds."""
    with shared(factory, name) as folder:
        output = folder / "rvllm.pyz"
        return output if output.exists() else build(output, *options)


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is shipped."""
    return built_once(tmp_path_factory, "dist")


@pytest.fixture(scope="session")
def quick_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed less hard, to stand beside others that are: compressing as for `archive` takes a minute of two cores."""
    return built_once(tmp_path_factory, "quick", *QUICK)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def filled(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the archive's build, for what comes after unpacking."""
    with shared(tmp_path_factory, "filled") as folder:
        result = run(sys.executable, archive, *UNPACKS, cache=folder)
        assert result.returncode == 0 and len(builds(folder)) == 1, result.stderr
        return folder


def environment(cache: Path | None, **more: str) -> dict[str, str]:
    chosen = {} if cache is None else {"RVLLM_CACHE": str(cache)}
    return {"PATH": os.environ["PATH"], "HOME": "/proc", "TMPDIR": "/proc", "LC_ALL": "C.UTF-8"} | chosen | more


def run(
    *command: str | Path, cache: Path | None = None, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    call = [str(word) for word in command]
    return subprocess.run(call, env=environment(cache, **more), cwd=cwd, capture_output=True, encoding="utf-8")


def store(cache: Path) -> Path:
    return cache / f"zipapp-{os.geteuid()}"


def builds(cache: Path) -> list[str]:
    """Names of the complete builds; fails on a leftover of a killed run."""
    names = sorted(entry.name for entry in store(cache).iterdir() if entry.name != "unpack.lock")
    assert not [name for name in names if name.startswith("new-")], names
    return names


def variant(archive: Path, number: int, folder: Path) -> Path:
    """Another build as far as unpacking goes: the same parts under an index of other bytes."""
    with zipfile.ZipFile(archive) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    old = entries["payload/index.json"]
    entries["payload/index.json"] = new = old + b" " * number
    old_id, new_id = (hashlib.sha256(index).hexdigest().encode() for index in (old, new))
    entries["__main__.py"] = entries["__main__.py"].replace(old_id, new_id)
    path = folder / f"variant{number}.pyz"
    with zipfile.ZipFile(path, "w") as target:
        for name, content in entries.items():
            target.writestr(name, content)
    return path


def other_pythons() -> list[Path]:
    """Interpreters of other minor versions on this machine: pyenv's, and those on PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = {path.parent.parent.name: path for path in pyenv.glob("*/bin/python")}
    for minor in range(6, 20):
        path = shutil.which(f"python3.{minor}")
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            found.setdefault(f"3.{minor}", Path(path))
    return [path for version, path in sorted(found.items()) if ".".join(version.split(".")[:2]) != MINOR]


# --- What it answers.


def test_version_and_help_are_answered_without_unpacking(archive: Path, cache: Path) -> None:
    version = run(sys.executable, archive, "--version", cache=cache)
    assert (version.returncode, version.stdout, version.stderr) == (0, f"rvllm {VERSION}\n", "")
    shown = run(sys.executable, archive, "--help", cache=cache)
    checkout = run(sys.executable, "-m", "rvllm", "--help", cwd=ROOT, COLUMNS="80")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, checkout.stdout, "")
    assert not cache.exists()


def test_the_second_run_uses_what_the_first_unpacked(archive: Path, cache: Path) -> None:
    first = run(sys.executable, archive, *UNPACKS, cache=cache)
    assert first.returncode == 0 and first.stderr == "", first.stderr
    (name,) = builds(cache)
    inode = (store(cache) / name).stat().st_ino
    second = run(sys.executable, archive, *UNPACKS, cache=cache)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert (store(cache) / name).stat().st_ino == inode
    assert stat.S_IMODE(store(cache).stat().st_mode) == 0o700


def test_all_libraries_work_from_the_unpacked_build_alone(archive: Path, filled: Path) -> None:
    check = """
import numpy, tokenizers, jinja2.sandbox, markupsafe._speedups, msgspec, click, cuda.bindings.driver, cuda.pathfinder
import uvicorn.protocols.http.httptools_impl, uvicorn.protocols.http.h11_impl, uvloop, prometheus_client.multiprocess
import rvllm.version, kernels_ptx, llguidance.gbnf_to_lark
assert numpy.linalg.inv(numpy.eye(3) * 2)[0, 0] == 0.5
assert numpy.random.default_rng(0).random() < 1 and abs(numpy.fft.fft([1, 2])[0]) == 3
assert tokenizers.Tokenizer(tokenizers.models.BPE()).to_str()
assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_regex("a+"))
assert msgspec.msgpack.decode(msgspec.msgpack.encode({"a": [1]})) == {"a": [1]}
assert jinja2.sandbox.ImmutableSandboxedEnvironment().from_string("{{ a }}").render(a="x") == "x"
try:
    cuda.bindings.driver.cuInit(0)  # a machine with the driver
except cuda.pathfinder.DynamicLibNotFoundError as error:
    assert "libcuda.so.1" in str(error)
ours = ("numpy", "tokenizers", "jinja2", "markupsafe", "msgspec", "click", "cuda", "rvllm", "kernels_ptx", "llguidance", "uvicorn", "h11", "httptools", "uvloop", "prometheus_client")
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in ours and getattr(module, "__file__", None):
        assert module.__file__.startswith(folder), (name, module.__file__)
print("fine")
"""
    result = run(sys.executable, "-c", ENTER + check, archive, cache=filled)
    assert result.stdout == "fine\n", result.stderr


def test_a_bare_python_generates_with_it(archive: Path, cache: Path, tmp_path: Path) -> None:
    model = chain_model(tmp_path / "model", ["Paris", ".", EOS])
    bare = [sys.executable, "-I", "-S"]
    assert run(*bare, "-c", "import numpy").returncode != 0  # nothing but the standard library
    result = run(
        *bare, archive, "generate", "Capital of France?", "--model", model.folder, "--device", "cpu", cache=cache
    )
    assert (result.stdout, result.returncode) == ("Paris.\n", 0), result.stderr


def test_a_bare_python_serves_with_it(archive: Path, filled: Path, tmp_path: Path) -> None:
    model = chain_model(tmp_path / "model", ["Paris", ".", EOS])
    bare = (sys.executable, "-I", "-S", archive)
    with serving(model.folder, folder=tmp_path / "server", program=bare, RVLLM_CACHE=str(filled)) as server:
        reply = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Capital of France?"}])
        assert reply.json["choices"][0]["message"]["content"] == "Paris."
        formed = server.post("/v1/completions", prompt="x", structured_outputs={"choice": ["no"]})
        assert formed.json["choices"][0]["text"] == "no", formed
        libraries = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert all(
            f"{store(filled)}/{name}/{part}" in libraries for name in builds(filled) for part in ("httptools", "uvloop")
        )
        server.process.terminate()
        assert server.ended() == 0
    assert not list((tmp_path / "server").iterdir())


def test_the_engine_process_runs_what_this_process_runs(archive: Path, filled: Path, tmp_path: Path) -> None:
    model = chain_model(tmp_path / "model", ["Paris", ".", EOS])
    script = f"""
from pathlib import Path
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
    print(*(event.token_id for event in client.stream(request)))
    for line in Path(f"/proc/{{child.pid}}/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "site-packages" in path or ("numpy" in path and folder not in "/" + path):
            print(line)
"""
    for flags in (["-I", "-S"], []):
        result = run(sys.executable, *flags, "-c", ENTER + script, archive, cache=filled)
        assert result.stdout == " ".join(map(str, model.script)) + "\n", result.stderr


def test_it_can_be_started_again_from_inside_and_leaves_the_environment_alone(
    archive: Path, filled: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import atexit, json, os, sys
def report():
    seen = {"again": sys.argv[0], "path": sys.path, "environment": dict(os.environ), "main": sys.modules["rvllm"].__file__}
    open(os.environ["REPORT"], "w").write(json.dumps(seen))
atexit.register(report)
""")
    more = {"PYTHONPATH": str(tmp_path), "REPORT": str(tmp_path / "report.json")}
    result = run(sys.executable, "./rvllm.pyz", *UNPACKS, cache=filled, cwd=archive.parent, **more)
    assert result.returncode == 0, result.stderr
    seen = json.loads((tmp_path / "report.json").read_text())
    assert seen["environment"] == environment(filled, **more)
    assert seen["main"] == f"{seen['path'][0]}/rvllm/__init__.py" and seen["path"][0].startswith(str(store(filled)))
    assert not [entry for entry in seen["path"] if entry.endswith("rvllm.pyz")]
    again = run(sys.executable, seen["again"], "--version", cwd=Path("/"))
    assert again.stdout == f"rvllm {VERSION}\n", again.stderr


def test_an_answer_that_cannot_be_written_ends_without_a_traceback(archive: Path) -> None:
    for target, code, said in (
        ("> /dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("| true", 0, ""),
    ):
        shell = f'"$0" "$1" --help {target}'
        result = run("bash", "-c", shell, sys.executable, archive)
        assert result.stderr == said, target
        assert result.returncode == code, target


# --- How it is called.


def odd_calls(archive: Path, folder: Path) -> Iterator[tuple[str, list[str], Path, dict[str, str]]]:
    """(what, command, working folder, environment) of ways that people call a program."""
    place = folder / "a b" / "é"
    place.mkdir(parents=True)
    copy = place / "rvllm.pyz"
    shutil.copy(archive, copy)
    (folder / "link").symlink_to(copy)
    plain = folder / "plain.pyz"
    shutil.copyfile(archive, plain)
    plain.chmod(0o444)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    yield "./", ["./rvllm.pyz"], place, {"PATH": path}
    yield "../", ["../é/rvllm.pyz"], place, {"PATH": path}
    yield "symlink", [str(folder / "link")], folder, {"PATH": path}
    yield "PATH", ["rvllm.pyz"], folder, {"PATH": os.pathsep.join([str(place), path])}
    yield "read-only and not executable", [sys.executable, "plain.pyz"], folder, {}
    yield "isolated", [sys.executable, "-I", "-S", str(copy)], folder, {}
    yield (
        "deleted working folder",
        ["sh", "-c", f'mkdir gone; cd gone; rmdir ../gone; "{copy}" "$@"', "sh"],
        folder,
        {"PATH": path},
    )


def test_it_runs_however_it_is_called(archive: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    for what, command, cwd, more in odd_calls(archive, tmp_path / "odd"):
        version = run(*command, "--version", cache=cache, cwd=cwd, **more)
        assert version.stdout == f"rvllm {VERSION}\n", (what, version.stderr)
        unpacked = run(*command, *UNPACKS, cache=cache, cwd=cwd, **more)
        assert unpacked.returncode == 0 and "Usage: " in unpacked.stdout, (what, unpacked.stderr)
    assert len(builds(cache)) == 1


# --- Many at once, killed, damaged.


def test_sixteen_first_runs_at_once_all_succeed_and_unpack_once(archive: Path, cache: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: run(sys.executable, archive, *UNPACKS, cache=cache), range(16)))
    assert {(one.returncode, one.stderr) for one in runs} == {(0, "")}
    assert len({one.stdout for one in runs}) == 1
    assert len(builds(cache)) == 1


def test_a_run_killed_while_unpacking_hurts_no_later_run(archive: Path, tmp_path: Path) -> None:
    began = 0
    for attempt in range(10):
        cache = tmp_path / f"cache{attempt}"
        command = [sys.executable, str(archive), *UNPACKS]
        process = subprocess.Popen(command, env=environment(cache), stdout=subprocess.DEVNULL)
        time.sleep(0.03 + 0.05 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        began += any(store(cache).glob("new-*"))
        after = run(sys.executable, archive, *UNPACKS, cache=cache)
        assert after.returncode == 0, after.stderr
        assert len(builds(cache)) == 1
    assert began, "no run was killed while it unpacked: the delays are wrong for this machine"


def test_an_interrupt_while_unpacking_ends_in_one_word_and_leaves_nothing(archive: Path, cache: Path) -> None:
    command = [sys.executable, str(archive), *UNPACKS]
    with subprocess.Popen(command, env=environment(cache), stderr=subprocess.PIPE, encoding="utf-8") as process:
        deadline = time.monotonic() + 20
        while not any(store(cache).glob("new-*")) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.stderr and process.stderr.read() == "interrupted\n"
    assert process.returncode == 130 and builds(cache) == []


def test_a_build_that_lost_a_file_is_unpacked_anew(archive: Path, cache: Path) -> None:
    run(sys.executable, archive, *UNPACKS, cache=cache)
    (name,) = builds(cache)
    victim = store(cache) / name / "click" / "core.py"
    whole = victim.read_bytes()
    for damage in (victim.unlink, lambda: victim.write_bytes(whole[:100]), (victim.parent.parent / ".files").unlink):
        damage()
        after = run(sys.executable, archive, *UNPACKS, cache=cache)
        assert after.returncode == 0, after.stderr
        assert builds(cache) == [name] and victim.read_bytes() == whole


@pytest.mark.parametrize("entry", ["payload/003.xz", "payload/index.json"])
def test_a_damaged_archive_is_named_and_leaves_nothing(archive: Path, cache: Path, tmp_path: Path, entry: str) -> None:
    with zipfile.ZipFile(archive) as source:
        info = source.getinfo(entry)
    content = bytearray(archive.read_bytes())
    content[info.header_offset + 30 + len(entry) + info.file_size // 2] ^= 1
    damaged = tmp_path / "damaged.pyz"
    damaged.write_bytes(content)
    result = run(sys.executable, damaged, *UNPACKS, cache=cache)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(f"error: {damaged} is damaged: {entry} "), result.stderr
    assert builds(cache) == []


def test_the_three_builds_used_last_are_kept_and_one_in_use_is_never_removed(
    archive: Path, cache: Path, tmp_path: Path
) -> None:
    variants = [variant(archive, number, tmp_path) for number in range(1, 7)]
    running = [sys.executable, "-c", ENTER + "print(folder, flush=True); sys.stdin.read()", str(variants[0])]
    with subprocess.Popen(
        running, env=environment(cache), stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdin and process.stdout
        in_use = Path(process.stdout.readline().strip())
        for other in variants[1:5]:
            assert run(sys.executable, other, *UNPACKS, cache=cache).returncode == 0
        assert in_use.is_dir() and len(builds(cache)) == 4
        process.stdin.close()
    kept = set(builds(cache)) - {in_use.name}
    assert run(sys.executable, variants[2], *UNPACKS, cache=cache).returncode == 0  # now the one used last
    assert run(sys.executable, variants[5], *UNPACKS, cache=cache).returncode == 0
    assert len(builds(cache)) == 3 and len(kept & set(builds(cache))) == 2
    third = hashlib.sha256(zipfile.ZipFile(variants[2]).read("payload/index.json")).hexdigest()[:16]
    assert any(name.startswith(third) for name in builds(cache))


# --- Where it unpacks.


def falls_back(result: subprocess.CompletedProcess[str], temporary: Path, reason: str) -> None:
    """Assert that the run worked from `temporary`, with one warning that gives the reason and the setting."""
    assert result.returncode == 0, result.stderr
    (warning,) = result.stderr.splitlines()
    assert "warning" in warning and reason in warning and "RVLLM_CACHE" in warning
    assert len(builds(temporary / f"rvllm-{os.geteuid()}")) == 1


def test_a_home_that_cannot_be_written_falls_back_to_a_private_folder(archive: Path, tmp_path: Path) -> None:
    result = run(sys.executable, archive, *UNPACKS, HOME="/proc", TMPDIR=str(tmp_path))
    falls_back(result, tmp_path, "/proc/.cache/rvllm: no such file")
    assert stat.S_IMODE((tmp_path / f"rvllm-{os.geteuid()}").stat().st_mode) == 0o700


def test_the_xdg_folder_comes_before_home_unless_it_is_relative(archive: Path, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert run(sys.executable, archive, *UNPACKS, HOME=home, XDG_CACHE_HOME=str(tmp_path / "xdg")).stderr == ""
    assert len(builds(tmp_path / "xdg" / "rvllm")) == 1 and not Path(home).exists()
    assert run(sys.executable, archive, *UNPACKS, HOME=home, XDG_CACHE_HOME="xdg", cwd=tmp_path).stderr == ""
    assert len(builds(Path(home) / ".cache" / "rvllm")) == 1


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_to_is_not_used(archive: Path, cache: Path, tmp_path: Path, mode: int) -> None:
    cache.mkdir()
    if mode == 0o775:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another group")
        os.chown(cache, 0, 12345)
    cache.chmod(mode)
    result = run(sys.executable, archive, *UNPACKS, cache=cache, TMPDIR=str(tmp_path))
    falls_back(result, tmp_path, f"other users can write to {cache}")


def test_a_shared_folder_with_the_sticky_bit_gets_a_private_one_inside(archive: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o1777)
    assert run(sys.executable, archive, *UNPACKS, cache=cache).stderr == ""
    assert len(builds(cache)) == 1 and stat.S_IMODE(store(cache).stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(archive: Path, cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    os.chown(cache, 12345, 12345)
    result = run(sys.executable, archive, *UNPACKS, cache=cache, TMPDIR=str(tmp_path))
    falls_back(result, tmp_path, f"{cache} belongs to user 12345")


def can_mount() -> bool:
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs in a namespace of its own")
def test_a_noexec_cache_is_passed_over_and_if_all_are_the_message_says_so(archive: Path, tmp_path: Path) -> None:
    for name in ("cache", "home", "tmp"):
        (tmp_path / name).mkdir()

    def run_with_noexec(*names: str) -> subprocess.CompletedProcess[str]:
        mounts = "".join(f"mount -t tmpfs -o noexec none '{tmp_path / name}' && " for name in names)
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'{mounts} exec "$@"',
            "sh",
            sys.executable,
            str(archive),
            *UNPACKS,
        ]
        home, temporary = str(tmp_path / "home"), str(tmp_path / "tmp")
        return run(*command, cache=tmp_path / "cache", HOME=home, TMPDIR=temporary)

    one = run_with_noexec("cache", "tmp")
    assert one.returncode == 0 and one.stderr.count("mounted noexec") == 1 and "RVLLM_CACHE" in one.stderr
    assert len(builds(tmp_path / "home" / ".cache" / "rvllm")) == 1
    every = run_with_noexec("cache", "home", "tmp")
    assert every.returncode == 1 and every.stderr.count("mounted noexec") >= 3 and "RVLLM_CACHE" in every.stderr
    assert len(every.stderr.splitlines()) == 1


# --- The wrong Python, the wrong machine.


def test_another_python_gets_one_line_and_exit_code_78(archive: Path) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no Python of another minor version on this machine")
    for python in pythons:
        version = run(python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])").stdout.strip()
        for flags in ([], ["-S"], ["-E", "-s"], ["-I"]):
            if version.startswith("2.") and "-I" in flags:
                continue  # Python 2 has no -I
            result = run(python, *flags, archive, "--version")
            assert (result.returncode, result.stdout) == (78, ""), (version, flags, result.stderr)
            assert result.stderr.count("\n") == 1
            assert f"needs CPython {MINOR} " in result.stderr and f"this is Python {version} " in result.stderr


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("os.confstr = lambda name: 'glibc 2.17'", "glibc 2.17"),
        ("os.confstr = lambda name: int(name)", "a system without glibc"),  # ValueError, as musl's Python raises
        ("os.uname = lambda: ('Linux', 'host', '6', '1', 'aarch64')", "a machine of type aarch64"),
        ("sys.platform = 'darwin'", "darwin"),
        ("sys.maxsize = 2**31 - 1", "a 32-bit Python"),
        ("sys.abiflags = 't'", "a free-threaded Python"),
        ("sys.implementation.name = 'pypy'", "pypy"),
    ],
)
def test_another_machine_is_named_and_so_is_what_is_needed(archive: Path, change: str, named: str) -> None:
    code = f"import os, runpy, sys; {change}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    result = run(sys.executable, "-c", code, archive, "--version")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (78, "", 1), result.stderr
    assert "glibc 2.28 or newer" in result.stderr and f"but this is {named} " in result.stderr


# --- What is in it.


def test_the_same_sources_give_the_same_bytes_in_another_folder(quick_archive: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another place"
    for name in ("rvllm", "kernels_ptx"):
        shutil.copytree(ROOT / name, copy / name, copy_function=shutil.copyfile)
    for name in ("build_zipapp.py", "build_zipapp.lock", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    again = build(tmp_path / "again.pyz", *QUICK, root=copy)
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(quick_archive.read_bytes()).digest()


def test_no_library_needs_more_than_glibc_2_28_and_the_libstdcxx_of_gcc_8(filled: Path) -> None:
    libraries = list(store(filled).rglob("*.so*"))
    assert len(libraries) > 20
    for path in libraries:
        content = path.read_bytes()
        for name, newest in ((b"GLIBC", (2, 28)), (b"GLIBCXX", (3, 4, 25)), (b"CXXABI", (1, 3, 11))):
            # Version names stand in the string table; one mentioned elsewhere would only make this stricter.
            versions = re.findall(rb"\b" + name + rb"_([0-9.]+)\0", content)
            asked = max((tuple(map(int, version.split(b"."))) for version in versions), default=(0,))
            assert asked <= newest, (path.name, name, asked)


def test_the_licences_of_everything_inside_are_in_one_file(archive: Path) -> None:
    with zipfile.ZipFile(archive) as source:
        text = source.read("LICENSES").decode("utf-8")
    for title in (
        "rvllm",
        "click 8",
        "cuda_bindings 12",
        "jinja2 3",
        "markupsafe 3",
        "msgspec 0",
        "numpy 2",
        "tokenizers 0",
    ):
        assert re.search(rf"^=+\n{title}[0-9.]*\n=+\n\s*\S", text, re.MULTILINE), title
    for phrase in ("Apache License", "OpenBLAS", "GCC RUNTIME LIBRARY EXCEPTION", "aho-corasick"):
        assert phrase in text, phrase


def test_the_entries_are_sorted_and_bear_no_time(archive: Path) -> None:
    with zipfile.ZipFile(archive) as source:
        infos = source.infolist()
        index = json.loads(source.read("payload/index.json"))
    names = [info.filename for info in infos]
    assert names == sorted(names) and {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    paths = {path for part in index for path, _, _ in part["pieces"]}
    assert {part["name"] for part in index} == {name for name in names if name.endswith(".xz")}
    assert {path.partition("/")[0] for path in paths} == {
        *(
            "click",
            "cuda",
            "h11",
            "httptools",
            "jinja2",
            "kernels_ptx",
            "llguidance",
            "markupsafe",
            "msgspec",
            "numpy",
            "numpy.libs",
            "prometheus_client",
            "rvllm",
            "tokenizers",
            "uvicorn",
            "uvloop",
            "yaml",
        )
    }


def test_one_file_can_serve_several_pythons_and_hold_what_they_share_once(quick_archive: Path, tmp_path: Path) -> None:
    for python in reversed(other_pythons()):
        minor = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").stdout.strip()
        if minor in ("3.11", "3.12", "3.13", "3.14"):
            break
    else:
        pytest.skip("no second Python that is supported on this machine")
    both = build(tmp_path / "both.pyz", *QUICK, "--python", minor, "--python", MINOR)
    for executable in (sys.executable, python):
        check = "import numpy, tokenizers, jinja2, cuda.bindings.driver; print(numpy.eye(2).sum())"
        result = run(executable, "-I", "-c", ENTER + check, both, cache=tmp_path / "cache")
        assert result.stdout == "2.0\n", result.stderr
    assert both.stat().st_size < 1.6 * quick_archive.stat().st_size
