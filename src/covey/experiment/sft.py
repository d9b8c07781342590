"""Supervised fine-tuning: `covey sft`, a warm start for `covey train`.

runs/arithmetic_sft-001/
  config.toml     the recipe with every default; its algorithm is sft and its steps are the optimizer steps
  origin.json     the config, checksums of the examples, and the held-out loss before training
  metrics.jsonl   one line for each optimizer step; the last of an epoch has the held-out loss too
  examples.jsonl  the samples that are trained, if the examples are the model's own
  checkpoints/    for `covey sft --resume`
  model/          the trained model in the format of transformers
  summary.json    the result, with the held-out loss before and after
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.faults import faults_of, machine_error
from covey.config.fields import command, plural
from covey.config.files import read_json
from covey.config.model_sources import ARCHITECTURE_FOLDER, CONFIG_FILE, MODEL_FOLDER
from covey.config.recipe import config_from_dict
from covey.config.recipe_writing import config_to_dict, write_config
from covey.config.rules import validate_sft
from covey.config.sft import SAMPLES, SFT_ALGORITHM, is_sampled
from covey.data import Batch
from covey.experiment.advice import Launch
from covey.experiment.build import build_checkpoints, build_optimizer
from covey.experiment.conversations import tools_of
from covey.experiment.llm import Machine, build_machine
from covey.experiment.problem import rendered_notes
from covey.experiment.resuming import load_newest
from covey.experiment.sft_samples import examples_of_run, sampled_examples
from covey.llm.data.sft_examples import Examples
from covey.llm.generation.backend import find_kernels
from covey.llm.model.loading import load_chat, load_model, resolve_checkpoint, save_architecture
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from covey.llm.sft.encoding import EncodedExample, ExampleEncoder, batch_of, encode_examples, longest_example
from covey.llm.sft.samples import read_back, tokens_of, written
from covey.llm.sft.sources import read_source
from covey.runtime.device import differences, environment, peak_memory_bytes
from covey.runtime.interrupts import set_last_words, stop_requests
from covey.runtime.optimizer import learning_rate_schedule
from covey.tracking.console import Display
from covey.tracking.output import outlasting_output
from covey.tracking.run_folder import EXAMPLES_FILE, ORIGIN_FILE, holds_run, write_atomically, write_folders
from covey.tracking.run_store import RunStore, read_metrics
from covey.train.supervised import (
    SupervisedTrainer,
    batches_per_epoch,
    mean_loss,
    shuffled_batches,
    train_supervised,
)


@dataclass(frozen=True)
class Data:
    """The encoded examples of a training."""

    training: list[EncodedExample]
    held_out: list[EncodedExample]
    notes: Sequence[str]  # for the user
    samples: bytes = b""  # content of examples.jsonl; empty if the examples are no samples

    @property
    def digest(self) -> str:
        """A checksum of all tokens."""
        parts = [[vars(example) for example in examples] for examples in (self.training, self.held_out)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out examples in batches."""
        return (batch_of(self.held_out[begin : begin + size]) for begin in range(0, len(self.held_out), size))


def train_sft(
    config: RunConfig, run_dir: Callable[[], str | Path], launch: Launch, examples: Examples | None = None
) -> dict[str, Any] | None:
    """Train a model on the examples of a recipe.

    Args:
        config: of a recipe.
        examples: those of the config, if they have been read; None: they are read.
        run_dir: gives the new run folder.
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
    with RunStore(run_dir()) as store, _faults_of_run(store):
        config = replace(config, run_dir=str(store.run_dir))
        with faults_of(store.run_dir / CONFIG_FILE):
            write_config(config, store.run_dir / CONFIG_FILE)
        if data.samples:
            write_atomically(store.run_dir / EXAMPLES_FILE, data.samples)
        origin = {
            "recipe": launch.title,
            "launch": vars(launch),
            "config": json.loads(json.dumps(config_to_dict(replace(config, run_dir="")))),  # its folder may be moved
            "inputs": {"examples": data.digest},
            "environment": environment(machine.device, machine.dtype),
            "before": [],
        }
        return _Training(config, data, machine, store, launch, origin).run(resuming=False)


def resume_sft(run_dir: Path) -> dict[str, Any] | None:
    """Continue a stopped training exactly, from its last checkpoint.

    Returns:
        as `train_sft`.

    Raises:
        ConfigError: if there is none, or its settings or examples have changed.
    """
    with RunStore(run_dir, resume=True) as store, _faults_of_run(store):
        if store.finished():
            raise ConfigError(f"the training in {run_dir} is finished: its model is {run_dir / MODEL_FOLDER}")
        origin, config = _read_beginning(store.run_dir)
        validate_sft(replace(config, algorithm="grpo"), resuming=True)
        data = recorded_data(config, store.run_dir) if is_sampled(config.sft.data) else read_data(config)
        if data.digest != origin["inputs"]["examples"]:
            raise ConfigError(
                f"the examples of {config.sft.data} have changed since the training began; a resumed one reads what it "
                "read before, so put them back, or train anew"
            )
        machine = build_machine(config.device, config.precision, config.threads)
        launch = Launch.from_dict(origin["launch"])
        return _Training(config, data, machine, store, launch, origin).run(resuming=True)


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
    return Data(training, held_out, [*notes, *_notes(config)])


def sample_data(config: RunConfig, machine: Machine) -> Data:
    """The model's own samples, of this training or of a run, as examples.

    Raises:
        ConfigError: if none has enough reward.
    """
    sampled = sampled_examples(config, machine) if config.sft.data == SAMPLES else examples_of_run(config)
    training, held_out = tokens_of(sampled.training), tokens_of(sampled.held_out)
    return Data(training, held_out, [*sampled.notes, *_notes(config)], written(sampled.training, sampled.held_out))


def recorded_data(config: RunConfig, run_dir: Path) -> Data:
    """The samples that a run folder has recorded.

    Raises:
        ConfigError: if their file is missing or damaged.
    """
    training, held_out = map(tokens_of, read_back(run_dir / EXAMPLES_FILE))
    return Data(training, held_out, _notes(config))


def _notes(config: RunConfig) -> list[str]:
    if not config.trackers:
        return []
    return [f"no metrics are sent to {', '.join(config.trackers)}, which {command('train')} alone does"]


class _Training:
    """One training in its run folder."""

    def __init__(
        self, config: RunConfig, data: Data, machine: Machine, store: RunStore, launch: Launch, origin: dict[str, Any]
    ) -> None:
        self.config, self.data, self.store, self.launch, self.origin = config, data, store, launch, origin
        self.machine = machine
        self.display = Display(title="covey: supervised fine-tuning")
        self.checkpoints = build_checkpoints(store, config.checkpoint)
        self.per_epoch = batches_per_epoch(len(data.training), config.sft.batch_size)

    def run(self, *, resuming: bool) -> dict[str, Any] | None:
        """Train to the end; None if it was stopped."""
        config, sft, display = self.config, self.config.sft, self.display
        display.note(self._describe())
        for line in self.data.notes:
            display.note(line)
        set_last_words(lambda: f"interrupted. {self._how_to_continue()}")
        chat, policy = self._load()
        optimizer = build_optimizer(policy.module, replace(config.update, learning_rate=sft.learning_rate))
        rate = learning_rate_schedule(
            sft.schedule, sft.learning_rate, steps=config.steps, warmup_steps=sft.warmup_steps
        )
        trainer = SupervisedTrainer(policy, optimizer, rate)
        with outlasting_output(), display:
            if resuming:
                self._restore(trainer)
            else:
                self.origin["held_out_loss"] = self._held_out_loss(policy)
                write_atomically(self.store.run_dir / ORIGIN_FILE, json.dumps(self.origin, indent=2).encode())
            before = self.origin["held_out_loss"]
            if before is not None and not trainer.step:
                display.note(f"before training: held-out loss {before:.4f} nats per token")
            self._train(trainer)
            if trainer.step < config.steps:
                display.note(f"stopped after step {trainer.step}. {self._how_to_continue()}")
                return None
            return self._finish(trainer, policy, chat.tokenizer)

    def _train(self, trainer: SupervisedTrainer) -> None:
        config, sft, display = self.config, self.config.sft, self.display
        total, every = config.steps, config.checkpoint.every
        with stop_requests(display.note) as stopped, display.progress("training", total) as advance:
            advance(trainer.step)
            last = time.monotonic()

            def on_step(step: int, metrics: dict[str, float]) -> bool:
                nonlocal last
                metrics["sft/epoch"] = step / self.per_epoch
                metrics["time/step"] = time.monotonic() - last
                if step % self.per_epoch == 0 and (loss := self._held_out_loss(trainer.policy)) is not None:
                    metrics["sft/held_out_loss"] = loss
                last = time.monotonic()
                self.store.record_metrics(step, metrics)
                if not display.is_live and (step % self.per_epoch == 0 or step % every == 0 or step == total):
                    display.note(_line(step, total, metrics))
                if step % every == 0 or step == total or stopped():
                    self.checkpoints.save(step, trainer.state_dict())
                advance(1)
                return not stopped()

            chosen = shuffled_batches(
                self.data.training, sft.batch_size, seed=config.seed, epochs=sft.epochs, done=trainer.step
            )
            train_supervised(trainer, map(batch_of, chosen), on_step)

    def _load(self) -> tuple[Any, LanguagePolicy]:
        """Load the model, and write its config and tokenizer into the run folder."""
        config, machine = self.config, self.machine
        with ThreadPoolExecutor(1) as executor:
            executor.submit(find_kernels, machine.device)  # may compile, which takes about 20 s
            loaded = load_model(config.model, dtype=machine.dtype, device=machine.device)
        policy = LanguagePolicy(loaded.module, microbatch_tokens=config.update.microbatch_tokens)
        if config.update.recompute:
            recompute_layers(policy.module)
        module, tokenizer = policy.module, loaded.chat.tokenizer
        write_folders(
            self.store.run_dir, lambda folder: save_architecture(module, tokenizer, folder / ARCHITECTURE_FOLDER)
        )
        now = environment(machine.device, machine.dtype) | policy.backend.recorded()
        for line in differences(self.origin["environment"] | policy.backend.recorded(), now):
            self.display.note(f"resuming on another footing, so the last bits may differ: {line}")
        return loaded.chat, policy

    def _held_out_loss(self, policy: Any) -> float | None:
        """The mean loss of the held-out examples; None if there are none."""
        if not self.data.held_out:
            return None
        return mean_loss(policy, self.data.held_out_batches(self.config.sft.batch_size))

    def _restore(self, trainer: SupervisedTrainer) -> None:
        """Load the newest complete checkpoint, and remove the records of later steps."""
        load_newest(self.checkpoints, trainer.load_state_dict)
        for line in self.store.rewind_metrics(trainer.step):
            self.display.note(line)
        self.display.note(f"resuming after step {trainer.step}")

    def _finish(self, trainer: SupervisedTrainer, policy: LanguagePolicy, tokenizer: Any) -> dict[str, Any]:
        """Write the model and the summary, and say what to do next."""

        def write(folder: Path) -> None:
            policy.save(folder / MODEL_FOLDER)
            tokenizer.save_pretrained(folder / MODEL_FOLDER)

        records = read_metrics(self.store.run_dir)
        before, after = self.origin["held_out_loss"], records[-1].get("sft/held_out_loss")
        write_folders(self.store.run_dir, write)
        summary = {
            "domain": "language",
            "score_kind": "score",
            "run_dir": str(self.store.run_dir),
            "recipe": self.origin["recipe"],
            "algorithm": SFT_ALGORITHM,
            "seed": self.config.seed,
            "steps": trainer.step,
            "seconds": sum(record.get("time/step", 0.0) for record in records),
            "decisions_trained": sum(int(record["sft/decisions"]) for record in records),
            "peak_memory_bytes": peak_memory_bytes(),
            "machine": self.origin["environment"],
            "evaluations": [],
            "examples": {"training": len(self.data.training), "held_out": len(self.data.held_out)},
            "loss": {"first": records[0]["sft/loss"], "last": records[-1]["sft/loss"]},
            "held_out_loss": {"before": before, "after": after},
        }
        self.store.write_summary(summary)
        self.display.note(_result(summary))
        self.display.note(f"Next: {self._next()}")
        return summary

    def _next(self) -> str:
        recipe = self.launch.recipe if self.config.task is not None else "RECIPE"
        return command("train", recipe, "--model", self.store.run_dir / MODEL_FOLDER)

    def _describe(self) -> str:
        data, sft = self.data, self.config.sft
        tokens = sum(example.trained for example in data.training)
        return (
            f"supervised fine-tuning of {self.config.model} on {plural(len(data.training), 'example')} of {sft.data} "
            f"({tokens:,} trained tokens), {len(data.held_out):,} held out; {plural(self.config.steps, 'step')} of "
            f"{sft.batch_size}; {self.machine.device.type}, {str(self.machine.dtype).removeprefix('torch.')}; "
            f"everything goes to {self.store.run_dir}"
        )

    def _how_to_continue(self) -> str:
        if holds_run(self.store.run_dir):
            return f"Go on with: {command('sft', '--resume', self.store.run_dir)}"
        return f"Start again with: {command('sft', self.launch.recipe, *self.launch.fields)}"


def _line(step: int, total: int, metrics: dict[str, float]) -> str:
    held_out = metrics.get("sft/held_out_loss", math.nan)
    known = "" if math.isnan(held_out) else f"  held-out loss {held_out:.4f}"
    return f"step {step}/{total}  loss {metrics['sft/loss']:.4f}{known}"


def _result(summary: dict[str, Any]) -> str:
    """The outcome of a training in one sentence."""
    held_out, loss = summary["held_out_loss"], summary["loss"]
    words = f"loss of the first step {loss['first']:.4f}, of the last {loss['last']:.4f}"
    if held_out["before"] is not None and held_out["after"] is not None:
        words = f"held-out loss {held_out['before']:.4f} before, {held_out['after']:.4f} after (nats per token)"
    return f"{words}. Everything is in {summary['run_dir']}"


def _read_beginning(run_dir: Path) -> tuple[dict[str, Any], RunConfig]:
    """The origin and the config of a training that is resumed."""
    path = run_dir / ORIGIN_FILE
    try:
        origin = dict(read_json(path))
        config = config_from_dict(dict(origin["config"]))
        complete = {"inputs", "launch", "environment", "held_out_loss"} <= origin.keys()
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is missing or damaged, so the training cannot be resumed: train anew") from error
    if not isinstance(config, RunConfig) or config.algorithm != SFT_ALGORITHM or not complete:
        raise ConfigError(
            f"{run_dir} is no supervised training: continue it with {command('train', '--resume', run_dir)}"
        )
    return origin, replace(config, run_dir=str(run_dir))


@contextmanager
def _faults_of_run(store: RunStore) -> Iterator[None]:
    """Context manager that adds the command that continues the training to a fault of the machine."""
    try:
        yield
    except Exception as error:
        fault = machine_error(error)
        if fault is None:
            raise
        raise type(fault)(f"{fault}; then go on with: {command('sft', '--resume', store.run_dir)}") from error
