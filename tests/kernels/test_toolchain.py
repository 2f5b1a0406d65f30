"""The committed PTX is what its sources compile to, and assembles for every GPU that it may run on."""

from __future__ import annotations

import importlib.metadata
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels_ptx import assemble, build
from kernels_ptx.source import Source, SourceError, read_entries, read_source
from kernels_ptx.tiers import MINIMUM_DRIVERS, OLDEST_PTXAS, TIERS, Tier

CHECKOUT = Path(__file__).parents[2]
ROOTS = pytest.mark.parametrize("root", build.ROOTS, ids=lambda root: root.name)


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not installed("nvidia-cuda-nvrtc-cu12"), reason=f"needs pip install {build.COMPILER}")


def built(root: Path) -> Iterator[tuple[Source, Tier, str]]:
    """Every source and tier, and the place of its PTX."""
    for source in build.sources(root):
        for tier in source.tiers:
            yield source, tier, build.ptx_place(source, tier)


@ROOTS
def test_the_manifest_describes_exactly_the_files_that_are_there(root: Path) -> None:
    files = build.read_manifest(root)
    assert sorted(files) == sorted(path.relative_to(root).as_posix() for path in root.rglob("*.ptx"))
    assert sorted(files) == sorted(place for _, _, place in built(root))
    assert (root / "manifest.json").read_text(encoding="utf-8") == build.manifest_text(files)


@ROOTS
def test_no_source_has_changed_since_its_ptx_was_compiled(root: Path) -> None:
    files = build.read_manifest(root)
    stale = [
        place for source, tier, place in built(root) if files[place]["source_sha256"] != build.source_hash(source, tier)
    ]
    assert not stale, "hint: python -m kernels_ptx.build --ptxas"


@ROOTS
def test_the_manifest_says_of_each_ptx_what_its_text_says(root: Path) -> None:
    for source, tier, place in built(root):
        record = {key: value for key, value in build.read_manifest(root)[place].items() if key != "assembled"}
        assert record == build.describe(source, tier, (root / place).read_text(encoding="ascii"))


@ROOTS
def test_every_ptx_names_its_tiers_version_and_target_and_keeps_the_rules(root: Path) -> None:
    for _, tier, place in built(root):
        text = (root / place).read_text(encoding="ascii")
        assert re.findall(r"^\.version (.*)$", text, re.MULTILINE) == [tier.ptx_version]
        assert re.findall(r"^\.target (.*)$", text, re.MULTILINE) == [f"sm_{tier.architecture}"]
        assert not re.search(r"\b(atom|red)\.[\w.]*\.f(16|32|64)", text), (
            f"{place}: the order of float atomics is not fixed"
        )
        assert ".local" not in text, f"{place}: an array is not in registers"
        assert not re.search(r"^\.(file|section)\b|^\.global (?!.*__nv_atomic)", text, re.MULTILINE), (
            f"{place}: line information, or a global"
        )


@ROOTS
@needs_nvrtc
def test_compiling_again_gives_the_committed_bytes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what has not changed since the last whole `--check`, each tier's shortest stands for the rest."""
    monkeypatch.chdir(tmp_path)
    longest_first = sorted(built(root), key=lambda one: -(root / one[2]).stat().st_size)
    shortest = {tier.name: place for _, tier, place in longest_first}.values()
    equal = {place: record for place, record in build.read_checked(root).items() if place not in shortest}
    assert build.differences(root, equal) == []


@ROOTS
def test_every_ptx_assembles_for_every_target_without_spills(root: Path) -> None:
    """What the manifest does not know yet is assembled now, which fetches ptxas through pip."""
    for source, tier, place in built(root):
        record = build.read_manifest(root)[place]
        report = record.get("assembled") or build.assemble_all(source, tier, (root / place).read_text(encoding="ascii"))
        assert sorted(report) == sorted(f"sm_{target}" for target in tier.targets)
        for resources in report.values():
            assert sorted(resources) == sorted(record["entries"])
            assert all(taken["spill_bytes"] <= source.spill_bytes for taken in resources.values())


def test_the_flag_for_dependent_launch_is_read_from_the_text() -> None:
    files = build.read_manifest(build.ROOTS[1])
    assert files["ptx/t90/probe.ptx"]["griddepcontrol"]
    assert not files["ptx/t70/probe.ptx"]["griddepcontrol"]


def test_every_tier_has_a_driver_and_an_old_assembler() -> None:
    for tier in TIERS.values():
        assert tier.ptx_version in MINIMUM_DRIVERS
        assert tier.ptx_version in OLDEST_PTXAS
        assert tier.architecture in tier.targets


# ---- The parts


KERNEL = """// twice: out = 2 x.
// tiers: t70 t80
#include "element.cuh"

KERNEL(64) void twice_f16(const half_t* x, half_t* out,
                          int count) { if (thread_index() < count) out[thread_index()] = x[thread_index()]; }
"""


def root_with(folder: Path, text: str = KERNEL) -> Path:
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "twice.cu").write_text(text)
    return folder


def test_a_source_says_its_tiers_entries_and_headers(tmp_path: Path) -> None:
    source = read_source(root_with(tmp_path) / "src" / "twice.cu", build.HEADERS)
    assert [tier.name for tier in source.tiers] == ["t70", "t80"]
    assert [(entry.name, entry.threads, entry.arguments) for entry in source.entries] == [
        ("twice_f16", 64, ("x", "out", "count"))
    ]
    assert list(source.files) == ["element.cuh", "intrinsics.cuh", "twice.cu"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("// tiers: t70 t80\n", "", "no tiers"),
        ("t70 t80", "t70 t81", "no such tier: t81"),
        ("KERNEL(64) void", "void", "no entry"),
    ],
)
def test_a_source_that_does_not_say_them_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = root_with(tmp_path, KERNEL.replace(old, new)) / "src" / "twice.cu"
    with pytest.raises(SourceError, match=message):
        read_source(path, build.HEADERS)


def test_a_changed_header_changes_the_hash(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.mkdir()
    for name in ("element.cuh", "intrinsics.cuh"):
        (headers / name).write_text((build.HEADERS / name).read_text())
    path = root_with(tmp_path / "root") / "src" / "twice.cu"
    before = build.source_hash(read_source(path, headers), TIERS["t70"])
    assert before == build.source_hash(read_source(path, build.HEADERS), TIERS["t70"])
    assert before != build.source_hash(read_source(path, headers), TIERS["t80"])
    (headers / "intrinsics.cuh").write_text("// changed\n" + (headers / "intrinsics.cuh").read_text())
    assert before != build.source_hash(read_source(path, headers), TIERS["t70"])


@needs_nvrtc
def test_only_what_changed_is_compiled_and_what_has_no_source_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = root_with(tmp_path)
    build.compile_changed(root, everything=False)
    assert capsys.readouterr().err.split() == ["compile", "ptx/t70/twice.ptx", "compile", "ptx/t80/twice.ptx"]
    build.compile_changed(root, everything=False)
    assert capsys.readouterr().err == ""
    assert build.differences(root) == []
    (root / "src" / "twice.cu").write_text(KERNEL.replace("t70 t80", "t80").replace("= x[", "= x[1 + "))
    assert build.differences(root) == [
        "ptx/t80/twice.ptx is not what its source compiles to",
        "ptx/t70/twice.ptx has no source",
    ]
    build.compile_changed(root, everything=False)
    assert [path.name for path in sorted((root / "ptx").rglob("*.ptx"))] == ["twice.ptx"]
    assert build.differences(root) == []


@needs_nvrtc
def test_what_was_found_equal_is_compiled_again_only_when_a_hash_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_with(tmp_path)
    build.compile_changed(root, everything=False)
    texts = {place: (root / place).read_text(encoding="ascii") for _, _, place in built(root)}
    equal = {place: build.check_record(source, tier, texts[place]) for source, tier, place in built(root)}
    compiled: list[str] = []
    compile_ptx = build.compile_ptx
    monkeypatch.setattr(
        build, "compile_ptx", lambda source, tier: compiled.append(tier.name) or compile_ptx(source, tier)
    )
    assert build.differences(root, equal) == [] and compiled == []
    (root / "ptx/t70/twice.ptx").write_text(texts["ptx/t70/twice.ptx"] + "// changed\n")
    assert build.differences(root, equal) == ["ptx/t70/twice.ptx is not what its source compiles to"]
    assert compiled == ["t70"]
    (root / "src" / "twice.cu").write_text(KERNEL.replace("= x[", "= x[1 + "))
    assert len(build.differences(root, equal)) == 2
    assert compiled == ["t70", "t70", "t80"]


@needs_nvrtc
def test_a_source_that_does_not_compile_is_shown_with_the_compilers_words(tmp_path: Path) -> None:
    source = read_source(root_with(tmp_path, KERNEL.replace("= x[", "= y[")) / "src" / "twice.cu", build.HEADERS)
    with pytest.raises(build.BuildError, match='identifier "y" is undefined'):
        build.compile_ptx(source, TIERS["t80"])


@needs_nvrtc
def test_an_entry_that_is_not_marked_as_one_is_refused(tmp_path: Path) -> None:
    hidden = '\nextern "C" __global__ void hidden() {}\n'
    source = read_source(root_with(tmp_path, KERNEL + hidden) / "src" / "twice.cu", build.HEADERS)
    with pytest.raises(build.BuildError, match=r"not written as KERNEL.*hidden"):
        build.build(source, TIERS["t80"])


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 128 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, 380 bytes cmem[0]
"""


def test_registers_shared_memory_and_spills_are_read_from_the_assembler() -> None:
    assert assemble.read_report(REPORT) == {"a": assemble.Resources(20, 0, 0), "b": assemble.Resources(48, 128, 20)}


@pytest.fixture
def assembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of ptxas, for what the real one would have to be provoked to say."""
    monkeypatch.setenv("RVLLM_BUILD_CACHE", str(tmp_path))
    path = assemble.cache_folder() / "ptxas" / "0.0.0" / "nvidia/cuda_nvcc/bin/ptxas"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_serialised_matrix_product_is_an_error(assembler: Path) -> None:
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assembler.write_text(f"#!/bin/sh\necho '{warning}'\n")
    with pytest.raises(assemble.AssemblyError, match="C7510"):
        assemble.assemble("", "90a", "0.0.0")
    assert assemble.assemble("", "90a", "0.0.0", may_be_slow=True) == {}


def test_a_refused_ptx_is_shown_with_the_assemblers_words(assembler: Path) -> None:
    assembler.write_text("#!/bin/sh\necho 'Unsupported .version 8.8' >&2; exit 255\n")
    with pytest.raises(
        assemble.AssemblyError, match=r"ptxas 0\.0\.0 refuses it for sm_80:\nUnsupported \.version 8\.8"
    ):
        assemble.assemble("", "80", "0.0.0")


def test_a_spill_beyond_the_budget_is_an_error(
    assembler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assembler.write_text(f"#!/bin/sh\ncat <<'END'\n{REPORT}END\n")
    monkeypatch.setattr(build, "NEWEST_PTXAS", "0.0.0")
    monkeypatch.setattr(build, "OLDEST_PTXAS", dict.fromkeys(OLDEST_PTXAS, "0.0.0"))
    path = root_with(tmp_path / "root") / "src" / "twice.cu"
    with pytest.raises(assemble.AssemblyError, match="b spills 20 bytes on sm_80, the budget is 0"):
        build.assemble_all(read_source(path, build.HEADERS), TIERS["t80"], "")
    path.write_text(KERNEL.replace("// tiers", "// spills: at most 20 bytes\n// tiers"))
    assert set(build.assemble_all(read_source(path, build.HEADERS), TIERS["t90"], "")) == {"sm_90", "sm_100", "sm_120"}


# ---- What a reviewer would say twice

SOURCES = [path for root in build.ROOTS for path in sorted((root / "src").iterdir())]
MATHS = "exp|exp2|tanh|erf|fma|sqrt|rsqrt|fmax|fmin|log|pow|sin|cos|rint|floor|fabs"
BUILT_IN = re.compile(rf"\basm\b|__\w+|\b(thread|block|grid)(Idx|Dim)\b|\b({MATHS})f?\(|#include <")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_only_the_intrinsics_know_cuda(path: Path) -> None:
    if not path.name.startswith("intrinsics"):
        code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        assert [found[0] for found in BUILT_IN.finditer(code)] == []


@pytest.mark.parametrize("path", sorted(build.HEADERS.glob("*.cu")), ids=lambda path: path.name)
def test_a_kernels_head_says_its_formula_shapes_launch_bound_and_assumptions(path: Path) -> None:
    head = head_of(path)
    assert head.startswith(f"// {path.stem}: ")
    # What is the same for several kernels stands in one of them, which the others name.
    head += "".join(head_of(build.HEADERS / name) for name in re.findall(r"as in (\w+\.cuh?)", head))
    for word in ("launch: ", "bound: ", "assumes: ", "tiers: "):
        assert f"\n// {word}" in head
    for name in {argument for entry in read_entries(path.read_text(encoding="utf-8")) for argument in entry.arguments}:
        assert re.search(rf"\b{name}\b", head), f"{name} is not explained"


def head_of(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("#include")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_kernel_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_every_entry_is_named_by_its_file() -> None:
    for source in build.sources(build.PACKAGE):
        for entry in source.entries:
            assert re.fullmatch(rf"{source.stem}_\w+", entry.name)
