"""Every test is a function of the code: not of chance, of the tests before it, or of the machine's load."""

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; processes that a test starts inherit it
# covey sets these in its own process when it draws an environment, and when it limits oneDNN's caches.
os.environ |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
os.environ |= {
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "PYGAME_HIDE_SUPPORT_PROMPT": "hide",
}  # as gymnasium sets it
os.environ["MATPLOTLIBRC"] = str(Path(__file__).with_name("helpers") / "matplotlibrc")
os.environ["TRITON_INTERPRET"] = "0" if os.path.exists("/dev/nvidiactl") else "1"  # kernels for GPUs, without one
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell, and so in every process started
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

from helpers import rotation

# `derandomize` draws the same examples every time. There is no database of failures of earlier runs.
settings.register_profile("tests", derandomize=True, deadline=None, database=None, max_examples=100)
# For the mutants: a test must notice each of them by its explicit examples alone.
settings.register_profile("explicit", settings.get_profile("tests"), phases=[Phase.explicit])
settings.load_profile("tests")

# Suites with packages or a machine of their own, and the mutants, which take half an hour: `-m` must name the mark.
BY_NAME = ("mutants", "scale", "trackers", "environments", "gpu", "site")
UNWATCHED = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # the second is set when torch first needs its compiler
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD]  # SIGALRM is pytest-timeout's


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run one N-th of the slow tests, or of the mutants of unchanged files: another one each day"
    parser.addoption("--share", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """BY_NAME; `sampled(n)`: the first of every n cases are quick, the others slow; `--share`: a part of the slow."""
    unnamed = [mark for mark in BY_NAME if mark not in config.option.markexpr]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, unnamed))]
    slow: dict[str, list[pytest.Item]] = {}
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        sampled = item.get_closest_marker("sampled")
        if sampled:
            if cases[test] % sampled.args[0]:
                item.add_marker("slow")
            cases[test] += 1
        if item.get_closest_marker("slow"):
            slow.setdefault(test, []).append(item)
    parts = config.getoption("share")
    if parts == 1:
        return
    units: list[list[pytest.Item]] = []  # a test with few cases stays whole, because they often share a fixture
    for group in slow.values():
        units += [group] if len(group) < parts else [[item] for item in group]
    kept = {id(item) for unit in rotation.share(units, parts) for item in unit}
    left_out = {id(item) for unit in units for item in unit if id(item) not in kept}
    files = Counter(item.nodeid.partition("::")[0] for item in items if id(item) in left_out)
    rotation.LEFT_OUT += [f"{count} slow tests of {file}" for file, count in sorted(files.items())]
    items[:] = [item for item in items if id(item) not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = rotation.LEFT_OUT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    rotation.LEFT_OUT[:] = getattr(node, "workeroutput", {}).get("left out", [])  # every worker has the same


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if rotation.LEFT_OUT:
        terminalreporter.section(f"left out by rotation (repeat with ROTATION={rotation.DAY})")
        terminalreporter.line("; ".join(rotation.LEFT_OUT))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Tests may use the global generators and set the number of threads; each begins with the same of both."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail a test that changes what the tests after it would see; `monkeypatch` changes things for one test."""
    before = _state()
    yield
    after = _state()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    assert not changed, f"the test left these changed: {', '.join(changed)}"


def _state() -> dict[str, Any]:
    mask = os.umask(0o022)
    os.umask(mask)
    variables = {f"${name}": value for name, value in os.environ.items() if name not in UNWATCHED}
    return variables | {
        "working folder": os.getcwd(),
        "umask": mask,
        "sys.path": list(sys.path),
        "signal handlers": [signal.getsignal(number) for number in SIGNALS],
        "default type of torch": torch.get_default_dtype(),
        "gradients of torch": torch.is_grad_enabled(),
        "deterministic algorithms of torch": torch.are_deterministic_algorithms_enabled(),
    }
