"""Faulty rewards, kinds x moments: no other rollout's reward and no weight changes, and no process is left.

A completion "KIND@MOMENT" makes the function in `FAULTS` act. All cases run at once, each in a worker of its own.
"""

import contextlib
import itertools
import os
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from covey import CheckpointConfig, RewardConfig, RunConfig, SamplingConfig, UpdateConfig, resume, run
from covey.config import EvaluationConfig
from covey.data import Start
from covey.llm.grader import build_grader
from covey.runtime.worker.child import MARK
from helpers.graded import asked as group
from helpers.run_helpers import is_running
from helpers.tiny_models import tiny_folder

FAULTS = """
    import locale, os, resource, signal, subprocess, sys, threading, time

    class Mute(Exception):
        def __str__(self): raise ValueError("no text")
        __repr__ = __str__
    class Base(BaseException):
        pass
    class Huge(Exception):
        def __str__(self): return "x y " * (1 << 24)
    def deep(): return deep()
    def note(pid):
        with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file: file.write(f"{pid}\\n")
    def daemon(environment):
        note(subprocess.Popen(["sleep", "1000"], start_new_session=True, env=environment).pid)
    def double_fork():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: note(os.getpid()); time.sleep(1000)
            os._exit(0)
        os.wait()
    def descriptors():
        return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    def write_everywhere(data):
        for number in descriptors():
            try: os.set_blocking(number, False); os.write(number, data)
            except OSError: pass
    def close_and_open():
        os.closerange(3, 256)
        return [open(os.devnull, "w") for _ in range(20)]
    def limit(soft, hard): resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    def flood():
        for _ in range(256): os.write(1, b"noise " * 3000)
    def stolen(completions): completions.clear(); sys.stdin.close()

    KINDS = {
        # the call ends in another way than by returning
        "raise": lambda c: [][1],
        "mute": lambda c: exec("raise Mute", globals()),
        "base": lambda c: exec("raise Base", globals()),
        "huge_message": lambda c: exec("raise Huge", globals()),
        "interrupt": lambda c: exec("raise KeyboardInterrupt", globals()),
        "sys_exit": lambda c: sys.exit(0),
        "deep": lambda c: deep(),
        "os_exit": lambda c: os._exit(0),
        "segfault": lambda c: os.kill(os.getpid(), signal.SIGSEGV),
        "kill_group": lambda c: os.killpg(0, signal.SIGKILL),
        "kill_parent": lambda c: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(1000)),
        "terminate_parent": lambda c: os.kill(os.getppid(), signal.SIGTERM),
        "exec": lambda c: os.execvp("true", ["true"]),
        "daemonise": lambda c: os.fork() and os._exit(0),
        # the call goes on in another process as well
        "fork": lambda c: os.fork(),
        "fork_often": lambda c: [os.fork() for _ in range(4)],
        "fork_and_raise": lambda c: os.fork() or [][1],
        "fork_and_write": lambda c: os.fork() or write_everywhere(b'{"results": [9.0, 9.0]}\\n'),
        "daemon": lambda c: daemon(None),
        "bare_daemon": lambda c: daemon({}),
        "double_fork": lambda c: double_fork(),
        "daemon_and_kill_parent": lambda c: (daemon(None), KINDS["kill_parent"](c)),
        # the connection
        "close": lambda c: os.closerange(0, 256),
        "close_and_open": lambda c: close_and_open(),
        "answer_twice": lambda c: write_everywhere(b'{"results": [9.0, 9.0]}\\n'),
        "half_a_line": lambda c: write_everywhere(b'{"results": [9.0'),
        "steal_requests": lambda c: [os.set_blocking(n, False) or n for n in descriptors()],
        "flood": lambda c: flood(),
        # the state of the process
        "chdir": lambda c: os.chdir("/"),
        "no_files": lambda c: limit(3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        "no_files_ever": lambda c: limit(3, 3),
        "alarm": lambda c: signal.setitimer(signal.ITIMER_REAL, 0.01),
        "shallow": lambda c: sys.setrecursionlimit(40),
        "umask": lambda c: os.umask(0o777),
        "steal_arguments": lambda c: stolen(c),
        "ignore_signals": lambda c: [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15, 17)],
        "stop_parent": lambda c: os.kill(os.getppid(), signal.SIGSTOP),
        "block_signals": lambda c: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    }

    def reward(completions, **columns):
        texts = list(completions)
        assert os.getcwd() != "/" and open(__file__) and os.umask(0o22) == 0o22
        acts = [text.split("@") for text in texts if "@" in text]
        for kind, moment in acts:
            if moment == "first": KINDS[kind](completions)
        rewards = []
        for text in texts:
            if text.endswith("@between"): KINDS[text.split("@")[0]](completions)
            rewards.append(float(len(text)))
        for kind, moment in acts:
            if moment == "last": KINDS[kind](completions)
            if moment == "later": threading.Timer(0.01, KINDS[kind], [completions]).start()
        return rewards
"""
KINDS = [line.split('"')[1] for line in FAULTS.splitlines() if line.strip().startswith('"')]
MOMENTS = ("first", "between", "last", "later")
CLEAN = [1.0, 2.0]


def grade_a_case(path, case):
    """What is wrong after two steps of six groups, one of them faulty; nothing where all is well."""
    one = build_grader([RewardConfig(function=f"{path}:reward", timeout_seconds=5.0)], ())
    try:
        for _ in range(2):
            groups = one.grade([group(*(("a", "ok") if i != 2 else ("fine", case)), index=i) for i in range(6)])
            rewards = [[rollout.reward for rollout in each.rollouts] for each in groups]
            faulty = rewards.pop(2)
            if rewards != [CLEAN] * 5 or faulty not in ([4.0, float(len(case))], [None, None]):
                return f"{case}: {rewards} {faulty}"
    except Exception as error:
        return f"{case}: {type(error).__name__}: {error}"
    finally:
        one.close()
    return ""


def left_behind(folder, label):
    """Processes that the workers started: by an environment variable that they got, or by the number they noted."""
    noted = [int(line) for line in (folder / "pids").read_text().split()] if (folder / "pids").exists() else []
    found = [pid for pid in noted if is_running(pid)]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if label in variables and f"{MARK}=".encode() in variables:
            found.append(int(pid))
    return found


@pytest.fixture
def faults(tmp_path, monkeypatch):
    monkeypatch.setenv("COVEY_TEST_LABEL", str(tmp_path))
    path = tmp_path / "faults.py"
    path.write_text(textwrap.dedent(FAULTS))
    yield path
    assert left_behind(tmp_path, str(tmp_path).encode()) == []


CASES = [f"{kind}@{moment}" for kind, moment in itertools.product(KINDS, MOMENTS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [f"{kind}@{MOMENTS[place % 4]}" for place, kind in enumerate(KINDS)],
            id="each_kind_once",
        ),
        pytest.param(CASES, id="every_pair"),
    ],
)
def test_no_fault_at_any_moment_costs_more_than_its_own_group(cases, faults, capfd):
    with ThreadPoolExecutor(8) as pool:
        wrong = [line for line in pool.map(lambda case: grade_a_case(faults, case), cases) if line]
    assert wrong == []
    assert len(capfd.readouterr().err) < 2 * len(cases) * (1 << 18)  # "flood" writes more


# ---- the weights of a run ----


class Sums:
    """A task of eight prompts, all of them in every step; the column says which one is faulty."""

    def draw(self, seed, step, count, *, first, before):
        return [Start(i, f"{i}+{i}=", {"answer": str(2 * i), "fault": i == 3}) for i in range(first, first + count)]

    def held_out(self, count):
        return [Start(i, f"{i}+1=", {"answer": str(i + 1), "fault": False}) for i in range(count)]


REWARD = """
    def {name}(completions, fault, **columns):
        rewards = [float(len(text)) for text in completions]
        if any(fault): {action}
        return rewards
"""
NOTHING, LEFT_OUT = "pass", "rewards = [None if bad else reward for bad, reward in zip(fault, rewards)]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a tiny model for two steps with a reward that does `action` in the faulty group; returns its weights."""
    folder = tmp_path_factory.mktemp("trained")
    model = tiny_folder(folder / "model")
    known = {}

    def train(action):
        if action not in known:
            name = f"reward_{len(known)}"
            path = folder / f"{name}.py"
            path.write_text(textwrap.dedent(FAULTS) + textwrap.dedent(REWARD.format(name=name, action=action)))
            config = RunConfig(
                model=str(model),
                steps=2,
                threads=1,
                precision="fp32",
                run_dir=str(folder / name),
                rewards=(RewardConfig(function=f"{path}:{name}"),),
                sampling=SamplingConfig(prompts_per_step=8, group_size=2, max_new_tokens=4),
                update=UpdateConfig(learning_rate=1e-2),
                evaluation=EvaluationConfig(problems=2),
            )
            run(config, task=Sums())
            known[action] = (folder / name / "model" / "model.safetensors").read_bytes()
        return known[action]

    train.model = model
    return train


@pytest.mark.slow
def test_a_resumed_run_says_that_a_reward_ended_its_process(trained, tmp_path, capfd):
    """In the run's own process, where nothing can keep a function from it."""
    calls = []

    def ending(completions, **_):
        calls.append(1)
        if len(calls) == 6:  # after the dry run, the first evaluation and two steps
            os._exit(77)
        return [float(len(text)) for text in completions]

    trained(NOTHING)
    config = RunConfig(
        model=str(trained.model),
        steps=5,
        threads=1,
        precision="fp32",
        run_dir=str(tmp_path / "run"),
        sampling=SamplingConfig(prompts_per_step=8, group_size=2, max_new_tokens=4),
        evaluation=EvaluationConfig(problems=2),
        checkpoint=CheckpointConfig(every=1),
    )
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            run(config, task=Sums(), rewards=[ending])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
    calls[:] = [1] * 10
    assert resume(tmp_path / "run", task=Sums(), rewards=[ending])["steps"] == 5
    said = " ".join(capfd.readouterr().out.split())
    assert "the process of this run ended while its rewards were computed (ending)" in said
    assert not list((tmp_path / "run").rglob("unfinished_call.json"))


@pytest.mark.slow
def test_a_group_that_is_left_out_changes_the_weights(trained):
    assert trained(NOTHING) != trained(LEFT_OUT)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["mute", "os_exit", "kill_parent", "close_and_open"])
def test_the_weights_are_those_of_a_run_that_leaves_the_faulty_group_out(kind, trained):
    assert trained(f"KINDS[{kind!r}](completions)") == trained(LEFT_OUT)


@pytest.mark.slow
def test_the_weights_are_those_of_a_run_without_forks(trained):
    assert trained("KINDS['fork'](completions)") == trained(NOTHING)
