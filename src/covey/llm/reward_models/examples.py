"""Examples as token ids, with the tokens at which a reward model's scores are read, and the objectives that turn these
scores into losses.

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
from covey.config.sft import DEFAULT_SEPARATOR, RewardModelKind
from covey.core.reward_model_losses import bradley_terry, cross_entropy, squared_error
from covey.llm.data.reward_examples import Example, Graded, Pair, Steps
from covey.llm.data.rows import Options, encode_fitting
from covey.llm.model.chat import Chat, Message


@dataclass(frozen=True)
class EncodedExample:
    """An example with its sequences: two of a pair, one of a completion."""

    example: Example
    rows: tuple[ScoredRow, ...]

    @property
    def content(self) -> str:
        """Key that is equal for equal prompts."""
        return self.example.content

    @property
    def tokens(self) -> int:
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
class LabelObjective:
    """Grades of completions, or labels of steps over the steps of all examples: `cross_entropy` if they are
    probabilities, else `squared_error`.
    """

    are_probabilities: bool = True

    def losses(self, logit_N: Tensor, examples: Sequence[Graded | Steps]) -> Tensor:
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy if self.are_probabilities else squared_error
        return loss(logit_N, labels_of(examples).to(logit_N))

    def right(self, logit_N: Tensor, examples: Sequence[Graded | Steps]) -> Tensor | None:
        if not self.are_probabilities:
            return None
        return (logit_N > 0) == (labels_of(examples) > 0.5).to(logit_N.device)

    def terms(self, example: Graded | Steps) -> int:
        return len(example.labels)


def labels_of(examples: Sequence[Graded | Steps]) -> Tensor:
    """label_M of all completions or steps."""
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
        return LabelObjective()
    grades = [example for example in examples if isinstance(example, Graded)]
    if grade_loss == "cross_entropy":
        outside = [example for example in grades if not 0 <= example.grade <= 1]
        if outside:
            raise ConfigError(
                f"{outside[0].place}: the grade is {outside[0].grade:g}, and cross_entropy needs 0 to 1: set "
                "grade_loss to squared_error, or scale the grades"
            )
        return LabelObjective(are_probabilities=True)
    binary = all(example.grade in (0, 1) for example in grades)
    return LabelObjective(are_probabilities=grade_loss == "auto" and binary)


def kind_of_examples(examples: Sequence[Example]) -> RewardModelKind:
    """The kind of reward model that the examples train."""
    return RewardModelKind.PROCESS if isinstance(examples[0], Steps) else RewardModelKind.OUTCOME


REWARD_OPTIONS = Options("--max-tokens", "set --long-examples drop to leave such lines out")


def encode_examples(
    examples: Sequence[Example], encoder: RewardEncoder, most_tokens: int | None, *, drop: bool = False
) -> list[EncodedExample]:
    """Encode examples. Examples with more than `most_tokens` tokens (None: any length) are dropped or, without `drop`,
    refused.

    Raises:
        ConfigError: naming the line of the first example that cannot be encoded or is refused; if none is left.
    """
    return encode_fitting(
        examples, lambda one: encode_example(one, encoder), most_tokens, drop=drop, options=REWARD_OPTIONS
    )


def encode_example(example: Example, encoder: RewardEncoder) -> EncodedExample:
    """Encode an example. Sequences of equal prompts share their common prefix, and so do both texts of a pair without
    one.

    Raises:
        ConfigError: if it cannot be encoded.
    """
    score = partial(encoder.outcome, example.prompt)
    if isinstance(example, Pair):
        rows = [score(example.chosen), score(example.rejected)]
    elif isinstance(example, Steps):
        rows = [encoder.process(example.prompt, example.steps)]
    else:
        assert isinstance(example, Graded)
        rows = [score(example.completion)]
    return EncodedExample(example, tuple(replace(row, group=example.content) for row in rows))


@dataclass(frozen=True)
class ScoredRow:
    """One sequence for a reward model."""

    tokens: tuple[int, ...]
    reads: tuple[int, ...]  # positions of the tokens whose scores are read, ascending
    group: Any = None  # rows with an equal group, such as their prompt, share their common prefix


@dataclass(frozen=True)
class RewardEncoder:
    """Encodes prompts with completions for one reward model.

    A whole chat is encoded by the model's chat template. A string prompt is followed by the completion and the
    tokenizer's end token, as in TRL.
    """

    chat: Chat
    pad_id: int | None  # of the model's config: transformers reads the score at the last token that is another one
    separator: str = DEFAULT_SEPARATOR  # after each step
    reads_end: bool = False  # the score of a completion's last step is read at an end token after it

    def outcome(self, prompt: str | Sequence[Message], completion: str | Sequence[Message]) -> ScoredRow:
        """The sequence of a prompt and a completion, whose score is read at its last token that is not padding.

        Raises:
            ConfigError: if there is no token, or the chat template cannot render the messages.
        """
        if isinstance(prompt, str):
            assert isinstance(completion, str)
            tokens = self._begin(prompt) + self.chat.encode_text(completion) + self._end()
        else:
            reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            tokens = self.chat.encode_whole([*prompt, *reply])
        last = max((place for place, token in enumerate(tokens) if token != self.pad_id), default=-1)
        if last < 0:
            raise ConfigError("a prompt with its completion has no token: give texts that are not empty")
        return ScoredRow(tokens, (last,), _group(prompt))

    def process(self, prompt: str | Sequence[Message], steps: Sequence[str]) -> ScoredRow:
        """The sequence of a prompt and the steps of a completion, whose scores are read at the last token of each.

        White space around a step is removed and the separator put after it. So a step has the same tokens wherever the
        text of a completion is cut, and the scores of its steps do not depend on what follows. With `reads_end`, the
        score of the last step is read at the tokenizer's end token, which follows it, so that it depends on whether
        the completion ends there: otherwise a policy that stops after a right first step would have the best scores.

        Raises:
            ConfigError: if the prompt cannot be encoded, or a step has no token.
        """
        tokens = list(self._begin(prompt))
        reads = []
        for step in steps:
            added = self.chat.encode_text(step.strip()) + self.chat.encode_text(self.separator)
            if not added:
                raise ConfigError(
                    f"a step has no token, because it is empty and the tokenizer makes none of {self.separator!r}: "
                    "leave empty steps out, or choose another --step-separator"
                )
            tokens += added
            reads.append(len(tokens) - 1)
        if self.reads_end and steps:
            tokens += self._end()
            reads[-1] = len(tokens) - 1
        return ScoredRow(tuple(tokens), tuple(reads), _group(prompt))

    def _begin(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        if prompt == "":
            first = self.chat.tokenizer.bos_token_id
            return () if first is None else (int(first),)
        return self.chat.encode(prompt)

    def _end(self) -> tuple[int, ...]:
        tokenizer = self.chat.tokenizer
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        return () if end is None else (int(end),)


def _group(prompt: str | Sequence[Message]) -> Any:
    """A hashable key that is equal for equal prompts."""
    if isinstance(prompt, str):
        return prompt
    return tuple(tuple(sorted(message.items())) for message in prompt)
