"""A reward model as a reward of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.config import ConfigError, RewardConfig
from covey.config.reward_models import RewardModelKind
from covey.core.reward_model_losses import aggregate, step_differences
from covey.llm.model.architecture import position_limit
from covey.llm.reward_models.encoding import ScoredRow
from covey.llm.reward_models.loading import load_reward_model
from covey.llm.reward_models.model import RewardModel
from covey.llm.rewards.reward_call import Results
from covey.runtime.device import choose_device, choose_precision

log = logging.getLogger(__name__)


class ModelReward:
    """Scores completions with a reward model; implements `covey.llm.rewards.runner.RewardRunner`.

    The model is loaded at the first call. It runs in this process and on the device of the run, without a deadline. A
    score that is not finite, and a completion that is longer than the model's limit, is a failure of the grader.

    | kind    | per_step | result                                                                          |
    |---------|----------|---------------------------------------------------------------------------------|
    | outcome | no       | the score, standardised and clipped by the options                              |
    | process | yes      | sigmoid of each step's logit, or its difference from the step before            |
    | process | no       | the aggregate of these probabilities, for steps that end at the model's separator |
    """

    def __init__(self, config: RewardConfig, device: str = "auto", precision: str = "auto") -> None:
        """`device` and `precision` are those of the run, as in a recipe."""
        self.config = config
        self._place = device, precision
        self._model: RewardModel | None = None

    workers = 1

    def start(self, *_: Any) -> None:
        """None: the model computes on the device of the sampler, so it is called after the step has been sampled."""

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """One score per completion; with `step_counts` one list of that length.

        Raises:
            ConfigError: if the model cannot be loaded, or does not fit the options or the prompts.
        """
        model = self.loaded()
        prompts, completions = arguments["prompts"], arguments["completions"]
        if model.kind is RewardModelKind.OUTCOME:
            rows = [model.encoder.outcome(*pair) for pair in zip(prompts, completions, strict=True)]
        else:
            texts = [_text(completion) for completion in completions]
            steps = arguments["steps"] if step_counts is not None else [self._steps(model, text) for text in texts]
            rows = [model.encoder.process(*pair) for pair in zip(prompts, steps, strict=True)]
        scores = self._scores(model, rows)
        finite = [float(score) for score_N in scores for score in score_N if math.isfinite(score)]
        return Results([self._value(model, score_N) for score_N in scores], {"raw_score": finite}, {})

    def close(self) -> None:
        """Free the model."""
        self._model = None

    def loaded(self) -> RewardModel:
        """The model, which is loaded at the first call.

        Raises:
            ConfigError: as `call`.
        """
        if self._model is None:
            device = choose_device(self._place[0])
            dtype = choose_precision(self._place[1], device)
            model = load_reward_model(self.config.model, dtype=dtype, device=device)
            self._check(model)
            self._model = model
        return self._model

    def reload(self) -> RewardModel:
        """The model as its files have it, in place of one that was trained since."""
        self.close()
        return self.loaded()

    def _check(self, model: RewardModel) -> None:
        """Refuse options that the kind of the model does not have.

        Raises:
            ConfigError: naming the option.
        """
        config, name = self.config, self.config.model
        if model.kind is RewardModelKind.OUTCOME:
            if fault := _set_options(config, "per_step", "step_differences", "aggregate"):
                raise ConfigError(f"{fault} is for process reward models, and {name} is an outcome one: take it out")
            if config.standardise and model.scale.mean is None:
                raise ConfigError(
                    f"standardise = true, but {name} has no mean and deviation of its scores, because covey did not "
                    "train it: take it out"
                )
        elif fault := _set_options(config, "standardise", "clip"):
            raise ConfigError(f"{fault} is for outcome reward models, and {name} is a process one: take it out")

    def _steps(self, model: RewardModel, text: str) -> list[str]:
        """The parts of a completion that end with the separator of the model's training; at least one."""
        parts = [part for part in text.split(model.encoder.separator) if part.strip()]
        return parts or [text]

    def _scores(self, model: RewardModel, rows: Sequence[ScoredRow]) -> list[Tensor]:
        """logit_N of each row; NaN for rows that are longer than the model's limit."""
        limit = position_limit(model.module.config) or math.inf
        fitting = [number for number, row in enumerate(rows) if len(row.tokens) <= limit]
        if len(fitting) < len(rows):
            log.warning(
                "the reward model %s takes at most %d tokens, and %d of %d completions are longer: they are not graded",
                self.config.model,
                limit,
                len(rows) - len(fitting),
                len(rows),
            )
        found = dict(zip(fitting, model.scores([rows[number] for number in fitting]), strict=True))
        return [found.get(number, torch.full((len(row.reads),), math.nan)) for number, row in enumerate(rows)]

    def _value(self, model: RewardModel, score_N: Tensor) -> float | list[float]:
        if model.kind is RewardModelKind.PROCESS:
            return self._of_steps(score_N.double().sigmoid())
        score = float(score_N)
        if not math.isfinite(score):
            return score  # a comparison with a bound would hide it
        if self.config.standardise is not False:
            score = model.scale.standardised(score)
        bound = math.inf if self.config.clip is None else self.config.clip
        return max(-bound, min(bound, score))

    def _of_steps(self, probability_N: Tensor) -> float | list[float]:
        if self.config.per_step:
            values: list[float] = (
                step_differences(probability_N) if self.config.step_differences else probability_N
            ).tolist()
            return values
        return float(aggregate(probability_N, self.config.aggregate or "min"))


def _set_options(config: RewardConfig, *names: str) -> str:
    """The first of these options that is set; "" if none is."""
    return next((name for name in names if getattr(config, name) not in (None, False, "")), "")


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)
