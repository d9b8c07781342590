"""Runs the mutants of `tests/**/mutants.toml`: deliberate faults, each of which must make a test fail.

A mutant is one change of text in a copy of the package. `python mutants.py FOLDER [NAME ...]` makes the copies in
FOLDER, runs each mutant's tests on it until one fails, and prints a JSON object with the `Outcome` of each. The tests
that failed then run on unchanged copies, where they must pass. A test that was too slow may hang or wait for the
processor: its mutant's tests are timed on an unchanged copy and repeated, each with a multiple of that time, and a
second time-out is a failure. If a test failed, the mutant's copy is removed. `make
mutants` runs all of them; `make test` only checks that each text occurs exactly once. Each runs in a fork of a process
that has imported all other packages, and its copy has the bytecode of the files that the mutant leaves unchanged,
because imports take longer than most of the tests. Some tests wait, so one more runs at a time than there are
processors.
"""

import gc
import importlib
import json
import os
import runpy
import shutil
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file is also run as a script
from helpers import rotation

TESTS = Path(__file__).parents[1]
EXTRAS = TESTS.parent / "extras"
PACKAGES = {"covey": TESTS.parent / "src"} | {path.name: path / "src" for path in sorted(EXTRAS.glob("covey_*"))}
UNCHANGED = "unchanged"
FAILED = "failed_tests"
IMPORTED = "imported_modules"
COMPILED = "compiled"
AT_ONCE = 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
PARTS = 8  # of the tests on unchanged copies

CPU_INFO = Path("/proc/cpuinfo")

# A mutant must be noticed by the explicit examples of a property: which ones hypothesis makes is chance.
OPTIONS = ["-x", "--tb=line", "--hypothesis-profile=explicit"]
SECONDS = 120.0  # of a test on a mutant, where it may hang
PATIENT_SECONDS = 400.0  # without a mutant, where nothing hangs: on a busy machine some tests take a minute
SLOWER = 5  # one test takes that many times as long as all of its mutant on an unchanged copy: it hangs
TIMED_OUT = 98  # exit status, instead of pytest's 1

# Makes pytest, hypothesis and torch import what they import on first use.
WARM_UP = """
import pytest, torch
from hypothesis import given, strategies

@given(strategies.integers())
def test_hypothesis(number): ...

def test_torch():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.zeros(1), torch.ones(1))
"""


class Mutant(NamedTuple):
    name: str
    file: str  # in the package covey, or with the name of another package before it
    old: str  # occurs there exactly once
    new: str
    tests: list[str]  # files, or single tests where they notice sooner
    cpu: str = ""  # flag of the processors that run this code, and after "without" one that they lack

    @property
    def place(self) -> Path:
        """The file in the folder of its package, or of a copy of all packages."""
        return Path(self.file) if self.file.partition("/")[0] in PACKAGES else Path("covey", self.file)

    @property
    def source(self) -> Path:
        return PACKAGES[self.place.parts[0]] / self.place


class Outcome(NamedTuple):
    """How the tests of a mutant ended."""

    status: int  # pytest's exit status (1: a test failed), TIMED_OUT, or minus the signal that ended the process
    seconds: float
    mib: int  # peak memory
    failed: list[str]  # tests, each as file::name below the folder of the tests


class Job(NamedTuple):
    """Tests on a copy of the packages."""

    name: str  # of the copy
    mutant: Mutant | None
    tests: list[str]
    seconds: float = SECONDS  # of each test


class FailedTests:
    """A plugin of pytest that writes the names of failed tests to a file, one per line, and tells those that were too
    slow by the exit status."""

    def __init__(self, file: Path) -> None:
        self.file, self.timed_out = file, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.timed_out |= "from pytest-timeout" in report.longreprtext
            with self.file.open("a") as file:
                file.write(report.nodeid.removeprefix(f"{TESTS.name}/") + "\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.timed_out:
            session.exitstatus = TIMED_OUT


def _runs_here(cpu: str) -> bool:
    """Whether this processor runs the code of a mutant."""
    flags = CPU_INFO.read_text().split() if CPU_INFO.exists() else []
    needed, _, lacking = cpu.partition(" without ")
    return not cpu or (needed in flags and lacking not in flags)


def read_mutants() -> list[Mutant]:
    """Those of `tests/**/mutants.toml`, each file beside the tests of its package."""
    tables = (tomllib.loads(path.read_text()) for path in sorted(TESTS.rglob("mutants.toml")))
    return [Mutant(name, **fields) for table in tables for name, fields in table.items()]


MUTANTS = [mutant for mutant in read_mutants() if _runs_here(mutant.cpu)]


def some_mutants(parts: int) -> list[Mutant]:
    """One of `parts` shares of the mutants, another each day; before them those in changed files, at most as many."""
    changed = rotation.changed_files()
    new = [mutant for mutant in MUTANTS if str(mutant.source.relative_to(TESTS.parent)) in changed]
    rest = [mutant for mutant in MUTANTS if mutant not in new]
    return [*rotation.at_most(new, -(-len(MUTANTS) // parts)), *rotation.share(rest, parts)]


def copy_packages(source: Path, folder: Path, mutant: Mutant | None) -> None:
    """Copy compiled packages without their bytecode of the file that the mutant changes."""
    for name in PACKAGES:
        shutil.copytree(source / name, folder / name, copy_function=os.link)
    if mutant:
        target = folder / mutant.place
        text = target.read_text()
        target.unlink()  # the file is linked from all copies
        target.write_text(text.replace(mutant.old, mutant.new))
        for compiled in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
            compiled.unlink()


def import_packages(root: Path, tests: set[str]) -> Path:
    """Import all that the tests import outside of this project, and return a copy of it with its bytecode."""
    for name, source in PACKAGES.items():
        shutil.copytree(source / name, root / COMPILED / name, ignore=_all_but_code)
    warm_up = root / "test_warm_up.py"
    warm_up.write_text(WARM_UP)
    with redirect_stdout(sys.stderr):
        pytest.main([str(warm_up)])
    runpy.run_path(str(TESTS / "conftest.py"))  # sets variables that packages read when they are imported
    files = sorted({name.partition("::")[0] for name in tests})
    _, status = os.waitpid(start(root / COMPILED, files, "--collect-only"), 0)
    if status:
        sys.exit((root / COMPILED / "log").read_text())
    for name in (root / COMPILED / IMPORTED).read_text().split():
        top = name.partition(".")[0]
        if top not in (*PACKAGES, "tests", "conftest", "__main__") and not (TESTS / top).exists():  # they import covey
            with suppress(ImportError):  # a module that another one makes
                importlib.import_module(name)
    gc.freeze()  # pytest collects garbage at its end: without looking through all of torch again
    return root / COMPILED


def _all_but_code(folder: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not name.endswith((".py", ".cpp", ".h", ".html", ".js", ".css", ".svg", ".toml"))
        and (name == "__pycache__" or Path(folder, name).is_file())
    ]


def start(folder: Path, tests: Sequence[str], *options: str, compiles: bool = False) -> int:
    """The id of a fork of this process that imports covey from `folder`, runs the tests and exits as pytest does.

    It writes the names of the modules that it has imported to a file. `compiles`: it has kernels of its own.
    """
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)  # for the processes that tests start
        if compiles:
            os.environ["COVEY_CACHE"] = str(folder / "cache")  # a cache lets one process compile at a time
        import covey

        assert Path(covey.__file__).is_relative_to(folder)
        plugin = FailedTests(folder / FAILED)
        # As text: a path would make "[7 / 2]" of the parameters "[7 // 2]".
        status = pytest.main([*OPTIONS, *options, *(f"{TESTS}/{name}" for name in tests)], plugins=[plugin])
        (folder / IMPORTED).write_text("\n".join(sys.modules))
    finally:
        os._exit(status)


def write_unoptimised_compiler(folder: Path) -> Path | None:
    """A script in `folder` that is the C++ compiler with -O0, three times as fast; None if there is no compiler."""
    found = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if not found:
        return None
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {found} "$@" -O0\n')
    compiler.chmod(0o755)
    return compiler


def main(root: Path, names: list[str]) -> None:
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no mutant that runs on this processor is named {', '.join(sorted(unknown))}")
    compiler = write_unoptimised_compiler(root)
    if compiler:
        os.environ["CXX"] = str(compiler)  # a mutant of the kernels is compiled once
    torch.set_num_threads(1)
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    source = import_packages(root, {name for mutant in mutants for name in mutant.tests})
    outcomes = run_all(root, source, [Job(mutant.name, mutant, mutant.tests) for mutant in mutants])
    outcomes |= repeat_slow(root, source, mutants, outcomes)
    # A mutant that crashed has no failed test.
    noticed = {name for mutant in mutants for name in (outcomes[mutant.name].failed or mutant.tests)}
    parts = enumerate(in_parts(noticed))
    outcomes |= run_all(root, source, [Job(f"{UNCHANGED}_{i}", None, part, PATIENT_SECONDS) for i, part in parts])
    print(json.dumps({name: outcome._asdict() for name, outcome in outcomes.items()}))


def in_parts(tests: set[str]) -> list[list[str]]:
    """Divide tests into parts with whole files."""
    files = sorted({name.partition("::")[0] for name in tests})
    chosen = [set(files[i::PARTS]) for i in range(PARTS)]
    return [sorted(name for name in tests if name.partition("::")[0] in some) for some in chosen if some]


def repeat_slow(root: Path, source: Path, mutants: list[Mutant], outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """New outcomes of the mutants with a test that was too slow, and those of their tests on unchanged copies."""
    slow = {f"{UNCHANGED}_{mutant.name}": mutant for mutant in mutants if outcomes[mutant.name].status == TIMED_OUT}
    timed = run_all(root, source, [Job(copy, None, m.tests, PATIENT_SECONDS) for copy, m in slow.items()])
    limits = {copy: max(SECONDS, SLOWER * timed[copy].seconds) for copy in slow}
    again = run_all(root, source, [Job(m.name, m, m.tests, limits[copy]) for copy, m in slow.items()])
    return timed | {name: end._replace(status=1) if end.status == TIMED_OUT else end for name, end in again.items()}


def run_all(root: Path, source: Path, jobs: Sequence[Job]) -> dict[str, Outcome]:
    """Run tests on copies of the packages of `source`, in the folder `root`."""
    outcomes: dict[str, Outcome] = {}
    running: dict[int, tuple[str, float]] = {}

    def wait_for_one() -> None:
        child, status, usage = os.wait4(-1, 0)
        name, started = running.pop(child)
        code, failed = os.waitstatus_to_exitcode(status), root / name / FAILED
        names = failed.read_text().splitlines() if failed.exists() else []
        outcomes[name] = Outcome(code, round(time.monotonic() - started, 1), usage.ru_maxrss >> 10, names)
        if code in (1, TIMED_OUT) and not name.startswith(UNCHANGED):
            shutil.rmtree(root / name, ignore_errors=True)  # hundreds of copies would fill a small disk

    for name, mutant, tests, seconds in jobs:
        copy_packages(source, root / name, mutant)
        if len(running) == AT_ONCE:
            wait_for_one()
        compiles = mutant is not None and not mutant.file.endswith(".py")
        process = start(root / name, tests, f"--timeout={seconds:.0f}", compiles=compiles)
        running[process] = (name, time.monotonic())
    while running:
        wait_for_one()
    return outcomes


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
