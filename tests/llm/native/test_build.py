"""The kernels are compiled once, loaded only from files that nobody else can have written, and never stop a run."""

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from covey.llm.native import bindings, build
from covey.runtime.variables import cache_folder
from helpers.mutants import write_unoptimised_compiler
from helpers.tiny_models import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
REASON = "covey's kernels are not used, so sampling and updates are slower and bf16 is rounded elsewhere: "


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory) -> Iterator[None]:
    """Without optimisation, because the kernels run for milliseconds."""
    unoptimised = write_unoptimised_compiler(tmp_path_factory.mktemp("compiler"))
    with pytest.MonkeyPatch.context() as patch:
        if unoptimised:
            patch.setenv("CXX", str(unoptimised))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory, compiler) -> Path:
    """A cache that holds the compiled kernels; to be copied, never changed."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVEY_CACHE", str(folder))
        build.load_library(build.find_compiler())
    return folder


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The kernels have not been looked for yet, and the cache is empty."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("COVEY_CACHE", str(cache))
    bindings._library.cache_clear()
    bindings._kernels.cache_clear()
    yield cache
    bindings._library.cache_clear()
    bindings._kernels.cache_clear()


@pytest.fixture
def filled(fresh, built):
    """The cache holds the compiled kernels; compiling them again fails the test."""
    shutil.copytree(built, fresh, dirs_exist_ok=True)
    return fresh


def the_library(cache: Path) -> Path:
    (found,) = cache.glob("*/kernels-*.so")
    return found


def no_compiler(*_: object) -> None:
    raise AssertionError("compiled again")


def kernels_work() -> bool:
    kernels = bindings.kernels_for(torch.float32, CPU)
    return kernels is not None and kernels.rmsnorm(torch.ones(1, 8), torch.ones(8), 0.0)[0].tolist() == [[1.0] * 8]


def only_line(caplog) -> str:
    (line,) = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
    return line


# A line of Python that compiles something else.
COMPILES = "import subprocess; subprocess.run(['gcc', '-xc', '-shared', '-', '-o', out], input=b'%s')"


def compiler_that(folder: Path, does: str) -> str:
    """A script in place of the compiler, which tells its version and otherwise `does` something with sys.argv."""
    script = folder / "compiler"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nif '--version' in sys.argv: sys.exit(print('c++ 1.0'))\n"
        f"out = sys.argv[sys.argv.index('-o') + 1]\n{does}\n"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_the_kernels_are_compiled_once(filled, monkeypatch):
    monkeypatch.setattr(build, "_compile", no_compiler)
    assert kernels_work()
    bindings._library.cache_clear()
    bindings._kernels.cache_clear()
    assert bindings.kernels_for(torch.bfloat16, CPU) is not None
    left = sorted(path.name for path in the_library(filled).parent.iterdir())
    stem = the_library(filled).stem
    assert left == [f"{stem}.sha256", f"{stem}.so", "lock"], "nothing else is left behind"


@pytest.mark.slow
def test_only_the_user_may_read_and_write_the_cache(built):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in built.rglob("*")}
    assert modes == {name: 0o700 if name.endswith(".so") or "." not in name else 0o600 for name in modes} | {
        "lock": 0o600
    }


@pytest.mark.parametrize("changed", ["source", "header", "compiler", "flags", "processor"])
def test_another_source_compiler_flag_or_processor_means_another_library(changed, monkeypatch, tmp_path):
    shutil.copytree(build.SOURCE.parent, tmp_path / "native")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "native" / "kernels.cpp")
    compiler, flags = build.find_compiler(), build.FLAGS
    before = build._fingerprint(compiler, flags)
    assert before == build._fingerprint(compiler, flags)
    if changed == "source":
        build.SOURCE.write_text(build.SOURCE.read_text() + "\n")
    if changed == "header":
        header = build.SOURCE.with_name("simd.h")
        header.write_text(header.read_text() + "\n")
    if changed == "compiler":
        compiler = [compiler_that(tmp_path, "")]
    if changed == "flags":
        flags = [*flags, "-g"]
    if changed == "processor":
        monkeypatch.setattr(build, "cpu_info", lambda field: "another")
    assert build._fingerprint(compiler, flags) != before


@pytest.mark.sampled(10)
@pytest.mark.parametrize("what", ["library", "checksum", "folder"])
@pytest.mark.parametrize("how", ["group", "others", "link", "owner"])
def test_a_library_that_somebody_else_may_have_written_is_not_loaded(what, how, filled, monkeypatch, caplog, tmp_path):
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    planted = the_library(filled)
    path = {"library": planted, "checksum": planted.with_suffix(".sha256"), "folder": planted.parent}[what]
    if how == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "owner":
        os.chown(path, 12345, -1)
    else:
        path.chmod(path.stat().st_mode | (stat.S_IWGRP if how == "group" else stat.S_IWOTH))
    monkeypatch.setattr(ctypes, "CDLL", no_compiler)
    assert bindings.kernels_for(torch.float32, CPU) is None
    line = only_line(caplog)
    assert line.startswith(REASON)
    assert str(path) in line


@pytest.mark.slow
def test_a_planted_library_without_its_checksum_is_replaced(fresh, monkeypatch):
    folder = fresh / f"kernels-{os.geteuid()}"
    folder.mkdir(parents=True, mode=0o700)
    name = f"kernels-{build._fingerprint(build.find_compiler(), build.FLAGS)}.so"
    (folder / name).write_bytes(b"planted")
    (folder / name).chmod(0o700)
    assert kernels_work()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "checksum empty", "checksum missing", "no text"])
def test_a_damaged_library_is_compiled_anew_before_it_is_loaded(damage, filled, built, monkeypatch, caplog):
    path = the_library(filled)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "checksum missing":
        path.with_suffix(".sha256").unlink()
    else:
        path.with_suffix(".sha256").write_bytes(b"" if damage == "checksum empty" else b"\xff\xfe\x00")
    compiled: list[Path] = []

    def again(_compiler, _flags, target: Path) -> None:
        compiled.append(target)
        for file in the_library(built).parent.glob("kernels-*"):
            shutil.copy(file, target.parent)

    monkeypatch.setattr(build, "_compile", again)
    assert kernels_work()
    assert compiled == [path]
    assert only_line(caplog) == f"the compiled kernels {path} are damaged and will be compiled again"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("sys.exit('fatal error: no disk')", "compiler: fatal error: no disk"),
        ("sys.exit('\\x1b[31mfatal error\\x07: \\udcff')", "compiler: [31mfatal error"),
        ("os.write(2, b'error: \\xff\\xfe')", "wrote no library"),
        ("sys.exit(3)", "compiler: exit status 3"),
        ("os.kill(os.getpid(), 9)", "compiler: exit status -9"),
        ("pass", "wrote no library"),
        ("os.mkdir(out)", "wrote no library"),
        ("open(out, 'w').write('no library')", "file too short"),
        (COMPILES % "int another;", "undefined symbol: self_test"),
        (COMPILES % ("int self_test() { return 0; }"), "exit status 1"),
        (COMPILES % ("int self_test() { __builtin_trap(); }"), "exit status -"),
    ],
)
def test_a_compiler_that_fails_is_told_in_one_line(does, reason, fresh, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", compiler_that(tmp_path, does))
    assert bindings.kernels_for(torch.float32, CPU) is None
    assert bindings.kernels_for(torch.bfloat16, CPU) is None
    line = only_line(caplog)
    assert line.startswith(REASON)
    assert reason in line
    assert line.isprintable()
    assert not list(fresh.glob("*/kernels-*")), "nothing is kept"
    assert not list(fresh.glob(f"*/{build.SCRATCH}*"))


@pytest.mark.parametrize("named", ["/nowhere/c++", "no-such-compiler", "/", "'unclosed", "true", "false", "cat \0"])
def test_a_cxx_that_is_no_compiler_ends_in_one_line(named, fresh, monkeypatch, caplog):
    if "\0" not in named:
        monkeypatch.setenv("CXX", named)
    else:
        monkeypatch.setattr(build, "find_compiler", lambda: [named])
        monkeypatch.setattr(bindings, "find_compiler", lambda: [named])
    assert bindings.kernels_for(torch.float32, CPU) is None
    assert only_line(caplog).startswith(REASON)


def test_cxx_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "  ccache 'my compiler' -stdlib=libc++ ")
    assert build.find_compiler() == ["ccache", "my compiler", "-stdlib=libc++"]
    monkeypatch.setenv("CXX", " ")
    assert len(build.find_compiler()) == 1


def test_a_compiler_that_never_ends_is_ended_with_what_it_started(fresh, tmp_path, monkeypatch, caplog):
    """As the driver of gcc, which starts the compiler proper. Its child keeps the pipe open until it is ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waits = f"import subprocess; subprocess.run(['sh', '-c', 'exec 3>{pipe}; sleep 600'])"
    monkeypatch.setenv("CXX", compiler_that(tmp_path, waits))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1.0)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert bindings.kernels_for(torch.float32, CPU) is None
    assert "did not finish in 1 s" in only_line(caplog)
    os.set_blocking(descriptor, True)
    assert os.read(descriptor, 1) == b""
    os.close(descriptor)


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["lib/libbackend_with_compiler.so", "lib/libgomp.so.1"], "lib/libgomp.so.1"),
        (["lib/libarm_compute.so", "lib/libarm_compute_graph.so", "lib/libgomp-4dbbc2f2.so.1.0.0"], "lib/libgomp-4dbb"),
        (["lib/libbackend_with_compiler.so", "../torch.libs/libgomp-a34b3233.so.1.0.0"], "../torch.libs/libgomp-a34b"),
        (["lib/libcomposable.so", "lib/libomp.dylib", "lib/libtorch.dylib"], "lib/libomp.dylib"),
        (["lib/libiomp5.so", "lib/libnvpl_blas_lp64_gomp.so.0"], "lib/libiomp5.so"),
        (["lib/libbackend_with_compiler.so", "lib/libnvpl_blas_lp64_gomp.so.0"], None),
    ],
)
def test_the_openmp_library_of_torch_is_found_by_its_name(files, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    for file in files:
        (tmp_path / "torch" / "lib" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / file).touch()
    found = build._openmp_of_torch()
    if chosen is None:
        assert found is None
    else:
        assert str(found).startswith(str((tmp_path / "torch" / chosen).resolve()))


@pytest.mark.parametrize("refused", [[], ["-fopenmp"], ["-fopenmp", "-Xclang"]], ids=["gcc", "Apple's clang", "none"])
def test_a_compiler_is_given_openmp_as_it_takes_it_or_one_thread_is_said(refused, fresh, tmp_path, monkeypatch, caplog):
    """Apple's clang refuses -fopenmp but for the compiler proper."""
    log = tmp_path / "log"
    does = f"""
if any(word == '-fopenmp' and sys.argv[at - 1] != '-Xclang' or word == '-Xclang' for at, word in enumerate(sys.argv)
       if word in {refused}): sys.exit("clang: error: unsupported option '-fopenmp'")
if '-shared' in sys.argv: open({str(log)!r}, 'w').write(' '.join(sys.argv))
"""
    compiles = does + COMPILES % "int self_test() { return 1; }"
    monkeypatch.setenv("CXX", compiler_that(tmp_path, compiles))
    assert build.load_library(build.find_compiler()).self_test() == 1
    words = log.read_text().split()
    assert [word for word in words if word in ("-Xclang", "-fopenmp")] == [["-fopenmp"], ["-Xclang", "-fopenmp"], []][
        len(refused)
    ]
    runtime = build._openmp_of_torch()
    assert (str(runtime) in words) is (runtime is not None and len(refused) < 2)
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.endswith("has no OpenMP, so covey's kernels compute with one thread") for line in lines] == [True] * (
        len(refused) == 2
    )


def test_the_self_test_finds_an_openmp_that_torch_alone_has_loaded(fresh, tmp_path, monkeypatch):
    """Such as one with a name of the wheel's own, or Apple's, whose install name is a path of torch's builder."""
    runtime, source = tmp_path / "libomp.so", tmp_path / "kernels.cpp"
    (tmp_path / "omp.cpp").write_text('extern "C" int found() { return 1; }')
    source.write_text('extern "C" int found(); extern "C" int self_test() { return found(); }')
    named = ["-shared", "-fPIC", "-Wl,-soname,libomp-of-torch.so"]
    subprocess.run([*build.find_compiler(), *named, tmp_path / "omp.cpp", "-o", runtime], check=True)
    ctypes.CDLL(str(runtime))  # by torch
    monkeypatch.setattr(build, "_openmp_of_torch", lambda: runtime)
    monkeypatch.setattr(build, "SOURCE", source)
    assert build.load_library(build.find_compiler()).self_test() == 1


def test_without_a_compiler_torch_decodes_and_one_line_says_so(fresh, tmp_path, monkeypatch, caplog):
    from covey.data import Start
    from covey.llm.generation.local_generator import LocalGenerator
    from covey.llm.model.chat import Chat
    from covey.llm.policy import LanguagePolicy
    from covey.llm.sampler import LanguageSampler

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    made = LanguageSampler(LocalGenerator(LanguagePolicy(tiny_model("llama"))), chat, seed=5, max_new_tokens=4)
    for step in (1, 2):
        made.sample([Start(0, "1+2")], 2, step=step)
    assert only_line(caplog) == f"{REASON}no C++ compiler was found"


def test_they_can_be_switched_off(fresh, monkeypatch, caplog):
    monkeypatch.setenv(bindings.SWITCH, "0")
    assert bindings.kernels_for(torch.float32, CPU) is None
    assert not caplog.records
    assert not fresh.exists()


@pytest.mark.parametrize("obstacle", ["a file", "below a file", "a link to itself", "no home"])
def test_a_cache_that_cannot_be_written_ends_in_one_line(obstacle, fresh, tmp_path, monkeypatch, caplog):
    if obstacle == "a file":
        fresh.write_text("")
    elif obstacle == "below a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "file" / "cache"))
    elif obstacle == "a link to itself":
        fresh.symlink_to(fresh)
    else:
        monkeypatch.setenv("COVEY_CACHE", "~nobody-of-this-name/cache")
    assert bindings.kernels_for(torch.float32, CPU) is None
    assert only_line(caplog).startswith(REASON)


@pytest.mark.slow
def test_processes_that_compile_at_once_wait_for_each_other(fresh, tmp_path, built):
    """The first compiles; the others find its library. What a killed compiler left is removed."""
    folder = fresh / f"kernels-{os.geteuid()}"
    (folder / f"{build.SCRATCH}old").mkdir(parents=True)
    folder.chmod(0o700)
    counted = tmp_path / "counted"
    does = (
        f"import shutil, time; open({str(counted)!r}, 'a').write('x' * ('-shared' in sys.argv)); time.sleep(0.5); "
        f"shutil.copy({str(the_library(built))!r}, out)"
    )
    code = (
        "from covey.llm.native import build; library = build.load_library(build.find_compiler()); "
        "print(library.self_test())"
    )
    environment = os.environ | {"CXX": compiler_that(tmp_path, does), "COVEY_CACHE": str(fresh)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == ["1"] * 3
    assert counted.read_text() == "x"
    assert not list(folder.glob(f"{build.SCRATCH}*"))


@pytest.mark.slow
def test_a_process_that_was_killed_while_it_compiled_is_no_obstacle(fresh, tmp_path, built):
    started = tmp_path / "started"
    does = (
        f"import shutil, time\nif not os.path.exists({str(started)!r}):\n    open({str(started)!r}, 'w'); "
        f"time.sleep(600)\nshutil.copy({str(the_library(built))!r}, out)"
    )
    code = "from covey.llm.native import build; build.load_library(build.find_compiler())"
    environment = os.environ | {"CXX": compiler_that(tmp_path, does), "COVEY_CACHE": str(fresh)}
    first = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    while not started.exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, 9)
    first.wait()
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=300, check=False).returncode == 0
    assert the_library(fresh).is_file()
    assert not list(fresh.glob(f"*/{build.SCRATCH}*"))


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"COVEY_CACHE": "/there"}, "/there"),
        ({"COVEY_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/covey"),
        ({"XDG_CACHE_HOME": ""}, "/home/somebody/.cache/covey"),
        ({"XDG_CACHE_HOME": "relative/cache"}, "/home/somebody/.cache/covey"),
        ({"XDG_CACHE_HOME": "~/cache"}, "/home/somebody/.cache/covey"),
        ({"COVEY_CACHE": "~/cache"}, "/home/somebody/cache"),
        ({}, "/home/somebody/.cache/covey"),
    ],
)
def test_where_the_cache_is(variables, place, monkeypatch):
    for name in ("COVEY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/somebody"} | variables).items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(place)


def test_a_relative_cache_does_not_follow_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("COVEY_CACHE", "cache")
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == tmp_path / "cache"
