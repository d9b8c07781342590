"""Encoded training examples, and the objectives that turn the scores of their rows into losses.

Shapes: N reads of the examples' rows, M terms of the loss (pairs, completions or steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.config.fields import plural
from covey.config.sft import RewardModelKind
from covey.core.reward_model_losses import bradley_terry, cross_entropy, squared_error
from covey.llm.data.reward_examples import Example, Graded, Pair, Steps
from covey.llm.reward_models.encoding import RewardEncoder, ScoredRow


@dataclass(frozen=True)
class EncodedExample:
    """An example with its sequences: two of a pair, one of a completion."""

    example: Example
    rows: tuple[ScoredRow, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(row.tokens) for row in self.rows)


class Objective(Protocol):
    """What a reward model is trained on."""

    def losses(self, logit_N: Tensor, examples: Sequence[Any]) -> Tensor:
        """loss_M of some examples from the scores of their rows."""

    def right(self, logit_N: Tensor, examples: Sequence[Any]) -> Tensor | None:
        """right_M, whether each term is predicted right; None if this has no meaning."""

    def terms(self, example: Any) -> int:
        """Number of terms of an example in the loss."""


@dataclass(frozen=True)
class PairObjective:
    """Preference pairs: `bradley_terry`."""

    center: float = 0.0

    def losses(self, logit_N: Tensor, examples: Sequence[Pair]) -> Tensor:
        chosen_M, rejected_M = logit_N.view(-1, 2).unbind(dim=1)
        margin_M = torch.tensor([example.margin for example in examples]).to(logit_N)
        return bradley_terry(chosen_M, rejected_M, margin_M, center=self.center)

    def right(self, logit_N: Tensor, examples: Sequence[Pair]) -> Tensor:
        chosen_M, rejected_M = logit_N.view(-1, 2).unbind(dim=1)
        return chosen_M > rejected_M

    def terms(self, example: Pair) -> int:
        return 1


@dataclass(frozen=True)
class GradeObjective:
    """Grades of completions: `cross_entropy` if they are probabilities, else `squared_error`."""

    are_probabilities: bool

    def losses(self, logit_N: Tensor, examples: Sequence[Graded]) -> Tensor:
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy if self.are_probabilities else squared_error
        return loss(logit_N, torch.tensor([example.grade for example in examples]).to(logit_N))

    def right(self, logit_N: Tensor, examples: Sequence[Graded]) -> Tensor | None:
        if not self.are_probabilities:
            return None
        return (logit_N > 0) == (torch.tensor([example.grade for example in examples]) > 0.5).to(logit_N.device)

    def terms(self, example: Graded) -> int:
        return 1


@dataclass(frozen=True)
class StepObjective:
    """Labels of steps: `cross_entropy`, averaged over the steps of all examples."""

    def losses(self, logit_N: Tensor, examples: Sequence[Steps]) -> Tensor:
        return cross_entropy(logit_N, labels_of(examples).to(logit_N))

    def right(self, logit_N: Tensor, examples: Sequence[Steps]) -> Tensor:
        return (logit_N > 0) == (labels_of(examples) > 0.5).to(logit_N.device)

    def terms(self, example: Steps) -> int:
        return len(example.labels)


def labels_of(examples: Sequence[Steps]) -> Tensor:
    """label_M of all steps."""
    return torch.tensor([label for example in examples for label in example.labels])


def choose_objective(examples: Sequence[Example], grade_loss: str = "auto", center: float = 0.0) -> Objective:
    """The objective for examples of one kind.

    Args:
        grade_loss: of grades: auto is cross_entropy if all are 0 or 1, else squared_error.
        center: of pairs.

    Raises:
        ConfigError: if an option does not fit the data.
    """
    first = examples[0]
    if center and not isinstance(first, Pair):
        raise ConfigError("center is for preference pairs, which these data are not: leave it out")
    if grade_loss != "auto" and not isinstance(first, Graded):
        raise ConfigError("grade_loss is for grades, which these data are not: leave it out")
    if isinstance(first, Pair):
        return PairObjective(center)
    if isinstance(first, Steps):
        return StepObjective()
    grades = [example for example in examples if isinstance(example, Graded)]
    if grade_loss == "cross_entropy":
        outside = [example for example in grades if not 0 <= example.grade <= 1]
        if outside:
            raise ConfigError(
                f"{outside[0].place}: the grade is {outside[0].grade:g}, and cross_entropy needs 0 to 1: set "
                "grade_loss to squared_error, or scale the grades"
            )
        return GradeObjective(are_probabilities=True)
    binary = all(example.grade in (0, 1) for example in grades)
    return GradeObjective(are_probabilities=grade_loss == "auto" and binary)


def kind_of_examples(examples: Sequence[Example]) -> RewardModelKind:
    """The kind of reward model that the examples train."""
    return RewardModelKind.PROCESS if isinstance(examples[0], Steps) else RewardModelKind.OUTCOME


def encode_examples(
    examples: Sequence[Example], encoder: RewardEncoder, most_tokens: int | None, *, drop: bool = False
) -> tuple[list[EncodedExample], int]:
    """Encode examples; returns them and the number of dropped ones.

    Args:
        most_tokens: longest sequence; None: any length.
        drop: leave longer examples out; otherwise they are an error.

    Raises:
        ConfigError: naming the line of the first example that cannot be encoded or is too long; if all are.
    """
    found = []
    for example in examples:
        encoded = encode_example(example, encoder)
        if most_tokens is None or encoded.longest <= most_tokens:
            found.append(encoded)
        elif not drop:
            raise ConfigError(
                f"{example.place}: the prompt with its completion has {encoded.longest:,} tokens, more than "
                f"{most_tokens:,} (max_tokens, or the model's limit): set --long-examples drop to leave such lines out"
            )
    if not found:
        raise ConfigError(
            f"all of {plural(len(examples), 'example')} are longer than {most_tokens:,} tokens: raise --max-tokens, or "
            "choose a model that reads more"
        )
    return found, len(examples) - len(found)


def encode_example(example: Example, encoder: RewardEncoder) -> EncodedExample:
    """Encode an example.

    Raises:
        ConfigError: naming its line, if it cannot be encoded.
    """
    try:
        return EncodedExample(example, _rows(example, encoder))
    except ConfigError as error:
        raise ConfigError(f"{example.place}: {error}") from error


def _rows(example: Example, encoder: RewardEncoder) -> tuple[ScoredRow, ...]:
    """The sequences. Those of equal prompts share their common prefix, and so do both texts of a pair without one."""
    return tuple(replace(row, group=example.content) for row in _encoded(example, encoder))


def _encoded(example: Example, encoder: RewardEncoder) -> tuple[ScoredRow, ...]:
    score = partial(encoder.outcome, example.prompt)
    if isinstance(example, Pair):
        return score(example.chosen), score(example.rejected)
    if isinstance(example, Steps):
        return (encoder.process(example.prompt, example.steps),)
    assert isinstance(example, Graded)
    return (score(example.completion),)
