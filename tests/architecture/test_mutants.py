"""Every mutant of `tests/**/mutants.toml` makes a test fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import mutants, rotation

SECONDS = 4200  # they take half an hour on two calm cores; this is for a machine that has other work

# Wrong indices that reach the kernels end the process, in ways that depend on where they point: outside of the mapped
# memory (SIGSEGV, SIGBUS) or into the allocator's own data, which notices it later (SIGABRT). Each counts as noticed.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mutants")


@pytest.fixture(scope="module")
def statuses(folder, pytestconfig) -> dict[str, int]:
    """pytest's exit status on the mutants, or on a share of them, and on unchanged copies."""
    parts = pytestconfig.getoption("share")
    names = [mutant.name for mutant in (mutants.some_mutants(parts) if parts > 1 else mutants.MUTANTS)]
    rotation.LEFT_OUT.append(f"{len(mutants.MUTANTS) - len(names)} of {len(mutants.MUTANTS)} mutants")
    made = subprocess.run(
        [sys.executable, str(Path(mutants.__file__)), str(folder), *names],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COVEY_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return {name: outcome["status"] for name, outcome in json.loads(made.stdout).items()}


def test_every_mutant_changes_one_place():
    texts = {mutant.file: mutant.source.read_text() for mutant in mutants.read_mutants()}
    wrong = [m.name for m in mutants.read_mutants() if texts[m.file].count(m.old) != 1 or m.old == m.new]
    assert wrong == []


def test_no_name_is_used_twice():
    names = [mutant.name for mutant in mutants.read_mutants()]
    assert len(names) == len(set(names))


@pytest.mark.mutants
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the mutants run in forks")
@pytest.mark.timeout(SECONDS + 60)
class TestMutants:
    """`make mutants` runs them."""

    def test_a_test_that_is_too_slow_has_a_status_of_its_own(self, tmp_path):
        (tmp_path / "test_it.py").write_text("import time\ndef test_it():\n    time.sleep(60)\n")
        program = "import pathlib, pytest; from helpers.mutants import *; " + (
            "raise SystemExit(pytest.main(['--timeout=1', '.'], plugins=[FailedTests(pathlib.Path('failed'))]))"
        )
        environment = os.environ | {"PYTHONPATH": str(mutants.TESTS)}
        ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=False)
        assert ended.returncode == mutants.TIMED_OUT

    def test_the_tests_that_failed_pass_on_an_unchanged_copy(self, folder, statuses):
        copies = [name for name in statuses if name.startswith(mutants.UNCHANGED)]
        assert copies
        for name in copies:
            assert statuses[name] == 0, (folder / name / "log").read_text()[-5000:]

    def test_every_mutant_is_killed(self, statuses):
        ended = {name: status for name, status in statuses.items() if not name.startswith(mutants.UNCHANGED)}
        assert ended
        assert [name for name, status in ended.items() if status == 0] == [], "no test notices these"
        assert [name for name, s in ended.items() if s != 1 and -s not in CRASHES] == [], (
            "the tests of these did not run"
        )
