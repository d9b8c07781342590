"""Evaluates and samples a model without training: `covey eval` and `covey sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from covey.config import RunConfig, RunError
from covey.config.model_sources import find_origin
from covey.config.recipe import config_from_dict
from covey.data import Group, Start
from covey.experiment.conversations import build_rollout_kind
from covey.experiment.evaluate_llm import answer_records, answers, by_kind, nothing_scored, scores_of, unscored
from covey.experiment.llm import build_machine, load_policy
from covey.experiment.problem import build_problem, fit_prompts
from covey.llm.generation.truncation import WHOLE, Truncation
from covey.tracking.console import Display
from covey.tracking.score_kinds import SCORE_KINDS, ScoreKind
from covey.tracking.statistics import Estimate


@dataclass(frozen=True)
class ModelEvaluation:
    """Graded answers of a model to held-out problems."""

    groups: list[Group]  # one per problem
    kind: ScoreKind  # of their scores
    max_new_tokens: int
    notes: list[str]  # notes on the data for the user

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
        return answer_records(0, {self.max_new_tokens: self.groups})


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
    kind = build_rollout_kind(config)
    try:
        problem = build_problem(config, kind=kind)
    except BaseException:
        kind.close()
        raise
    try:
        loaded = load_policy(config, build_machine(config.device, config.precision, config.threads))
        left_out: list[str] = []
        problem = fit_prompts(
            problem, config, loaded.chat, loaded.policy.module.config, left_out.append, training=False
        )
        sampler = replace(kind.sampler(loaded.sampler), temperature=temperature, truncation=truncation)
        groups: list[Group] = []
        with Display() as display, display.progress("answering", len(problem.held_out)) as advance:
            for piece in answers(sampler, problem.held_out, samples):
                groups += problem.grader.grade(piece)
                advance(len(piece))
    finally:
        problem.grader.close()
        kind.close()
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
    )


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


def precision_of(model: str) -> str:
    """Precision of the run that a model is from; "auto" if it is from none."""
    origin = find_origin(model)
    config = None if origin is None else config_from_dict(origin.config_tables)
    return config.precision if isinstance(config, RunConfig) else "auto"
