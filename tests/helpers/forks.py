"""Commands of covey, each in a fork of one process that has imported what they need, so that hundreds take a minute.

`Forks` starts the process that forks; a `Case` is one command in a folder of its own, an `Outcome` what became of it.
The process itself runs this file as a script and never runs a command, so its forks inherit no threads and no state.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LIGHT = ("covey.cli.main",)
EVERYTHING = (
    *LIGHT, "covey.experiment.run", "covey.experiment.llm", "covey.experiment.control", "covey.experiment.plan",
    "covey.comparison.compare", "gguf", "gymnasium.envs.classic_control", "transformers.models.llama.modeling_llama",
    "transformers.integrations.ggml", "transformers.modeling_gguf_pytorch_utils",
)  # fmt: skip

MEMORY = 6 << 30  # bytes of addresses that a fork may take beside what it inherits
FILE_SIZE = 1 << 30  # bytes
PROCESSOR_SECONDS = 30  # of a fork, before it is killed
PR_SET_CHILD_SUBREAPER = 36  # of Linux: children of a fork that is gone become this process's own


@dataclass(frozen=True)
class Case:
    """One command."""

    name: str
    words: tuple[str, ...]
    cwd: str
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 300.0  # by the clock, before it is killed: a busy machine gives it little of itself
    encoding: str = "utf-8"  # of standard output and error


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int  # exit code; below 0 the signal that ended it
    output: str
    errors: str
    seconds: float  # of the processor, its children's included
    modules: tuple[str, ...]  # of torch, transformers, gymnasium and matplotlib, those that it or its parent imported
    left_behind: tuple[str, ...]  # files that appeared in its folder, and processes that outlived it


class Forks:
    """A process that has imported `modules` and forks for every case; a context manager."""

    def __init__(self, modules: Sequence[str] = EVERYTHING, at_once: int | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(list(modules)), str(at_once or os.cpu_count() or 1)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COVEY_NATIVE": "0"},
        )  # fmt: skip

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """The outcome of every case, in their order."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([asdict(case) for case in cases]) + "\n")
        self.process.stdin.flush()
        outcomes = json.loads(self.process.stdout.readline())
        return [
            Outcome(**{k: tuple(v) if isinstance(v, list) else v for k, v in outcome.items()}) for outcome in outcomes
        ]

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes both pipes, at which the process ends, and waits for it
            pass


# ---- the process that forks ----


@dataclass
class _Running:
    case: dict[str, Any]
    index: int
    folder: Path  # of its output
    before: set[str]
    deadline: float


def main(modules: list[str], at_once: int) -> None:
    """Answer every line of cases with a line of outcomes."""
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # forks then share these pages
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        outcomes: dict[int, dict[str, Any]] = {}
        running: dict[int, _Running] = {}
        waiting = list(enumerate(json.loads(line)))[::-1]
        while waiting or running:
            while waiting and len(running) < at_once:
                index, case = waiting.pop()
                running.update([_start(index, case)])
            for child in list(running):
                if time.monotonic() > running[child].deadline:
                    os.kill(child, signal.SIGKILL)
            child, status, used = os.wait4(-1, os.WNOHANG)
            if child in running:
                done = running.pop(child)
                others = set(running)
                outcomes[done.index] = _outcome(done, status, used, _survivors(child, others))
            elif not child:
                select.select([], [], [], 0.002)
        replies.write(json.dumps([outcomes[index] for index in sorted(outcomes)]) + "\n")
        replies.flush()


def _start(index: int, case: dict[str, Any]) -> tuple[int, _Running]:
    folder = Path(tempfile.mkdtemp(prefix="fork-"))
    before = _names(case["cwd"])
    child = os.fork()
    if not child:
        _run(case, folder)
    return child, _Running(case, index, folder, before, time.monotonic() + case["seconds"])


def _run(case: dict[str, Any], folder: Path) -> None:
    """In the fork: the command, and its end."""
    code = 99
    try:
        for number, name in ((0, None), (1, "output"), (2, "errors")):
            path = folder / name if name else Path(os.devnull)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=case["encoding"])
        sys.stderr = os.fdopen(os.dup(2), "w", encoding=case["encoding"], buffering=1)
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
        addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (addresses + MEMORY,) * 2)
        os.chdir(case["cwd"])
        os.environ.update(case["environment"])
        from covey.cli.main import main as covey

        try:
            code = covey(case["words"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException as error:
            import traceback

            print("escaped from covey.cli.main.main:", file=sys.stderr)
            traceback.print_exception(error)
        sys.stdout.flush()
        heavy = [name for name in ("torch", "transformers", "gymnasium", "matplotlib") if name in sys.modules]
        (folder / "modules").write_text(json.dumps(heavy))
    finally:
        os._exit(code)


def _names(folder: str) -> set[str]:
    names: set[str] = set()
    for where, folders, files in os.walk(folder):
        names |= {os.path.relpath(os.path.join(where, name), folder) for name in (*folders, *files)}
    return names


def _survivors(parent: int, others: set[int]) -> list[str]:
    """Processes that a fork started and that have not ended soon after it; they are killed."""
    deadline = time.monotonic() + 10
    while True:
        left = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) in others:
                continue
            with contextlib.suppress(OSError):
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == os.getpid() and status[0] != "Z":
                    left.append(int(entry.name))
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    words = []
    for process in left:
        with contextlib.suppress(OSError):
            words.append(f"process {Path(f'/proc/{process}/cmdline').read_bytes()!r}")
            os.kill(process, signal.SIGKILL)
    return words


def _outcome(done: _Running, status: int, used: resource.struct_rusage, survivors: list[str]) -> dict[str, Any]:
    def text(name: str) -> str:
        path = done.folder / name
        return path.read_bytes()[:200_000].decode(done.case["encoding"], "surrogateescape") if path.exists() else ""

    modules = text("modules")
    outcome = {
        "code": os.waitstatus_to_exitcode(status),
        "output": text("output"),
        "errors": text("errors"),
        "seconds": used.ru_utime + used.ru_stime,
        "modules": json.loads(modules) if modules else [],
        "left_behind": sorted(_names(done.case["cwd"]) - done.before) + survivors,
    }
    shutil.rmtree(done.folder)
    return outcome


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
