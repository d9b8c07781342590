"""Supervised fine-tuning: `covey sft`, a warm start for `covey train`.

runs/arithmetic_sft-001/
  config.toml     the recipe with every default; its algorithm is sft and its steps are the optimizer steps
  origin.json     the config, checksums of the examples, and the held-out loss before training
  metrics.jsonl   one line for each optimizer step; the last of an epoch has the held-out loss too
  examples.jsonl  the samples that are trained, if the examples are the model's own
  checkpoints/    for `covey sft --resume`
  model/          the trained model in the format of transformers
  trackers/       records of experiment trackers
  summary.json    the result, with the held-out loss before and after
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.fields import command, plural
from covey.config.model_sources import ARCHITECTURE_FOLDER, MODEL_FOLDER
from covey.config.recipe import training_command
from covey.config.rules import validate_sft
from covey.config.sft import SAMPLES, SFT_ALGORITHM, is_sampled
from covey.data import Batch
from covey.experiment.advice import Finished, Launch
from covey.experiment.build import Experiment, build_checkpoints, build_optimizer
from covey.experiment.conversations import tools_of
from covey.experiment.job import Job, begun, resumed
from covey.experiment.llm import Machine, build_machine
from covey.experiment.problem import rendered_notes
from covey.experiment.sft_samples import examples_of_run, sampled_examples
from covey.experiment.supervised import HeldOutExamples, SupervisedBuilder
from covey.llm.data.sft_examples import Examples
from covey.llm.generation.backend import find_kernels
from covey.llm.model.loading import load_chat, load_model, resolve_checkpoint, save_architecture
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from covey.llm.sft.encoding import EncodedExample, ExampleEncoder, batch_of, encode_examples, longest_example
from covey.llm.sft.samples import read_back, tokens_of, written
from covey.llm.sft.sources import read_source
from covey.runtime.device import environment
from covey.runtime.distributed import ALONE
from covey.runtime.optimizer import learning_rate_schedule
from covey.runtime.rng import batches_per_epoch, shuffled_batches
from covey.tracking.console import Display, RunResult
from covey.tracking.run_folder import EXAMPLES_FILE, write_atomically, write_folders
from covey.tracking.run_store import RunStore, read_metrics
from covey.tracking.wording import SFT
from covey.train.state import Limits
from covey.train.supervised import SupervisedRun, SupervisedTrainer, mean_loss, train_supervised


@dataclass(frozen=True)
class Data:
    """The encoded examples of a training."""

    training: list[EncodedExample]
    held_out: list[EncodedExample]
    notes: Sequence[str]  # for the user
    samples: bytes = b""  # content of examples.jsonl; empty if the examples are not samples

    @property
    def digest(self) -> str:
        """A checksum of all tokens."""
        parts = [[vars(example) for example in examples] for examples in (self.training, self.held_out)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def inputs(self) -> dict[str, str]:
        """The checksum by which a resumed training knows its examples."""
        return {"examples": self.digest}

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out examples in batches."""
        return (batch_of(self.held_out[begin : begin + size]) for begin in range(0, len(self.held_out), size))


def train_sft(
    config: RunConfig, run_dir: str | Path | Callable[[], Path], launch: Launch, examples: Examples | None = None
) -> RunResult | None:
    """Train a model on the examples of a recipe.

    Args:
        config: of a recipe.
        examples: those of the config, if they have been read; None: they are read.
        run_dir: the new run folder, or a function that creates it.
        launch: the command that started it.

    Returns:
        the content of summary.json; None if it was stopped before its end.

    Raises:
        ConfigError: for the first mistake, before the model is loaded.
    """
    validate_sft(config)
    config = replace(config, model=resolve_checkpoint(config.model))
    machine = build_machine(config.device, config.precision, config.threads)
    data = sample_data(config, machine) if is_sampled(config.sft.data) else read_data(config, examples)
    steps = config.sft.epochs * batches_per_epoch(len(data.training), config.sft.batch_size)
    config = replace(config, algorithm=SFT_ALGORITHM, steps=steps)
    with begun(ALONE, run_dir, config, launch) as store:
        return Job(SFTBuilder(config, data, machine), store, launch, data.inputs).run()


def resume_sft(run_dir: Path) -> RunResult | None:
    """Continue a stopped training exactly, from its last checkpoint.

    Returns:
        as `train_sft`.

    Raises:
        ConfigError: if there is none, or its settings or examples have changed.
    """
    with resumed(ALONE, run_dir, "sft") as run:
        if run.store.finished():
            raise ConfigError(f"the training in {run_dir} is finished: its model is {run_dir / MODEL_FOLDER}")
        config = run.config
        assert isinstance(config, RunConfig)  # of a run of covey sft
        validate_sft(config, resuming=True)
        data = recorded_data(config, run.store.run_dir) if is_sampled(config.sft.data) else read_data(config)
        run.refuse_changed(data.inputs)
        machine = build_machine(config.device, config.precision, config.threads)
        builder = SFTBuilder(config, data, machine)
        return Job(builder, run.store, run.launch, data.inputs, (), run.origin, run.notes, resuming=True).run()


def read_data(config: RunConfig, examples: Examples | None = None) -> Data:
    """The examples of a config as tokens, for which only the tokenizer of the model is loaded.

    Args:
        examples: as of `train_sft`.

    Raises:
        ConfigError: for the first example that cannot be used.
    """
    chat, model_config = load_chat(config.model)
    chat = chat.with_config(config.chat)
    examples = read_source(config) if examples is None else examples
    encoder, longest = ExampleEncoder(chat, tools_of(config)), longest_example(model_config, config.sft.max_tokens)
    drop = config.sft.long_examples == "drop"
    training, held_out = (
        encode_examples(some, encoder, longest, drop=drop) for some in (examples.training, examples.held_out)
    )
    notes = rendered_notes((example.prompt for example in (*examples.training, *examples.held_out)), chat)
    dropped = len(examples.training) + len(examples.held_out) - len(training) - len(held_out)
    if dropped:
        notes.append(f"{plural(dropped, 'example')} of more than {longest:,} tokens left out")
    if examples.overlap:
        notes.append(f"{plural(examples.overlap, 'example')} left out of training because their prompts are held out")
    return Data(training, held_out, notes)


def sample_data(config: RunConfig, machine: Machine) -> Data:
    """The model's own samples, of this training or of a run, as examples.

    Raises:
        ConfigError: if none has enough reward.
    """
    sampled = sampled_examples(config, machine) if config.sft.data == SAMPLES else examples_of_run(config)
    training, held_out = tokens_of(sampled.training), tokens_of(sampled.held_out)
    return Data(training, held_out, sampled.notes, written(sampled.training, sampled.held_out))


def recorded_data(config: RunConfig, run_dir: Path) -> Data:
    """The samples that a run folder has recorded.

    Raises:
        ConfigError: if their file is missing or damaged.
    """
    training, held_out = map(tokens_of, read_back(run_dir / EXAMPLES_FILE))
    return Data(training, held_out, [])


class SFTBuilder(SupervisedBuilder):
    """Builder of a supervised fine-tuning; implements `covey.experiment.build.ExperimentBuilder`."""

    prefix = algorithm_name = SFT_ALGORITHM
    wording = SFT

    def __init__(self, config: RunConfig, data: Data, machine: Machine) -> None:
        self.config, self.data, self.machine = config, data, machine
        self.notes = data.notes

    @property
    def saves_if_stopped(self) -> bool:
        return self.config.checkpoint.model_if_stopped

    def describe(self) -> str:
        data, sft = self.data, self.config.sft
        tokens = sum(example.trained for example in data.training)
        return (
            f"supervised fine-tuning of {self.config.model} on {plural(len(data.training), 'example')} of {sft.data} "
            f"({tokens:,} trained tokens), {len(data.held_out):,} held out; {plural(self.config.steps, 'step')} of "
            f"{sft.batch_size}; {self.machine.device.type}, {str(self.machine.dtype).removeprefix('torch.')}"
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load the model, and write its config and tokenizer into the run folder."""
        config, sft, machine, data = self.config, self.config.sft, self.machine, self.data
        if data.samples:
            write_atomically(store.run_dir / EXAMPLES_FILE, data.samples)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(find_kernels, machine.device)  # may compile, which takes about 20 s
            loaded = load_model(config.model, dtype=machine.dtype, device=machine.device)
        policy = LanguagePolicy(loaded.module, microbatch_tokens=config.update.microbatch_tokens)
        if config.update.recompute:
            recompute_layers(policy.module)
        module, tokenizer = policy.module, loaded.chat.tokenizer
        write_folders(store.run_dir, lambda folder: save_architecture(module, tokenizer, folder / ARCHITECTURE_FOLDER))
        optimizer = build_optimizer(policy.module, replace(config.update, learning_rate=sft.learning_rate))
        rate = learning_rate_schedule(
            sft.schedule, sft.learning_rate, steps=config.steps, warmup_steps=sft.warmup_steps
        )

        def batches(done: int) -> Iterator[Batch]:
            alone = [[example] for example in data.training]
            return map(
                batch_of, shuffled_batches(alone, sft.batch_size, seed=config.seed, epochs=sft.epochs, done=done)
            )

        def held_out() -> dict[str, float]:
            return {"loss": mean_loss(policy, data.held_out_batches(sft.batch_size))} if data.held_out else {}

        per_epoch = batches_per_epoch(len(data.training), sft.batch_size)
        evaluation = HeldOutExamples(self, held_out, per_epoch, display)
        parts = SupervisedRun(
            name=self.prefix,
            trainer=SupervisedTrainer(policy, optimizer, rate),
            batches=batches,
            steps_per_epoch=per_epoch,
            evaluate=evaluation.due,
            observers=(store, display),
            checkpoints=build_checkpoints(store, config.checkpoint.keep, best=config.checkpoint.best),
        )
        settings = Limits(
            steps=config.steps,
            checkpoint_every=config.checkpoint.every,
            patience=sft.patience or math.inf,
            keep_best=config.checkpoint.best,
            score_metric=f"{self.prefix}/held_out_loss",
            lower_is_better=True,
        )

        def save(run_dir: Path) -> None:
            policy.save(run_dir / MODEL_FOLDER)
            tokenizer.save_pretrained(run_dir / MODEL_FOLDER)

        known = environment(machine.device, machine.dtype) | policy.backend.recorded()
        return Experiment(
            parts, settings, evaluation.measure, lambda: save, known, lambda: self._facts(store), train_supervised
        )

    def _facts(self, store: RunStore) -> dict[str, Any]:
        decisions = sum(int(record.get("sft/decisions", 0)) for record in read_metrics(store.run_dir))
        examples = {"training": len(self.data.training), "held_out": len(self.data.held_out)}
        return {"decisions_trained": decisions, "examples": examples} | self.losses(store)

    def show(self, display: Display, summary: dict[str, Any], run: Finished) -> None:
        super().show(display, summary, run)
        recipe = run.launch.recipe if self.config.task is not None else "RECIPE"
        model = Path(run.run_dir) / MODEL_FOLDER
        display.note(
            f"Next: {command(training_command(replace(self.config, algorithm='grpo')), recipe, '--model', model)}"
        )
