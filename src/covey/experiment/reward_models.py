"""Trains and evaluates reward models: `covey reward-model train` and `covey reward-model eval`.

runs/reward_model-001/
  config.toml                   data and settings; its algorithm is reward_model
  origin.json                   how it was called, checksums of the data, the evaluation before training
  metrics.jsonl                 one line per optimizer step; the last of an epoch has the held-out metrics too
  checkpoints/                  for `covey reward-model train --resume`
  model/                        the trained model in the format of transformers, with the scale of its scores
  summary.json, reliability.png the result
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.config.fields import plural
from covey.config.files import faults_of, user_path
from covey.config.model_sources import MODEL_FOLDER
from covey.config.sft import (
    REWARD_MODEL_ALGORITHM,
    RewardModelConfig,
    RewardModelKind,
    RewardModelTraining,
    check_training,
    locate_reward_model,
)
from covey.experiment.advice import Finished, Launch
from covey.experiment.build import Experiment, build_checkpoints
from covey.experiment.job import Job, begun, resumed
from covey.experiment.llm import Machine, build_machine
from covey.experiment.supervised import HeldOutExamples, SupervisedBuilder
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
from covey.llm.reward_models.training import RewardModelTrainer, by_prompt
from covey.runtime.device import environment
from covey.runtime.distributed import ALONE
from covey.runtime.rng import batches_per_epoch, shuffled_batches
from covey.tracking.console import Display
from covey.tracking.reliability import draw_reliability
from covey.tracking.run_result import RunResult
from covey.tracking.run_store import RunStore
from covey.tracking.wording import REWARD_MODEL
from covey.train.state import Limits
from covey.train.supervised import SupervisedRun, train_supervised

RELIABILITY_FILE = "reliability.png"
SCALE_COMPLETIONS = 2000  # completions of the training data from which the mean and deviation of scores are measured


@dataclass(frozen=True)
class Data:
    """Examples of a training."""

    training: list[Example]
    held_out: list[Example]
    objective: Objective
    kind: RewardModelKind
    overlap: int = 0  # examples that were dropped because their prompts are held out


def read_training_data(config: RewardModelTraining) -> Data:
    """Read and split the data, and check that the settings fit them, before a model is loaded.

    Raises:
        ConfigError: naming the first line that is unusable.
    """
    examples = read_examples(config.data, config.grade_column)
    if config.held_out:
        held_out = read_examples(config.held_out, config.grade_column)
        if type(held_out[0]) is not type(examples[0]):
            raise ConfigError(f"{config.held_out} has another kind of data than {config.data}")
        kept = without_held_out(
            examples,
            held_out,
            paths=(config.data, config.held_out),
            drop=config.overlap == "drop",
            remedy=": add --overlap drop",
        )
    else:
        one_prompt = "the data have only one prompt, so none is left for evaluation: add prompts"
        kept, held_out = hold_out(examples, config.held_out_fraction, one_prompt=one_prompt)
    objective = choose_objective([*kept, *held_out], config.grade_loss, config.center)
    overlap = len(examples) - len(kept) if config.held_out else 0
    return Data(kept, held_out, objective, kind_of_examples(kept), overlap)


def train_reward_model(
    config: RewardModelTraining, run_dir: str | Path | Callable[[], Path], launch: Launch
) -> RunResult | None:
    """Train a reward model into a new run folder.

    Args:
        config: the settings with the names of the data.
        run_dir: the new run folder, or a function that creates it.
        launch: the command that started it.

    Returns:
        the content of summary.json; None if it was stopped before its end.

    Raises:
        ConfigError: for the first mistake, before the model is loaded.
    """
    check_training(config)
    held_out = _absolute_file(config.held_out) if config.held_out else ""
    config = replace(config, model=_absolute(config.model), data=_absolute_file(config.data), held_out=held_out)
    data = read_training_data(config)
    machine = build_machine(config.device, config.precision, config.threads)
    builder = RewardModelBuilder(config, data, machine)
    with begun(ALONE, run_dir, builder.config, launch) as store:
        return Job(builder, store, launch, _checksums(config)).run()


def resume_reward_model(run_dir: Path) -> RunResult | None:
    """Continue a stopped training exactly, from its last checkpoint.

    Returns:
        as `train_reward_model`.

    Raises:
        ConfigError: if there is none, it is finished, or its settings or data have changed.
    """
    with resumed(ALONE, run_dir, "reward-model train") as run:
        if run.store.finished():
            raise ConfigError(f"the training in {run_dir} is finished: its model is {run_dir / MODEL_FOLDER}")
        config = run.config
        assert isinstance(config, RewardModelTraining)  # of a run of covey reward-model train
        check_training(config)
        inputs = _checksums(config)
        run.refuse_changed(inputs)
        data = read_training_data(config)
        machine = build_machine(config.device, config.precision, config.threads)
        builder = RewardModelBuilder(config, data, machine)
        return Job(builder, run.store, run.launch, inputs, (), run.origin, run.notes, resuming=True).run()


class RewardModelBuilder(SupervisedBuilder):
    """Builder of the training of a reward model; implements `covey.experiment.build.ExperimentBuilder`."""

    prefix = algorithm_name = REWARD_MODEL_ALGORITHM
    wording = REWARD_MODEL
    saves_if_stopped = False

    def __init__(self, config: RewardModelTraining, data: Data, machine: Machine) -> None:
        """Load the model, because its limit decides which examples are trained.

        Raises:
            ConfigError: if the model cannot be loaded, or an example is too long.
        """
        self.data, self.machine = data, machine
        self.model = begin_reward_model(config.model, data.kind, dtype=machine.dtype, device=machine.device)
        reads_end = data.kind is RewardModelKind.PROCESS
        self.model.scale = replace(self.model.scale, step_separator=config.step_separator, reads_end=reads_end)
        self.notes: list[str] = []  # for the user, before the training
        self.examples, self.held_out = _encoded(self.model, data, config, self.notes)
        self.per_epoch = batches_per_epoch(len(self.examples), config.batch_size)
        self.config = replace(config, steps=config.epochs * self.per_epoch)
        self._quality: Quality | None = None  # the last one that was measured

    def describe(self) -> str:
        config, machine = self.config, self.machine
        return (
            f"{self.data.kind.noun} on {config.model}: {plural(len(self.examples), 'example')} to train on, "
            f"{len(self.held_out):,} held out, {plural(config.steps, 'step')} of {config.batch_size}; "
            f"{machine.device.type}, {str(machine.dtype).removeprefix('torch.')}"
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Build the components."""
        config, machine = self.config, self.machine
        evaluation = HeldOutExamples(self, self._measured, self.per_epoch, display)
        parts = SupervisedRun(
            name=self.prefix,
            trainer=RewardModelTrainer(self.model, config, self.data.objective, config.steps),
            batches=self._batches,
            steps_per_epoch=self.per_epoch,
            evaluate=evaluation.due,
            observers=(store, display),
            checkpoints=build_checkpoints(store, config.checkpoint_keep, best=config.checkpoint_best),
        )
        settings = Limits(
            steps=config.steps,
            checkpoint_every=config.checkpoint_every,
            patience=config.patience or math.inf,
            keep_best=config.checkpoint_best,
            score_metric=f"{self.prefix}/held_out_loss",
            lower_is_better=True,
        )
        return Experiment(
            parts, settings, evaluation.measure, self._collect, environment(machine.device, machine.dtype),
            partial(self._facts, store), train_supervised,
        )  # fmt: skip

    def _batches(self, done: int) -> Iterator[list[EncodedExample]]:
        config = self.config
        return shuffled_batches(
            by_prompt(self.examples), config.batch_size, seed=config.seed, epochs=config.epochs, done=done
        )

    def _measured(self) -> dict[str, float]:
        self._quality = evaluate(self.model, self.held_out, self.data.objective)
        return self._quality.metrics

    def _collect(self) -> Callable[[Path], None]:
        """Measure the scale of the scores; returns a function that writes the model."""
        model = self.model
        if model.kind is RewardModelKind.OUTCOME:
            model.measure_scale([row for one in self.examples for row in one.rows][:SCALE_COMPLETIONS])
        return lambda run_dir: model.save(run_dir / MODEL_FOLDER)

    def _facts(self, store: RunStore) -> dict[str, Any]:
        scale, quality = self.model.scale, self._quality
        return {
            "kind": self.model.kind.noun,
            "examples": {"training": len(self.examples), "held_out": len(self.held_out)},
            "held_out": quality.metrics if quality is not None else {},
            "scale": {"mean": scale.mean, "deviation": scale.deviation},
        } | self.losses(store)

    def draw(self, store: RunStore) -> None:
        """Draw the reliability diagram of the last evaluation."""
        if self._quality is not None and self._quality.reliability is not None:
            title = f"{self.model.kind.noun}, {plural(len(self.held_out), 'held-out example')}"
            draw_reliability(store.run_dir / RELIABILITY_FILE, self._quality.reliability, title)

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        super().show(display, summary, run)
        if self._quality is not None:
            display.note(f"held out: {self._quality.describe()}")
        per_step = "per_step = true and " if self.model.kind is RewardModelKind.PROCESS else ""
        display.note(f'Use it as a reward in a recipe: [[rewards]] with {per_step}model = "{run.run_dir}"')


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


def _absolute(model: str) -> str:
    """The model's name in a form that is valid in any working directory."""
    return resolve_checkpoint(locate_reward_model(model).name)


def _absolute_file(name: str) -> str:
    return str(user_path(name).absolute())


def _checksums(config: RewardModelTraining) -> dict[str, str]:
    """SHA-256 of the data files."""
    found = {}
    for name in filter(None, (config.data, config.held_out)):
        with faults_of(name), open(name, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
