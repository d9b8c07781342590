"""Examples for a reward model from the completions of a run, which the verifier has graded.

| source        | examples                                                  | grades from                     |
|---------------|-----------------------------------------------------------|---------------------------------|
| `PairSource`  | a right and a wrong completion of a prompt                | `Rollout.score`                 |
| `GradeSource` | a completion with its grade                               | `Rollout.score`                 |
| `StepSource`  | a completion with the labels of its steps by continuation | a verifier of the continuations |

Labels of steps need no human: Math-Shepherd (arXiv 2312.08935), section 3.3. The quality of a step is its potential to
lead to the right answer. From the end of each step the policy samples N continuations, and the verifier grades the
completed texts.

    soft label = share of right continuations (eq. 4)        hard label = 1 if any is right (eq. 3)

The last step of a completion has nothing to continue: both of its labels are whether the completion is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from covey.config import ConfigError
from covey.data import EndReason, Grader, Group, Rollout, Start
from covey.llm.data.reward_examples import Example, Graded, Messages, Pair, Steps
from covey.llm.generation.generator import Completion, GenerationRequest, RandomKey
from covey.llm.reward_models.examples import LabelObjective, Objective, PairObjective
from covey.llm.rewards.step_splitter import StepSplitter
from covey.llm.sampler import LanguageSampler, completions_of
from covey.runtime.rng import CONTINUING, SELECTING, permutation

RIGHT = 0.5  # a score above it is right


class ExampleSource(Protocol):
    """Makes examples of one kind from graded groups."""

    @property
    def objective(self) -> Objective:
        """The objective of these examples."""

    def examples(self, groups: Sequence[Group], step: int) -> Sequence[Example]:
        """Examples of the groups of a step; the choice is a function of (seed, step, group)."""


@dataclass(frozen=True)
class PairSource:
    """Pairs of different texts, at most `most` of a group, drawn evenly from all pairs of the group."""

    seed: int
    most: int

    objective = PairObjective()

    def examples(self, groups: Sequence[Group], step: int) -> list[Pair]:
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

    objective = LabelObjective()

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

    objective = LabelObjective()

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
    return msgspec.json.encode(examples).decode()


def decode_state(text: str) -> list[Example]:
    """The examples that `encode_state` wrote."""
    return msgspec.json.decode(text, type=list[Pair | Graded | Steps])


def _is_right(rollout: Rollout) -> bool:
    assert rollout.score is not None
    return rollout.score > RIGHT


def _place(step: int, start: Start) -> str:
    return f"step {step}, prompt {start.index}"


# A random number's rollout word has the rollout, the step and the continuation: 12 + 12 + 8 bits.
MOST_ROLLOUTS, MOST_STEPS, MOST_CONTINUATIONS = 1 << 12, 1 << 12, 1 << 8


@dataclass(frozen=True)
class LabelledCompletion:
    """A sampled completion with the labels of its steps."""

    group: int  # index of its group among those labelled together
    rollout: int  # its index in the group
    steps: tuple[str, ...]
    soft: tuple[float, ...]  # share of right continuations
    right: bool  # the verifier's grade of the completion itself

    @property
    def hard(self) -> tuple[float, ...]:
        """1 for steps from which any continuation is right, else 0."""
        return tuple(float(share > 0) for share in self.soft)


@dataclass(frozen=True)
class _Prefix:
    """A step whose end is continued."""

    group: int
    rollout: int
    step: int
    actions: tuple[int, ...]  # of the completion, up to the end of the step
    room: int  # tokens that the limit leaves


@dataclass(frozen=True)
class StepLabeller:
    """Labels the steps of sampled completions.

    The continuations are functions of (seed, iteration, group, rollout, step, continuation) and of the policy, so that
    they do not depend on which completions are labelled together.
    """

    sampler: LanguageSampler  # its token limit holds for a prefix and its continuation together
    splitter: StepSplitter  # its chat is set
    verifier: Grader  # fills in `score`: 1 for right, 0 for wrong
    continuations: int = 8
    positions: int | None = None  # longest sequence of the model; None: any

    def __post_init__(self) -> None:
        """Raises ConfigError for more continuations than there are random numbers for."""
        if not 1 <= self.continuations <= MOST_CONTINUATIONS:
            raise ConfigError(f"the number of continuations must be from 1 to {MOST_CONTINUATIONS}")

    def label(self, groups: Sequence[Group], iteration: int = 0) -> list[LabelledCompletion]:
        """Label the steps of every rollout, in their order.

        A continuation whose grading failed counts neither as right nor as wrong. A completion is left out if the
        verifier failed on it, or on all continuations of a step.

        Raises:
            ConfigError: if a group has too many rollouts, or a completion too many steps.
            RunError: if continuations cannot be generated or graded.
        """
        whole = [
            Group(group.start, [replace(one, score=None, reward_parts={}, extras={}) for one in group.rollouts])
            for group in groups
        ]
        texts = {
            (number, place): tuple(self.splitter.split(rollout))
            for number, group in enumerate(whole)
            for place, rollout in enumerate(group.rollouts)
        }
        if not texts:
            return []
        self.verifier.grade(whole)
        prefixes = self._prefixes(whole)
        shares = self._shares(whole, prefixes, iteration)
        found = []
        for (number, place), steps in texts.items():
            score = whole[number].rollouts[place].score
            soft = [shares.get((number, place, step), score) for step in range(len(steps))]
            known = [share for share in soft if share is not None]
            if score is not None and len(known) == len(steps):
                found.append(LabelledCompletion(number, place, steps, tuple(known), score > RIGHT))
        return found

    def _prefixes(self, groups: Sequence[Group]) -> list[_Prefix]:
        """The ends of all steps except the last of each completion."""
        found = []
        for number, group in enumerate(groups):
            for place, rollout in enumerate(group.rollouts):
                ends = rollout.step_ends
                assert ends is not None
                if place >= MOST_ROLLOUTS or len(ends) > MOST_STEPS:
                    raise ConfigError(
                        f"at most {MOST_ROLLOUTS:,} completions of a prompt and {MOST_STEPS:,} steps of a completion "
                        "can be labelled: sample fewer, or change process.boundary"
                    )
                for step, end in enumerate(ends[:-1]):
                    actions = tuple(rollout.actions[: end + 1])
                    found.append(_Prefix(number, place, step, actions, self.sampler.max_new_tokens - len(actions)))
        return found

    def _shares(
        self, groups: Sequence[Group], prefixes: Sequence[_Prefix], iteration: int
    ) -> dict[tuple[int, int, int], float | None]:
        """(group, rollout, step) -> share of right continuations; None if none could be graded."""
        if not prefixes:
            return {}
        longest = max(prefix.room for prefix in prefixes)
        requests = [self._request(groups[prefix.group], prefix, longest, iteration) for prefix in prefixes]
        results = self.sampler.generator.generate(requests)
        continued = []
        for prefix, result in zip(prefixes, results, strict=True):
            group = groups[prefix.group]
            origin = group.rollouts[prefix.rollout]
            rollouts = [self._rollout(origin, prefix, one) for one in completions_of(result)]
            continued.append(Group(group.start, rollouts))
        self.verifier.grade(continued)
        shares: dict[tuple[int, int, int], float | None] = {}
        for prefix, group in zip(prefixes, continued, strict=True):
            scores = [rollout.score for rollout in group.rollouts if rollout.score is not None]
            share = sum(score > RIGHT for score in scores) / len(scores) if scores else None
            shares[prefix.group, prefix.rollout, prefix.step] = share
        return shares

    def _request(self, group: Group, prefix: _Prefix, longest: int, iteration: int) -> GenerationRequest:
        """The continuations of a prefix. Requests with the same limit are one batch, so the longest is asked for where
        the model's positions allow it, and `_rollout` cuts what is beyond the prefix's own limit.
        """
        sampler = self.sampler
        prompt = (*group.rollouts[prefix.rollout].context, *prefix.actions)
        fits = self.positions is None or len(prompt) + longest <= self.positions
        settings = replace(
            sampler.settings(longest if fits else prefix.room),
            deadline_seconds=None,
            truncation=sampler.truncation.after(len(prefix.actions)),
        )
        first = (prefix.rollout * MOST_STEPS + prefix.step) * MOST_CONTINUATIONS
        key = RandomKey(sampler.seed, iteration, group.start.index, first, CONTINUING)
        return GenerationRequest(prompt, self.continuations, key, settings)

    def _rollout(self, origin: Rollout, prefix: _Prefix, continuation: Completion) -> Rollout:
        """The completion that begins with the prefix, cut at the token limit."""
        actions = [*prefix.actions, *continuation.tokens[: prefix.room]]
        stop = self.sampler.stop
        stopped = None if stop is None else stop.end_of(actions)  # it may begin in the prefix
        actions = actions[:stopped]
        ended = actions[-1] in self.sampler.chat.end_ids
        return Rollout(
            context=origin.context,
            actions=actions,
            behavior_logprobs=[0.0] * len(actions),
            end=EndReason.STOP if ended or stopped else EndReason.LENGTH,
            text=self.sampler.chat.decode(actions[:-1] if ended else actions),
            version=continuation.version,
        )
