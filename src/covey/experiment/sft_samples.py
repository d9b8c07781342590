"""Examples of `covey sft` by rejection sampling: of the model that is trained, or from the rollouts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.fields import plural
from covey.config.files import user_path
from covey.config.recipe import config_from_dict
from covey.data import EndReason, Group, Rollout, Start
from covey.experiment.conversations import build_rollout_kind
from covey.experiment.llm import Machine, load_policy
from covey.experiment.problem import fit_prompts, opened_problem
from covey.llm.data.rows import encode_fitting, hold_out
from covey.llm.model.loading import load_chat
from covey.llm.sampler import LanguageSampler
from covey.llm.sft.encoding import SFT_OPTIONS, longest_example
from covey.llm.sft.samples import Sample, read_back, select
from covey.tracking.console import Display
from covey.tracking.run_folder import EXAMPLES_FILE
from covey.tracking.run_reader import RunReader, number, table, text

PIECE = 64  # prompts per call of the sampler
STEP = 1  # whose random numbers are used


@dataclass(frozen=True)
class SampledExamples:
    """Samples with enough reward."""

    training: list[Sample]
    held_out: list[Sample]
    notes: list[str]  # for the user


def sampled_examples(config: RunConfig, machine: Machine) -> SampledExamples:
    """Sample the recipe's prompts with its model, and grade by its rewards. A function of the recipe and its seed.

    Raises:
        ConfigError: if task, rewards or environment are invalid, before the model is loaded; if no sample has enough
            reward.
    """
    sft, notes = config.sft, list[str]()
    groups: list[Group] = []
    with opened_problem(config) as (problem, kind):
        loaded = load_policy(config, machine)
        model_config = loaded.policy.module.config
        problem = fit_prompts(problem, config, loaded.chat, model_config, notes.append, kind=kind)
        problem.grader.use_chat(loaded.chat)
        loaded.sampler.ready = problem.grader.start
        sampler = kind.sampler(loaded.sampler)
        starts = problem.task.draw(config.seed, STEP, sft.count, first=0, before=0)
        with Display(title="covey: samples") as display, display.progress("sampling", len(starts)) as advance:
            for begin in range(0, len(starts), PIECE):
                piece = starts[begin : begin + PIECE]
                groups += problem.grader.grade(sampler.sample(piece, sft.samples_per_prompt, STEP))
                advance(len(piece))
    remedy = ", raise sft.samples_per_prompt or sft.count, or begin with another model"
    return _examples(config, groups, sampler, model_config, notes, remedy)


def examples_of_run(config: RunConfig) -> SampledExamples:
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
        return SampledExamples(*read_back(samples_file), [])
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
) -> SampledExamples:
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
        return SampledExamples(fitting, [], told)
    one_prompt = (
        "the examples have one prompt only, so none is left to hold out: sample more prompts, lower sft.min_reward, or "
        "set sft.held_out_fraction = 0"
    )
    split = hold_out(fitting, sft.held_out_fraction, one_prompt=one_prompt)
    return SampledExamples(split.training, split.held_out, told)


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
