"""How a run ends: stopped by a signal, by an observer, early by its score; and the checkpoint with the best score."""

import json
import os
import shutil
import signal
import stat
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from covey import (
    ArithmeticConfig,
    ControlConfig,
    ControlEvaluationConfig,
    ControlUpdateConfig,
    EnvironmentConfig,
    EvaluationConfig,
    RecordConfig,
    RolloutsConfig,
    RunConfig,
    SamplingConfig,
    UpdateConfig,
    resume,
    run,
)
from covey.cli.main import main
from covey.config import CheckpointConfig, ConfigError, RewardConfig, RunError
from covey.config.model_sources import locate_model
from covey.config.rules import validate
from covey.data import StepRecord
from covey.experiment import algorithm
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.run_store import read_metrics
from covey.train.pace import TimeBudget
from helpers.run_helpers import files, reproducible_metrics
from helpers.tiny_models import tiny_folder

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stopping")
    tiny_folder(made / "tiny")
    return made


def config(folder: Path, name: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": str(folder / "tiny"),
        "steps": 4,
        "threads": 1,
        "precision": "fp32",
        "task": ArithmeticConfig(digits=(1,)),
        "rewards": (RewardConfig(name="digits"),),
        "sampling": SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=5),
        "update": UpdateConfig(learning_rate=1e-3),
        "evaluation": EvaluationConfig(problems=4, every=2),
        "checkpoint": CheckpointConfig(every=3),
        "record": RecordConfig(tokens=True),
        "show_rollouts_every": 0,
        "run_dir": str(folder / name),
    }
    return RunConfig(**settings | changes)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run that was never stopped."""
    assert run(config(folder, "whole")) is not None
    return folder / "whole"


class Signals:
    """Sends a signal to its own process in a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def record(self, step: StepRecord) -> None:
        if step.step == self.step:
            os.kill(os.getpid(), self.number)


class Breaks:
    """Raises an exception in a step."""

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self.error, self.seen = step, error, []  # type: ignore[var-annotated]

    def record(self, step: StepRecord) -> None:
        self.seen.append(step.step)
        if step.step == self.step:
            raise self.error


class Seen:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def record(self, step: StepRecord) -> None:
        self.records.append(step)


def assert_same(run_dir: Path, whole: Path) -> None:
    assert reproducible_metrics(run_dir) == reproducible_metrics(whole)
    for part in ("rollouts", "held_out", "model"):
        assert files(run_dir / part) == files(whole / part), part
    assert (run_dir / "checkpoints").is_dir()
    last = f"step-{4:08d}"
    made, expected = (CheckpointFolder(path / "checkpoints").folder(4) for path in (run_dir, whole))
    assert made.name == expected.name == last
    assert (made / "state.json").read_bytes() == (expected / "state.json").read_bytes()
    assert (made / "tensors.safetensors").read_bytes() == (expected / "tensors.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "with_model"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_stopped_run_leaves_its_summary_so_far_and_its_picture(
    folder: Path, whole: Path, number: int, with_model: bool
) -> None:
    run_dir = folder / f"stopped-{number}-{with_model}"
    checkpoint = CheckpointConfig(every=3, model_if_stopped=with_model)
    settings = config(folder, run_dir.name, checkpoint=checkpoint)
    assert run(settings, observers=Signals(2, number)) is None
    stopped = json.loads((run_dir / "stopped.json").read_text())
    assert stopped["state"] == "stopped"
    assert stopped["step"] == stopped["steps"] == 2
    assert stopped["recipe"] == "run"
    assert stopped["model"] == settings.model
    (evaluation,) = stopped["evaluations"]
    assert evaluation.keys() == {"max_new_tokens", "before"}
    assert evaluation["before"]["count"] == 4
    assert stopped["best"] == {"step": 2, "score": read_metrics(run_dir)[1]["eval/score"]}
    assert (run_dir / "curve.png").read_bytes()[:8] == PNG
    assert (run_dir / "model").is_dir() == with_model
    assert not (run_dir / "summary.json").exists()
    if with_model:
        assert locate_model(str(run_dir)).name == str(run_dir / "model")
    picture = (run_dir / "curve.png").read_bytes()
    assert resume(run_dir) is not None
    assert not (run_dir / "stopped.json").exists()
    assert (run_dir / "curve.png").read_bytes() != picture
    assert_same(run_dir, whole)


@pytest.mark.slow
def test_the_weights_of_a_stop_are_gone_as_soon_as_the_run_goes_on(folder: Path, whole: Path) -> None:
    """Else `covey sample RUN` would answer with weights that are older than the newest checkpoint."""
    settings = config(folder, "twice", checkpoint=CheckpointConfig(every=3, model_if_stopped=True))
    assert run(settings, observers=Signals(1, signal.SIGINT)) is None
    first = (folder / "twice/model/model.safetensors").read_bytes()
    seen: list[bool] = []

    class Looks:
        def record(self, step: StepRecord) -> None:
            seen.append((folder / "twice/model").exists() or (folder / "twice/stopped.json").exists())

    assert resume(folder / "twice", observers=[Looks(), Signals(3, signal.SIGINT)]) is None
    assert seen == [False, False]
    assert (folder / "twice/model/model.safetensors").read_bytes() != first
    assert json.loads((folder / "twice/stopped.json").read_text())["step"] == 3
    resume(folder / "twice")
    assert_same(folder / "twice", whole)


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_and_stopped_is_still_finished(folder: Path, whole: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(whole, copy)
    (copy / "stopped.json").write_text("{}")
    resume(copy)
    assert not (copy / "stopped.json").exists()
    assert_same(copy, whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_an_observer_that_fails_ends_the_run_and_nothing_is_lost(folder: Path, whole: Path, step: int) -> None:
    run_dir, broken, after = folder / f"broken-{step}", Breaks(step, ZeroDivisionError("a bug\nof mine")), Seen()
    with pytest.raises(RunError) as raised:
        run(config(folder, run_dir.name), observers=[broken, after])
    assert str(raised.value) == (
        f"the observer Breaks raised ZeroDivisionError (a bug of mine) in step {step}, which is recorded and saved. Go "
        f"on with: import covey; covey.resume({str(run_dir)!r}, observers=observers)"
    )
    assert raised.value.__cause__ is broken.error
    assert broken.seen == list(range(1, step + 1))
    assert [one.step for one in after.records] == list(range(1, step))
    assert len(read_metrics(run_dir)) == step
    assert CheckpointFolder(run_dir / "checkpoints").latest() == step
    assert json.loads((run_dir / "stopped.json").read_text())["step"] == step
    assert resume(run_dir, observers=after) is not None
    assert [one.step for one in after.records] == [*range(1, step), *range(step + 1, 5)]
    assert_same(run_dir, whole)


@pytest.mark.slow
def test_observers_get_what_is_in_the_files(folder: Path, whole: Path) -> None:
    seen = Seen()
    run(config(folder, "seen"), observers=[seen])
    assert_same(folder / "seen", whole)
    assert [one.step for one in seen.records] == [1, 2, 3, 4]
    for record in seen.records:
        assert {"step": record.step, **record.metrics} == read_metrics(folder / "seen")[record.step - 1]
        lines = (folder / f"seen/rollouts/step_{record.step:06d}.jsonl").read_text().splitlines()
        for line, (group, rollout, credit) in zip(map(json.loads, lines), record.rollouts(), strict=True):
            assert (line["group"], line["text"]) == (group.start.index, rollout.text)
            assert (line["advantage"], line["baseline"]) == (credit.advantage, credit.baseline)
            assert line["version"] == record.step - 1
            assert line["columns"].keys() == {"answer"}
            assert credit.tokens is not None
            assert line["tokens"] == vars(credit.tokens)


@pytest.mark.slow
def test_the_token_table_is_that_of_the_completion(whole: Path) -> None:
    from covey.llm.model.loading import find_chat

    found = find_chat(str(whole / "model"))
    assert found is not None
    tokenizer = found[0].tokenizer
    for path in sorted((whole / "rollouts").iterdir()):
        for line in map(json.loads, path.read_text().splitlines()):
            table = line["tokens"]
            assert len({len(column) for column in table.values() if column is not None}) == 1
            assert len(table["ids"]) == line["decisions"]
            assert "".join(table["texts"]) == tokenizer.decode(table["ids"])
            assert all(value == pytest.approx(line["advantage"], abs=1e-6) for value in table["advantages"])
            # On-policy, the reference of the first step is the policy that sampled.
            if line["step"] == 1 and table["reference_logprobs"] is not None:
                assert table["reference_logprobs"] == pytest.approx(table["logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    ("observers", "kind"),
    [
        (print, "of type builtin_function_or_method"),
        ([Seen(), 3], "of type int"),
        (Seen, "the class Seen"),
        ("console", "of type str"),
    ],
)
def test_what_is_no_observer_is_refused_before_a_model_is_loaded(folder: Path, observers: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"one is {kind}: give objects with the method record"):
        run(config(folder, "never", model="no such model"), observers=observers)
    assert not (folder / "never").exists()


def test_every_evaluation_is_written(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "held_out").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in (0, 2, 4)
    ]
    for step, score in ((2, read_metrics(whole)[1]["eval/score"]), (4, read_metrics(whole)[3]["eval/score"])):
        answers = [json.loads(line) for line in (whole / f"held_out/step_{step:06d}.jsonl").read_text().splitlines()]
        assert [answer["problem"] for answer in answers] == [0, 1, 2, 3]
        assert sum(answer["score"] for answer in answers) / 4 == score


def control(run_dir: Path, **changes: Any) -> ControlConfig:
    settings: dict[str, Any] = {
        "steps": 12,
        "environment": EnvironmentConfig("CartPole-v1"),
        "rollouts": RolloutsConfig(starts_per_step=2, group_size=4),
        "evaluation": ControlEvaluationConfig(episodes=5, every=1),
        "checkpoint": CheckpointConfig(every=5, best=True),
        "run_dir": str(run_dir),
    }
    return ControlConfig(**settings | changes)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = run(control(Path("agent")))
    assert summary is not None
    scores = [line["eval/score"] for line in read_metrics(Path("agent"))]
    best = scores.index(max(scores)) + 1
    assert best < 11, "not among the newest two, so that it could be lost"
    assert summary["best"] == {"step": best, "score": max(scores)}
    assert json.loads(Path("agent/checkpoints/best.json").read_text()) == {"step": best}
    assert CheckpointFolder("agent/checkpoints").steps() == sorted({best, 10, 12} | ({best} - {0}))[-3:]
    assert CheckpointFolder("agent/checkpoints").load(best)["progress"]["best_step"] == best


@pytest.mark.slow
def test_a_run_without_the_option_keeps_the_newest_checkpoints_alone(tmp_path: Path) -> None:
    run(control(tmp_path / "agent", checkpoint=CheckpointConfig(every=5)))
    assert CheckpointFolder(tmp_path / "agent/checkpoints").steps() == [10, 12]
    assert not (tmp_path / "agent/checkpoints/best.json").exists()


@pytest.mark.slow
def test_a_run_ends_early_and_a_stop_in_between_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def settings(name: str) -> ControlConfig:
        evaluation = ControlEvaluationConfig(episodes=5, every=1, patience=3)
        return control(tmp_path / name, steps=60, evaluation=evaluation)

    summary = run(settings("whole"))
    assert summary is not None
    assert summary["steps"] < 60
    scores = [line["eval/score"] for line in read_metrics(tmp_path / "whole")]
    best = scores.index(max(scores)) + 1
    assert len(scores) == best + 3
    assert all(max(scores[: step - 1]) >= scores[step - 1] for step in range(best + 1, best + 4))
    assert f"training ends early after step {best + 3}: the held-out return was best after step {best} " in (
        capsys.readouterr().out
    )
    assert run(settings("parts"), observers=Signals(best + 1, signal.SIGINT)) is None
    assert resume(tmp_path / "parts", observers=Signals(best + 2, signal.SIGINT)) is None
    assert resume(tmp_path / "parts") is not None
    for name in ("rollouts", "checkpoints"):
        made, expected = files(tmp_path / "parts" / name), files(tmp_path / "whole" / name)
        for path in made.keys() & expected.keys():
            assert made[path] == expected[path], path
    assert reproducible_metrics(tmp_path / "parts") == reproducible_metrics(tmp_path / "whole")
    assert (tmp_path / "parts/checkpoints/best.json").read_text() == json.dumps({"step": best}) + "\n"


@pytest.mark.slow
def test_a_time_budget_ends_a_run_and_a_kill_in_between_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 100 s of a fake clock, and the evaluations a few real seconds of the 800 s."""
    clock = count(0.0, 100.0).__next__
    monkeypatch.setattr(algorithm, "TimeBudget", partial(TimeBudget, clock=lambda: clock()))

    class Copies:
        def record(self, step: StepRecord) -> None:
            shutil.copytree(tmp_path / "whole", tmp_path / f"killed {step.step}")

    update = ControlUpdateConfig(schedule="linear", learning_rate=1e-3)
    summary = run(control(tmp_path / "whole", time_budget="800s", update=update), observers=Copies())
    assert summary is not None
    assert summary["steps"] == 8
    assert "the time budget of 800s ends training after step 8" in capsys.readouterr().out
    recorded = read_metrics(tmp_path / "whole")
    assert [line["time/elapsed"] for line in recorded] == [100.0 * step for step in range(1, 9)]
    rates = [1e-3 * (13 - (1 + 12 * step / 8)) / 13 for step in range(8)]
    assert [line["learning_rate"] for line in recorded] == pytest.approx(rates, rel=0.1)
    for step in (4, 7, 8):  # checkpoints are those of 5 and of the best steps
        clock = count(1e6 * step, 100.0).__next__
        assert resume(tmp_path / f"killed {step}") is not None
        assert reproducible_metrics(tmp_path / f"killed {step}") == reproducible_metrics(tmp_path / "whole"), step
        assert files(tmp_path / f"killed {step}" / "model") == files(tmp_path / "whole" / "model")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"evaluation": EvaluationConfig(patience=2)}, "evaluation.patience"),
        ({"checkpoint": CheckpointConfig(best=True), "evaluation": EvaluationConfig()}, "checkpoint.best"),
    ],
)
def test_options_that_follow_the_score_need_evaluations(folder: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{field} is set, but has no effect while evaluation.every is 0: set evaluation.every"
    ):
        validate(config(folder, "x", **changes))


@pytest.mark.slow
def test_run_at_best_is_a_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(
        folder,
        "best",
        checkpoint=CheckpointConfig(every=2, best=True),
        evaluation=EvaluationConfig(problems=4, every=1),
    )
    summary = run(settings)
    assert summary is not None
    step = summary["best"]["step"]
    found = locate_model(f"{folder / 'best'}@best")
    assert found.name == str(folder / f"best/checkpoints/step-{step:08d}")
    assert main(["export", f"{folder / 'best'}@best", str(tmp_path / "out")]) == 0
    assert main(["sample", f"{folder / 'best'}@best", "1+2", "--n", "1", "--max-new-tokens", "2"]) == 0
    # A new run from it records the checkpoint, which stays valid if the best one changes.
    chained = config(folder, "chained", steps=1, model=f"{folder / 'best'}@best")
    run(chained)
    assert f"step-{step:08d}" in (folder / "chained/config.toml").read_text()
    capsys.readouterr()
    Path(folder / "best/checkpoints/best.json").rename(tmp_path / "best.json")
    assert main(["export", f"{folder / 'best'}@best", str(tmp_path / "new")]) == 2
    assert "has no best checkpoint: a run keeps it with checkpoint.best = true" in capsys.readouterr().err
    assert main(["export", f"{folder / 'nothing'}@best", str(tmp_path / "new")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (folder / "best/checkpoints/best.json").write_text('{"step": "x"}')
    assert main(["export", f"{folder / 'best'}@best", str(tmp_path / "new")]) == 2
    assert "names no step" in capsys.readouterr().err


@pytest.mark.slow
def test_files_have_the_permissions_of_the_umask(folder: Path, whole: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        settings = config(folder, "modes", checkpoint=CheckpointConfig(every=1, best=True, model_if_stopped=True))
        settings = replace(settings, evaluation=EvaluationConfig(problems=4, every=1))
        assert run(settings, observers=Signals(2, signal.SIGINT)) is None
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder / "modes").rglob("*")}
        assert resume(folder / "modes") is not None
        modes |= {path: stat.S_IMODE(path.stat().st_mode) for path in (folder / "modes").rglob("*")}
        assert main(["export", str(folder / "modes"), str(tmp_path / "out")]) == 0
        modes |= {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*")}
    finally:
        os.umask(before)
    assert {path.name for path in modes} >= {"stopped.json", "summary.json", "best.json", "curve.png", "README.md"}
    expected = {path: 0o750 if "." not in path.name else 0o640 for path in modes}
    assert modes == expected
