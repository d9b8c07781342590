"""Examples for a reward model from the completions of a run, which the verifier has graded.

| source        | examples                                                  | grades from                     |
|---------------|-----------------------------------------------------------|---------------------------------|
| `PairSource`  | a right and a wrong completion of a prompt                | `Rollout.score`                 |
| `GradeSource` | a completion with its grade                               | `Rollout.score`                 |
| `StepSource`  | a completion with the labels of its steps by continuation | a verifier of the continuations |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from covey.data import Group, Rollout, Start
from covey.llm.data.reward_examples import Example, Graded, Messages, Pair, Steps
from covey.llm.reward_models.continuation_labels import StepLabeller
from covey.llm.reward_models.examples import GradeObjective, Objective, PairObjective, StepObjective
from covey.runtime.rng import SELECTING, permutation

RIGHT = 0.5  # a score above it is right


class ExampleSource(Protocol):
    """Makes examples of one kind from graded groups."""

    @property
    def objective(self) -> Objective:
        """The objective of these examples."""

    def examples(self, groups: Sequence[Group], step: int) -> list[Example]:
        """Examples of the groups of a step; the choice is a function of (seed, step, group)."""


@dataclass(frozen=True)
class PairSource:
    """Pairs of different texts, at most `most` of a group, drawn evenly from all pairs of the group."""

    seed: int
    most: int

    objective = PairObjective()

    def examples(self, groups: Sequence[Group], step: int) -> list[Example]:
        return list(self.pairs(groups, step))

    def pairs(self, groups: Sequence[Group], step: int) -> list[Pair]:
        """As `examples`."""
        found = []
        for group in groups:
            graded = [rollout for rollout in group.rollouts if rollout.score is not None]
            right = dict.fromkeys(rollout.text for rollout in graded if _is_right(rollout))
            wrong = dict.fromkeys(rollout.text for rollout in graded if not _is_right(rollout))
            pairs = [(chosen, rejected) for chosen in right for rejected in wrong if chosen != rejected]
            for number in permutation(self.seed, step, group.start.index, len(pairs), stream=SELECTING)[: self.most]:
                found.append(Pair(_place(step, group.start), prompt_of(group.start), *pairs[number]))
        return found


@dataclass(frozen=True)
class GradeSource:
    """Graded completions, at most `most` of a group, drawn evenly."""

    seed: int
    most: int

    objective = GradeObjective(are_probabilities=True)

    def examples(self, groups: Sequence[Group], step: int) -> list[Example]:
        found: list[Example] = []
        for group in groups:
            graded = [rollout for rollout in group.rollouts if rollout.score is not None]
            for number in permutation(self.seed, step, group.start.index, len(graded), stream=SELECTING)[: self.most]:
                rollout = graded[number]
                grade = float(_is_right(rollout))
                found.append(Graded(_place(step, group.start), prompt_of(group.start), rollout.text, grade))
        return found


@dataclass(frozen=True)
class StepSource:
    """Step-labelled completions: the first `most` rollouts of each group."""

    labeller: StepLabeller
    most: int
    estimate: str = "hard"  # or soft

    objective = StepObjective()

    def examples(self, groups: Sequence[Group], step: int) -> list[Example]:
        chosen = [replace(group, rollouts=group.rollouts[: self.most]) for group in groups]
        found: list[Example] = []
        for one in self.labeller.label(chosen, step):
            start = chosen[one.group].start
            labels = one.hard if self.estimate == "hard" else one.soft
            found.append(Steps(_place(step, start), prompt_of(start), one.steps, labels))
        return found


def graded_completions(groups: Sequence[Group]) -> list[Graded]:
    """Every completion with a score, in order."""
    return [
        Graded("", prompt_of(group.start), rollout.text, float(_is_right(rollout)))
        for group in groups
        for rollout in group.rollouts
        if rollout.score is not None
    ]


def prompt_of(start: Start) -> str | Messages:
    """The prompt of a start in the form of examples."""
    return start.prompt if isinstance(start.prompt, str) else tuple(dict(message) for message in start.prompt)


def encode_state(examples: Sequence[Example]) -> str:
    """Examples as text, for a checkpoint."""
    return json.dumps([{"kind": type(example).__name__} | asdict(example) for example in examples])


def decode_state(text: str) -> list[Example]:
    """The examples that `encode_state` wrote."""
    kinds: dict[str, type[Example]] = {kind.__name__: kind for kind in (Pair, Graded, Steps)}
    return [
        kinds[record.pop("kind")](**{name: _as_tuples(value) for name, value in record.items()})
        for record in json.loads(text)
    ]


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _is_right(rollout: Rollout) -> bool:
    assert rollout.score is not None
    return rollout.score > RIGHT


def _place(step: int, start: Start) -> str:
    return f"step {step}, prompt {start.index}"
