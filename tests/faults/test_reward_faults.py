"""Reward functions that misbehave, each in a real child process: what one bad answer costs, and what stops a run."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from covey.config import ConfigError, RewardConfig
from covey.llm.grader import GradingError, build_grader
from covey.llm.rewards.runner import InProcess
from covey.llm.rewards.weighted_reward import WeightedReward
from helpers.graded import asked as group
from helpers.graded import rewards_of
from helpers.run_helpers import is_running

# What the completion says is what the function does.
FUNCTIONS = """
    import asyncio, os, signal, subprocess, sys, time

    def act(text):
        if text == "raise": raise KeyError("no such\\nanswer")
        if text == "hang": time.sleep(1000)
        if text == "regex": __import__("re").match("(a+)+b", "a" * 60)  # never lets go of the GIL
        if text == "sys.exit": sys.exit(0)
        if text == "os._exit": os._exit(3)
        if text == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if text == "none": return None
        if text == "nan": return float("nan")
        if text == "inf": return float("-inf")
        if text == "child": subprocess.Popen(["sleep", "1000"]); time.sleep(1000)
        if text == "print":
            print("noise " * 1000); os.write(1, b'{"results": [9.0]}\\n'); subprocess.run(["echo", "more noise"])
            sys.__stdout__.write("and more"); assert sys.stdin.read() == ""
        return float(len(text))

    def reward(completions, **columns): return [act(text) for text in completions]
    async def later(completions, **columns):
        await asyncio.sleep(0.01)
        return reward(completions)
    def other(completions, **columns): return [1.0] * len(completions)
    def short(completions, **columns): return [1.0] * (len(completions) - 1)
    def wants(completions, solution): return [1.0] * len(completions)
    def stepped(completions, trainer_state, log_metric): return [trainer_state.global_step] * len(completions)
    def process(completions, **columns): return [os.getpid()] * len(completions)
    not_callable = 5
"""


@pytest.fixture
def grader(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    graders = []

    def build(*names, seconds=1.0):
        configs = [RewardConfig(function=f"{path}:{name}", timeout_seconds=seconds) for name in names or ("reward",)]
        graders.append(build_grader(configs, ()))
        return graders[-1]

    yield build
    for one in graders:
        one.close()


def step(*bad):
    """Six groups of two; the third has the bad completions."""
    return [group("a", "ok"), group("a", "ok"), group(*bad), *(group("a", "ok") for _ in range(3))]


GOOD_GROUP = [1.0, 2.0]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fault", ["raise", "hang", "regex", "sys.exit", "os._exit", "killed", "child"])
def test_a_call_that_fails_costs_its_own_group_only(grader, fault, caplog):
    one = grader()
    groups = step("fine", fault)
    with caplog.at_level(logging.WARNING):
        assert one.grade(groups) is groups
    assert rewards_of(groups) == [GOOD_GROUP, GOOD_GROUP, [None, None], GOOD_GROUP, GOOD_GROUP, GOOD_GROUP]
    assert groups[2].rollouts[0].reward_parts == {"reward": None}
    assert groups[2].rollouts[0].score is None
    assert "group by group" in caplog.text
    assert rewards_of(one.grade([group("still", "works")])) == [[5.0, 5.0]]


@pytest.mark.parametrize("fault", ["none", "nan", "inf"])
def test_a_value_that_is_no_reward_costs_its_own_rollout_only(grader, fault):
    groups = grader().grade(step("fine", fault))
    assert rewards_of(groups) == [GOOD_GROUP, GOOD_GROUP, [4.0, None], GOOD_GROUP, GOOD_GROUP, GOOD_GROUP]


@pytest.mark.slow
def test_none_is_skipped_where_another_reward_speaks_but_nan_and_failures_are_not(grader):
    one = grader("reward", "other")
    assert rewards_of(one.grade(step("fine", "none")))[2] == [5.0, 1.0]
    assert rewards_of(one.grade(step("fine", "nan")))[2] == [5.0, None]
    groups = one.grade(step("fine", "raise"))
    assert rewards_of(groups)[2] == [None, None]
    assert groups[2].rollouts[0].reward_parts == {"reward": None, "other": 1.0}


def test_printing_and_reading_do_not_touch_the_conversation(grader, capfd):
    assert rewards_of(grader().grade([group("print", "a")])) == [[5.0, 1.0]]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "more noise" in captured.err


@pytest.mark.slow
@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", r"KeyError: 'no such\\nanswer' \(my_rewards.py line \d+\)"),
        ("sys.exit", r"SystemExit: 0 \(my_rewards.py line \d+\)"),
        ("os._exit", "its process ended by itself with exit code 3"),
        ("killed", "its process was killed by SIGKILL"),
        ("hang", r"took longer than 0\.3 s"),
        ("nan", "returned nan"),
        ("inf", "returned -inf"),
        ("none", "returned None"),
    ],
)
def test_more_than_a_fifth_failed_stops_the_run_with_one_line(grader, fault, why):
    groups = [group("a", "ok") for _ in range(4)] + [group(fault, fault) for _ in range(10)]
    # After a failed call the third bad group is already too many; nobody waits for the other deadlines.
    failed = "20" if fault in ("nan", "inf", "none") else "at least 6"
    message = f"^{failed} of 28 rollouts could not be graded, more than 20 %: reward 'reward': {why}"
    with pytest.raises(GradingError, match=message) as caught:
        grader(seconds=0.3).grade(groups)
    assert "\n" not in str(caught.value)


def test_async_functions_and_trainer_state_work_in_the_child(grader):
    assert rewards_of(grader("later").grade([group("a", "abc")])) == [[1.0, 3.0]]
    groups = [group("a", "abc")]
    groups[0].rollouts[0].version = 3
    assert rewards_of(grader("stepped").grade(groups)) == [[3.0, 3.0]]


def test_one_process_serves_all_calls(grader):
    one = grader("process")
    processes = {reward for _ in range(3) for row in rewards_of(one.grade([group("a"), group("b")])) for reward in row}
    assert len(processes) == 1


def test_a_killed_worker_is_replaced(grader):
    one = grader("process")
    first = int(rewards_of(one.grade([group("a")]))[0][0])
    os.kill(first, signal.SIGKILL)
    second = int(rewards_of(one.grade([group("a")]))[0][0])
    assert second != first


def test_large_batches_pass_through_the_pipe(grader):
    groups = [group("x" * 20_000, "y" * 30_000, prompt="z" * 50_000, answer="w" * 1000) for _ in range(64)]
    assert rewards_of(grader(seconds=20.0).grade(groups)) == [[20_000.0, 30_000.0]] * 64


# ---- the dry run before training ----


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("function", "answer", "why"),
    [
        ("reward", "raise", r"dry run.*KeyError: 'no such\\nanswer' \(my_rewards.py line \d+\)"),
        ("reward", "hang", "took longer than 1 s, its timeout_seconds, for 2 completions in a dry run"),
        ("reward", "os._exit", "ended by itself with exit code 3"),
        ("reward", "none", "returned None"),
        ("reward", "nan", "returned nan"),
        ("reward", "inf", "returned -inf"),
        ("short", "a", "returned 1 results for 2 completions"),
        ("wants", "a", "asks for 'solution', but the data has only prompts, completions, completion_ids, answer"),
        ("missing", "a", "my_rewards.py has no function 'missing'"),
        ("not_callable", "a", "my_rewards.py is not a function"),
    ],
)
def test_the_dry_run_turns_every_fault_into_a_config_error(grader, function, answer, why):
    with pytest.raises(ConfigError, match=f"reward '?{function}'?.*{why}") as caught:
        grader(function, seconds=1.0 if answer == "hang" else 10.0).check([group(answer=answer).start] * 3)
    assert "\n" not in str(caught.value)


def test_a_slow_function_has_its_own_deadline_in_the_dry_run():
    """Not a tenth of it. The function is not called: its runner is asked for the deadline."""
    given = []

    class Runner(InProcess):
        def call(self, arguments, global_step, seconds, step_counts=None):
            given.append(seconds)
            return super().call(arguments, global_step, seconds, step_counts)

    slow = WeightedReward("slow", Runner(lambda completions, **_: [0.0] * len(completions)), {}, timeout_seconds=100.0)
    build_grader([slow], ()).check([group().start] * 2)
    assert given == [100.0]


def test_the_dry_run_passes_a_good_function(grader):
    grader("later", seconds=10.0).check([group(answer="5").start, group().start])


def test_a_file_with_a_syntax_error_or_a_failing_import(tmp_path):
    for source, why in [
        ("def reward(:", "is not valid Python"),
        ("import no_such_module\ndef reward(): ...", "No module named 'no_such_module'"),
    ]:
        path = tmp_path / "broken.py"
        path.write_text(source)
        with pytest.raises(ConfigError, match=f"reward '?reward'?.*{why}"):
            build_grader([RewardConfig(function=f"{path}:reward")], ()).check([group(answer="1").start])


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "helper_module.py").write_text("GOOD = 7.0")
    (tmp_path / "my_module.py").write_text("import helper_module\ndef f(completions): return [helper_module.GOOD]")
    monkeypatch.chdir(tmp_path)
    for name in ("my_module:f", "my_module.py:f"):
        one = build_grader([RewardConfig(function=name)], ())
        assert rewards_of(one.grade([group("a")])) == [[7.0]]
        one.close()


def test_columns_that_are_no_json_are_named(grader):
    with pytest.raises(ConfigError, match=r"cannot be sent to its process as JSON.*set"):
        grader().check([group(answer="1", extra={1, 2}).start])


# ---- a pattern that runs away, and functions in this process ----


@pytest.mark.slow
def test_a_runaway_pattern_meets_its_deadline():
    one = build_grader([RewardConfig(name="format", pattern="(a+)+b", timeout_seconds=1.0)], ())
    groups = one.grade([group("aab"), group("c"), *(group("ab") for _ in range(8)), group("a" * 60)])
    one.close()
    assert rewards_of(groups) == [[1.0], [0.0], *[[1.0]] * 8, [None]]


def test_a_function_that_hangs_in_this_process_stops_the_run():
    def sleepy(completions, **_):
        time.sleep(5)

    one = build_grader([WeightedReward.from_function(sleepy, timeout_seconds=0.2)], ())
    with pytest.raises(GradingError, match=r"reward 'sleepy' took longer than 0.2 s .* name it as file.py:function"):
        one.grade([group("a")])
    with pytest.raises(ConfigError, match=r"reward 'sleepy'.*took longer than 0.2 s"):
        one.check([group(answer="1").start])


def test_a_function_that_raises_in_this_process_costs_its_group():
    def picky(completions, **_):
        return [1 / (text != "bad") for text in completions]

    groups = build_grader([picky], ()).grade(step("fine", "bad"))
    assert rewards_of(groups) == [[1.0, 1.0]] * 2 + [[None, None]] + [[1.0, 1.0]] * 3


# ---- no process stays behind ----


def wait_for_end(pid, seconds):
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_close_ends_the_worker(grader):
    one = grader("process")
    pid = int(rewards_of(one.grade([group("a")]))[0][0])
    assert is_running(pid)
    one.close()
    assert not is_running(pid)
    one.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("busy", ["", "hang", "regex"])
def test_the_worker_ends_when_its_parent_is_killed(tmp_path, busy):
    """Idle, asleep, or in C code that holds the GIL."""
    path = tmp_path / "my_rewards.py"
    path.write_text(
        textwrap.dedent(FUNCTIONS) + f"\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, time\n"
        "from covey.llm.rewards.runner import RewardPool\n"
        f"worker = RewardPool({str(path) + ':reward'!r})\n"
        f"worker.call({{'completions': ['a']}}, 0, 2.0)\n"
        "print('ready', flush=True)\n"
        f"worker.call({{'completions': [{busy!r}]}}, 0, 2.0)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # the second call is under way
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid)
    process.kill()
    process.wait()
    assert wait_for_end(pid, 60)
