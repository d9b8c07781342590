"""Answers of a model without training: `covey eval` and `covey sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from covey.config import RunConfig, RunError, SamplingConfig
from covey.config.model_sources import find_origin
from covey.config.recipe import config_from_dict
from covey.data import Group, Start
from covey.experiment.evaluate_llm import answer_records, answers, nothing_scored, scores_of, unscored
from covey.experiment.llm import build_machine, build_problem, fit_prompts, load_policy
from covey.tracking.console import Display
from covey.tracking.score_kinds import SCORE_KINDS, ScoreKind


@dataclass(frozen=True)
class ModelEvaluation:
    """Graded answers of a model to held-out problems."""

    groups: list[Group]  # one a problem
    kind: ScoreKind  # of their scores
    max_new_tokens: int
    notes: list[str]  # what a user should know of the data

    @property
    def scores(self) -> list[list[float]]:
        """Of every problem the scores of its answers, those that could not be graded left out."""
        return [scores_of(group.rollouts) for group in self.groups]

    def records(self) -> list[dict[str, Any]]:
        """The answers as lines of a file, as `covey.tracking.run_store.answer_record` writes them."""
        return answer_records(0, {self.max_new_tokens: self.groups})


def evaluate_model(
    config: RunConfig,
    *,
    samples: int,
    temperature: float,
) -> ModelEvaluation:
    """Answers of a model to held-out problems, and their scores.

    Args:
        config: names model, task, rewards, token limit, number of problems, seed and machine.
        samples: answers to each problem.
        temperature: 0 is greedy.

    Raises:
        ConfigError: as `build_problem` and `load_policy` do.
        RunError: where no answer has a score.
    """
    problem = build_problem(config)
    try:
        loaded = load_policy(config, build_machine(config.device, config.precision, config.threads))
        left_out: list[str] = []
        problem = fit_prompts(
            problem, config, loaded.chat, loaded.policy.module.config, left_out.append, training=False
        )
        sampler = replace(loaded.sampler, temperature=temperature)
        groups: list[Group] = []
        with Display() as display, display.progress("answering", len(problem.held_out)) as advance:
            for piece in answers(sampler, problem.held_out, samples):
                groups += problem.grader.grade(piece)
                advance(len(piece))
    finally:
        problem.grader.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    missing = len(rollouts) - len(scores_of(rollouts))
    if missing == len(rollouts):
        raise RunError(nothing_scored(problem.grader))
    notes = problem.notes(config.evaluation.problems, "--problems")
    return ModelEvaluation(
        groups,
        SCORE_KINDS[problem.grader.score_kind],
        config.sampling.max_new_tokens,
        [*notes, *left_out, *([unscored(missing, len(rollouts))] if missing else [])],
    )


def sample_model(model: str, prompt: str, n: int, temperature: float, max_new_tokens: int, seed: int) -> list[str]:
    """`n` answers to a user's message, through the model's chat template if it has one; a run's in its precision."""
    config = RunConfig(model=model, seed=seed, sampling=SamplingConfig(max_new_tokens=max_new_tokens))
    loaded = load_policy(config, build_machine("auto", _precision_of(model), 0))
    sampler = replace(loaded.sampler, temperature=temperature)
    asked = [{"role": "user", "content": prompt}] if loaded.chat.tokenizer.chat_template else prompt
    (group,) = sampler.sample([Start(0, asked)], n, step=0)
    return [rollout.text for rollout in group.rollouts]


def _precision_of(model: str) -> str:
    """Precision of the run that a model comes from; "auto" if it comes from none."""
    origin = find_origin(model)
    config = None if origin is None else config_from_dict(origin.told)
    return config.precision if isinstance(config, RunConfig) else "auto"
