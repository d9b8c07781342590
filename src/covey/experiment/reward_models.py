"""Trains and evaluates reward models: `covey reward-model train` and `covey reward-model eval`.

runs/reward_model-001/
  reward_model.json             data, settings and environment; `--resume` continues with them
  metrics.jsonl                 one line per optimizer step, and one per evaluation on the held-out examples
  checkpoints/                  for `--resume`; removed at the end
  model/                        the trained model in the format of transformers, with the scale of its scores
  summary.json, reliability.png the result
  covey.lock                    locked by the process that writes here
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.config.faults import faults_of
from covey.config.fields import command, plural
from covey.config.files import read_json, user_path
from covey.config.reward_models import (
    TRAINING_FILE,
    RewardModelConfig,
    RewardModelKind,
    check_training,
    locate_reward_model,
)
from covey.experiment.llm import Machine, build_machine
from covey.experiment.resuming import load_newest
from covey.experiment.reward_model_folder import RELIABILITY_FILE, RewardModelFolder
from covey.llm.data.reward_examples import Example, read_examples
from covey.llm.data.rows import hold_out, without_held_out
from covey.llm.model.loading import resolve_checkpoint
from covey.llm.reward_models.evaluation import Quality, evaluate
from covey.llm.reward_models.examples import (
    EncodedExample,
    Objective,
    choose_objective,
    encode_examples,
    kind_of_examples,
)
from covey.llm.reward_models.loading import begin_reward_model, load_reward_model
from covey.llm.reward_models.model import RewardModel
from covey.llm.reward_models.training import Metrics, RewardModelTrainer, batches_per_epoch, train_epochs
from covey.runtime.device import differences, environment
from covey.runtime.interrupts import set_last_words, stop_requests
from covey.tracking.console import Display
from covey.tracking.output import outlasting_output
from covey.tracking.reliability import draw_reliability

SCALE_COMPLETIONS = 2000  # completions of the training data from which the mean and deviation of scores are measured


@dataclass(frozen=True)
class Training:
    """A training of a reward model, as `reward_model.json` records it."""

    config: RewardModelConfig
    data: str
    held_out: str = ""  # data of the evaluation; empty: a fraction of `data`


@dataclass(frozen=True)
class Data:
    """Examples of a training."""

    training: list[Example]
    held_out: list[Example]
    objective: Objective
    kind: RewardModelKind
    overlap: int = 0  # examples that were dropped because their prompts are held out


def read_training_data(training: Training) -> Data:
    """Read and split the data, and check that the settings fit them, before a model is loaded.

    Raises:
        ConfigError: naming the first line that is unusable.
    """
    config = training.config
    examples = read_examples(training.data, config.grade_column)
    if training.held_out:
        held_out = read_examples(training.held_out, config.grade_column)
        if type(held_out[0]) is not type(examples[0]):
            raise ConfigError(f"{training.held_out} has another kind of data than {training.data}")
        kept = without_held_out(
            examples,
            held_out,
            paths=(training.data, training.held_out),
            drop=config.overlap == "drop",
            remedy=": add --overlap drop",
        )
    else:
        one_prompt = "the data have only one prompt, so none is left for evaluation: add prompts"
        kept, held_out = hold_out(examples, config.held_out_fraction, one_prompt=one_prompt)
    objective = choose_objective([*kept, *held_out], config.grade_loss, config.center)
    overlap = len(examples) - len(kept) if training.held_out else 0
    return Data(kept, held_out, objective, kind_of_examples(kept), overlap)


def train_reward_model(training: Training, run_dir: Path) -> bool:
    """Train a reward model into a new run folder; False if it was stopped before its end.

    Raises:
        ConfigError: for the first mistake.
    """
    check_training(training.config)
    config = replace(training.config, model=_absolute(training.config.model))
    training = replace(training, config=config, data=_absolute_file(training.data))
    if training.held_out:
        training = replace(training, held_out=_absolute_file(training.held_out))
    data = read_training_data(training)
    machine = build_machine(config.device, config.precision, config.threads)
    with RewardModelFolder(run_dir) as folder:
        record = {
            "training": asdict(training),
            "inputs": _checksums(training),
            "environment": environment(machine.device, machine.dtype),
        }
        return _train(training, data, machine, folder, record, resuming=False)


def resume_reward_model(run_dir: Path) -> bool:
    """Continue a stopped training exactly, from its last checkpoint; False if it was stopped again.

    Raises:
        ConfigError: if there is none, it is finished, or its data have changed.
    """
    with RewardModelFolder(run_dir, resume=True) as folder:
        record = read_json(run_dir / TRAINING_FILE)
        try:
            saved = dict(record["training"])
            training = Training(RewardModelConfig(**saved.pop("config")), **saved)
            inputs, machine_before = dict(record["inputs"]), dict(record["environment"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{run_dir / TRAINING_FILE} is damaged: train the reward model again") from error
        check_training(training.config)
        data = read_training_data(training)
        for name, checksum in _checksums(training).items():
            if inputs.get(name) != checksum:
                raise ConfigError(
                    f"{name} has changed since the training began; a resumed one reads what it read before, so put it "
                    "back, or train a new reward model"
                )
        config = training.config
        machine = build_machine(config.device, config.precision, config.threads)
        now = environment(machine.device, machine.dtype)
        folder.notes = [
            f"resuming on another footing, so the last bits may differ: {line}"
            for line in differences(machine_before, now)
        ]
        return _train(training, data, machine, folder, record, resuming=True)


def _train(
    training: Training,
    data: Data,
    machine: Machine,
    folder: RewardModelFolder,
    record: dict[str, Any],
    *,
    resuming: bool,
) -> bool:
    config, run_dir = training.config, folder.run_dir
    go_on = command("reward-model", "train", "--resume", run_dir)
    model = begin_reward_model(config.model, data.kind, dtype=machine.dtype, device=machine.device)
    reads_end = data.kind is RewardModelKind.PROCESS
    model.scale = replace(model.scale, step_separator=config.step_separator, reads_end=reads_end)
    examples, held_out = _encoded(model, data, config, folder.notes)
    per_epoch = batches_per_epoch(len(examples), config.batch_size)
    total = config.epochs * per_epoch
    trainer = RewardModelTrainer(model, config, data.objective, total)
    display = Display(title=f"covey: {data.kind.noun}")
    display.note(
        f"{data.kind.noun} on {config.model}: {plural(len(examples), 'example')} to train on, {len(held_out):,} held "
        f"out, {plural(total, 'step')} of {config.batch_size}; {machine.device.type}, "
        f"{str(machine.dtype).removeprefix('torch.')}; everything goes to {run_dir}"
    )
    for line in folder.notes:
        display.note(line)
    if resuming:
        _restore(trainer, folder, display)
    else:
        folder.begin(record)
    set_last_words(lambda: f"interrupted. Go on with: {go_on}")
    with outlasting_output(), display:
        if not trainer.step:
            _evaluate(trainer, held_out, data.objective, folder, 0, display)
        with stop_requests(display.note) as stopped, display.progress("training", total) as advance:
            advance(trainer.step)
            last = time.monotonic()

            def on_step(done: int, metrics: Metrics) -> bool:
                nonlocal last
                now = time.monotonic()
                folder.record({"step": done, "epoch": done / per_epoch, **metrics, "time/step": now - last})
                last = now
                if not display.is_live and (done % config.checkpoint_every == 0 or done == total):
                    display.note(_line(done, total, metrics))
                if done % per_epoch == 0:
                    _evaluate(trainer, held_out, data.objective, folder, done, display)
                if done % config.checkpoint_every == 0 or done == total or stopped():
                    folder.save_checkpoint(done, trainer.state_dict())
                advance(1)
                return not stopped()

            train_epochs(trainer, examples, epochs=config.epochs, on_step=on_step, done=trainer.step)
        if trainer.step < total:
            display.note(f"stopped after step {trainer.step}. Go on with: {go_on}")
            return False
        _finish(trainer, examples, held_out, data.objective, folder, display)
    return True


def _finish(
    trainer: RewardModelTrainer,
    examples: Sequence[EncodedExample],
    held_out: Sequence[EncodedExample],
    objective: Objective,
    folder: RewardModelFolder,
    display: Display,
) -> None:
    """Measure the final model and write it."""
    model = trainer.model
    if model.kind is RewardModelKind.OUTCOME:
        model.measure_scale([row for one in examples for row in one.rows][:SCALE_COMPLETIONS])
    quality = evaluate(model, held_out, objective)
    folder.write_model(model.save)
    if quality.reliability is not None:
        title = f"{model.kind.noun}, {plural(len(held_out), 'held-out example')}"
        draw_reliability(folder.run_dir / RELIABILITY_FILE, quality.reliability, title)
    scale = {"mean": model.scale.mean, "deviation": model.scale.deviation}
    folder.finish({"kind": model.kind.noun, "steps": trainer.step, "held_out": quality.metrics, "scale": scale})
    display.note(f"held out: {quality.describe()}. Everything is in {folder.run_dir}")
    per_step = "per_step = true and " if model.kind is RewardModelKind.PROCESS else ""
    display.note(f'Use it as a reward in a recipe: [[rewards]] with {per_step}model = "{folder.run_dir}"')


def evaluate_reward_model(
    name: str, data: str, *, config: RewardModelConfig, picture: Path | None = None
) -> tuple[Quality, int]:
    """Measure a reward model on a data set; returns the quality and the number of examples.

    Args:
        name: a reward model's folder, the run folder of its training, or a hub name.
        data: preference pairs, grades or step labels, as for its training.
        config: grade_loss, grade_column, max_tokens, long_examples and the machine are used.
        picture: file of the reliability diagram.

    Raises:
        ConfigError: if the data do not fit the model.
    """
    examples = read_examples(data, config.grade_column)
    objective = choose_objective(examples, config.grade_loss)
    machine = build_machine(config.device, config.precision, config.threads)
    model = load_reward_model(name, dtype=machine.dtype, device=machine.device)
    kind = kind_of_examples(examples)
    if kind is not model.kind:
        raise ConfigError(
            f"{data} has data of {kind.with_article}, and {name} is {model.kind.with_article}: name other data"
        )
    encoded, _ = encode_examples(
        examples, model.encoder, _most_tokens(model, config), drop=config.long_examples == "drop"
    )
    quality = evaluate(model, encoded, objective)
    if picture is not None and quality.reliability is not None:
        draw_reliability(picture, quality.reliability, f"{model.kind.noun}, {plural(len(encoded), 'example')}")
    return quality, len(encoded)


def _encoded(
    model: RewardModel, data: Data, config: RewardModelConfig, notes: list[str]
) -> tuple[list[EncodedExample], list[EncodedExample]]:
    """The encoded training and held-out examples."""
    most, drop = _most_tokens(model, config), config.long_examples == "drop"
    examples, dropped = encode_examples(data.training, model.encoder, most, drop=drop)
    held_out, more = encode_examples(data.held_out, model.encoder, most, drop=drop)
    if dropped + more:
        notes.append(f"{plural(dropped + more, 'example')} of more than {most:,} tokens were left out")
    if data.overlap:
        notes.append(f"{plural(data.overlap, 'example')} left out of training because their prompts are held out")
    return examples, held_out


def _most_tokens(model: RewardModel, config: RewardModelConfig) -> int | None:
    limit = model.longest
    return min(config.max_tokens or limit or 0, limit or config.max_tokens) or None


def _evaluate(
    trainer: RewardModelTrainer,
    held_out: Sequence[EncodedExample],
    objective: Objective,
    folder: RewardModelFolder,
    step: int,
    display: Display,
) -> None:
    quality = evaluate(trainer.model, held_out, objective)
    folder.record({"step": step, **{f"held_out/{name}": value for name, value in quality.metrics.items()}})
    display.note(f"step {step}, held out: {quality.describe()}")


def _restore(trainer: RewardModelTrainer, folder: RewardModelFolder, display: Display) -> None:
    """Load the newest complete checkpoint, and remove the records of later steps."""
    latest = load_newest(folder.checkpoints, trainer.load_state_dict)
    folder.rewind(-1 if latest is None else latest)
    display.note(f"resuming after step {trainer.step}")


def _line(done: int, total: int, metrics: Metrics) -> str:
    parts = [f"step {done}/{total}", f"loss {metrics['loss']:.4f}"]
    parts += [f"accuracy {metrics['accuracy']:.3f}"] if "accuracy" in metrics else []
    return "  ".join(parts)


def _absolute(model: str) -> str:
    """The model's name in a form that is valid in any working directory."""
    return resolve_checkpoint(locate_reward_model(model).name)


def _absolute_file(name: str) -> str:
    return str(user_path(name).absolute())


def _checksums(training: Training) -> dict[str, str]:
    """SHA-256 of the data files."""
    found = {}
    for name in filter(None, (training.data, training.held_out)):
        with faults_of(name), open(name, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
