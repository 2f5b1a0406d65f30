"""Compile src/*.cu to ptx/<tier>/*.ptx and describe them in manifest.json. Needs NVRTC from pip; no GPU, no toolkit.

    python -m kernels_ptx.build              compile what changed, by hash
    python -m kernels_ptx.build --check      compile everything, compare with what is committed, and write down what was
                                             found equal: benchmarks/results/ptx_check.json, which tests believe by hash
    python -m kernels_ptx.build --ptxas      also assemble, for every GPU it may run on, what was never assembled

The same sources give the same bytes on every machine: NVRTC sees file names without folders, fixed options, our own
headers only, and no line information. The tests' probes (tests/kernels/probes) are built in the same way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels_ptx.assemble import AssemblyError, assemble
from kernels_ptx.source import Source, SourceError, read_source
from kernels_ptx.tiers import MINIMUM_DRIVERS, NEWEST_PTXAS, OLDEST_PTXAS, Tier

PACKAGE = Path(__file__).resolve().parent
HEADERS = PACKAGE / "src"
ROOTS = (PACKAGE, PACKAGE.parent / "tests" / "kernels" / "probes")
CHECKED = PACKAGE.parent / "benchmarks" / "results" / "ptx_check.json"
COMPILER = "nvidia-cuda-nvrtc-cu12==12.9.86"
# No contraction: a fused multiply-add is where the source says so, and the CPU runs the same arithmetic.
OPTIONS = ("--std=c++17", "--fmad=false")

Record = dict[str, Any]  # one file's part of the manifest

_VERSION_LINE = re.compile(r"^\.version .*$", re.MULTILINE)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)\s*([^{]*)\{")
_PARAMETER = re.compile(r"\.param(?: \.align \d+)? \.(\w+) \w+(?:\[(\d+)\])?")
_THREADS = re.compile(r"\.maxntid (\d+), 1, 1")


class BuildError(Exception):
    """A kernel does not compile, or the compiler is not the pinned one."""


@dataclass(frozen=True, slots=True)
class Built:
    """One source for one tier: where its PTX belongs under the root, the text, and the manifest's record of it."""

    place: str
    ptx: str
    record: Record


def sources(root: Path) -> Iterator[Source]:
    """Every source under `root`, by name."""
    for path in sorted((root / "src").glob("*.cu")):
        yield read_source(path, HEADERS)


def build(source: Source, tier: Tier) -> Built:
    """Compile one source for one tier. Raises BuildError."""
    ptx = compile_ptx(source, tier)
    return Built(ptx_place(source, tier), ptx, describe(source, tier, ptx))


def ptx_place(source: Source, tier: Tier) -> str:
    return f"ptx/{tier.name}/{source.stem}.ptx"


def options(tier: Tier) -> tuple[str, ...]:
    return (f"--gpu-architecture=compute_{tier.architecture}", *OPTIONS, f"-DTIER={tier.number}")


def source_hash(source: Source, tier: Tier) -> str:
    """sha256 of all that decides the PTX: compiler, options, the file and its headers."""
    parts = (COMPILER, tier.ptx_version, *options(tier), *(part for file in source.files.items() for part in file))
    return _sha256("\0".join(parts))


def compile_ptx(source: Source, tier: Tier) -> str:
    """The PTX of `source`, with the tier's `.version`. Raises BuildError with the compiler's log."""
    from cuda.bindings import nvrtc

    headers = [(name, text) for name, text in source.files.items() if name.endswith(".cuh")]
    program = _call(
        nvrtc.nvrtcCreateProgram,
        source.text.encode(),
        f"{source.stem}.cu".encode(),
        len(headers),
        [text.encode() for _, text in headers],
        [name.encode() for name, _ in headers],
    )
    flags = [flag.encode() for flag in options(tier)]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    if int(status) != 0:
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise BuildError(f"{source.stem}.cu for {tier.name} does not compile:\n{log.strip()}")
    ptx = _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    _call(nvrtc.nvrtcDestroyProgram, program)
    pinned = COMPILER.partition("==")[2]
    if f", V{pinned}" not in ptx:
        raise BuildError(f"the compiler is not {COMPILER}. hint: pip install {COMPILER}")
    return _VERSION_LINE.sub(f".version {tier.ptx_version}", ptx, count=1)


def _text(program: Any, size: Any, get: Any) -> str:
    buffer = b" " * _call(size, program)
    _call(get, program, buffer)
    return buffer.rstrip(b"\0").decode("ascii")


def _call(function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if int(status) != 0:
        raise BuildError(f"{function.__name__} failed: {status}")
    return values[0] if values else None


def describe(source: Source, tier: Tier, ptx: str) -> Record:
    """The manifest's record of a PTX, but for what ptxas says of it."""
    return {
        "tier": tier.name,
        "source_sha256": source_hash(source, tier),
        "ptx_sha256": _sha256(ptx),
        "ptx_version": tier.ptx_version,
        "minimum_driver": MINIMUM_DRIVERS[tier.ptx_version],
        "griddepcontrol": "griddepcontrol.wait" in ptx,
        "entries": dict(_entries(source, ptx)),
    }


def _entries(source: Source, ptx: str) -> Iterator[tuple[str, Record]]:
    found = {name: (parameters, attributes) for name, parameters, attributes in _ENTRY.findall(ptx)}
    for entry in source.entries:
        parameters, attributes = found.pop(entry.name)
        types = [f"{kind}[{size}]" if size else kind for kind, size in _PARAMETER.findall(parameters)]
        threads = _THREADS.search(attributes)
        if len(types) != len(entry.arguments) or threads is None or int(threads[1]) != entry.threads:
            raise BuildError(f"{source.stem}.cu: {entry.name} and its PTX differ: {entry}, {types}, {attributes!r}")
        arguments = [f"{kind} {name}" for kind, name in zip(types, entry.arguments)]
        yield entry.name, {"threads": entry.threads, "arguments": ", ".join(arguments)}
    if found:
        raise BuildError(f"{source.stem}.cu: entries that are not written as KERNEL(threads): {', '.join(found)}")


def assemble_all(source: Source, tier: Tier, ptx: str) -> dict[str, dict[str, dict[str, int]]]:
    """{"sm_80": {entry: resources}} for every target of the tier. Raises AssemblyError, also for spills over budget."""
    # That the oldest driver loads it; what its compiler makes of products on warpgroups is slower.
    assemble(ptx, tier.architecture, OLDEST_PTXAS[tier.ptx_version], may_be_slow=True)
    report = {}
    for target in tier.targets:
        resources = assemble(ptx, target, NEWEST_PTXAS)
        for name, taken in resources.items():
            if taken.spill_bytes > source.spill_bytes:
                raise AssemblyError(
                    f"{name} spills {taken.spill_bytes} bytes on sm_{target}, the budget is {source.spill_bytes}. "
                    f"hint: use fewer registers, or write '// spills: at most N bytes' into the head of its source"
                )
        report[f"sm_{target}"] = {name: asdict(taken) for name, taken in resources.items()}
    return report


def read_manifest(root: Path) -> dict[str, Record]:
    """The records by the PTX's place under `root`; none where there is no manifest yet."""
    path = root / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8"))["files"] if path.exists() else {}


def manifest_text(files: dict[str, Record]) -> str:
    """The manifest as it is written: sorted, and a mapping of plain values on one line."""
    return _lines({"compiler": COMPILER, "files": files}) + "\n"


def _lines(value: Any, indent: str = "") -> str:
    if not isinstance(value, dict) or not any(isinstance(inner, dict) for inner in value.values()):
        return json.dumps(value, sort_keys=True)
    deeper = indent + " "
    rows = (f"{deeper}{json.dumps(key)}: {_lines(inner, deeper)}" for key, inner in sorted(value.items()))
    return "{\n" + ",\n".join(rows) + "\n" + indent + "}"


def compile_changed(root: Path, *, everything: bool) -> None:
    """Write the PTX and the manifest of `root`: keep what is up to date, remove what no source makes any more."""
    known, files = read_manifest(root), {}
    for source in sources(root):
        for tier in source.tiers:
            place = ptx_place(source, tier)
            record = known.get(place, {})
            if everything or not (root / place).exists() or record.get("source_sha256") != source_hash(source, tier):
                print(f"compile {place}", file=sys.stderr)
                built = build(source, tier)
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                (root / place).write_text(built.ptx, encoding="ascii")
                unchanged = built.record["ptx_sha256"] == record.get("ptx_sha256")
                record = {**(record if unchanged else {}), **built.record}  # what ptxas said holds as long as the PTX
            files[place] = record
    for path in sorted((root / "ptx").rglob("*.ptx")):
        if path.relative_to(root).as_posix() not in files:
            path.unlink()
    (root / "manifest.json").write_text(manifest_text(files), encoding="utf-8")


def assemble_missing(root: Path) -> None:
    """Add to the manifest of `root` what ptxas says of PTX that it has not said yet. Raises AssemblyError."""
    files = read_manifest(root)
    try:
        for source in sources(root):
            for tier in source.tiers:
                place = ptx_place(source, tier)
                if "assembled" not in files[place]:
                    print(f"assemble {place}", file=sys.stderr)
                    files[place]["assembled"] = assemble_all(source, tier, (root / place).read_text(encoding="ascii"))
    finally:
        (root / "manifest.json").write_text(manifest_text(files), encoding="utf-8")


def differences(root: Path, equal: dict[str, Record] | None = None) -> list[str]:
    """What compiling anew gives that is not what lies under `root`, one sentence each.

    `equal` holds what an earlier call found equal, by place, as `check_record` has it: that is not compiled again.
    """
    known, found = read_manifest(root), []
    for source in sources(root):
        for tier in source.tiers:
            place = ptx_place(source, tier)
            path, record = root / place, dict(known.pop(place, {}))
            ptx = path.read_text(encoding="ascii") if path.exists() else ""
            if equal and equal.get(place) == check_record(source, tier, ptx):
                continue
            built = build(source, tier)
            record.pop("assembled", None)
            if ptx != built.ptx:
                found.append(f"{place} is not what its source compiles to")
            elif record != built.record:
                found.append(f"{place} is described wrongly in manifest.json")
    return found + [f"{place} has no source" for place in known]


def check_record(source: Source, tier: Tier, ptx: str) -> Record:
    """What `--check` writes down of a PTX: the hashes of all that it is made from, and of itself."""
    return {"source_sha256": source_hash(source, tier), "ptx_sha256": _sha256(ptx)}


def read_checked(root: Path) -> dict[str, Record]:
    """What `--check` has found equal under `root`, by place; nothing where it never ran."""
    if not CHECKED.exists():
        return {}
    return json.loads(CHECKED.read_text(encoding="utf-8"))["files"].get(root.name, {})


def write_checked() -> None:
    """Write down the hashes of all that lies under the roots; to be called when all of it was found equal."""
    files = {
        root.name: {
            ptx_place(source, tier): check_record(
                source, tier, (root / ptx_place(source, tier)).read_text(encoding="ascii")
            )
            for source in sources(root)
            for tier in source.tiers
        }
        for root in ROOTS
    }
    CHECKED.write_text(manifest_text(files), encoding="utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels_ptx.build", description="Compile the kernels to PTX.")
    parser.add_argument("--check", action="store_true", help="compile everything, compare, write down what is equal")
    parser.add_argument("--ptxas", action="store_true", help="assemble what was never assembled")
    parser.add_argument("--all", action="store_true", help="compile also what has not changed")
    given = parser.parse_args()
    try:
        for root in filter(Path.exists, ROOTS):
            if given.check:
                if found := differences(root):
                    print("\n".join(found), "hint: python -m kernels_ptx.build --ptxas", sep="\n", file=sys.stderr)
                    return 1
            else:
                compile_changed(root, everything=given.all)
                if given.ptxas:
                    assemble_missing(root)
        if given.check:
            write_checked()
    except (AssemblyError, BuildError, SourceError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
