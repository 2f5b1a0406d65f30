"""Imports point downwards: what a reviewer would otherwise have to say twice."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rvllm"
LAYERS = [
    "__main__",
    "cli",
    "bench",
    "llm",
    "api",
    "text",
    "link",
    "engine",
    "backend",
    "model",
    "sampling",
    "program",
    "config",
    "cache",
    "errors",
    "version",
]


def layer_of(module: str) -> int | None:
    """The layer of a dotted rvllm module; None for the package itself."""
    names = module.split(".")
    return LAYERS.index(names[1]) if names[0] == "rvllm" and len(names) > 1 else None


def imports(path: Path) -> list[str]:
    """Every module a file imports, wherever in it, as a dotted name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [
                f"{node.module}.{alias.name}" if node.module == "rvllm" else str(node.module) for alias in node.names
            ]
    return found


def test_imports_point_downwards() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[1] in ("__init__", "bootstrap"):  # lazy names only; the archive's entry, which imports nothing of ours
            continue
        own = layer_of(".".join(parts))
        assert own is not None, parts
        wrong += [
            f"{'.'.join(parts)} imports {name}"
            for name in imports(path)
            if (layer := layer_of(name)) is not None and layer < own
        ]
    assert not wrong, "\n".join(wrong)


def test_only_one_file_imports_the_cuda_bindings() -> None:
    importers = [p.name for p in PACKAGE.rglob("*.py") if any(name.startswith("cuda") for name in imports(p))]
    assert set(importers) <= {"driver.py"}


def test_files_can_be_read_in_one_sitting() -> None:
    long = {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 420}
    assert not long


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(p)
        for p in PACKAGE.rglob("*.py")
        if p.name != "bootstrap.py" and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not silent
