"""Evaluates and samples a model without training: `covey eval` and `covey sample`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from covey.config import ConfigError, RunConfig, RunError
from covey.config.model_sources import find_origin, locate_model
from covey.config.recipe import config_from_dict
from covey.data import Group, RolloutCredit, Start
from covey.experiment.conversations import RolloutKind, build_rollout_kind
from covey.experiment.evaluate_llm import answer_records, answers, by_kind, nothing_scored, scores_of, unscored
from covey.experiment.llm import build_machine, load_policy
from covey.experiment.problem import build_problem, fit_prompts, opened_problem
from covey.llm.generation.token_sampling import WHOLE, Truncation
from covey.llm.grader import RewardGrader
from covey.llm.model.chat import Chat
from covey.llm.model.loading import find_chat
from covey.tracking.console import Display
from covey.tracking.records import rollout_record
from covey.tracking.run_state import checkpoint_steps, last_step
from covey.tracking.score_kinds import SCORE_KINDS, ScoreKind
from covey.tracking.statistics import Estimate


@dataclass(frozen=True)
class ModelEvaluation:
    """Graded answers of a model to held-out problems."""

    groups: list[Group]  # one per problem
    kind: ScoreKind  # of their scores
    max_new_tokens: int
    notes: list[str]  # notes on the data for the user
    step: int  # of the training that the weights are from; 0 without one

    @property
    def scores(self) -> list[list[float]]:
        """For every problem the scores of its answers, without those that could not be graded."""
        return [scores_of(group.rollouts) for group in self.groups]

    @property
    def by_kind(self) -> dict[str, Estimate]:
        """The mean score of every kind of problem; empty if there are not at least two."""
        return by_kind(self.groups, self.kind).get("by_kind", {})

    def records(self) -> list[dict[str, Any]]:
        """The answers as records of a file, from `covey.tracking.run_store.answer_record`."""
        return answer_records(self.step, {self.max_new_tokens: self.groups})


def evaluate_model(
    config: RunConfig,
    *,
    samples: int,
    temperature: float,
    truncation: Truncation = WHOLE,
) -> ModelEvaluation:
    """Sample and grade a model's answers to held-out problems.

    Args:
        config: model, task, rewards, chat, token limit, stop strings, number of problems, seed and machine are used.
        samples: number of answers to each problem.
        temperature: 0 is greedy.
        truncation: tokens that may not be drawn.

    Raises:
        ConfigError: as `build_problem` and `load_policy` do.
        RunError: if no answer has a score.
    """
    left_out: list[str] = []
    groups: list[Group] = []
    with opened_problem(config) as (problem, kind):
        loaded = load_policy(config, build_machine(config.device, config.precision, config.threads))
        problem = fit_prompts(
            problem, config, loaded.chat, loaded.policy.module.config, left_out.append, kind=kind, training=False
        )
        sampler = replace(kind.sampler(loaded.sampler), temperature=temperature, truncation=truncation)
        with Display() as display, display.progress("answering", len(problem.held_out)) as advance:
            for piece in answers(sampler, problem.held_out, samples):
                groups += problem.grader.grade(piece)
                advance(len(piece))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    missing = len(rollouts) - len(scores_of(rollouts))
    if missing == len(rollouts):
        raise RunError(nothing_scored(problem.grader))
    notes = [*problem.notes(config.evaluation.problems, "--problems"), *kind.notes()]
    return ModelEvaluation(
        groups,
        SCORE_KINDS[problem.grader.score_kind],
        config.sampling.max_new_tokens,
        [*notes, *left_out, *([unscored(missing, len(rollouts))] if missing else [])],
        _step_of(config.model),
    )


def _step_of(model: str) -> int:
    """The training step that the weights are from; 0 if no run trained them."""
    origin = locate_model(model).origin
    if origin is None:
        return 0
    if not origin.from_checkpoint:
        return last_step(origin.run_dir)
    return origin.step or max(checkpoint_steps(origin.run_dir), default=0)


def sample_model(
    config: RunConfig, prompt: str, n: int, temperature: float, truncation: Truncation = WHOLE
) -> list[str]:
    """Sample `n` answers to a user's message with the model's chat template, if it has one.

    Args:
        config: model, chat, token limit, stop strings, seed and precision are used.
    """
    loaded = load_policy(config, build_machine("auto", config.precision, 0))
    sampler = replace(loaded.sampler, temperature=temperature, truncation=truncation)
    asked = [{"role": "user", "content": prompt}] if loaded.chat.tokenizer.chat_template else prompt
    (group,) = sampler.sample([Start(0, asked)], n, step=0)
    return [rollout.text for rollout in group.rollouts]


@dataclass(frozen=True)
class Sampled:
    """Rollouts of one prompt."""

    group: Group
    notes: list[str]  # for the user

    def records(self) -> list[dict[str, Any]]:
        """The rollouts as lines of a rollouts file."""
        return [rollout_record(0, self.group, rollout, RolloutCredit(None, None)) for rollout in self.group.rollouts]


def sample_groups(
    config: RunConfig,
    n: int,
    temperature: float,
    truncation: Truncation = WHOLE,
    *,
    prompt: str | None = None,
    columns: Mapping[str, Any] = MappingProxyType({}),
    problem: int = 0,
) -> Sampled:
    """Sample `n` completions or conversations of a prompt, or of a held-out problem, which are then graded.

    Args:
        config: model, conversation, chat, token limits, stop strings, seed and precision are used, of a held-out
            problem also task and rewards.
        n: number of rollouts.
        temperature: 0 is greedy.
        truncation: tokens that may not be drawn.
        prompt: the user's message; None: the held-out problem.
        columns: of the data, for the environment of `prompt`.
        problem: the number of the held-out problem, from 0.

    Raises:
        ConfigError: as `build_problem` and `load_policy` do; if there is no such problem, the prompt is too long, or
            every environment failed.
    """
    kind = build_rollout_kind(config)
    graders: list[RewardGrader] = []
    notes: list[str] = []
    try:
        if prompt is not None:
            start = Start(0, [{"role": "user", "content": prompt}], dict(columns))
        else:
            found = build_problem(config, kind=kind)
            graders.append(found.grader)
            if problem >= len(found.held_out):
                raise ConfigError(f"there is no held-out problem {problem}: the last is {len(found.held_out) - 1}")
            start = found.held_out[problem]
        if (described := find_chat(config.model)) is not None:
            _refuse_long(config, kind, start, *described)
        loaded = load_policy(config, build_machine("auto", config.precision, 0))
        sampler = replace(kind.sampler(loaded.sampler), temperature=temperature, truncation=truncation)
        (group,) = sampler.sample([start], n, step=0)
        failures = [rollout.failure for rollout in group.rollouts if rollout.failure]
        if len(failures) == n:
            raise ConfigError(f"{failures[0]}{'' if graders else '; --columns gives the columns of the data'}")
        notes += failures
        for grader in graders:
            grader.use_chat(loaded.chat)
            ungraded, _, why = grader.grade_part([group], 5 * n)  # failures of all of them do not end it
            notes += [why] if ungraded > len(failures) else []
    finally:
        for grader in graders:
            grader.close()
        kind.close()
    return Sampled(group, notes)


def _refuse_long(config: RunConfig, kind: RolloutKind, start: Start, chat: Chat, model_config: Any) -> None:
    """Refuse a prompt that leaves no room in the model's positions.

    Raises:
        ConfigError: with the numbers of tokens.
    """
    limit = kind.prompt_limit(chat.with_config(config.chat), model_config, config.rollout_limit, drop=False)
    if fault := limit.fault(start.prompt):
        raise ConfigError(fault)


def precision_of(model: str) -> str:
    """Precision of the run that a model is from; "auto" if it is from none."""
    origin = find_origin(model)
    config = None if origin is None else config_from_dict(origin.config_tables)
    return config.precision if isinstance(config, RunConfig) else "auto"
