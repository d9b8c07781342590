"""The table of built-in rewards: what every entry promises, and what a recipe may set for it."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from covey.config import ConfigError, RewardConfig
from covey.config.rewards import BUILT_IN_REWARDS
from covey.llm.grader import build_grader
from covey.llm.tasks import Arithmetic, Countdown, ReasoningGym, WordProblems
from covey.runtime.worker.child import load_function
from helpers.graded import group, rewards_of, start
from helpers.mutants import PACKAGES
from helpers.pages import ROOT

FIELDS = {field.name for field in fields(RewardConfig)}


def test_every_task_grades_its_own_answers_as_right():
    for task in (Arithmetic(operators=("+", "-", "*")), Countdown(), WordProblems(steps=(1, 2, 3, 4))):
        grader = build_grader([], task.default_rewards)
        starts = task.draw(0, 1, 20)
        grader.check(starts)
        groups = grader.grade([group(one, one.columns["answer"], "nothing") for one in starts])
        assert rewards_of(groups) == [[1.0, 0.0]] * 20
        assert all(rollout.score == rollout.reward for one in groups for rollout in one.rollouts)


def test_impossible_rewards_are_refused():
    for config, message in [
        (RewardConfig(), "neither name nor function"),
        (RewardConfig(name="numbers"), "numeric"),
        (RewardConfig(name="format"), "needs a value for pattern"),
        (RewardConfig(name="format", pattern="(a"), "not a regular expression"),
        (RewardConfig(name="numeric", weight=float("nan")), "finite"),
        (RewardConfig(name="numeric", timeout_seconds=0.0), "timeout_seconds"),
        (RewardConfig(function="no_colon"), "file.py:function or module:function"),
        (RewardConfig(function="missing_file.py:f"), "no file missing_file.py"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_grader([config], ())
    two = [RewardConfig(name="numeric", score=True), RewardConfig(name="exact", score=True)]
    with pytest.raises(ConfigError, match="more than one reward has score"):
        build_grader(two, ())
    with pytest.raises(ConfigError, match="there is no reward"):
        build_grader([], ())


def test_dry_run_finds_data_that_does_not_fit_the_reward():
    with pytest.raises(ConfigError, match=r"reward 'numeric', in a dry run.*no column 'answer', it has solution"):
        build_grader([RewardConfig(name="numeric")], ()).check([start(solution="4")])


@pytest.mark.slow
def test_the_worker_needs_neither_torch_nor_transformers():
    modules = {reward.function.partition(":")[0] for reward in BUILT_IN_REWARDS.values()}
    imports = f"import sys, covey.runtime.worker.child, {', '.join(sorted(modules))}"
    code = f"{imports}; print({{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


HOSTILE = [
    "<think>",
    "</think>",
    "<answer>",
    "\\boxed{",
    "\\frac{1}{",
    "answer is ",
    "1,111",
    "#### ",
    "a",
    "語",
    "\\a",
    " \n",
]
OPTIONS = {"answer_column": "answer", "tags": ("think", "answer"), "first_tag_in_prompt": True, "unit": "characters",
           "length_target": 1, "length_limit": 9, "length_shape": "cosine", "length_both_sides": True,
           "ngram_size": 100, "scripts": ("han",)}  # fmt: skip
IN_PROCESS = [
    *(
        entry.function
        for entry in BUILT_IN_REWARDS.values()
        if not (entry.own_process or entry.one_by_one or entry.runner)
    ),
    *(entry.shortcut for entry in BUILT_IN_REWARDS.values() if entry.shortcut),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("function", IN_PROCESS)
def test_long_hostile_completions_take_no_time_in_the_runs_own_process(function):
    """A reward that may need more than time linear in the text has to run in a process that can be ended."""
    call = load_function(function)
    began = time.process_time()
    for piece in HOSTILE:
        text = piece * (20_000 // len(piece))
        columns = {"answer": ["5"], "numbers": [[1]], "target": [1], "turn_rewards": [[0.5]]}
        if "steps" in inspect.signature(call).parameters:
            columns = {"answer": [[5]], "steps": [[text]]}
        taken = {name: value for name, value in OPTIONS.items() if name in inspect.signature(call).parameters}
        arguments = {"completions": [text], "completion_ids": [[1] * len(text)], **columns, **taken}
        known = inspect.signature(call).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        assert len(call(**{name: value for name, value in arguments.items() if takes_all or name in known})) == 1
    assert time.process_time() - began < 20.0, "seconds of the processor, of a tenth that is expected"


# ---- the table ----


@pytest.mark.parametrize("name", BUILT_IN_REWARDS)
def test_every_entry_is_a_function_that_takes_its_options(name):
    entry, reward = BUILT_IN_REWARDS[name], RewardConfig(name=name)
    options = {field.name for field in fields(reward) if name in field.metadata["used_by"]}
    parameters = inspect.signature(load_function(entry.function)).parameters
    assert set(entry.required) <= options
    assert {option for option in parameters if option in FIELDS} == set(reward.arguments) <= options
    assert ("workers" in options) == (entry.one_by_one or entry.own_process or bool(entry.runner))
    if entry.shortcut:
        assert set(reward.arguments) <= set(inspect.signature(load_function(entry.shortcut)).parameters)
    assert ("steps" in parameters) == entry.per_step


def test_an_option_is_refused_where_it_changes_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(completions, **columns):\n    return [1.0] * len(completions)\n")
    own = {"function": f"{tmp_path}/mine.py:mine"}
    for options, message in [
        ({"name": "numeric", "pattern": "a"}, "pattern is set, but not used with numeric: remove it, or choose format"),
        ({"name": "countdown", "answer_column": "gold"}, "answer_column is set, but not used with countdown"),
        ({**own, "pattern": "a"}, "pattern is set, but not used with function: remove it, or choose format"),
        ({**own, "answer_column": "gold"}, "or choose numeric, digits, exact, math or step_numbers"),
        ({"name": "numeric", "per_step": True}, "or choose function, model or step_numbers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_grader([RewardConfig(**options)], ())


@pytest.mark.slow
def test_a_reward_is_added_as_contributing_says(tmp_path):
    """The two blocks of CONTRIBUTING, applied to a copy of the package, make a reward that a recipe can name."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Adding a built-in reward")[2].partition("\n## ")[0]
    function, line = re.findall(r"```python\n(.*?)```", section, re.S)
    name = re.search(r"def (\w+)", function)[1]
    package = shutil.copytree(
        PACKAGES["covey"] / "covey", tmp_path / "covey", ignore=shutil.ignore_patterns("__pycache__")
    )
    rules = package / "llm" / "rewards" / "rules.py"
    rules.write_text(f"{rules.read_text()}\n\n{function}")
    table = package / "config" / "rewards.py"
    before, opening, after = table.read_text().partition("BUILT_IN_REWARDS: dict[str, BuiltInReward] = {\n")
    table.write_text(before + opening + line + after)
    program = (
        "from covey.config.recipe import config_from_dict, describe_fields\n"
        "from covey.config import RunConfig\n"
        "from covey.llm.grader import build_grader\n"
        "from covey.data import EndReason, Group, Rollout, Start\n"
        f"tables = {{'task': {{'name': 'arithmetic'}}, 'rewards': [{{'name': {name!r}}}]}}\n"
        "grader = build_grader(config_from_dict(tables).rewards, ())\n"
        "rollouts = [Rollout((1,), (1,), (0.0,), EndReason.STOP, text) for text in ('one', 'one\\ntwo')]\n"
        "grader.grade([Group(Start(0, 'p'), rollouts)])\n"
        "print([rollout.reward for rollout in rollouts], grader.score_kind)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[1.0, 0.0] accuracy\n", "")


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "answer", "completion"),
    [("math", "x^2 + 2x + 1", "\\boxed{(x + 1)^2}"), ("format", "", "a"), ("reasoning_gym", "", "5")],
)
def test_the_memory_of_a_process_is_about_that_of_the_table(name, answer, completion):
    """Of the worker and its supervisor, without the pages that they share with other processes."""
    columns = {"answer": answer}
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        columns = ReasoningGym().draw(0, 1, 1)[0].columns
    config = RewardConfig(name=name, workers=1, timeout_seconds=60.0, **({"pattern": "a"} if name == "format" else {}))
    before = descendants()
    grader = build_grader([config], ())
    try:
        grader.grade([group(start(**columns), completion)])
        measured = sum(private_mib(process) for process in descendants() - before)
    finally:
        grader.close()
    assert 0.4 * measured < config.built_in.resident_mib < 2.5 * measured


def descendants():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def private_mib(process):
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
