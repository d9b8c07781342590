"""A wheel with kernels inside: which library fits a processor, when another one is compiled, and that no compiler is
needed."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from covey.llm.native import bindings, build, variants
from covey.llm.native.variants import VARIANTS, fitting, flags_of
from helpers.mutants import write_unoptimised_compiler
from helpers.run_helpers import write_recipe
from helpers.tiny_models import tiny_folder

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++")

# From the field "flags" of /proc/cpuinfo ("Features" on aarch64); each line adds to those before it.
IVY_BRIDGE = "fpu sse sse2 pni ssse3 sse4_1 sse4_2 popcnt aes xsave avx f16c rdrand"
HASWELL = f"{IVY_BRIDGE} fma movbe abm bmi1 avx2 bmi2 erms"
KNIGHTS_LANDING = f"{HASWELL} avx512f avx512pf avx512er avx512cd"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
ZEN_4 = f"{ICE_LAKE} avx512_bf16 gfni vaes"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 avx512_fp16 amx_tile amx_int8"
ALDER_LAKE = f"{HASWELL} avx_vnni gfni vaes"
GRAVITON_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
GRAVITON_3 = f"{GRAVITON_2} sve asimdfhm svebf16 i8mm bf16 dgh rng"


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, "amx"),
        ("x86_64", SAPPHIRE_RAPIDS.replace(" amx_tile", ""), "avx512_bf16"),  # a virtual machine without tiles
        ("x86_64", ZEN_4, "avx512_bf16"),
        ("x86_64", ICE_LAKE, "avx512"),
        ("x86_64", SKYLAKE_X, "avx512"),
        ("x86_64", KNIGHTS_LANDING, "avx2"),
        ("x86_64", ALDER_LAKE, "avx2"),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", HASWELL.replace(" fma", ""), None),
        ("x86_64", IVY_BRIDGE, None),
        ("x86_64", "", None),  # macOS, which has no /proc/cpuinfo
        ("aarch64", GRAVITON_2, "neon"),
        ("aarch64", GRAVITON_3, "neon"),
        ("aarch64", "", None),
        ("arm64", "", None),
        ("riscv64", "", None),
    ],
)
def test_the_best_library_whose_instructions_the_processor_has_is_chosen(machine, features, name):
    assert fitting(machine, features.split()) == name


# What the sources ask the compiler, and what a processor needs besides: the instructions that the flags imply.
IMPLIED = {"SSE3", "SSSE3", "SSE4_1", "SSE4_2", "POPCNT", "CRC32", "XSAVE", "AVX", "EVEX512", "AVX512F"}


@pytest.mark.skipif(COMPILER is None or platform.machine() != "x86_64", reason="no g++ for x86-64")
@pytest.mark.parametrize("name", VARIANTS["x86_64"][1])
def test_the_compiler_may_use_no_instruction_that_is_not_asked_for(name):
    def macros(*flags: str) -> set[str]:
        words = [str(COMPILER), *flags, "-E", "-dM", "-x", "c++", os.devnull]
        lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
        return {line.split()[1].strip("_") for line in lines if line.endswith("__ 1") and "_tune_" not in line}

    used = macros(*flags_of("x86_64", name)) - macros("-O3", *variants.FLAGS, "-march=x86-64")
    asked = {feature.upper().replace("AVX512_", "AVX512") for feature in VARIANTS["x86_64"][1][name]}
    assert asked <= used
    assert used - asked <= IMPLIED


@pytest.fixture
def wheel_of(tmp_path, monkeypatch):
    """A function that makes a wheel's folder whose one library, the one for this processor, has this C++ source."""
    monkeypatch.setattr(variants, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "cpu_info", lambda field: HASWELL if field == "flags" else "")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def make(source: str) -> Path:
        library = tmp_path / "avx2.so"
        words = [str(COMPILER), "-shared", "-fPIC", "-fopenmp", "-x", "c++", "-", "-c", "-o", str(tmp_path / "made.o")]
        subprocess.run(words, input=source, text=True, check=True)
        subprocess.run([str(COMPILER), "-shared", str(tmp_path / "made.o"), "-o", str(library)], check=True)
        return library

    return make


NEITHER = {"has_amx": False, "has_avx512_bf16": False}
PARALLEL = """extern "C" int self_test() {
    int threads = 0;
    #pragma omp parallel num_threads(2) reduction(+ : threads)
    threads++;
    return threads == 2;
}
"""


def answering(statement: str) -> str:
    return f'extern "C" int nowhere(); extern "C" int self_test() {{ {statement} }}'


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (PARALLEL, ""),
        (answering("return 0;"), "exit status 1"),
        (answering("__builtin_trap();"), "exit status -4"),
        (answering("return nowhere();"), "undefined symbol: nowhere"),
        ("int another;", "undefined symbol: self_test"),
        ("truncated", "file too short"),
    ],
)
def test_a_library_that_fails_its_test_is_replaced_by_a_compiled_one(source, reason, wheel_of, monkeypatch, caplog):
    library = wheel_of(PARALLEL if source == "truncated" else source)
    if source == "truncated":
        library.write_bytes(library.read_bytes()[:40])
    compiled = object()
    monkeypatch.setattr(bindings, "load_library", lambda compiler: compiled)
    monkeypatch.setattr(bindings, "find_compiler", lambda: ["c++"])
    found = bindings._library.__wrapped__()
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    if reason:
        assert found is compiled
        assert len(lines) == 1
        assert lines[0].startswith(f"the kernels of the wheel, {library}, are not used, but compiled ones: ")
        assert reason in lines[0]
    else:
        assert build.variant_of(found) == "avx2"
        assert found.self_test() == 1
        assert b"libgomp" not in library.read_bytes(), "torch's is found, whatever its name is"
        assert not lines


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize(("wheel", "expected"), [(True, "AVX2, of the wheel"), (False, "AVX-512")])
def test_a_library_of_a_wheel_names_its_own_instructions(wheel, expected, wheel_of, monkeypatch):
    """On a processor with more, of which the next library needs too much."""
    if not wheel:
        monkeypatch.setattr(variants, "FOLDER", ROOT)
    library = ctypes.CDLL(str(wheel_of(PARALLEL)))
    for module in (build, bindings):
        monkeypatch.setattr(module, "cpu_info", lambda field: KNIGHTS_LANDING)
    monkeypatch.setattr(bindings.EntryPoints, "__init__", lambda entries, *_: vars(entries).update(NEITHER))
    assert bindings.Kernels(library, torch.bfloat16).instruction_set == expected


def test_without_a_fitting_library_the_kernels_are_compiled_in_silence(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(variants, "FOLDER", tmp_path)
    for flags in (IVY_BRIDGE, HASWELL):
        monkeypatch.setattr(build, "cpu_info", lambda field, flags=flags: flags)
        assert build.load_prebuilt() is None
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_a_wheel_trains_without_a_compiler(tmp_path):
    """As a stranger installs it, beside the other packages of this environment."""
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
    environment["CXX"] = str(write_unoptimised_compiler(tmp_path))
    make = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(make, cwd=ROOT, env=environment, check=True)
    (wheel,) = tmp_path.glob("covey-*-py3-none-linux_*.whl")
    machine = wheel.stem.partition("linux_")[2]
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).stem for name in archive.namelist() if name.endswith(".so")}
    assert names == set(VARIANTS[machine][1])

    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clean)], check=True)
    python = str(clean / "bin" / "python")
    install = ["-m", "pip", "--python", python, "-q", "install", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, *install], check=True)
    (site,) = clean.glob("lib/python3*/site-packages")
    (site / "zz.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model"), steps=1)
    environment = {"PATH": str(tmp_path / "no programs"), "HOME": str(tmp_path), "COVEY_CACHE": os.devnull}
    run = [python, "-m", "covey", "train", str(recipe), "--run-dir", str(tmp_path / "run")]
    output = subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout
    assert ", of the wheel; prompts are shared" in output
    code = (
        "import torch; from covey.llm.native.bindings import kernels_for; kernels_for(torch.float32, "
        "torch.device('cpu')); lines = list(open('/proc/self/maps')); "
        "print(len({line.split()[-1] for line in lines if 'omp.' in line or 'omp-' in line}))"
    )
    libraries = subprocess.run([python, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert libraries.stdout.strip() == "1", "a second OpenMP library has threads of its own"
