"""The loss of a reward model on minibatches of examples, and its quality on held-out examples: loss, accuracy, AUC,
calibration, order within prompts.

`covey reward-model train` trains in the loop of every training, an iterative run by `train_epochs` in each iteration.

Shapes: N reads, M terms of the loss, K bins.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor

from covey.config import ConfigError, IterationConfig, RunError
from covey.config.sft import RewardModelConfig
from covey.core.calibration import Reliability, auc, reliability
from covey.core.reward_model_losses import aggregate
from covey.data import ExampleTrainer, Group, RewardModelUpdater, StepRecord
from covey.llm.data.reward_examples import Example, Graded, Pair, Steps
from covey.llm.reward_models.examples import EncodedExample, Objective, encode_example
from covey.llm.reward_models.graded_groups import ExampleSource, decode_state, encode_state, graded_completions
from covey.llm.reward_models.model import RewardModel, ScoreScale, microbatches
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.runtime.rng import REPLAYING, batches_per_epoch, permutation, shuffled_batches

Metrics = dict[str, float]


@dataclass(frozen=True)
class RewardCriterion:
    """Lowers the mean loss of a reward model over its terms (pairs, completions or steps); a
    `covey.train.supervised.Criterion`.
    """

    model: RewardModel
    objective: Objective
    microbatch_tokens: int
    name = "reward_model"
    rate_option = "--learning-rate (of an iterative run, iteration.reward_model_learning_rate)"

    def terms(self, examples: Sequence[EncodedExample]) -> int:
        """Number of terms of the examples in the loss."""
        return sum(self.objective.terms(one.example) for one in examples)

    def microbatches(self, examples: Sequence[EncodedExample]) -> list[list[EncodedExample]]:
        """The examples in parts of at most `microbatch_tokens`, or of one longer example."""
        parts = microbatches([one.rows for one in examples], self.microbatch_tokens)
        return [[examples[number] for number in part] for part in parts]

    def share(self, part: Sequence[EncodedExample], terms: int) -> tuple[Tensor, dict[str, float]]:
        """The losses of a part divided by `terms`, and the number of right predictions, if they can be right."""
        logit_N = self.model.logits([row for one in part for row in one.rows])
        originals = [one.example for one in part]
        right_M = self.objective.right(logit_N.detach(), originals)
        share = self.objective.losses(logit_N, originals).sum() / terms
        return share, {} if right_M is None else {"accuracy": int(right_M.sum())}

    def counts(self, examples: Sequence[EncodedExample]) -> dict[str, float]:
        """The number of tokens."""
        return {"tokens": float(sum(len(row.tokens) for one in examples for row in one.rows))}


def train_epochs(
    trainer: ExampleTrainer,
    examples: Sequence[EncodedExample],
    config: RewardModelConfig,
    *,
    epochs: int,
    on_step: Callable[[int, Metrics], bool],
    done: int = 0,
    iteration: int = 0,
) -> int:
    """Train for some epochs, from the minibatch after the first `done` ones on.

    Args:
        config: with the size and the seed of the minibatches.
        on_step: called after each optimizer step with the number of minibatches so far and the metrics; training ends
            if it returns False.
        done: number of minibatches that an interrupted call has finished.
        iteration: of an iterative run; it changes the order of the examples.

    Returns:
        the number of minibatches so far.
    """
    batches = shuffled_batches(
        by_prompt(examples), config.batch_size, seed=config.seed, epochs=epochs, done=done, iteration=iteration
    )
    for batch in batches:
        metrics = trainer.train_step(batch)
        done += 1
        if not on_step(done, metrics):
            break
    return done


def by_prompt(examples: Sequence[EncodedExample]) -> list[list[EncodedExample]]:
    """The examples of each prompt, which are trained together, so that the prompt is computed once."""
    prompts: dict[str, list[EncodedExample]] = {}
    for one in examples:
        prompts.setdefault(one.content, []).append(one)
    return list(prompts.values())


BINS = 10


@dataclass(frozen=True)
class Quality:
    """Measured quality of a reward model."""

    metrics: dict[str, float]  # those that the data define
    reliability: Reliability | None  # None for grades that are not probabilities

    def describe(self) -> str:
        """The metrics in one line."""
        names = ("accuracy", "auc", "calibration_error", "rank_agreement", "completion_auc", "correlation", "loss")
        return ", ".join(f"{name} {self.metrics[name]:.3f}" for name in names if name in self.metrics)


def evaluate(model: RewardModel, examples: Sequence[EncodedExample], objective: Objective) -> Quality:
    """Score the examples and measure the quality of the scores.

    | data   | accuracy                      | auc                      | other metrics                     |
    |--------|-------------------------------|--------------------------|-----------------------------------|
    | pairs  | the chosen one scores higher  | chosen against rejected  | mean margin                       |
    | grades | sigmoid(score) > 0.5 is right | right against wrong      | rank_agreement, correlation       |
    | steps  | sigmoid(logit) > 0.5 is right | right against wrong step | completion_auc: by the lowest one |

    A tie counts one half. `rank_agreement` is the fraction of the pairs of completions of one prompt with different
    grades that the scores order as the grades do.

    Raises:
        RunError: if a score is not finite.
    """
    scores = model.scores([row for one in examples for row in one.rows])
    logit_N = torch.cat(scores).double()
    if not bool(logit_N.isfinite().all()):
        raise RunError("the reward model has scores that are not finite: its training has diverged")
    originals = [one.example for one in examples]
    metrics = {"loss": float(objective.losses(logit_N, originals).mean()), "count": float(len(examples))}
    first = originals[0]
    if isinstance(first, Pair):
        return _of_pairs(metrics, logit_N)
    if isinstance(first, Steps):
        labels = [torch.tensor(one.labels) for one in originals if isinstance(one, Steps)]
        return _of_steps(metrics, scores, labels)
    graded = [one for one in originals if isinstance(one, Graded)]
    return _of_grades(metrics, logit_N, graded, judged=objective.right(logit_N, originals) is not None)


def _of_pairs(metrics: dict[str, float], logit_N: Tensor) -> Quality:
    chosen, rejected = logit_N.view(-1, 2).unbind(dim=1)
    gap = chosen - rejected
    is_chosen = torch.tensor([True, False]).repeat(len(gap))
    right = _above(gap)  # the preferred one is the chosen one, which has the probability of the preference
    found = reliability(gap.abs().sigmoid(), right, BINS)
    metrics |= {"accuracy": float(right.mean()), "margin": float(gap.mean()), "calibration_error": found.error}
    return Quality(metrics | _measured("auc", auc(logit_N, is_chosen)), found)


def _of_grades(metrics: dict[str, float], logit_N: Tensor, graded: list[Graded], *, judged: bool) -> Quality:
    grade_N = torch.tensor([one.grade for one in graded], dtype=torch.float64)
    metrics |= _measured("rank_agreement", rank_agreement(logit_N, graded))
    metrics |= _measured("correlation", _correlation(logit_N, grade_N))
    if not judged:
        return Quality(metrics, None)
    right_N = grade_N > 0.5
    found = reliability(logit_N.sigmoid(), right_N, BINS)
    metrics |= {"accuracy": _accuracy(logit_N, right_N), "calibration_error": found.error}
    return Quality(metrics | _measured("auc", auc(logit_N, right_N)), found)


def _of_steps(metrics: dict[str, float], scores: list[Tensor], labels: list[Tensor]) -> Quality:
    logit_N, right_N = torch.cat(scores).double(), torch.cat(labels) > 0.5
    found = reliability(logit_N.sigmoid(), right_N, BINS)
    lowest = torch.stack([aggregate(score_K.double(), "min") for score_K in scores])
    all_right = torch.stack([(label_K > 0.5).all() for label_K in labels])
    metrics |= {"accuracy": _accuracy(logit_N, right_N), "calibration_error": found.error, "steps": float(len(logit_N))}
    metrics |= _measured("auc", auc(logit_N, right_N)) | _measured("completion_auc", auc(lowest, all_right))
    return Quality(metrics, found)


def _accuracy(logit_N: Tensor, right_N: Tensor) -> float:
    return float(_above(torch.where(right_N, logit_N, -logit_N)).mean())


def _above(gap_N: Tensor) -> Tensor:
    """1 for a number above 0, one half for 0."""
    return (gap_N > 0).double() + (gap_N == 0).double() / 2


def rank_agreement(score_N: Tensor, graded: Sequence[Graded]) -> float | None:
    """Fraction of the pairs of completions of one prompt with different grades that the scores order as the grades do;
    a tie counts one half. None if there is no such pair.
    """
    by_prompt: dict[str, list[int]] = {}
    for number, one in enumerate(graded):
        by_prompt.setdefault(one.content, []).append(number)
    gaps = [
        float(score_N[i] - score_N[j]) * math.copysign(1.0, graded[i].grade - graded[j].grade)
        for members in by_prompt.values()
        for i, j in combinations(members, 2)
        if graded[i].grade != graded[j].grade
    ]
    return float(_above(torch.tensor(gaps)).mean()) if gaps else None


def _correlation(score_N: Tensor, grade_N: Tensor) -> float | None:
    """Pearson's correlation; None if one of both is constant."""
    if len(score_N) < 2 or not float(score_N.var()) or not float(grade_N.var()):
        return None
    return float(torch.corrcoef(torch.stack([score_N, grade_N]))[0, 1])


def _measured(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}


# ---- the reward model of an iterative run ----

# Trained on what the policy has sampled since the last training.
# DeepSeekMath (arXiv 2402.03300), algorithm 1, line 11: continued training with a replay of earlier examples.

MOST_HISTORY = 50_000  # examples of earlier iterations, the newest ones

Record = dict[str, Any]


class Monitor(Protocol):
    """Shows and records the trainings of the reward model."""

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar; the function takes the number of items just finished."""

    def record(self, records: Sequence[Record], *, restored: bool = False) -> None:
        """Record all iterations so far, of which the last one is new unless they are those of a checkpoint."""


@dataclass
class Training:
    """A training that has begun."""

    before: dict[str, float]  # quality of the reward model before it
    losses: list[float]  # of the minibatches so far


class IteratedRewardModel(RewardModelUpdater):
    """Collects the examples of an iteration and trains the reward model on them.

    It is also a `covey.data.Observer` of the completions. If `reward_model_epochs`
    is 0, the model is frozen and only measured.

    The record of an iteration has these keys, and in `before` and `after` the quality before and after training:

        iteration, step                     its number, and that of its last step
        reward                              name of the reward model among the rewards
        examples, replayed                  number of examples, and of those from earlier iterations
        optimizer_steps, loss               their number and mean loss
        true_reward                         mean of the completions on which the model is measured

        accuracy, auc, calibration_error    of examples as those of training (`evaluate`)
        proxy_reward                        mean reward of the completions by the model, as the run gets it
        rank_agreement                      share of right and wrong completions of one prompt in the right order
    """

    def __init__(
        self,
        settings: IterationConfig,
        config: RewardModelConfig,
        source: ExampleSource,
        proxy: WeightedReward,
        load: Callable[[], RewardModel],
        trainer_of: Callable[[RewardModel], ExampleTrainer],
        sample: Callable[[int], list[Group]],
        monitor: Monitor,
    ) -> None:
        """
        Args:
            config: of the trainings.
            source: makes examples.
            proxy: the reward model as a term of the run's reward.
            load: loads the recipe's reward model into `proxy`.
            trainer_of: makes a trainer of a model, with a constant learning rate.
            sample: iteration -> completions of held-out problems by the current policy, graded.
            monitor: shows and records.
        """
        self.settings, self.config = settings, config
        self.iterations = 0
        self.records: list[Record] = []
        self._source, self._proxy, self._load, self._sample, self._monitor = source, proxy, load, sample, monitor
        self._trainer_of = trainer_of
        self._begin()
        self._step = 0  # last one
        self._new: list[Example] = []  # of this iteration
        self._history: list[Example] = []  # of earlier ones
        self._training: Training | None = None  # None: not begun

    def record(self, step: StepRecord) -> None:
        """Collect the examples of a step."""
        self._step = step.step
        if self.settings.reward_model_epochs:
            self._new += self._source.examples(step.groups, step.step)

    def update(self, should_stop: Callable[[], bool]) -> None:
        """Train the reward model on the new examples and some of the history."""
        number = self.iterations + 1
        groups = self._sample(number)
        held_out = self._source.examples(groups, self._step)
        if self._training is None:
            self._training = Training(self._quality(groups, held_out), [])
            if self.settings.restart_reward_model and self.settings.reward_model_epochs:
                self._begin()
        examples = _encoded(self._model, [*self._new, *self._replayed(number)])
        if all(self._train(trainer, examples, self._training.losses, should_stop) for trainer in self._trainers):
            self._finish(groups, held_out, examples)

    def save(self, folder: Path) -> None:
        """Write the reward model in the format of transformers."""
        self._model.save(folder)

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state is not copied. Frozen, the weights are those of the recipe's model and are left out."""
        return {
            "iterations": self.iterations,
            "step": self._step,
            "records": json.dumps(self.records),
            "new": encode_state(self._new),
            "history": encode_state(self._history),
            "training": json.dumps(None if self._training is None else asdict(self._training)),
            "scale": json.dumps(asdict(self._model.scale)),
            "trainer": {str(number): trainer.state_dict() for number, trainer in enumerate(self._trainers)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, bit for bit."""
        self.iterations, self._step = state["iterations"], state["step"]
        self.records = json.loads(state["records"])
        self._new, self._history = decode_state(state["new"]), decode_state(state["history"])
        training = json.loads(state["training"])
        self._training = None if training is None else Training(**training)
        self._model.scale = ScoreScale(**json.loads(state["scale"]))
        for number, trainer in enumerate(self._trainers):
            trainer.load_state_dict(state["trainer"][str(number)])
        self._monitor.record(self.records, restored=True)

    def _begin(self) -> None:
        """Load the recipe's reward model; unless it is frozen, with an optimizer."""
        self._model = self._load()
        self._trainers = [self._trainer_of(self._model)] if self.settings.reward_model_epochs else []

    def _replayed(self, number: int) -> list[Example]:
        """Examples of earlier iterations, so that they are `replay_fraction` of all; at most the whole history."""
        fraction = self.settings.replay_fraction
        count = round(fraction / (1 - fraction) * len(self._new))
        order = permutation(self.config.seed, number, 0, len(self._history), stream=REPLAYING)
        return [self._history[place] for place in sorted(order[:count])]

    def _train(
        self,
        trainer: ExampleTrainer,
        examples: Sequence[EncodedExample],
        losses: list[float],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Train from the minibatch after the last finished one; False if it was stopped."""
        number, epochs = self.iterations + 1, self.settings.reward_model_epochs
        total = epochs * batches_per_epoch(len(examples), self.config.batch_size)
        if not total:
            return True
        with self._monitor.progress(f"reward model, iteration {number}", total) as advance:
            advance(len(losses))

            def on_step(done: int, metrics: Metrics) -> bool:
                losses.append(metrics["reward_model/loss"])
                advance(1)
                return not should_stop()

            done = train_epochs(
                trainer, examples, self.config, epochs=epochs, on_step=on_step, done=len(losses), iteration=number
            )
        return done == total

    def _finish(self, groups: Sequence[Group], held_out: Sequence[Example], examples: Sequence[EncodedExample]) -> None:
        """Record a training, and begin the next iteration."""
        assert self._training is not None
        model, losses = self._model, self._training.losses
        model.measure_scale([row for one in examples for row in one.rows])
        self.iterations += 1
        record: Record = {
            "iteration": self.iterations,
            "step": self._step,
            "reward": self._proxy.name,
            "examples": len(examples),
            "replayed": max(0, len(examples) - len(self._new)),
            "optimizer_steps": len(losses),
            "before": self._training.before,
            "after": self._quality(groups, held_out) if losses else self._training.before,
        }
        grades = [one.grade for one in graded_completions(groups)]
        record |= {name: fmean(values) for name, values in (("true_reward", grades), ("loss", losses)) if values}
        self.records.append(record)
        self._history = [*self._history, *self._new][-MOST_HISTORY:]
        self._new, self._training = [], None
        self._monitor.record(self.records)

    def _quality(self, groups: Sequence[Group], held_out: Sequence[Example]) -> dict[str, float]:
        """Quality of the reward model on completions of the current policy."""
        results = self._proxy.evaluate(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scored = [result.value for result, rollout in zip(results, rollouts, strict=True) if rollout.score is not None]
        found: dict[str, float] = {}
        known = [value for value in scored if value is not None]
        if known:
            found["proxy_reward"] = fmean(known)
        if len(known) == len(scored):
            agreement = rank_agreement(torch.tensor(known), graded_completions(groups))
            found |= {} if agreement is None else {"rank_agreement": agreement}
        if encoded := _encoded(self._model, held_out):
            metrics = evaluate(self._model, encoded, self._source.objective).metrics
            found |= {name: metrics[name] for name in ("accuracy", "auc", "calibration_error") if name in metrics}
        return found


def _encoded(model: RewardModel, examples: Sequence[Example]) -> list[EncodedExample]:
    """The examples that the model can take: those that are not too long, and that its chat template does not refuse."""
    found = []
    for example in examples:
        with suppress(ConfigError):
            encoded = encode_example(example, model.encoder)
            if model.longest is None or encoded.tokens <= model.longest:
                found.append(encoded)
    return found
