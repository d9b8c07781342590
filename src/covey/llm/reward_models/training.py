"""The loss of a reward model on minibatches of examples, and its quality on held-out examples: loss, accuracy, AUC,
calibration, order within prompts.

`covey reward-model train` trains in the loop of every training, an iterative run by `train_epochs` in each iteration.

Shapes: N reads, M terms of the loss, K bins.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from covey.config import RunError
from covey.config.sft import RewardModelConfig
from covey.core.calibration import Reliability, auc, reliability
from covey.core.reward_model_losses import aggregate
from covey.data import ExampleTrainer
from covey.llm.data.reward_examples import Graded, Pair, Steps
from covey.llm.reward_models.examples import EncodedExample, Objective
from covey.llm.reward_models.model import RewardModel, microbatches
from covey.runtime.rng import shuffled_batches

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
