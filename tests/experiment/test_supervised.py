"""The life of a training is the same for `covey train`, `covey sft` and `covey reward-model train`: faults, changed
inputs, trackers, best checkpoint, early stopping, the lists of runs. The commands run in this process.
"""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from covey.cli.main import main
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking import trackers as observer
from covey.tracking.diagnosis import diagnose
from covey.tracking.trackers import Position, Row, TrackedRun
from covey.watch.answers import Answers
from covey.watch.library import Library
from helpers.examples import write_examples
from helpers.tiny_models import tiny_folder

RECIPE = """
model = "tiny"
steps = 3
precision = "fp32"
threads = 1

[task]
name = "arithmetic"
digits = [1]
[[rewards]]
name = "digits"
[sampling]
prompts_per_step = 2
group_size = 2
max_new_tokens = 2
[evaluation]
problems = 2

[sft]
data = "sums.jsonl"
epochs = 3
batch_size = 18
learning_rate = 1e-2
[checkpoint]
every = 1
"""
OF_REWARD_MODELS = [
    "--model", "tiny", "--precision", "fp32", "--threads", "1", "--batch-size", "18", "--learning-rate", "1e-2",
    "--epochs", "3", "--checkpoint-every", "1",
]  # fmt: skip
COMMANDS = {
    "train": ["train", "tiny.toml"],
    "sft": ["sft", "tiny.toml"],
    "reward-model train": ["reward-model", "train", "pairs.jsonl", *OF_REWARD_MODELS],
}
SUPERVISED = {"sft": "sft", "reward-model train": "reward_model"}  # command -> first part of its metrics' names
CHANGED = {"train": "", "sft": "sums.jsonl", "reward-model train": "pairs.jsonl"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_folder(tmp_path / "tiny")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    write_examples(tmp_path, "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def covey(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """A command in this process; returns its exit code and what it said."""

    def call(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def disk_is_full(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "the/file")


def read_only(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system", "the/file")


@pytest.mark.parametrize("fault", [disk_is_full, read_only])
@pytest.mark.parametrize(
    ("place_of_fault", "advised"),
    [
        ("covey.experiment.job.write_config", "start again with"),
        ("covey.experiment.job.write_atomically", "start again with"),
        ("covey.runtime.checkpoint.CheckpointFolder._save", "go on with"),
    ],
)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_fault_of_the_machine_names_a_command_that_ends_the_training(
    kind: str, place_of_fault: str, advised: str, fault: Any, place: Path, covey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(place_of_fault, fault)
        code, said = covey(*COMMANDS[kind], "--run-dir", "run")
    assert code == 3, said
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "the/file" in line or "run/" in line
    found = re.search(rf"; then {advised}: covey (.*)$", line)
    assert found, line
    code, said = covey(*shlex.split(found[1]))
    assert code == 0, said
    assert json.loads((place / "run" / "summary.json").read_text())["steps"] == 3


def stop_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let a training end at a checkpoint as by a fault of the machine."""
    save = CheckpointFolder._save

    def saved(self: CheckpointFolder, at: int, *more: Any) -> None:
        if at == step:
            disk_is_full()
        save(self, at, *more)

    patch.setattr(CheckpointFolder, "_save", saved)


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_resumed_training_keeps_its_inputs_and_settings_and_ends_with_the_same_bits(
    kind: str, place: Path, covey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert covey(*COMMANDS[kind], "--run-dir", "whole")[0] == 0
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        assert covey(*COMMANDS[kind], "--run-dir", "run")[0] == 3
    resume = [*kind.split(), "--resume", "run"]
    config = place / "run" / "config.toml"
    changes = [(config, "seed = 0", "seed = 1", "config.toml has changed since the run began: seed was 0 and is 1")]
    if CHANGED[kind]:
        changes.append((place / CHANGED[kind], "5+1=", "5-1=", "has changed since the run began"))
    for path, old, new, told in changes:
        before = path.read_text()
        path.write_text(before.replace(old, new))
        code, said = covey(*resume)
        path.write_text(before)
        assert code == 2, said
        assert told in said
        assert path.name in said
    others = [other for other in COMMANDS if other != kind]
    for other in others:
        code, said = covey(*other.split(), "--resume", "run")
        assert code == 2, said
        assert f"run is a run of covey {kind}: continue it with covey {kind} --resume run" in said
    code, said = covey(*COMMANDS[kind], "--run-dir", "run")
    assert code == 2
    assert f"run already holds a run: continue it with covey {kind} --resume run" in said
    code, said = covey(*resume)
    assert code == 0, said
    assert "resuming after step 2" in said
    made, wanted = (
        {
            str(path.relative_to(place / folder)): path.read_bytes()
            for pattern in ("model/*", "checkpoints/*/tensors.safetensors")
            for path in (place / folder).glob(pattern)
        }
        for folder in ("run", "whole")
    )
    assert "model/model.safetensors" in made
    assert made == wanted
    assert metrics_of(place / "run") == metrics_of(place / "whole")


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "memory/", "decisions_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(clocks)} for line in found]


class Listing:
    """A tracker that lists what it is given."""

    made: ClassVar[list[Listing]] = []

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.ended: list[Any] = []
        Listing.made.append(self)

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        return position or Position("own")

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        self.steps.append((step, dict(metrics)))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.ended.append(summary)


@pytest.mark.parametrize("kind", SUPERVISED)
def test_a_tracker_gets_every_step_and_a_resumed_training_sends_no_step_twice(
    kind: str, place: Path, covey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(observer.ADAPTERS, "tensorboard", Listing)
    monkeypatch.setattr(Listing, "made", [])
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        assert covey(*COMMANDS[kind], "--run-dir", "run", "--trackers", "tensorboard")[0] == 3
    code, said = covey(*kind.split(), "--resume", "run")
    assert code == 0, said
    first, second = Listing.made
    loss, held_out = f"{SUPERVISED[kind]}/loss", f"{SUPERVISED[kind]}/held_out_loss"
    assert [step for step, _ in first.steps] == [0, 1, 2, 3]
    assert held_out in first.steps[0][1]
    assert all(loss in metrics for _, metrics in first.steps[1:])
    assert second.ended == [json.loads((place / "run" / "summary.json").read_text())]
    assert [step for step, _ in second.steps] == []


@pytest.mark.parametrize("kind", SUPERVISED)
def test_the_best_checkpoint_is_that_of_the_lowest_held_out_loss_and_patience_ends_the_training(
    kind: str, place: Path, covey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([9.0, 5.0, 3.0, 4.0, 3.5, 1.0])
    if kind == "sft":
        monkeypatch.setattr("covey.experiment.sft.mean_loss", lambda *_: next(losses))
        best = ["--checkpoint.best", "true", "--sft.patience", "2", "--sft.epochs", "6"]
    else:
        from covey.experiment import reward_models

        measured = reward_models.evaluate

        def evaluated(*arguments: Any) -> Any:
            quality = measured(*arguments)
            quality.metrics["loss"] = next(losses)
            return quality

        monkeypatch.setattr(reward_models, "evaluate", evaluated)
        best = ["--checkpoint-best", "true", "--patience", "2", "--epochs", "6"]
    words = [word for word in COMMANDS[kind] if word not in ("--epochs", "3")]
    code, said = covey(*words, "--run-dir", "run", *best)
    assert code == 0, said
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["best"] == {"step": 2, "score": 3.0}
    assert summary["steps"] == 4
    assert "training ends early after step 4: the held-out loss was best after step 2 (3)" in said
    kept = sorted(int(path.name[5:]) for path in (place / "run" / "checkpoints").glob("step-*"))
    assert kept == [2, 3, 4]
    assert json.loads((place / "run" / "checkpoints" / "best.json").read_text()) == {"step": 2}


class NoIndexer:
    def ask(self, *arguments: Any, **options: Any) -> None:
        """Nothing to index."""


@pytest.mark.parametrize("kind", SUPERVISED)
def test_the_lists_of_runs_and_the_page_read_a_training_on_examples(kind: str, place: Path, covey: Any) -> None:
    assert covey(*COMMANDS[kind], "--run-dir", "runs/one")[0] == 0
    code, said = covey("runs")
    assert code == 0, said
    assert re.search(r"one +finished +[36]/[36]", said), said
    code, said = covey("diagnose", "runs/one")
    assert code == 0, said
    indexer: Any = NoIndexer()
    answers = Answers(Library([place / "runs"]), indexer)
    [run] = answers.runs()["runs"]
    loss = f"{SUPERVISED[kind]}/loss"
    assert loss in json.dumps(answers.run(run["id"]))
    assert len(answers.metrics(run["id"], [loss], 100, 0, None)["series"][loss]) > 0
    answers.diagnosis(run["id"])


@pytest.mark.parametrize("name", SUPERVISED.values())
def test_a_held_out_loss_that_rises_is_a_finding(name: str) -> None:
    falling = [{"step": n, f"{name}/loss": 3 / n, f"{name}/held_out_loss": 3 / n} for n in range(1, 7)]
    assert diagnose(falling, {}) == []
    rising = [line | {f"{name}/held_out_loss": 1 + abs(n - 2) / 4} for n, line in enumerate(falling)]
    [finding] = diagnose(rising, {})
    assert finding.check == "memorised examples"
    assert "after the lowest" in finding.evidence
