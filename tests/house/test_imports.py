"""What a start may import: measured in a process of its own, since this one has imported everything."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    "asyncio", "concurrent", "ctypes", "cuda", "importlib.metadata", "jinja2", "markupsafe", "multiprocessing", "numpy",
    "msgspec", "readline", "subprocess", "tokenizers",
}  # fmt: skip
LIGHT_RVLLM = {"rvllm", "rvllm.version"}


def modules_after(statement: str) -> set[str]:
    """Names of all modules loaded once `statement` has run, but for those that an idle Python has already.

    -S: .pth files of installed packages import what they like, and are not ours.
    """
    program = f"import sys; sys.path[:] = {sys.path!r}; idle = set(sys.modules); {statement}; print(*(set(sys.modules) - idle))"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules for parent in HEAVY if name == parent or name.startswith(parent + ".")}


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "rvllm"}


def test_importing_the_package_loads_its_version_and_nothing_else() -> None:
    modules = modules_after("import rvllm")
    assert ours(modules) == LIGHT_RVLLM
    assert not heavy(modules)


def test_asking_for_the_version_does_not_load_click() -> None:
    statement = "sys.argv = ['rvllm', '--version']; import io; sys.stdout = io.StringIO(); import rvllm.__main__ as m; m.main(); sys.stdout = sys.__stdout__"
    modules = modules_after(statement)
    assert "click" not in modules
    assert ours(modules) == {*LIGHT_RVLLM, "rvllm.__main__"}
    assert not heavy(modules)


def test_the_group_of_commands_loads_no_command() -> None:
    modules = modules_after("import rvllm.cli.main")
    assert "click" in modules
    assert ours(modules) == {*LIGHT_RVLLM, "rvllm.cli", "rvllm.cli.main"}
    assert not heavy(modules)


def test_help_of_the_program_loads_no_command() -> None:
    modules = modules_after(
        "from rvllm.cli.main import commands; import click.testing as t; done = t.CliRunner().invoke(commands, ['--help']); assert done.exit_code == 0, done"
    )
    assert ours(modules) == {*LIGHT_RVLLM, "rvllm.cli", "rvllm.cli.main"}


def test_help_of_generate_loads_nothing_heavy() -> None:
    modules = modules_after("import rvllm.cli.generate")
    assert "rvllm.llm" not in modules
    assert not heavy(modules)


def test_help_of_chat_loads_nothing_heavy() -> None:
    modules = modules_after("import rvllm.cli.chat")
    assert "rvllm.llm" not in modules
    assert not heavy(modules)


def test_help_of_benchmark_loads_nothing_heavy() -> None:
    modules = modules_after("import rvllm.cli.benchmark")
    assert not {name for name in modules if name.startswith(("rvllm.bench", "rvllm.engine"))}
    assert not heavy(modules)


def test_the_driver_module_loads_no_binding() -> None:
    modules = modules_after("import rvllm.backend.cuda.driver")
    assert not {name for name in modules if name.partition(".")[0] == "cuda"}


def test_help_of_serve_loads_nothing_heavy() -> None:
    modules = modules_after("import rvllm.cli.serve")
    assert not {name for name in modules if name.startswith(("rvllm.api", "rvllm.engine", "uvicorn"))}
    assert not heavy(modules)
