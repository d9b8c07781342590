"""What covey advises after a command is executed here, for every way to start a run and every way that it may end."""

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import covey
from covey import ControlConfig, RunConfig, UpdateConfig
from covey.cli.main import main
from covey.config.recipe import config_from_dict, read_tables
from covey.experiment import advice, llm
from covey.experiment.advice import ADVICE, Finished, Launch, after_training, read_launch
from covey.llm.tasks import Arithmetic
from helpers.run_helpers import write_recipe
from helpers.tiny_models import tiny_folder

QUICK = ["--evaluation.episodes", "3", "--evaluation.every", "0"]
SCORES = {  # evaluations before and after that lead to each verdict
    "reached": ((1.0, 1.0, 1.0), (9.0, 9.0, 9.0), 5.0),
    "short": ((1.0, 1.0, 1.0), (9.0, 9.0, 9.0), 50.0),
    "better": ((1.0, 1.0, 1.0), (9.0, 9.0, 9.0), None),
    "worse": ((9.0, 9.0, 9.0), (2.0, 2.0, 2.0), None),
    "unclear": ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0), None),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a space in its name, a recipe file and a tiny model."""
    home = tmp_path_factory.mktemp("advice") / "my work"
    home.mkdir()
    write_recipe(home, tiny_folder(home / "model"), steps=3)
    (home / "tiny.toml").rename(home / "my recipe.toml")
    return home


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def commanded(text: str) -> str:
    """The command or call at the end of a text."""
    last = text.strip().splitlines()[-1]
    for begin in ("covey ", "import covey; "):
        if f": {begin}" in last:
            return begin + last.partition(f": {begin}")[2]
    raise AssertionError(f"no advice in {last!r}")


def execute(advised: str, **names: Any) -> Any:
    """Run what was advised, as a user does: in a shell, or in a script that has only what the run was given."""
    if advised.startswith("covey "):
        assert main(shlex.split(advised)[1:]) == 0, advised
        return None
    imported, call = advised.split("; ", 1)
    exec(imported, names)
    return eval(call, names)


def newest_run() -> Path:
    return max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def settings(run_dir: Path) -> dict[str, Any]:
    """The config of a run without its folder, flat."""
    tables = read_tables(run_dir / "config.toml") | {"run_dir": ""}
    return {
        f"{section}.{name}": value
        for section, table in tables.items()
        for name, value in (table if isinstance(table, dict) else {"": table}).items()
    }


def changed(first: Path, second: Path) -> set[str]:
    """Fields in which two runs differ."""
    one, other = settings(first), settings(second)
    return {name.removesuffix(".") for name in {*one, *other} if one.get(name) != other.get(name)}


def a_copy(run_dir: Path) -> Path:
    """Of a finished run, that it may go on."""
    copy = run_dir.with_name(f"{run_dir.name} goes on")
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(run_dir, copy)


def goes_on(run_dir: Path, before: Path) -> bool:
    """The run has more steps than before, which its schedules know."""
    restarts = settings(run_dir)["schedule_restarts."]
    return changed(before, run_dir) == {"steps", "schedule_restarts"} and restarts == [settings(before)["steps."]]


def finished(run_dir: Path, *, drawable: bool = True) -> Finished:
    launch, config = read_launch(run_dir), config_from_dict(read_tables(run_dir / "config.toml"))
    assert launch is not None
    return Finished(launch, config, str(run_dir), drawable)


def ended(run_dir: Path, verdict: str) -> dict[str, Any]:
    """The summary of a run, as if its evaluations had come out so."""
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after, expected = SCORES[verdict]
    first, second = (
        dict(zip(("score", "low", "high"), values, strict=True)) | {"count": 3} for values in (before, after)
    )
    changes = {} if expected is None and summary["domain"] == "language" else {"expected_return": expected}
    evaluations = [{"max_new_tokens": 6, "before": first, "after": second}]
    return summary | changes | {"evaluations": evaluations, "findings": []}


@pytest.fixture(scope="module")
def language(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        words = ["my recipe.toml", "--group-size", "3", "--steps=2", "--run-dir", "a run"]
        assert main(["train", *words]) == 0
    return Path("a run")


@pytest.fixture(scope="module")
def control(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "cartpole_grpo", "--steps", "2", "--epochs", "1", *QUICK, "--run-dir", "an agent"]) == 0
    return Path("an agent")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("verdict", "fields"),
    [("unclear", None), ("better", None), ("worse", {"update.learning_rate"})],
)
def test_advice_after_a_language_run(verdict: str, fields: set[str] | None, language: Path) -> None:
    if verdict == "unclear":
        copy = a_copy(language)
        execute(commanded(after_training(finished(copy), ended(copy, verdict))))
        assert goes_on(copy, language)
        return
    advised = commanded(after_training(finished(language), ended(language, verdict)))
    execute(advised)
    if fields is None:
        assert advised == "covey eval 'a run' --samples 16"
        return
    assert changed(language, newest_run()) == fields
    assert newest_run().name.startswith("my recipe-")


@pytest.mark.slow
@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("verdict", "drawable", "fields"),
    [
        ("reached", True, None),
        ("reached", False, {"seed"}),
        ("short", True, None),
        ("better", True, None),
        ("better", False, {"seed"}),
        ("worse", True, {"update.learning_rate"}),
        ("unclear", True, {"seed"}),
    ],
)
def test_advice_after_a_control_run(verdict: str, drawable: bool, fields: set[str] | None, control: Path) -> None:
    if verdict == "short":
        copy = a_copy(control)
        execute(commanded(after_training(finished(copy), ended(copy, verdict))))
        assert goes_on(copy, control)
        return
    advised = commanded(after_training(finished(control, drawable=drawable), ended(control, verdict)))
    execute(advised)
    if fields is None:
        assert advised == "covey eval 'an agent' --render"
        assert (control / "agent.gif").is_file()
        return
    assert changed(control, newest_run()) == fields


def test_more_steps_are_never_fewer_than_the_recipe_s(control: Path) -> None:
    """Twice the 2 steps of this run would be fewer than the recipe's own 32."""
    advised = commanded(after_training(finished(control), ended(control, "short")))
    assert shlex.split(advised)[1:] == ["train", "--resume", "an agent", "--steps", "32"]
    long = replace(finished(control), config=replace(finished(control).config, steps=40))
    assert "--steps 80" in after_training(long, ended(control, "short"))


def test_a_run_that_its_token_budget_ended_gets_a_larger_one(language: Path) -> None:
    run = finished(language)
    assert isinstance(run.config, RunConfig)
    run = replace(run, config=replace(run.config, token_budget=500))
    assert commanded(after_training(run, ended(language, "unclear"))).endswith("--steps 4 --token-budget 1000")


REMEDY = "Try sampling.group_size = 16 (now 8)"
FINDING = {"check": "some check", "severity": "warning", "first_step": 1, "last_step": 2, "remedy": REMEDY}
PROBLEM = FINDING | {"severity": "problem"}
ALL_RIGHT = {"score_kind": "accuracy", "evaluations": [
    {"max_new_tokens": 6, "before": {"score": 1.0, "low": 0.9, "high": 1.0, "count": 9},
     "after": {"score": 1.0, "low": 0.9, "high": 1.0, "count": 9}}]}  # fmt: skip


@pytest.mark.parametrize("of_python", [False, True])
@pytest.mark.parametrize("verdict", ["better", "worse", "unclear"])
@pytest.mark.parametrize(
    ("change", "early", "next_is"),
    [
        ({"findings": [FINDING]}, False, "Next: try sampling.group_size = 16 (now 8)"),
        ({"findings": [PROBLEM]}, True, "Next: try sampling.group_size = 16 (now 8)"),
        ({"findings": [FINDING | {"last_step": 1}, PROBLEM]}, False, "Next: try sampling.group_size = 16 (now 8)"),
        ({"findings": [PROBLEM], **ALL_RIGHT}, False, "Next: try sampling.group_size = 16 (now 8)"),
        ({"findings": [FINDING], **ALL_RIGHT}, False, "Next: harder problems"),
        (ALL_RIGHT, False, "Next: harder problems"),
        ({}, True, "Next: "),
    ],
)
def test_the_last_line_agrees_with_the_diagnosis(
    change: dict[str, Any], early: bool, next_is: str, verdict: str, of_python: bool, language: Path
) -> None:
    run = replace(finished(language), ended_early=early, launch=Launch() if of_python else finished(language).launch)
    advised = after_training(run, ended(language, verdict) | change)
    assert next_is in advised
    assert "train for longer" not in advised


def test_a_finding_that_is_over_and_a_goal_that_is_reached_change_no_advice(language: Path, control: Path) -> None:
    over = {"findings": [PROBLEM | {"last_step": 1}]}
    assert "train for longer" in after_training(finished(language), ended(language, "unclear") | over)
    reached = ended(control, "reached") | {"findings": [FINDING]}
    assert "watch the policy" in after_training(finished(control), reached)


def nothing(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def by_prompt(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Equal within every group, and other in the next."""
    return [float(one) for one in answer]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reward", [nothing, by_prompt])
def test_two_steps_without_a_signal_are_a_finding_whose_remedy_is_advised(
    reward: Callable[..., list[float]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = covey.run(python_run(home), task=Arithmetic(digits=(1,)), rewards=[reward])
    assert result is not None
    (found,) = result["findings"]
    assert (found["check"], found["severity"]) == (
        "constant reward" if reward is nothing else "groups without signal", "problem",
    )  # fmt: skip
    *_, diagnosis, last = capsys.readouterr().out.strip().splitlines()
    assert found["check"] in diagnosis
    assert last.endswith(f"Next: t{found['remedy'][1:]}")


@pytest.mark.slow
def test_early_stopping_is_followed_by_no_advice_for_more_steps(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(
        python_run(home), steps=9, update=UpdateConfig(learning_rate=1e-12),
        evaluation=covey.EvaluationConfig(problems=2, every=1, patience=1),
    )  # fmt: skip
    result = covey.run(config, task=Arithmetic(digits=(1,)), rewards=[longest])
    assert result is not None
    assert (result["steps"], result["findings"]) == (2, [])
    assert "Next: lower the learning rate" in capsys.readouterr().out.splitlines()[-1]


def test_advice_lowers_the_learning_rate_that_the_run_had(language: Path) -> None:
    run = finished(language)
    for rate, expected in ((1e-7, "3e-08"), (0.0025, "0.0008"), (1e-3, "0.0003")):
        config = replace(run.config, update=replace(run.config.update, learning_rate=rate))
        advised = after_training(replace(run, config=config), ended(language, "worse"))
        assert advised.endswith(f"--learning-rate {expected}")


def test_the_last_seed_is_followed_by_the_first(control: Path) -> None:
    run = finished(control)
    advised = after_training(replace(run, config=replace(run.config, seed=2**32 - 1)), ended(control, "unclear"))
    assert advised.endswith("--seed 0")


def test_every_verdict_has_advice_that_is_always_possible() -> None:
    run = Finished(Launch(), ControlConfig(), "x", drawable=False)
    for world, rows in ADVICE.items():
        for verdict, row in rows.items():
            assert any(one.possible(run) for one in row), (world, verdict)


def longest(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def python_run(home: Path, **changes: Any) -> RunConfig:
    return RunConfig(
        model=str(home / "model"), steps=2, threads=1, precision="fp32", show_rollouts_every=0,
        sampling=covey.SamplingConfig(prompts_per_step=2, group_size=2, max_new_tokens=4),
        evaluation=covey.EvaluationConfig(problems=2), **changes,
    )  # fmt: skip


@pytest.mark.slow
def test_advice_after_a_run_from_python(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own task and rewards have no command, so the advice is the call."""
    given: dict[str, Any] = {"task": Arithmetic(digits=(1,)), "rewards": [longest]}
    assert covey.run(python_run(home, run_dir="by hand"), **given, recipe_name="mine")
    advised = commanded(capsys.readouterr().out)
    assert advised == "import covey; covey.resume('by hand', task=task, rewards=[longest], limits={'steps': 4})"
    for verdict in ADVICE["language"]:
        run_dir = a_copy(Path("by hand"))
        call = commanded(after_training(finished(run_dir), ended(run_dir, verdict)))
        assert execute(call, task=given["task"], longest=longest)
        if verdict == "worse":
            assert changed(run_dir, newest_run()) == {"update.learning_rate"}
        else:
            assert goes_on(run_dir, Path("by hand"))


class NotDrawn(gym.Wrapper):
    """CartPole without pixels."""

    metadata = {"render_modes": []}  # noqa: RUF012 -- gymnasium's own form

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1").unwrapped)


class CannotDraw(gym.Wrapper):
    """CartPole whose drawing package is missing."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 -- gymnasium's own form

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gym.make("CartPole-v1", render_mode=render_mode).unwrapped)

    def render(self) -> None:
        raise gym.error.DependencyNotInstalled("pygame is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NotDrawn, CannotDraw])
def test_nothing_is_advised_to_be_rendered_that_cannot(
    kind: type[gym.Env], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        gym.registry, "Undrawn-v0", gym.envs.registration.EnvSpec("Undrawn-v0", kind, max_episode_steps=20)
    )
    assert main(["train", "cartpole_grpo", "--environment", "Undrawn-v0", "--steps", "2", *QUICK]) == 0
    run_dir = newest_run()
    assert "--render" not in capsys.readouterr().out
    assert "--render" not in after_training(finished(run_dir, drawable=False), ended(run_dir, "reached"))
    assert main(["eval", str(run_dir)]) == 0
    advised = commanded(capsys.readouterr().out)
    assert "--render" not in advised
    execute(advised)


@pytest.mark.slow
def test_advice_of_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "my recipe.toml", "--group-size", "2", "--steps", "1"]) == 0
    execute(commanded(capsys.readouterr().out))
    assert settings(newest_run())["sampling.group_size"] == 2


@pytest.mark.slow
def test_advice_of_eval_with_and_without_a_picture(control: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(control)]) == 0
    advised = commanded(capsys.readouterr().out)
    assert advised == "covey eval 'an agent' --render"
    execute(advised)
    advised = commanded(capsys.readouterr().out)
    execute(advised)
    assert changed(control, newest_run()) == {"seed"}


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("python", [True, False])
def test_advice_after_ctrl_c(
    python: bool, begun: bool, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after a step it goes on from there; stopped before one it begins again, in the folder that was named."""
    taken: list[int] = []
    step = llm.train

    def interrupted(*arguments: Any, should_stop: Callable[[], bool]) -> None:
        if not taken:
            taken.append(1)
            if not begun:
                signal.raise_signal(signal.SIGINT)
            return step(*arguments, should_stop=lambda: (begun and bool(metrics.stat().st_size)) or should_stop())
        return step(*arguments, should_stop=should_stop)

    monkeypatch.setattr(llm, "train", interrupted)
    run_dir = Path(f"stopped {python} {begun}")
    metrics = run_dir / "metrics.jsonl"
    names: dict[str, Any] = {"task": Arithmetic(digits=(1,)), "longest": longest}
    if python:
        config = python_run(home, run_dir=str(run_dir))
        assert covey.run(config, task=names["task"], rewards=[longest], recipe_name="mine") is None
    else:
        assert main(["train", "my recipe.toml", "--run-dir", str(run_dir)]) == 130
    said = capsys.readouterr().out
    assert f"stopped after step {int(begun)}." in said
    advised = commanded(said)
    assert ("resume" in advised) == begun
    execute(advised, **names)
    assert (run_dir / "summary.json").is_file()


def test_a_reward_that_was_given_by_its_name_is_advised_by_it() -> None:
    launch = Launch.from_python("run", None, ["numeric", longest])
    advised = advice.start(launch, RunConfig(), {})
    assert advised == "import covey; covey.run(covey.RunConfig(), rewards=['numeric', longest])"


def test_a_lambda_is_named_as_the_script_may_name_it() -> None:
    launch = Launch.from_python("run", None, [lambda completions, **columns: [0.0]])
    assert advice.start(launch, RunConfig(update=UpdateConfig(epochs=2)), {}) == (
        "import covey; covey.run(covey.RunConfig(update=covey.UpdateConfig(epochs=2)), rewards=rewards)"
    )
