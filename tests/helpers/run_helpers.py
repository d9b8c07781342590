"""Runs of the command on tiny models, each in a process of its own, as a user starts them."""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from covey.tracking.metrics import is_reproducible

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "covey.cli.main",
        "covey.experiment.run",
        "covey.experiment.llm",
        "covey.experiment.control",
        "covey.experiment.reward_models",
        "covey.llm.remote.server",
    ]
)
OF_ITS_OWN = {"metrics.jsonl", "config.toml", "origin.json", "summary.json", "curve.png", "covey.lock"}  # of a run
CALLS_OF_A_STEP = 20_000  # of Python functions, about, in a run of RECIPE
LIMIT_SECONDS = 500  # of a command that should have ended
STUCK_SECONDS = 120  # of a call in C code that Ctrl-C should end
UNHEARD = 99  # exit code of a command that Ctrl-C did not end

RECIPE = """
model = "{model}"
steps = {steps}
seed = 3
threads = 1
precision = "fp32"
show_rollouts_every = 2

[task]
name = "arithmetic"
digits = [1]

[[rewards]]
name = "digits"
[[rewards]]
function = "{reward}:count_digits"
weight = 0.5

[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 6

[loss]
kl_coefficient = 0.02

[update]
learning_rate = 1e-3
schedule = "linear"
epochs = 2
minibatches = 2
microbatch_tokens = 200

[evaluation]
problems = 6

[checkpoint]
every = 2
"""

REWARD = """
import re

def count_digits(completions, **columns):
    return [float(len(re.findall("[0-9]", c[0]["content"]))) for c in completions]
"""


def write_recipe(folder: Path, model: Path, steps: int = 8) -> Path:
    """A recipe and its reward function in `folder`."""
    (folder / "rewards.py").write_text(REWARD)
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE.format(model=model, steps=steps, reward=folder / "rewards.py"))
    return recipe


class Running:
    """`covey` in a process of its own, in the background; its standard output and error are one text.

    The process is a fork of one that has imported torch and covey and never did anything else, because an interpreter
    that begins again takes seconds for its imports.
    """

    def __init__(
        self, words: Sequence[object], cwd: Path, variables: Mapping[str, str], moment: Moment | Interrupt | None
    ) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._output = Path(file.name)
        given = [str(word) for word in words], cwd, dict(os.environ | variables), self._output, moment
        self._process = _CONTEXT.Process(target=_command, args=given)
        self._process.start()
        atexit.register(self._process.kill)  # before multiprocessing waits for it
        self.pid = self._process.pid

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code, below 0 the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """The exit code, once it has ended."""
        self._process.join(LIMIT_SECONDS)
        assert self._process.exitcode is not None, f"it still runs after {LIMIT_SECONDS} s: {self._output.read_text()}"
        atexit.unregister(self._process.kill)
        return self._process.exitcode

    def output(self) -> str:
        """What it has written so far."""
        return self._output.read_text()

    def ended(self) -> tuple[int, str]:
        """Exit code and output, once it has ended."""
        code = self.wait()
        output = self._output.read_text()
        self._output.unlink()
        return code, output


@dataclass(frozen=True)
class Moment:
    """The same moment of a run every time: `calls` calls of Python functions after it has recorded step `step`."""

    step: int
    calls: int = 0
    signal: int = signal.SIGKILL  # what the process sends to itself then
    inside: str = ""  # module.function: the calls are counted from its first call on


@dataclass(frozen=True)
class Interrupt:
    """Ctrl-C when a function is called first."""

    module: str  # in which the function is looked up
    name: str  # dotted, where it is a method
    times: int = 1
    stuck: bool = False  # the call is in C code then, which does not return

    def prepare(self) -> None:
        """Put the signal in place of the function, in this process."""
        owner = import_module(self.module)
        *path, leaf = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        assert callable(getattr(owner, leaf))
        setattr(owner, leaf, lambda *arguments, **options: self._send())

    def _send(self) -> None:
        if self.stuck:
            _interrupt_c_code()
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():  # which gets the signal
            time.sleep(STUCK_SECONDS)
        os._exit(UNHEARD)


def _interrupt_c_code() -> None:
    """Ctrl-C while the main thread is in a call that no signal ends, as that of a library may be."""
    gate = threading.Lock()
    gate.acquire()

    def send() -> None:
        with gate:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    sleep = ctypes.CDLL(None).sleep  # without the interpreter's lock
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # another thread gets it, and `sleep` goes on
    sys.setswitchinterval(LIMIT_SECONDS)  # the thread runs when this one is in `sleep`, and not before
    gate.release()
    sleep(STUCK_SECONDS)
    os._exit(UNHEARD)


def _command(
    words: list[str], cwd: Path, variables: dict[str, str], output: Path, moment: Moment | Interrupt | None
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    from covey.cli.main import main
    from covey.runtime.interrupts import leave

    if isinstance(moment, Interrupt):
        moment.prepare()
    elif moment:
        _stop_at(moment)
    leave(main(words))


def _stop_at(moment: Moment) -> None:
    from covey.tracking.run_store import RunStore

    record = RunStore.record_metrics

    def recorded(store: RunStore, step: int, metrics: Mapping[str, float]) -> None:
        record(store, step, metrics)
        if step == moment.step:
            signal_after(moment.calls, moment.signal, moment.inside)

    RunStore.record_metrics = recorded  # type: ignore[method-assign]


def signal_after(calls: int, number: int = signal.SIGKILL, inside: str = "") -> None:
    """This process sends itself a signal after so many calls of Python functions from here, or from a function on."""
    left, begun = calls, not inside

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left, begun
        begun = begun or f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}" == inside
        if event == "call" and not left:
            sys.setprofile(None)
            os.kill(os.getpid(), number)
        left -= event == "call" and begun

    sys.setprofile(count)


def start(*words: object, cwd: Path, moment: Moment | Interrupt | None = None, **variables: str) -> Running:
    """`covey` with these words, in the background, with these environment variables; at `moment` it gets a signal."""
    return Running(words, cwd, variables, moment)


def covey(*words: object, cwd: Path, moment: Moment | Interrupt | None = None, **variables: str) -> tuple[int, str]:
    """Exit code and output of `covey` with these words; the rest as `start` takes it."""
    return start(*words, cwd=cwd, moment=moment, **variables).ended()


def reproducible_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """What a run measured, without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k == "step" or is_reproducible(k)} for line in lines]


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for_end(pid: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_same_run(run_dir: Path, whole: Path) -> None:
    """Every file of a run, but for clocks, the lock and the place."""
    assert reproducible_metrics(run_dir) == reproducible_metrics(whole)
    made, expected = files(run_dir), files(whole)
    assert expected.keys() == made.keys()
    for name in expected.keys() - OF_ITS_OWN:
        assert made[name] == expected[name], name


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
