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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.fields import plural
from covey.config.files import user_path
from covey.config.model_sources import ARCHITECTURE_FOLDER, MODEL_FOLDER
from covey.config.recipe import config_from_dict
from covey.config.rules import validate_sft
from covey.config.sft import SAMPLES, SFT_ALGORITHM, is_sampled
from covey.data import EndReason, Group, Rollout, Start, Team
from covey.experiment.advice import Launch
from covey.experiment.algorithm import build_pace
from covey.experiment.job import Experiment, begun
from covey.experiment.models import divide_alone, load_policy, load_trainable
from covey.experiment.problem import build_rollout_kind, opened_problem, text_notes, tools_of
from covey.experiment.supervised import SupervisedBuilder, build_trainer
from covey.llm.data.rows import Split, encode_fitting, encode_split, hold_out
from covey.llm.data.sft_examples import Example
from covey.llm.model.loading import load_chat, resolve_checkpoint, save_architecture
from covey.llm.sampler import LanguageSampler
from covey.llm.sft.encoding import (
    SFT_OPTIONS,
    EncodedExample,
    ExampleEncoder,
    Sample,
    batch_of,
    longest_example,
    read_back,
    read_source,
    select,
    tokens_of,
    written,
)
from covey.runtime.device import Machine, build_machine
from covey.runtime.distributed import describe_team, gather_groups, joined_ranks, own_shards, share, team_of
from covey.runtime.rng import batches_per_epoch, shuffled_batches
from covey.runtime.variables import check_ranks
from covey.tracking.console import Display, RunResult
from covey.tracking.run_folder import EXAMPLES_FILE, write_atomically, write_folders
from covey.tracking.run_reader import RunReader, number, table, text
from covey.tracking.run_store import RunStore, read_metrics
from covey.tracking.wording import SFT
from covey.train.supervised import Likelihood, mean_loss


@dataclass(frozen=True)
class Data:
    """The encoded examples of a training."""

    training: list[EncodedExample]
    held_out: list[EncodedExample]
    notes: Sequence[str]  # for the user
    samples: bytes = b""  # content of examples.jsonl; empty if the examples are not samples

    @classmethod
    def of_samples(cls, training: list[Sample], held_out: list[Sample], notes: Sequence[str]) -> Data:
        """The tokens of the model's own samples."""
        return cls(tokens_of(training), tokens_of(held_out), notes, written(training, held_out))

    @property
    def inputs(self) -> dict[str, str]:
        """The checksum of all tokens, by which a resumed training knows its examples."""
        parts = [[vars(example) for example in examples] for examples in (self.training, self.held_out)]
        return {"examples": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}


def train_sft(
    config: RunConfig, run_dir: str | Path | Callable[[], Path], launch: Launch, examples: Split[Example] | None = None
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
    check_ranks(config, sft=True)
    config = replace(config, model=resolve_checkpoint(config.model))
    with joined_ranks():
        machine = build_machine(config.device, config.precision, config.threads)
        if config.sft.data == SAMPLES:
            data = sampled_examples(config, machine, team_of(config.cluster.shards))
        else:
            data = examples_of_run(config) if is_sampled(config.sft.data) else read_data(config, examples)
        steps = config.sft.epochs * batches_per_epoch(len(data.training), config.sft.batch_size)
        config = replace(config, algorithm=SFT_ALGORITHM, steps=steps)
        with begun(team_of(0), run_dir, config, launch) as job:
            return job.run(SFTBuilder(config, data, machine), data.inputs)


def read_data(config: RunConfig, examples: Split[Example] | None = None) -> Data:
    """The examples of a config as tokens, for which only the tokenizer of the model is loaded.

    Args:
        examples: as of `train_sft`.

    Raises:
        ConfigError: for the first example that cannot be used.
    """
    chat, model_config = load_chat(config.model)
    chat = chat.with_config(config.chat)
    examples = read_source(config) if examples is None else examples
    notes = text_notes((example.prompt for example in (*examples.training, *examples.held_out)), chat)
    training, held_out = encode_split(
        examples,
        ExampleEncoder(chat, tools_of(config)).encode,
        longest_example(model_config, config.sft.max_tokens),
        drop=config.sft.long_examples == "drop",
        options=SFT_OPTIONS,
        notes=notes,
    )
    return Data(training, held_out, notes)


class SFTBuilder(SupervisedBuilder):
    """Builder of a supervised fine-tuning."""

    algorithm_name = command = SFT_ALGORITHM
    wording = SFT

    def __init__(self, config: RunConfig, data: Data, machine: Machine) -> None:
        super().__init__(config, data, machine)
        self.found, self.patience, self.pace = data.notes, config.sft.patience, build_pace(config)

    @classmethod
    def read(cls, config: Any, run_dir: Path) -> Data:
        validate_sft(config, resuming=True)
        if not is_sampled(config.sft.data):
            return read_data(config)
        return Data.of_samples(*read_back(run_dir / EXAMPLES_FILE), [])

    @property
    def counts(self) -> dict[str, int]:
        return {"training": len(self.data.training), "held_out": len(self.data.held_out)}

    @property
    def per_epoch(self) -> int:
        return batches_per_epoch(len(self.data.training), self.config.sft.batch_size)

    def describe(self) -> str:
        data, sft = self.data, self.config.sft
        tokens = sum(example.trained for example in data.training)
        return (
            f"supervised fine-tuning of {self.config.model} on {plural(len(data.training), 'example')} of {sft.data} "
            f"({tokens:,} trained tokens), {len(data.held_out):,} held out; {plural(self.config.steps, 'step')} of "
            f"{sft.batch_size}; {self.machine.describe()}{describe_team(self.team)}"
        )

    def build(self, store: RunStore, display: Display) -> Experiment:
        """Load the model, and write its config and tokenizer into the run folder."""
        config, sft, machine, data, team = self.config, self.config.sft, self.machine, self.data, self.team
        if data.samples:
            write_atomically(store.run_dir / EXAMPLES_FILE, data.samples)
        policy, chat = load_trainable(config, machine)
        module = policy.module
        write_folders(store.run_dir, lambda folder: save_architecture(module, chat, folder / ARCHITECTURE_FOLDER))
        policy = policy.with_outputs(weights=divide_alone(policy, config.model, config.cluster, team))
        criterion = Likelihood(policy, batch_of)
        trainer = build_trainer(
            criterion, module, sft, config.update, config.steps, team, policy.weights, self.pace,
            config.schedule_restarts,
        )  # fmt: skip

        def batches(done: int) -> Iterator[list[EncodedExample]]:
            alone = [[example] for example in data.training]
            return shuffled_batches(alone, sft.batch_size, seed=config.seed, epochs=sft.epochs, done=done)

        def held_out() -> dict[str, float]:
            begins = range(0, len(data.held_out), sft.batch_size)
            parts = (data.held_out[begin : begin + sft.batch_size] for begin in begins)
            return {"loss": mean_loss(criterion, parts, team)} if data.held_out else {}

        def collect() -> Callable[[Path], None]:
            write = policy.collect()

            def save(run_dir: Path) -> None:
                write(run_dir / MODEL_FOLDER)
                chat.save(run_dir / MODEL_FOLDER)

            return save

        return self.experiment(
            store,
            display,
            trainer=trainer,
            batches=batches,
            measured=held_out,
            collect=collect,
            facts=lambda: {"decisions_trained": self._decisions(store)},
            backend=policy.backend.recorded(),
            checkpoint=config.checkpoint,
        )

    def _decisions(self, store: RunStore) -> int:
        return sum(int(record.get("sft/decisions", 0)) for record in read_metrics(store.run_dir))


PIECE = 64  # prompts per call of the sampler
STEP = 1  # whose random numbers are used


def sampled_examples(config: RunConfig, machine: Machine, team: Team) -> Data:
    """Sample the recipe's prompts with its model, and grade by its rewards. A function of the recipe and its seed. Each
    rank samples its own prompts and receives the samples of all.

    Raises:
        ConfigError: if task, rewards or environment are invalid, before the model is loaded; if no sample has enough
            reward.
    """
    sft, notes = config.sft, list[str]()
    groups: list[Group] = []
    with opened_problem(config) as problem:
        problem.refuse_images("covey sft")
        loaded = load_policy(config, machine)
        model_config = loaded.policy.module.config
        problem = problem.fit(loaded.chat, model_config, notes.append)
        problem.grader.use_chat(loaded.chat)
        loaded.sampler.ready = problem.grader.start
        sampler = problem.kind.sampler(loaded.sampler)
        starts = problem.task.draw(config.seed, STEP, sft.count, first=0, before=0)
        with Display(title="covey: samples") as display, display.progress("sampling", len(starts)) as advance:
            parts = share(len(starts), team)
            own = [start for shard in own_shards(team) for start in starts[parts[shard]]]
            for begin in range(0, len(own), PIECE):
                piece = own[begin : begin + PIECE]
                groups += problem.grader.grade(sampler.sample(piece, sft.samples_per_prompt, STEP))
                advance(len(piece))
        if team.size > 1:
            groups = gather_groups(groups, starts, team, "the sampling of examples")
    remedy = ", raise sft.samples_per_prompt or sft.count, or begin with another model"
    return _examples(config, groups, sampler, model_config, notes, remedy)


def examples_of_run(config: RunConfig) -> Data:
    """The rollouts of a run with enough reward, or all samples on which a run of `covey sft` was trained.

    The prompts of rollouts are encoded with the recipe's [chat] and [conversation].

    Raises:
        ConfigError: if the run has no tokens or those of another tokenizer, or no rollout has enough reward.
    """
    name = config.sft.data
    reader = RunReader(user_path(name))
    steps, samples_file = reader.rollout_steps(), reader.run_dir / EXAMPLES_FILE
    if not samples_file.is_file() and not (steps and reader.has_tokens(steps[0])):
        raise ConfigError(
            f"sft.data: the run {name} has no rollouts with tokens, which covey train records with --record.tokens "
            'true; or set sft.data = "samples"'
        )
    chat, model_config = load_chat(config.model)
    if chat.tokenizer.get_vocab() != load_chat(name)[0].tokenizer.get_vocab():
        raise ConfigError(f"sft.data: the tokens of {name} are of another tokenizer than that of {config.model}")
    if samples_file.is_file():
        return Data.of_samples(*read_back(samples_file), [])
    notes = _differences(config, reader)
    kind = build_rollout_kind(config)
    try:
        plain = LanguageSampler(None, chat.with_config(config.chat), 0, 1)  # type: ignore[arg-type]  # it samples nothing
        sampler = kind.sampler(plain)
    finally:
        kind.close()
    return _examples(config, _groups(reader, steps, sampler), sampler, model_config, notes, "")


def _examples(
    config: RunConfig,
    groups: Iterable[Group],
    sampler: LanguageSampler,
    model_config: Any,
    notes: Sequence[str],
    remedy: str,
) -> Data:
    """The examples among graded groups."""
    sft, groups = config.sft, list(groups)
    chosen = select(groups, sft, sampler.prompt_of, remedy=remedy)
    longest = longest_example(model_config, sft.max_tokens)
    drop = sft.long_examples == "drop"
    fitting = encode_fitting(chosen, lambda sample: sample, longest, drop=drop, options=SFT_OPTIONS)
    told = list(notes)
    if len(fitting) < len(chosen):
        told.append(f"{plural(len(chosen) - len(fitting), 'example')} of more than {longest:,} tokens left out")
    rewards = [rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None]
    told.append(
        f"{plural(len(chosen), 'example')} of {plural(len(rewards), 'graded sample')} (mean reward "
        f"{sum(rewards) / len(rewards):.3g}), each with a reward of at least {sft.min_reward:g}"
    )
    if not sft.held_out_fraction:
        return Data.of_samples(fitting, [], told)
    one_prompt = (
        "the examples have one prompt only, so none is left to hold out: sample more prompts, lower sft.min_reward, or "
        "set sft.held_out_fraction = 0"
    )
    split = hold_out(fitting, sft.held_out_fraction, one_prompt=one_prompt)
    return Data.of_samples(split.training, split.held_out, told)


def _differences(config: RunConfig, reader: RunReader) -> list[str]:
    """Notes on settings of prompts that differ from those of the run.

    Raises:
        ConfigError: if only one of them has conversations.
    """
    run = config_from_dict(reader.config() or {})
    if not isinstance(run, RunConfig) or run.has_conversations != config.has_conversations:
        raise ConfigError(
            f"sft.data: one of the recipe and the run {config.sft.data} has conversations, and the other has not: give "
            "the recipe the [conversation] table of the run"
        )
    same = (run.chat, run.conversation) == (config.chat, config.conversation)
    return [] if same else ["the recipe has another [chat] or [conversation] than the run of the rollouts"]


def _groups(reader: RunReader, steps: Sequence[int], sampler: LanguageSampler) -> Iterator[Group]:
    """The recorded groups of a run as rollouts with tokens.

    Raises:
        ConfigError: if a record is damaged.
    """
    for step in steps:
        try:
            groups, _ = reader.groups(step)
        except OSError as error:
            raise ConfigError(f"the rollouts of step {step} in {reader.run_dir} cannot be read: {error}") from None
        for group in groups:
            try:
                rollouts = [_rollout(line, sampler) for line in group.rollouts]
                yield Group(Start(group.number, group.rollouts[0]["prompt"]), rollouts)
            except (KeyError, TypeError, ValueError, AttributeError):
                where = Path(reader.run_dir) / f"step {step}, group {group.number}"
                raise ConfigError(f"a rollout of {where} is damaged, or has no tokens") from None


def _rollout(line: dict[str, Any], sampler: LanguageSampler) -> Rollout:
    tokens = table(line["tokens"])
    observation = text(line.get("observation"))
    decided = [logprob is not None for logprob in tokens["logprobs"]]
    return Rollout(
        context=sampler.context_of(line["prompt"], observation),
        actions=[int(token) for token in tokens["ids"]],
        behavior_logprobs=[0.0] * len(decided),
        end=EndReason(line["end"]),
        text=text(line["text"]),
        decided=decided,
        messages=line.get("messages"),
        observation=observation,
        reward=number(line["reward"]),
        reward_parts=table(line.get("reward_parts")),
    )
