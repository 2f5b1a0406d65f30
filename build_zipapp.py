"""Build dist/rvllm.pyz: rvllm, its kernels and its libraries in one file. Knows wheels and bytes; never imports rvllm.

    python build_zipapp.py                                  for the running Python
    python build_zipapp.py --python 3.11 --python 3.12      for these, in one file
    python build_zipapp.py --lock                           write build_zipapp.lock anew from PINS (needs the network)

In the archive, sorted by name and stored without zip compression (zlib differs between machines):

    LICENSES             the licences of everything inside
    __main__.py          rvllm/bootstrap.py with its BUILD line filled in: it unpacks, once, and starts rvllm
    payload/NNN.xz       at most 8 MiB of files, joined and compressed, so that they unpack side by side
    payload/index.json   for each part its sha256, the Pythons it is for, and the pieces (path, offset, length) in it

A file with the same bytes for several Pythons is held once: files are grouped by the set of Pythons that have them.

The same checkout and lock give the same bytes, wherever they lie and whenever they are built: entries are sorted,
times fixed, xz settings given in full, and the wheels pinned by sha256. What remains is liblzma: two of its versions
may compress differently. Libraries are not stripped: the `strip` of another machine would give other bytes, what is
shipped would no longer be what its publisher hashed, and measured it saves 0.3 of 14 MB (of 64 unpacked, 3.7).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PINS = {
    "click": "8.5.1",
    "cuda-bindings": "12.9.10",
    "h11": "0.16.0",
    "httptools": "0.9.0",
    "jinja2": "3.1.6",
    "llguidance": "1.6.1",
    "markupsafe": "3.0.3",
    "msgspec": "0.23.0",
    "numpy": "2.4.6",
    "prometheus-client": "0.26.0",
    "pyyaml": "6.0.3",
    "tokenizers": "0.23.3",
    "uvicorn": "0.54.0",
    "uvloop": "0.23.0",
}
# numpy 2.3 and newer need Python 3.11; uvicorn needs typing-extensions before it
OLDER_PINS = {"3.10": {"numpy": "2.2.6", "typing-extensions": "4.16.0"}}

# pip takes a wheel only for a platform that is named; glibc 2.28 is the floor that rvllm/bootstrap.py checks.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + ["manylinux2014_x86_64"]

# What we ship of our own packages: the wheel's files, without the kernels' sources.
OWN_PACKAGES = ("rvllm", "kernels_ptx")
OWN_FILES = (
    "rvllm/*.py",
    "rvllm/py.typed",
    "rvllm/api/page.html",
    "kernels_ptx/__init__.py",
    "kernels_ptx/manifest.json",
    "kernels_ptx/ptx/*.ptx",
)

UNUSED = (
    *("*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.in", "*.c", "*.h", "*.a", "*/tests/*", "*.dist-info/*", "*/py.typed"),
    *("numpy/_core/include/*", "numpy/_core/lib/*", "numpy/_core/_simd.*", "numpy/_core/_*_tests.*"),
    *("numpy/_pyinstaller/*", "numpy/distutils/*", "numpy/f2py/*", "numpy/random/lib/*", "numpy/random/_examples/*"),
    *("_cuda_bindings_redirector.*", "tokenizers/tools/*", "_yaml/*"),
)
# Of cuda-bindings the driver layer is all we use; the rest (nvml, runtime, nvrtc, ...) is 27 of its 34 MB.
USED_OF_CUDA = (
    *("cuda/bindings/__init__.py", "cuda/bindings/_version.py", "cuda/bindings/utils/*.py"),
    *("cuda/bindings/driver.*.so", "cuda/bindings/cydriver.*.so", "cuda/bindings/_internal/*.py"),
    *("cuda/bindings/_internal/driver.*.so", "cuda/bindings/_internal/utils.*.so"),
)
# cuda-bindings 12.9.10 calls pathfinder once, for this. The real package costs 50 ms of every start, to search for
# toolkits that we never load. `cuda` is made a plain package so that no other `cuda` on sys.path can mix with ours.
GENERATED = {
    "cuda/__init__.py": b'"""The driver layer of cuda-bindings, without the rest of the cuda namespace."""\n',
    "cuda/pathfinder.py": b'''"""Stands in for cuda-pathfinder: finds the driver as the system's loader does."""

import ctypes


class DynamicLibNotFoundError(RuntimeError):
    """The NVIDIA driver is not installed, or not visible in this container."""


class LoadedDL:
    """A loaded library; `_handle_uint` is its dlopen handle."""

    def __init__(self, library):
        self._library = library
        self._handle_uint = library._handle


def load_nvidia_dynamic_lib(libname):
    assert libname == "cuda", libname
    try:
        return LoadedDL(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise DynamicLibNotFoundError(str(error)) from None
''',
}

PART_BYTES = 8 << 20
PRESET = 9  # with PRESET_EXTREME; what is shipped
RENDER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = "rvllm"
from rvllm.__main__ import main
sys.exit(main())
"""

Files = Mapping[str, bytes]
Piece = tuple[str, int, int]  # path, offset in the file, length


@dataclass(frozen=True, slots=True)
class Part:
    """Up to PART_BYTES of joined files, raw, for the Pythons in `tags` ("cp311", ...)."""

    tags: tuple[str, ...]
    native: bool
    pieces: tuple[Piece, ...]
    raw: bytes

    def compressed(self, preset: int) -> bytes:
        """The part as an .xz file; machine code goes through the x86 filter first (-1.5 to -15 %)."""
        hard = preset | (lzma.PRESET_EXTREME if preset == PRESET else 0)
        compression = {"id": lzma.FILTER_LZMA2, "preset": hard, "dict_size": PART_BYTES}
        filters = [{"id": lzma.FILTER_X86}] * self.native + [compression]
        return lzma.compress(self.raw, lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=filters)


# --- The lock: one section a Python, in it pip's requirement lines with one hash each.


def read_lock(path: Path) -> dict[str, list[str]]:
    """Requirement lines by Python, as {"3.11": ["click==8.5.1 --hash=sha256:...", ...]}."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(line)
    return sections


def write_lock(path: Path) -> None:
    """Ask pip for each Python's wheels of PINS and record what came."""
    lines = ["# Written by `python build_zipapp.py --lock`: the wheels in rvllm.pyz, for CPython on Linux x86-64."]
    for python in PYTHONS:
        lines += ["", f"[{python}]"]
        pins = PINS | OLDER_PINS.get(python, {})
        with tempfile.TemporaryDirectory() as folder:
            for name, version in sorted(pins.items()):
                into = Path(folder, name)
                download(python, [f"{name}=={version}"], into)
                (wheel,) = into.iterdir()
                lines.append(f"{name}=={version} --hash=sha256:{sha256(wheel.read_bytes())}")
    path.write_text("\n".join(lines) + "\n", "utf-8")


def download(python: str, requirements: list[str], into: Path) -> None:
    """Have pip fetch these wheels, and nothing that they depend on, for `python`."""
    into.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory(dir=into) as fetched:  # whole wheels appear, also to a build beside this one
        listing = Path(fetched, "requirements.txt")
        listing.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        if subprocess.run([*command, "--dest", fetched, "--requirement", str(listing)]).returncode:
            raise SystemExit(f"build_zipapp: pip could not fetch the wheels for Python {python}")
        for wheel in Path(fetched).glob("*.whl"):
            wheel.replace(into / wheel.name)


def locked_wheels(python: str, folder: Path) -> list[Path]:
    """The wheels that the lock names for `python`: from `folder`, and fetched into it where missing."""
    requirements = read_lock(ROOT / "build_zipapp.lock").get(python)
    if requirements is None:
        raise SystemExit(f"build_zipapp: Python {python} is not in build_zipapp.lock. hint: write it with --lock")
    hashes = {line.rpartition("sha256:")[2]: line for line in requirements}
    found = wheels_by_hash(folder)
    if missing := [line for digest, line in hashes.items() if digest not in found]:
        download(python, missing, folder)
        found = wheels_by_hash(folder)
    return [found[digest] for digest in hashes]


def wheels_by_hash(folder: Path) -> dict[str, Path]:
    return {sha256(wheel.read_bytes()): wheel for wheel in folder.glob("*.whl")}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- What goes in.


def own_files(root: Path) -> dict[str, bytes]:
    """rvllm and the kernels as the wheel has them, by path relative to `root`."""
    paths = [path for package in OWN_PACKAGES for path in (root / package).rglob("*") if path.is_file()]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    kept = {name: path for name, path in names.items() if matches(name, OWN_FILES)}
    return {name: path.read_bytes() for name, path in kept.items()}


def library_files(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel that we use, by path."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/") and used(name)]
        return {name: archive.read(name) for name in names}


def used(name: str) -> bool:
    """Whether we ship this file of a wheel."""
    return matches(name, USED_OF_CUDA) if name.startswith("cuda/") else not matches(name, UNUSED)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits; its * also spans folders."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def licences(root: Path, wheels: Iterable[Path]) -> str:
    """Our licence, then each library's licence files, or what its metadata says where it ships none."""
    sections = {"": (root / "LICENSE").read_text("utf-8")}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(name for name in archive.namelist() if ".dist-info/" in name)
            title = next(name for name in names).partition(".dist-info/")[0].replace("-", " ")
            sections[title] = "\n".join(licence_texts(archive, names))
    line = "=" * 100
    return "\n".join(f"{line}\n{title or 'rvllm'}\n{line}\n\n{text}" for title, text in sorted(sections.items()))


def licence_texts(archive: zipfile.ZipFile, names: list[str]) -> Iterator[str]:
    """The texts of one wheel's licences, and the licences of the Rust crates linked into it."""
    texts = [name for name in names if "/licenses/" in name or "/LICENSE" in name or "/COPYING" in name]
    yield from (f"--- {name.partition('.dist-info/')[2]}\n\n{archive.read(name).decode('utf-8')}" for name in texts)
    if not texts:
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("/METADATA"))).decode("utf-8"))
        stated = [value for value in metadata.get_all("Classifier", []) if value.startswith("License ::")]
        if stated != ["License :: OSI Approved :: Apache Software License"]:
            raise SystemExit(f"build_zipapp: {names[0]} holds no licence text, and states {stated}")
        yield "Apache License 2.0: the text is that of rvllm's own licence, above.\n"
    for name in names:
        if "/sboms/" in name:
            crates = json.loads(archive.read(name))["components"]
            yield "Linked into it:\n" + "".join(
                f"  {crate['name']} {crate['version']}: {crate['licenses'][0]['expression']}\n" for crate in crates
            )


# --- How it is laid out.


def grouped(trees: Mapping[str, Files]) -> dict[tuple[str, ...], dict[str, bytes]]:
    """Files by the Pythons that have them with the same bytes: {("cp311", "cp312"): {path: content}, ...}."""
    holders: dict[tuple[str, bytes], list[str]] = {}
    for tag, files in trees.items():
        for path, content in files.items():
            holders.setdefault((path, content), []).append(tag)
    groups: dict[tuple[str, ...], dict[str, bytes]] = {}
    for (path, content), tags in sorted(holders.items()):
        groups.setdefault(tuple(tags), {})[path] = content
    return dict(sorted(groups.items()))


def parts(trees: Mapping[str, Files]) -> Iterator[Part]:
    """Cut every group into parts; machine code and text lie apart, as they compress differently."""
    for tags, files in grouped(trees).items():
        for native in (True, False):
            kind = {path: content for path, content in files.items() if is_native(path) == native}
            for pieces, raw in cut(kind):
                yield Part(tags, native, tuple(pieces), raw)


def is_native(path: str) -> bool:
    """Whether a path is a shared library: name.so, name.so.5."""
    return ".so" in Path(path).suffixes


def cut(files: Files) -> Iterator[tuple[list[Piece], bytes]]:
    """Join files in order, and cut at equal steps of at most PART_BYTES."""
    total = sum(map(len, files.values()))
    count = max(1, -(-total // PART_BYTES))
    step = max(1, -(-total // count))
    pieces: list[Piece] = []
    raw = bytearray()
    for path, content in files.items():
        for offset, length in spans(len(content), step, len(raw)):
            pieces.append((path, offset, length))
            raw += content[offset : offset + length]
            if len(raw) == step:
                yield pieces, bytes(raw)
                pieces, raw = [], bytearray()
    if pieces:
        yield pieces, bytes(raw)


def spans(size: int, step: int, filled: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the pieces of a file of `size` bytes, where `filled` bytes of the first step are taken."""
    offset = 0
    while True:
        length = min(size - offset, step - filled)
        yield offset, length
        offset += length
        filled = (filled + length) % step
        if offset == size:
            return


def payload(trees: Mapping[str, Files], preset: int) -> dict[str, bytes]:
    """The archive's payload/ entries: the compressed parts and their index."""
    cuts = list(parts(trees))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = list(pool.map(lambda part: part.compressed(preset), cuts))
    entries = {f"payload/{number:03}.xz": content for number, content in enumerate(packed)}
    index = [
        {"name": name, "pieces": part.pieces, "sha256": sha256(entries[name]), "tags": part.tags}
        for name, part in zip(entries, cuts)
    ]
    entries["payload/index.json"] = json.dumps(index, separators=(",", ":"), sort_keys=True).encode()
    return entries


# --- The archive.


def rendered(files: Files, argument: str) -> str:
    """What `rvllm ARGUMENT` prints, run from the files that we ship (so: with the pinned click), 80 columns wide."""
    with tempfile.TemporaryDirectory() as stage:
        for path, content in files.items():
            if not is_native(path):
                Path(stage, path).parent.mkdir(parents=True, exist_ok=True)
                Path(stage, path).write_bytes(content)
        command = [sys.executable, "-I", "-S", "-B", "-c", RENDER, stage, argument]
        environment = {"COLUMNS": "80", "LC_ALL": "C.UTF-8"}
        run = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    if run.returncode or not run.stdout:
        raise SystemExit(f"build_zipapp: rvllm {argument} failed:\n{run.stderr}")
    return run.stdout


def bootstrap(pythons: list[str], index: bytes, files: Files) -> bytes:
    """The archive's __main__.py: rvllm/bootstrap.py, told what it is in."""
    build = {
        "help": rendered(files, "--help"),
        "payload": sha256(index),
        "pythons": [[int(number) for number in python.split(".")] for python in pythons],
        "version": rendered(files, "--version"),
    }
    before, placeholder, after = files["rvllm/bootstrap.py"].decode("utf-8").partition("\nBUILD = {}\n")
    assert placeholder, "rvllm/bootstrap.py has no line BUILD = {}"
    return f"{before}\nBUILD = {build!a}\n{after}".encode("ascii")


def write_archive(path: Path, entries: Files) -> None:
    """Write the executable archive in one step: whoever runs an older one keeps its file."""
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(entries.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Unix, wherever it is built
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(buffer.getvalue())
    new.chmod(0o755)
    new.replace(path)


def build(pythons: list[str], output: Path, wheels: Path, preset: int) -> None:
    """Build `output` for these Pythons ("3.11", ...) with xz's `preset`; `wheels` holds what was fetched before."""
    ours = own_files(ROOT) | GENERATED
    libraries = {python: locked_wheels(python, wheels) for python in pythons}
    trees = {}
    for python in pythons:
        trees["cp" + python.replace(".", "")] = ours | {
            path: content for wheel in libraries[python] for path, content in library_files(wheel).items()
        }
    entries = payload(trees, preset)
    entries["__main__.py"] = bootstrap(pythons, entries["payload/index.json"], next(iter(trees.values())))
    entries["LICENSES"] = licences(ROOT, [wheel for found in libraries.values() for wheel in found]).encode()
    write_archive(output, entries)


def main() -> None:
    """The command line; prints the file, its size and its sha256."""
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser = argparse.ArgumentParser(description="Build rvllm and all that it needs as one executable file.")
    parser.add_argument("--python", action="append", metavar="X.Y", help="a Python it is for; may be repeated")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "rvllm.pyz", metavar="FILE")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".cache" / "wheels", metavar="DIR", help="fetched wheels")
    parser.add_argument(
        "--preset", type=int, choices=range(PRESET + 1), default=PRESET, metavar="N", help="0: a quick, larger file"
    )
    parser.add_argument("--lock", action="store_true", help="write build_zipapp.lock anew and build nothing")
    options = parser.parse_args()
    if options.lock:
        write_lock(ROOT / "build_zipapp.lock")
        return
    wanted = set(options.python or [running])
    if wanted - set(PYTHONS):
        parser.error(
            f"a file can be for Python {', '.join(PYTHONS)}, not for {', '.join(sorted(wanted - set(PYTHONS)))}"
        )
    build([python for python in PYTHONS if python in wanted], options.output, options.wheels, options.preset)
    content = options.output.read_bytes()
    print(f"{options.output}  {len(content) / 1e6:.1f} MB  sha256 {sha256(content)}")


if __name__ == "__main__":
    main()
