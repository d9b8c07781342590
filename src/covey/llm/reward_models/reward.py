"""A reward model as a reward of a run."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from covey.config import ConfigError, RewardConfig
from covey.config.sft import RewardModelKind
from covey.core.reward_model_losses import aggregate, step_differences
from covey.llm.model.files import reading
from covey.llm.reward_models.examples import ScoredRow
from covey.llm.reward_models.loading import load_reward_model
from covey.llm.reward_models.model import RewardModel
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.runner import RewardRunner
from covey.runtime.device import choose_device, choose_precision

log = logging.getLogger(__name__)

NOT_FINITE = "has a score that is NaN or infinite: set precision to fp32, or take another model"


class ModelReward(RewardRunner):
    """Scores completions with a reward model.

    The model is loaded at the first call. It runs in this process and on the device of the run, without a deadline. A
    score that is not finite is a failure of the grader, and so is a completion that is longer than the model's limit or
    that its chat template refuses.

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

    early = False  # the model computes on the device of the sampler, so it is called after the step has been sampled

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """One score per completion; with `step_counts` one list of that length.

        Raises:
            ConfigError: if the model cannot be loaded, does not fit the options, or its forward pass fails.
        """
        model = self.loaded()
        prompts, completions = arguments["prompts"], arguments["completions"]
        if model.kind is RewardModelKind.OUTCOME:
            encode: Callable[..., ScoredRow] = model.encoder.outcome
            parts = completions
        else:
            encode = model.encoder.process
            texts = [_text(completion) for completion in completions]
            parts = arguments["steps"] if step_counts is not None else [self._steps(model, text) for text in texts]
        rows: dict[int, ScoredRow] = {}
        errors: dict[int, str] = {}
        for number, pair in enumerate(zip(prompts, parts, strict=True)):
            try:
                rows[number] = self._fitting(model, encode(*pair))
            except ConfigError as error:
                errors[number] = f"cannot read a completion: {error}"
        if errors:
            log.warning("%d of %d completions are not graded: the reward model %s %s", len(errors), len(prompts),
                        self.config.model, next(iter(errors.values())))  # fmt: skip
        scores = self._scores(model, rows)
        errors |= {number: NOT_FINITE for number, score_N in scores.items() if not bool(score_N.isfinite().all())}
        values = [None if number in errors else self._value(model, scores[number]) for number in range(len(prompts))]
        finite = [float(score) for score_N in scores.values() for score in score_N if math.isfinite(score)]
        return Results(values, {"raw_score": finite}, {}, errors)

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
                raise ConfigError(f"{fault} is for process reward models, and {name} is an outcome one: remove it")
            if config.standardise and model.scale.mean is None:
                raise ConfigError(
                    f"standardise = true, but {name} has no mean and deviation of its scores, because covey did not "
                    "train it: remove it"
                )
        elif fault := _set_options(config, "standardise", "clip"):
            raise ConfigError(f"{fault} is for outcome reward models, and {name} is a process one: remove it")

    def _steps(self, model: RewardModel, text: str) -> list[str]:
        """The parts of a completion that end with the separator of the model's training; at least one."""
        parts = [part for part in text.split(model.encoder.separator) if part.strip()]
        return parts or [text]

    def _fitting(self, model: RewardModel, row: ScoredRow) -> ScoredRow:
        """The row.

        Raises:
            ConfigError: if it is longer than the model's limit.
        """
        if model.longest is not None and len(row.tokens) > model.longest:
            raise ConfigError(
                f"with its prompt it has {len(row.tokens):,} tokens, and the model takes at most {model.longest:,}: "
                "lower sampling.max_new_tokens, leave out long prompts, or take a model that reads more"
            )
        return row

    def _scores(self, model: RewardModel, rows: Mapping[int, ScoredRow]) -> dict[int, Tensor]:
        """logit_N of each row."""
        with reading(f"reward model {self.config.model}: its forward pass fails", "choose another model"):
            return dict(zip(rows, model.scores(list(rows.values())), strict=True))

    def _value(self, model: RewardModel, score_N: Tensor) -> float | list[float]:
        if model.kind is RewardModelKind.PROCESS:
            return self._of_steps(score_N.double().sigmoid())
        score = float(score_N)
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
