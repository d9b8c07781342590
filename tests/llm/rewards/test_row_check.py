"""Every row of a data set is checked before a run, and a failure in a run names the row."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.config import ConfigError, DatasetConfig, RewardConfig, RunConfig
from covey.config.rewards import BUILT_IN_REWARDS
from covey.data import Start
from covey.experiment.problem import build_problem
from covey.llm.grader import GradingError, build_grader, check_answers, rows_of_every_kind
from covey.llm.tasks import Rows, RunningTotal
from helpers.graded import group

GOOD: dict[str, dict[str, Any]] = {
    "numeric": {"answer": "1,200"},
    "digits": {"answer": 12},
    "exact": {"answer": "Paris"},
    "math": {"answer": "\\frac{x}{2}"},
    "step_numbers": {"answer": ["1", 2]},
    "code": {"tests": ["assert f(1) == 2"]},
    "countdown": {"target": 6, "numbers": [2, 3]},
}
# Columns that replace those of GOOD; ABSENT: the row has no such column.
ABSENT = object()
BAD: list[tuple[str, str, Any, str]] = [
    *((name, column, ABSENT, rf"no column '{column}'") for name in GOOD for column in list(GOOD[name])[:1]),
    *((name, column, None, rf"'{column}' is null") for name in GOOD for column in list(GOOD[name])[:1]),
    *((name, "answer", value, "is not a number") for name in ("numeric", "digits") for value in ("", "none", "n/a")),
    *(
        (name, "answer", value, "must be a text or a number")
        for name in ("numeric", "digits", "exact", "math")
        for value in (True, ["12"], {"value": 12})
    ),
    *(("math", "answer", value, "is not mathematics") for value in ("", "  ", "$$", "4}", "\\boxed{}")),
    *(("step_numbers", "answer", value, reason) for value, reason in (("3", "is not a list"), (["a"], "not a number"))),
    *(("code", "tests", value, "the tests") for value in ("", [], [1], "def f(): pass", {"inputs": [1]})),
    *(("countdown", "target", value, "a target and a list") for value in ("x", [], "")),
    *(("countdown", "numbers", value, "a target and a list") for value in (None, [], ["a"], 3, "23")),
]


def data(folder: Path, rows: Sequence[dict[str, Any]]) -> DatasetConfig:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(path))


def config(task: Any, *rewards: RewardConfig) -> RunConfig:
    return RunConfig(task=task, rewards=rewards)


def test_every_built_in_reward_that_reads_the_data_checks_it() -> None:
    assert {name for name, reward in BUILT_IN_REWARDS.items() if reward.check} == set(GOOD)
    others = {"format", "tags", "length", "repetition", "language", "environment", "reasoning_gym", "zero"}
    assert set(BUILT_IN_REWARDS) == set(GOOD) | others


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "column", "value", "reason"), BAD)
def test_one_unusable_answer_among_many_is_found_with_its_line(
    name: str, column: str, value: Any, reason: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"Question {number}", **GOOD[name]} for number in range(40)]
    rows[22] = {key: one for key, one in (rows[22] | {column: value}).items() if one is not ABSENT}
    grader = build_grader([RewardConfig(name=name)], ())
    try:
        check_answers(grader.rewards, Rows(rows[:22]).rows)
        with pytest.raises(ConfigError, match=rf"^task\[22\]: reward '{name}': .*{reason}"):
            check_answers(grader.rewards, Rows(rows).rows)
        with pytest.raises(ConfigError, match=rf"data.jsonl line 23: reward '{name}': .*{reason}"):
            build_problem(config(data(tmp_path, rows), RewardConfig(name=name)))
    finally:
        grader.close()


def test_all_faulty_rows_are_counted_and_equal_answers_are_read_once() -> None:
    rows = [{"prompt": f"Question {number}", "answer": ("1", 1, True, "x")[number % 4]} for number in range(4000)]
    grader = build_grader([RewardConfig(name="numeric")], ())
    (reward,) = grader.rewards
    asked: list[Any] = []
    known = reward.check

    def counted(answer: Any) -> None:
        asked.append(answer)
        assert known is not None
        known(answer)

    object.__setattr__(reward, "check", counted)
    with pytest.raises(ConfigError, match=r"True.*\(2,000 such rows\)"):
        check_answers([reward], sorted(Rows(rows).rows, key=lambda row: int(row.prompt.split()[1])))
    assert sorted(map(repr, asked)) == ["'1'", "'x'", "1", "True"]


def test_another_column_is_read_if_the_reward_names_it() -> None:
    rows = Rows([{"prompt": f"Question {number}", "solution": number, "answer": "none"} for number in range(5)])
    reward = RewardConfig(name="numeric", answer_column="solution")
    check_answers(build_grader([reward], ()).rewards, rows.rows)
    running = RunningTotal()
    check_answers(build_grader([], running.default_rewards).rewards, running.held_out(20))


def needs_hint(completions: list[str], hint: list[str], **columns: Any) -> list[float | None]:
    """Like most functions of users: it takes what the first rows have for granted."""
    return [None if not one else float(len(one.split()[0])) for one in hint]


def test_a_function_is_tried_on_a_row_of_every_kind(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"Question {number}", "hint": "a"} for number in range(50)]
    build_problem(config(data(tmp_path, rows)), rewards=[needs_hint])
    rows[30]["hint"] = ""  # for which it returns None, as TRL allows it
    build_problem(config(data(tmp_path, rows)), rewards=[needs_hint])
    faults = [
        ({}, "it asks for 'hint'"), ({"hint": 3}, "AttributeError"), ({"hint": ["a"]}, "AttributeError"),
        ({"hint": "a", "prompt": [{"role": "user", "content": "Q"}], "chat": 1}, ""),
    ]  # fmt: skip
    for columns, reason in faults:
        rows[40] = {"prompt": "Question 40", **columns}
        if not reason:
            build_problem(config(data(tmp_path, rows)), rewards=[needs_hint])
            continue
        with pytest.raises(ConfigError, match=rf"data.jsonl line 41: reward 'needs_hint', in a dry run.*{reason}"):
            build_problem(config(data(tmp_path, rows)), rewards=[needs_hint])


@pytest.mark.slow
def test_a_function_in_a_file_and_one_with_another_signature_are_tried_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def mine(completions, hint):\n    return [1.0] * len(completions)\n"
        "def verl(data_source, solution_str, ground_truth, extra_info):\n    return float(extra_info['n'])\n"
    )
    rows: list[dict[str, Any]] = [
        {"prompt": f"Q {n}", "hint": "a", "data_source": "d", "answer": "1", "extra_info": {"n": n}} for n in range(20)
    ]
    for name, without in (("mine", "hint"), ("verl", "extra_info"), ("verl", "answer")):
        reward = RewardConfig(function=f"{tmp_path / 'mine.py'}:{name}")
        build_problem(config(data(tmp_path, rows), reward)).grader.close()
        changed = [
            {key: value for key, value in row.items() if key != without or n != 13} for n, row in enumerate(rows)
        ]
        with pytest.raises(ConfigError, match=rf"data.jsonl line 14: reward '{name}', in a dry run"):
            build_problem(config(data(tmp_path, changed), reward))


def test_rows_of_every_kind_are_few_and_have_all_kinds() -> None:
    rows = Rows(
        [{"prompt": f"Q {n}", "a": n, "b": "x"} for n in range(100)]
        + [{"prompt": "R 1", "a": None, "b": "x"}, {"prompt": "R 2", "b": ""}, {"prompt": "R 3", "a": None, "b": ""}]
    ).rows
    assert {row.prompt for row in rows_of_every_kind(sorted(rows, key=lambda row: row.prompt))} == {"Q 0", "R 1", "R 2"}
    assert rows_of_every_kind([]) == []


def test_failures_in_a_run_name_file_and_line() -> None:
    def sometimes(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [float(one) for one in answer]

    starts = [Start(n, "Q", {"answer": "x" if n == 2 else "1"}, place=f"data.jsonl line {n + 1}") for n in range(3)]
    groups = [group(start, "a", "b") for start in starts]
    reason = r"2 of 6 rollouts could not be graded.*'sometimes': ValueError: .*'x'.*\(data.jsonl line 3\)"
    with pytest.raises(GradingError, match=reason):
        build_grader([sometimes], ()).grade(groups)
    with pytest.raises(GradingError, match=r"'three' returned 3 results for 2 completions \(data.jsonl line 1\)"):
        build_grader([three], ()).grade(groups[:1])


def three(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * 3
