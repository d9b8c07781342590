"""Grades completions: calls every reward function, sums the rewards with their weights, and separates failures.

A failed call is not a wrong answer: a rollout that could not be graded has the reward None and is removed from its
group. Reward functions are the user's own trusted code; there is no sandbox for them, only for the programs of `code`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config import ConfigError, RewardConfig
from covey.config.fields import plural
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.model.chat import Chat
from covey.llm.rewards.group_calls import GradingError, RewardCalls, first_error, too_many
from covey.llm.rewards.runner import FAILURES_ALLOWED, RewardHung
from covey.llm.rewards.step_splitter import StepSplitter
from covey.llm.rewards.weighted_reward import RewardResult, WeightedReward
from covey.runtime.worker.child import InvalidResult
from covey.runtime.worker.process import CallError, CallTimeout

BOUNDARY = "process.boundary"  # name of the boundary function in messages
MISREADINGS = ("TypeError", "AttributeError", "KeyError", "IndexError")  # from a wrong form of completions


@dataclass(frozen=True)
class Failures:
    """Rollouts that could not be graded."""

    count: int
    reward: str  # name of the first reward that failed
    why: str

    def exceed(self, total: int) -> bool:
        """Whether they are more than may fail of `total` rollouts."""
        return self.count > FAILURES_ALLOWED * total


class RewardGrader:
    """Implements `covey.data.Grader` with a weighted sum of rewards.

    If a reward returns None for a rollout, its term is left out, as in TRL. Grading of a rollout fails, and its reward
    is None, if all its rewards are None, or one is NaN or infinite, raised an exception or timed out.

    With a step reward, completions are split into steps. The reward of a step belongs to the decision that ends it, a
    reward of the whole completion to the last decision; `reward` is the sum of all. The steps of a conversation are the
    turns of the model, also without a step reward.
    """

    def __init__(self, rewards: Sequence[WeightedReward], boundary: str = "line") -> None:
        """A second reward of the same name is called name_2; `boundary` defines the ends of reasoning steps.

        Raises:
            ConfigError: if there is no reward, or more than one has score = true.
        """
        if not rewards:
            raise ConfigError("there is no reward: add a [[rewards]] table")
        if sum(reward.score for reward in rewards) > 1:
            raise ConfigError("more than one reward has score = true: evaluation counts one")
        self.rewards: list[WeightedReward] = []
        names: list[str] = []
        for reward in rewards:
            names.append(reward.name)
            same = names.count(reward.name)
            self.rewards.append(reward if same == 1 else replace(reward, name=f"{reward.name}_{same}"))
        by_preference = sorted(self.rewards, key=lambda reward: (not reward.score, reward.per_step))
        self.score_name = by_preference[0].name
        self.score_kind = "accuracy" if by_preference[0].binary else "score"  # a key of tracking's SCORE_KINDS
        self.splitter = StepSplitter(boundary) if any(reward.per_step for reward in self.rewards) else None
        self._calls = RewardCalls(self.rewards)
        self.start = self._calls.start  # starts the calls for a sampled group

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward in the sum, by its name in `Rollout.reward_parts`."""
        return {reward.name: reward.weight for reward in self.rewards}

    def use_chat(self, chat: Chat) -> None:
        """Set the chat of the model, with which `grade` also computes the tokens at which steps end."""
        if self.splitter is not None:
            self.splitter.chat = chat

    def grade(self, groups: list[Group]) -> list[Group]:
        """Fill in `reward`, `reward_parts` and `score` of every rollout, and with a step reward its steps.

        Raises:
            GradingError: if more than 20 % of the rollouts failed, or a function returned an invalid result.
        """
        rollouts = sum(len(group.rollouts) for group in groups)
        failures = self.grade_part(groups, rollouts)
        if failures.exceed(rollouts):
            raise too_many(failures.reward, str(failures.count), rollouts, failures.why)
        return groups

    def grade_part(self, groups: list[Group], total: int) -> Failures:
        """As `grade`, for a part of `total` rollouts: returns its failures.

        Raises:
            GradingError: if the failures of this part alone are more than 20 % of `total`, so that calls need not be
                waited for, or a function returned an invalid result.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return Failures(0, "", "")
        uncut = self._cut(rollouts, total)
        results = self._calls.results(groups, total)
        failed = 0
        for row, rollout in enumerate(rollouts):
            parts = {
                reward.name: uncut[row] if reward.per_step and row in uncut else results[reward.name][row]
                for reward in self.rewards
            }
            rollout.reward_parts = {name: verdict.value for name, verdict in parts.items()}
            rollout.score = parts[self.score_name].score
            self._assign_step_rewards(rollout, parts)
            terms = [
                reward.weight * parts[reward.name].value  # type: ignore[operator]
                for reward in self.rewards
                if parts[reward.name].value is not None
            ]
            judged = any(parts[reward.name].value is not None for reward in self.rewards if not reward.shaping)
            failed_here = not judged or any(verdict.error for verdict in parts.values())
            rollout.reward = None if failed_here else math.fsum(terms)
            failed += failed_here
        return Failures(failed, *first_error(results | ({BOUNDARY: list(uncut.values())} if uncut else {})))

    def _cut(self, rollouts: Sequence[Rollout], total: int) -> dict[int, RewardResult]:
        """Split completions into steps; returns those for which the user's boundary function failed, by row."""
        failed: dict[int, RewardResult] = {}
        if self.splitter is None:
            return failed
        for row, rollout in enumerate(rollouts):
            try:
                rollout.step_texts = self.splitter.split(rollout)
            except CallError as error:
                failed[row] = RewardResult(None, str(error))
            except InvalidResult as error:
                raise GradingError(f"{BOUNDARY} {self.splitter.boundary} {error}") from None
            if len(failed) > FAILURES_ALLOWED * total:  # do not wait for the others' deadlines
                count, why = f"at least {len(failed)} of {plural(total, 'completion')}", failed[row].error
                raise GradingError(f"{BOUNDARY} {self.splitter.boundary} failed on {count}: {why}")
        return failed

    def _assign_step_rewards(self, rollout: Rollout, parts: Mapping[str, RewardResult]) -> None:
        """Fill in the reward of each decision, if the decisions that end a step or a turn are known."""
        if rollout.step_ends is None:
            return
        earned = [0.0] * len(rollout.actions)
        for reward in self.rewards:
            verdict = parts[reward.name]
            if verdict.value is None:
                continue
            numbers = rollout.turn_rewards if reward.per_turn and rollout.turn_rewards else verdict.steps
            if numbers:
                for end, number in zip(rollout.step_ends, numbers, strict=True):
                    earned[end] += reward.weight * number
            else:
                earned[rollout.step_ends[-1]] += reward.weight * verdict.value
        rollout.step_rewards = earned

    def check(
        self,
        starts: Sequence[Start],
        example: Callable[[Start], Rollout] | None = None,
        kinds: Sequence[Start] = (),
    ) -> None:
        """Call the rewards on each of `kinds` alone (`rows_of_every_kind`), for which they may return None, then on up
        to two starts, with the right answer (or "0") as the completion, or with an `example`.

        Raises:
            ConfigError: if a function cannot be loaded, raises, hangs, or returns something unusable.
        """
        for start in kinds:
            try:
                self._try([Group(start, [(example or right_rollout)(start)])])
            except ConfigError as error:
                raise ConfigError(f"{start.place}: {error}") from None
        groups = [Group(start, [(example or right_rollout)(start)]) for start in starts[:2]]
        values = self._try(groups)
        if any(all(verdict.value is None for verdict in row) for row in zip(*values, strict=True)):
            names = ", ".join(repr(reward.name) for reward in self.rewards if not reward.shaping)
            raise ConfigError(f"reward {names} returned None, in a dry run on the right answer: nothing to learn from")

    def _try(self, groups: Sequence[Group]) -> list[list[RewardResult]]:
        """Call the user's rewards once on all groups; errors as of `check`."""
        try:
            self._cut([group.rollouts[0] for group in groups], len(groups))
        except GradingError as error:
            raise ConfigError(f"{error}, in a dry run on the right answer") from None
        return [self._try_reward(reward, groups) for reward in self.rewards if not reward.shaping]

    @staticmethod
    def _try_reward(reward: WeightedReward, groups: Sequence[Group]) -> list[RewardResult]:
        try:
            verdicts = reward.evaluate(groups, reward.timeout_seconds)
        except CallTimeout:
            raise ConfigError(
                f"reward {reward.name!r} took longer than {reward.timeout_seconds:g} s, its timeout_seconds, for "
                f"{plural(len(groups), 'completion')} in a dry run; if it is slow but sound, raise it"
            ) from None
        except (CallError, InvalidResult, RewardHung) as error:
            form = _form_of_completions(groups[0].start) if str(error).startswith(MISREADINGS) else ""
            raise ConfigError(f"reward {reward.name!r}, in a dry run on the right answer: {error}{form}") from None
        for verdict in verdicts:
            if verdict.error:
                raise ConfigError(f"reward {reward.name!r} {verdict.error}, in a dry run on the right answer")
        return verdicts

    def close(self) -> None:
        """End the processes of the reward functions."""
        for reward in self.rewards:
            reward.caller.close()
        if self.splitter is not None:
            self.splitter.close()


def build_grader(
    rewards: Sequence[RewardConfig | WeightedReward | str | Callable[..., Any]],
    default: Sequence[RewardConfig],
    shaping: Sequence[WeightedReward] = (),
    boundary: str = "line",
    device: str = "auto",
    precision: str = "auto",
) -> RewardGrader:
    """Build the grader of a run; `rewards` may mix config tables, names, functions and weighted functions.

    >>> build_grader([my_reward, RewardConfig(name="format", pattern="-?[0-9]+", weight=0.2)], task.default_rewards)

    Args:
        rewards: if empty, `default` is used.
        default: the task's own rewards.
        shaping: terms that the run adds to them.
        boundary: end of a reasoning step, for step rewards (`ProcessConfig.boundary`).
        device, precision: of reward models, as in a recipe.

    Raises:
        ConfigError: if a reward is invalid.
    """
    weighted = [_weighted(reward, device, precision) for reward in rewards or default]
    return RewardGrader([*weighted, *shaping], boundary)


def _weighted(
    reward: RewardConfig | WeightedReward | str | Callable[..., Any], device: str, precision: str
) -> WeightedReward:
    if isinstance(reward, WeightedReward):
        return reward
    if isinstance(reward, str):
        reward = RewardConfig(function=reward) if ":" in reward else RewardConfig(name=reward)
    if isinstance(reward, RewardConfig):
        return WeightedReward.from_config(reward, device, precision)
    if callable(reward):
        return WeightedReward.from_function(reward)
    raise ConfigError(
        f"a reward is of type {type(reward).__name__}: give a function, a built-in reward's name, file.py:function or "
        "a RewardConfig"
    )


def _form_of_completions(start: Start) -> str:
    """Hint for a function that expects completions in another form."""
    if isinstance(start.prompt, str):
        return "; a completion is a string here, because the prompt is one"
    return "; a completion is a list with one message here, because the prompt is a chat: completion[0]['content']"


def right_rollout(start: Start) -> Rollout:
    """A rollout with the right answer, or "0" if the data has none."""
    text = str(start.columns.get("answer", "0"))
    return Rollout(context=(), actions=(0,), behavior_logprobs=(0.0,), end=EndReason.STOP, text=text)
