"""Reward functions in several processes, called while other groups are still being sampled."""

import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.config import ConfigError, RewardConfig
from covey.config.rewards import check_reward
from covey.data import Start
from covey.llm.grader import GradingError, RewardGrader, build_grader
from covey.llm.rewards.runner import RewardPool
from covey.runtime.worker.process import CallError, CallTimeout
from helpers.graded import asked as group
from helpers.graded import rewards_of
from helpers.run_helpers import covey, is_running, reproducible_metrics, write_recipe
from helpers.tiny_models import tiny_folder

# A completion is the number of seconds for which the function works, or a fault.
FUNCTIONS = """
    import os, signal, time

    calls = []

    def work(text):
        if text == "die": os.kill(os.getpid(), signal.SIGKILL)
        if text == "raise": raise ValueError("no")
        if text == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(float(text))
        return float(text)

    def seconds(completions, **columns): return [work(text) for text in completions]
    def order(completions, **columns):
        calls.append(completions[0])
        work(completions[0])
        return [float(len(calls))] * len(completions)
    def process(completions, **columns):
        time.sleep(0.2)
        return [os.getpid()] * len(completions)
    def too_few(completions, **columns): return [1.0] * (len(completions) - 1)
    def logged(completions, log_metric, log_extra, **columns):
        for text in completions: log_metric("length", len(text))
        log_extra("text", [text.upper() for text in completions])
        return [len(text) for text in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


@pytest.fixture
def pool(file: Path) -> Iterator[Callable[..., RewardPool]]:
    made: list[RewardPool] = []

    def make(name: str, workers: int) -> RewardPool:
        made.append(RewardPool(f"{file}:{name}", workers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def grader(file: Path) -> Iterator[Callable[..., RewardGrader]]:
    made: list[RewardGrader] = []

    def make(*names: str, workers: int = 2, seconds: float = 5.0) -> RewardGrader:
        configs = [RewardConfig(function=f"{file}:{name}", timeout_seconds=seconds, workers=workers) for name in names]
        made.append(build_grader(configs, ()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def completions(*texts: str) -> dict[str, list[str]]:
    return {"prompts": ["p"] * len(texts), "completions": list(texts)}


# ---- the pool ----


@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_calls_run_side_by_side_as_there_are_workers(pool, workers):
    reward = pool("process", workers)
    calls = [reward.start(completions("x"), 0, 5.0) for _ in range(6)]
    seen = {call.result().values[0] for call in calls}
    assert len(seen) == workers


def test_calls_of_one_worker_have_the_order_in_which_they_were_started(pool):
    reward = pool("order", 1)
    calls = [reward.start(completions(text), 0, 5.0) for text in ("0.2", "0", "0.1", "0")]
    assert [call.result().values for call in calls] == [[1.0], [2.0], [3.0], [4.0]]


def test_a_deadline_begins_with_its_own_call(pool):
    reward = pool("seconds", 1)
    calls = [reward.start(completions("0.4"), 0, 0.7) for _ in range(3)]
    assert [call.result().values for call in calls] == [[0.4]] * 3  # the last one waited for longer than 0.7 s
    with pytest.raises(CallTimeout):
        reward.call(completions("5"), 0, 0.3)
    assert reward.call(completions("0"), 0, 5.0).values == [0.0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ["die", "raise", "stop"])
def test_a_fault_fails_its_own_call_only(pool, fault):
    reward = pool("seconds", 2)
    calls = [reward.start(completions(text), 0, 0.8) for text in ("0", fault, "0.1", "0")]
    with pytest.raises(CallError):
        calls[1].result()
    assert [calls[number].result().values for number in (0, 2, 3)] == [[0.0], [0.1], [0.0]]


def test_close_cancels_calls_and_ends_their_processes(pool):
    reward = pool("process", 2)
    processes = {reward.start(completions("x"), 0, 5.0).result().values[0] for _ in range(2)}
    sleeping = pool("seconds", 2)
    calls = [sleeping.start(completions("20"), 0, 30.0) for _ in range(5)]
    time.sleep(0.5)
    before = time.monotonic()
    sleeping.close()
    reward.close()
    assert time.monotonic() - before < 5
    assert all(call.cancelled() for call in calls)
    assert not any(map(is_running, processes))
    assert sleeping.call(completions("0"), 0, 5.0).values == [0.0]  # a later call starts new processes


def test_a_stopped_process_is_ended_by_close(pool):
    reward = pool("seconds", 1)
    reward.start(completions("stop"), 0, 20.0)
    time.sleep(0.5)
    before = time.monotonic()
    reward.close()
    assert time.monotonic() - before < 5


# ---- the grader ----


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["seconds", "logged"])
def test_started_calls_give_what_grade_alone_gives(grader, name):
    texts = [("0", "0.01"), ("0.02", "0.003"), ("0.1", "0")]
    started, alone = ([group(*of, index=number) for number, of in enumerate(texts)] for _ in range(2))
    first, second = grader(name), grader(name, workers=1)
    for one in reversed(started):  # as they are completed
        first.start(one)
    first.grade(started)
    second.grade(alone)
    assert rewards_of(started) == rewards_of(alone)
    for one, other in zip(started, alone, strict=True):
        assert [rollout.extras for rollout in one.rollouts] == [rollout.extras for rollout in other.rollouts]
    logs = [
        [number for one in groups for number in one.logged.get(f"{name}/length", [])] for groups in (started, alone)
    ]
    assert sorted(logs[0]) == sorted(logs[1])


@pytest.mark.slow
def test_calls_run_while_the_sampler_works(grader):
    judged, groups = grader("seconds", "process", workers=2), [group("0.3", "0.3", index=index) for index in range(4)]
    judged.check([Start(0, "p")])  # starts the processes
    for one in groups:
        judged.start(one)
    time.sleep(2.0)  # sampling
    before = time.monotonic()
    judged.grade(groups)
    assert time.monotonic() - before < 0.3
    assert all(rollout.reward is not None for one in groups for rollout in one.rollouts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 4, 7])
def test_groups_that_were_not_started_are_shared_out(grader, count):
    """Each part is one call, in a process of its own."""
    judged, groups = grader("process", workers=3), [group("a", "b", index=index) for index in range(count)]
    judged.grade(groups)
    processes = [rollout.reward for one in groups for rollout in one.rollouts]
    assert len(set(processes)) == {1: 1, 4: 2, 7: 3}[count]
    assert processes == sorted(processes, key=processes.index)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("is_started", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_failing_group_alone_has_no_rewards(grader, is_started, workers):
    judged = grader("seconds", workers=workers)
    groups = [group("die" if index == 3 else "0.01", "0", index=index) for index in range(7)]
    for one in groups if is_started else ():
        judged.start(one)
    judged.grade(groups)
    assert rewards_of(groups) == [[None] * 2 if index == 3 else [0.01, 0.0] for index in range(7)]


def test_an_unusable_result_of_a_started_call_stops_the_run(grader):
    judged, one = grader("too_few"), group("a", "b")
    judged.start(one)
    with pytest.raises(GradingError, match="too_few"):
        judged.grade([one])


def test_a_reward_in_this_process_is_called_once_for_the_step():
    calls = []

    def count(completions, **_):
        calls.append(len(completions))
        return [1.0] * len(completions)

    judged, groups = build_grader([count], ()), [group("a", "b", index=index) for index in range(3)]
    for one in groups:
        judged.start(one)
    judged.grade(groups)
    assert calls == [6]


def test_workers_are_for_functions_with_processes_of_their_own():
    with pytest.raises(ConfigError, match=r"workers is set, but not used with numeric: .*function, math, format, reas"):
        check_reward(RewardConfig(name="numeric", workers=2), "reward numeric")
    check_reward(RewardConfig(name="format", pattern="a", workers=2), "reward format")


# ---- a run ----

SLOW = """
import time

def slow(completions, **columns):
    time.sleep(0.03 * len(completions))
    return [float(len(text) % 5) for text in completions]
"""


@pytest.mark.slow
def test_a_run_has_the_same_numbers_with_any_number_of_workers(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    recipe = write_recipe(tmp_path, tiny_folder(tmp_path / "model"), steps=3)
    before, _, rest = recipe.read_text().partition("[[rewards]]")
    after = rest[rest.index("[sampling]") :]
    runs = {}
    for workers in (1, 3):
        recipe.write_text(f'{before}[[rewards]]\nfunction = "slow.py:slow"\nworkers = {workers}\n{after}')
        code, output = covey("train", recipe, "--run-dir", tmp_path / f"{workers}", cwd=tmp_path)
        assert code == 0, output
        runs[workers] = reproducible_metrics(tmp_path / f"{workers}")
    assert len(runs[1]) == 3
    assert runs[1] == runs[3]
