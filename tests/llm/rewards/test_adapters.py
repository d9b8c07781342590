"""Functions in the signatures of verl and verifiers, and coroutines, in a worker and in this process."""

import json
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from covey.config import ConfigError, RewardConfig
from covey.data import EndReason, Group, Rollout
from covey.llm.grader import GradingError, RewardGrader, build_grader
from covey.llm.rewards.reward_call import adapted
from covey.llm.rewards.runner import RewardPool
from covey.llm.tasks import PromptDataset
from helpers.graded import all_rewards as rewards_of
from helpers.graded import asked

# The examples have the shapes that verl's and verifiers' documentation show.
FUNCTIONS = """
    import asyncio, re

    # ---- verl ----
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if data_source == "broken": raise ValueError("no rule")
        found = re.findall(r"#### (-?[0-9]+)", solution_str)
        return float(bool(found) and found[-1] == ground_truth)
    def with_kwargs(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        return {"score": float(solution_str == ground_truth), "pred": solution_str, "index": extra_info["index"]}
    def needs_more(data_source, solution_str, ground_truth, sandbox): return 0.0
    async def later(data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(0)
        return float(solution_str == ground_truth)

    # ---- verifiers ----
    async def correct_answer(completion, answer) -> float:
        response = completion[-1]["content"]
        return 1.0 if answer in response else 0.0
    def everything(prompt, completion, answer, state, task, info, **kwargs):
        assert state["answer"] == answer and state["completion"] == completion and "completions" not in kwargs
        return len(prompt[0]["content"]) + (10 if task == "default" else 20) + info.get("bonus", 0)
    def diversity_bonus(completions) -> list:
        responses = [c[-1]["content"] for c in completions]
        return [0.2 if responses.count(r) == 1 else 0.0 for r in responses]
    def all_answers(completions, answers): return [float(a == c[-1]["content"]) for a, c in zip(answers, completions)]
    def none_of_it(completion, **kwargs): return None
    def wrong(completion): return "high"

    # ---- TRL ----
    waiting = 0
    async def one_at_a_time(completions, **columns):
        await asyncio.sleep(0)
        return [1.0] * len(completions)
    async def raises(completions, **columns):
        await asyncio.sleep(0)
        raise KeyError("later")
    async def hangs(completions, **columns):
        if "hang" in str(completions): await asyncio.sleep(1000)
        return [1.0] * len(completions)
    async def together(completion, info):
        global waiting
        waiting += 1
        while waiting < info["count"]: await asyncio.sleep(0.01)
        return 1.0
    def from_file(completions, answer):
        return [float(a == c[-1]["content"]) for a, c in zip(answer, completions)]
"""
PROMPT = [{"role": "user", "content": "What is 2 + 2?"}]
group = partial(asked, prompt=PROMPT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "their_rewards.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


@pytest.fixture(params=["worker", "in process"])
def build(request: pytest.FixtureRequest, file: Path):
    """Build a grader of functions of the file, named or imported."""
    graders: list[RewardGrader] = []

    def make(*names: str, seconds: float = 60.0) -> RewardGrader:
        if request.param == "worker":
            graders.append(
                build_grader([RewardConfig(function=f"{file}:{name}", timeout_seconds=seconds) for name in names], ())
            )
        else:
            namespace: dict[str, Any] = {}
            exec(compile(file.read_text(), str(file), "exec"), namespace)
            graders.append(build_grader([namespace[name] for name in names], ()))
        return graders[-1]

    yield make
    for one in graders:
        one.close()


ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}


def test_compute_score_of_verl(build) -> None:
    groups = [group("2 + 2 = 4\n#### 4", "#### 5", **ROW), group("4", prompt="plain", **ROW)]
    assert rewards_of(build("compute_score").grade(groups)) == [1.0, 0.0, 0.0]
    assert rewards_of(build("compute_score").grade([group("#### 4", data_source="x", answer="4")])) == [1.0]
    assert rewards_of(build("compute_score").grade([group("#### 4", data_source="x", ground_truth="4")])) == [1.0]


def test_a_dict_of_verl_has_the_score_and_its_other_values_are_logged(build) -> None:
    groups = [group("4", "5", **ROW)]
    assert rewards_of(build("with_kwargs").grade(groups)) == [1.0, 0.0]
    assert [r.extras["with_kwargs"] for r in groups[0].rollouts] == [
        {"pred": "4", "index": 7},
        {"pred": "5", "index": 7},
    ]


def test_a_coroutine_of_verl(build) -> None:
    assert rewards_of(build("later").grade([group("4", "5", **ROW)])) == [1.0, 0.0]


def test_a_failed_call_of_verl_costs_its_group(build) -> None:
    groups = [group("#### 4", **ROW) for _ in range(5)] + [group("#### 4", **(ROW | {"data_source": "broken"}))]
    assert rewards_of(build("compute_score").grade(groups)) == [1.0] * 5 + [None]


def test_an_argument_that_the_data_lacks_is_named(build) -> None:
    starts = [group("4", **ROW).start]
    with pytest.raises(ConfigError, match=r"TypeError: it asks for 'sandbox', but the data has only .*data_source"):
        build("needs_more").check(starts)
    with pytest.raises(ConfigError, match="it asks for 'ground_truth'"):
        build("compute_score").check([group("4", data_source="x").start])


def test_functions_of_verifiers(build) -> None:
    assert rewards_of(build("correct_answer").grade([group("It is 4.", "5", answer="4")])) == [1.0, 0.0]
    assert rewards_of(build("everything").grade([group("x", answer="4")])) == [24.0]
    row = {"answer": "4", "task": "sums", "info": json.dumps({"bonus": 100})}
    assert rewards_of(build("everything").grade([group("x", **row)])) == [134.0]


def test_functions_of_a_group_of_verifiers(build) -> None:
    assert rewards_of(build("diversity_bonus").grade([group("a", "b", "a")])) == [0.0, 0.2, 0.0]
    assert rewards_of(build("all_answers").grade([group("4", "5", answer="4")])) == [1.0, 0.0]
    assert rewards_of(build("all_answers").grade([group("4", "5", answer="5", answers="4")])) == [1.0, 0.0]


def test_results_of_single_completions_are_checked_as_others(build) -> None:
    with pytest.raises(GradingError, match="returned None"):
        build("none_of_it").grade([group("a")])
    with pytest.raises(GradingError, match="returned str 'high' where a number or None is needed"):
        build("wrong").grade([group("a")])


def test_a_boundary_function_may_call_its_text_completion(file: Path) -> None:
    file.write_text("def split(completion): return [len(completion)]")
    process = RewardPool(f"{file}:split")
    assert process.positions("abc", 60.0) == [3]
    process.close()


def test_a_function_without_a_signature_is_left_as_it_is() -> None:
    assert adapted(dict.fromkeys, ()) is not None
    assert adapted(max, ("completions",)) is max


def test_verls_example_from_data_to_reward(file: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [
        ROW | {"prompt": PROMPT, "ability": "math"},
        ROW | {"prompt": [{"role": "user", "content": "1 + 3?"}], "ability": "math"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    task = PromptDataset(path=str(tmp_path / "train.parquet"), held_out_fraction=0.5)
    [start] = task.draw(0, 1, 1)
    one = build_grader([RewardConfig(function=f"{file}:compute_score")], ())
    one.check([start])
    rollout = Rollout(context=(), actions=[1], behavior_logprobs=[0.0], end=EndReason.STOP, text="#### 4")
    assert rewards_of(one.grade([Group(start, [rollout])])) == [1.0]
    one.close()


# ---- coroutines ----


def test_coroutines_of_single_completions_wait_together(build) -> None:
    """Each waits for all others, so they would hang if they were awaited in turn."""
    groups = [group("a", "b", "c", info={"count": 6}), group("d", "e", "f", info={"count": 6})]
    assert rewards_of(build("together").grade(groups)) == [1.0] * 6


def test_coroutines_fail_as_other_functions(build) -> None:
    with pytest.raises(GradingError, match=r"KeyError: 'later' \(their_rewards.py line \d+\)"):
        build("raises").grade([group("a")])


@pytest.mark.slow
def test_a_coroutine_that_hangs_is_given_up_at_its_deadline(file: Path) -> None:
    one = build_grader([RewardConfig(function=f"{file}:hangs", timeout_seconds=1.0)], ())
    groups = [group("a", "b"), group("a", "b"), group("a", "b"), group("a", "b"), group("hang", "a"), group("a", "b")]
    assert rewards_of(one.grade(groups)) == [1.0] * 8 + [None] * 2 + [1.0] * 2
    one.close()


def test_rewards_that_may_run_beside_each_other_do() -> None:
    """Two coroutine functions meet at a barrier, so neither can end before the other began; a third is none."""
    barrier, threads = threading.Barrier(2), set()

    def meet(name: str) -> Any:
        async def function(completions: Any, **columns: Any) -> list[float]:
            barrier.wait(60)
            return [float(len(name))] * len(completions)

        function.__name__ = name
        return function

    def plain(completions: Any, **columns: Any) -> list[float]:
        threads.add(threading.current_thread().name)
        return [0.5] * len(completions)

    one = build_grader([meet("a"), plain, meet("bb")], ())
    groups = [group("x", "y")]
    assert rewards_of(one.grade(groups)) == [3.5, 3.5]
    assert groups[0].rollouts[0].reward_parts == {"a": 1.0, "plain": 0.5, "bb": 2.0}
    assert list(groups[0].rollouts[0].reward_parts) == ["a", "plain", "bb"]


def test_functions_that_are_no_coroutines_run_one_after_the_other() -> None:
    """Each waits for another one that runs beside it."""
    running, most, beside = 0, 0, threading.Event()

    def make(name: str) -> Any:
        def function(completions: Any, **columns: Any) -> list[float]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if most > 1:
                beside.set()
            beside.wait(0.5)
            running -= 1
            return [1.0] * len(completions)

        function.__name__ = name
        return function

    build_grader([make("a"), make("b"), make("c")], ()).grade([group("x")])
    assert most == 1


def test_processes_of_several_functions_work_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the file of the other."""
    (tmp_path / "meet.py").write_text(
        "import pathlib, time\n"
        "def meet(me, other):\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / me).touch()\n"
        "    while not (here / other).exists(): time.sleep(0.01)\n"
        "def a(completions): meet('a', 'b'); return [1.0] * len(completions)\n"
        "def b(completions): meet('b', 'a'); return [2.0] * len(completions)\n"
    )
    rewards = [RewardConfig(function=f"{tmp_path}/meet.py:{name}", timeout_seconds=60.0) for name in "ab"]
    one = build_grader(rewards, ())
    assert rewards_of(one.grade([group("x")])) == [3.0]
    one.close()


def test_the_first_error_of_rewards_beside_each_other_is_raised(file: Path) -> None:
    one = build_grader([RewardConfig(function=f"{file}:{name}") for name in ("one_at_a_time", "raises", "wrong")], ())
    with pytest.raises(GradingError, match="reward 'raises': KeyError"):
        one.grade([group("x")])
    one.close()


def test_a_set_has_the_same_order_in_every_process(tmp_path: Path) -> None:
    """So a function that depends on it gives a resumed run the same rewards."""
    (tmp_path / "order.py").write_text("def hashed(completions): return [float(hash('text') % 2**40)]\n")
    values = set()
    for _ in range(2):
        one = build_grader([RewardConfig(function=f"{tmp_path}/order.py:hashed")], ())
        values.add(rewards_of(one.grade([group("x")]))[0])
        one.close()
    assert len(values) == 1
