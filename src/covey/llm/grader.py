"""From completions to rewards: calls every reward, adds them up with their weights, and keeps failures apart.

A failure of the grader is not a wrong answer: a rollout that could not be graded has reward None and leaves its group.
Reward functions are the user's own trusted code. Nothing here is a sandbox for them.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from covey.config import ConfigError, RewardConfig, RunError
from covey.config.checks import check_reward
from covey.config.values import check_fields
from covey.data import EndReason, Group, Rollout, Start
from covey.llm import rewards as builtin
from covey.llm.reward_worker import CallFailed, RewardProcess, TookTooLong, WrongResults, call_function, one_line

FAILURES_ALLOWED = 0.2  # share of a step's rollouts
# The dry run has two completions, a step has hundreds: it gets a tenth of the time, and a hang is found at once.
DRY_RUN_SHARE = 0.1
DRY_RUN_LEAST_SECONDS = 1.0

log = logging.getLogger(__name__)

BUILT_IN: dict[str, Callable[..., list[float]]] = {
    "numeric": builtin.numeric,
    "digits": builtin.digits,
    "exact": builtin.exact,
    "countdown": builtin.countdown,
}


class GradingError(RunError):
    """Grading cannot go on; one line that names the reward and what it did."""


class Hanging(Exception):
    """A function hangs in this process, where nothing can stop it."""


class Caller(Protocol):
    """Calls a reward function under a deadline."""

    def call(self, arguments: Mapping[str, Any], global_step: int, seconds: float) -> list[float | None]:
        """One float or None per completion.

        Raises:
            CallFailed: for this call.
            WrongResults, Hanging: if there is no point in another call.
        """

    def close(self) -> None:
        """Let go of what the calls needed."""


class InProcess:
    """Calls a function in a thread of this process. One that hangs cannot be killed there, so it stops the run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def call(self, arguments: Mapping[str, Any], global_step: int, seconds: float) -> list[float | None]:
        results: list[list[float | None]] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call_function(self.function, arguments, global_step))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True, name="covey-reward")
        thread.start()
        thread.join(seconds)
        if results:
            return results[0]
        if not errors:
            raise Hanging(
                f"took longer than {seconds:g} s inside this process, where it cannot be stopped; raise its "
                f"timeout_seconds, or name it as file.py:function to run it in a process of its own"
            )
        if isinstance(errors[0], WrongResults):
            raise errors[0]
        raise CallFailed(one_line(errors[0]))

    def close(self) -> None:
        """Nothing is held between calls."""


@dataclass(frozen=True)
class WeightedReward:
    """One term of a rollout's reward."""

    name: str
    caller: Caller
    options: Mapping[str, Any]  # arguments that come from the config, not from the data
    weight: float = 1.0
    score: bool = False  # evaluation counts this one
    timeout_seconds: float = 10.0

    @staticmethod
    def from_function(
        function: Callable[..., Any], *, weight: float = 1.0, score: bool = False, timeout_seconds: float = 60.0
    ) -> WeightedReward:
        """A Python callable with TRL's signature, called in a thread of this process."""
        name = getattr(function, "__name__", type(function).__name__)
        return WeightedReward(name, InProcess(function), {}, weight, score, timeout_seconds)

    @staticmethod
    def from_config(config: RewardConfig) -> WeightedReward:
        """A built-in reward, or a function by its name in a process of its own.

        Raises:
            ConfigError: if a field is impossible or the file is missing. The function itself is not yet loaded.
        """
        name = config.name or config.function.rpartition(":")[2]
        check_reward(config, f"reward {name or '(no name)'}")
        check_fields(config, f"reward {name}: ")
        caller: Caller
        options: dict[str, Any] = {}
        if config.function:
            caller = RewardProcess(config.function)
        elif config.name == "format":  # a regular expression can run away
            caller, options = RewardProcess(f"{builtin.__name__}:format_match"), {"pattern": config.pattern}
        else:
            caller = InProcess(BUILT_IN[config.name])
            if config.name != "countdown":
                options = {"answer_column": config.answer_column}
        return WeightedReward(name, caller, options, config.weight, config.score, config.timeout_seconds)

    def evaluate(self, groups: Sequence[Group], seconds: float) -> list[float | None]:
        """What the function says of every rollout of `groups`, in one call."""
        rows = [(group.start, rollout) for group in groups for rollout in group.rollouts]
        columns = dict.fromkeys(name for start, _ in rows for name in start.columns)
        arguments = {
            "prompts": [start.prompt for start, _ in rows],
            "completions": [_completion(start, rollout) for start, rollout in rows],
            "completion_ids": [list(rollout.actions) for _, rollout in rows],
            **{name: [start.columns.get(name) for start, _ in rows] for name in columns},
            **self.options,
        }
        return self.caller.call(arguments, rows[0][1].version, seconds)


@dataclass(frozen=True)
class Verdict:
    """What one reward says of one rollout: a value, nothing (None, on purpose), or that it failed."""

    value: float | None
    error: str = ""


class RewardGrader:
    """Implements `covey.data.Grader` with a weighted sum of rewards.

    Of several rewards one may return None for a rollout, as in TRL: its term is left out. A rollout whose rewards are
    all None, or one of whose rewards is NaN, infinite, raised or ran out of time, has failed: its reward is None.
    """

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        """Two rewards of one name are told apart as name and name_2.

        Raises:
            ConfigError: if there is no reward, or more than one is marked as the score.
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
        self.score_name = next((reward.name for reward in self.rewards if reward.score), self.rewards[0].name)

    def grade(self, groups: list[Group]) -> list[Group]:
        """Fill in `reward`, `reward_parts` and `score` of every rollout.

        Raises:
            GradingError: if more than 20 % of the rollouts failed, or a function returned something else than one
                number or None per completion.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return groups
        verdicts = {reward.name: self._verdicts(reward, groups) for reward in self.rewards}
        failed = 0
        for row, rollout in enumerate(rollouts):
            parts = {name: of_rollouts[row] for name, of_rollouts in verdicts.items()}
            rollout.reward_parts = {name: verdict.value for name, verdict in parts.items()}
            rollout.score = rollout.reward_parts[self.score_name]
            terms = [
                reward.weight * parts[reward.name].value  # type: ignore[operator]
                for reward in self.rewards
                if parts[reward.name].value is not None
            ]
            failed_here = not terms or any(verdict.error for verdict in parts.values())
            rollout.reward = None if failed_here else math.fsum(terms)
            failed += failed_here
        if failed > FAILURES_ALLOWED * len(rollouts):
            name, why = _first_error(verdicts)
            raise _too_many(name, str(failed), len(rollouts), why)
        return groups

    def check(self, starts: Sequence[Start]) -> None:
        """A dry run on up to two starts, with the right answer (or "0") as the completion.

        Raises:
            ConfigError: if a function cannot be loaded, raises, hangs, or returns something unusable.
        """
        groups = [Group(start, [_right_rollout(start)]) for start in starts[:2]]
        values = []
        for reward in self.rewards:
            seconds = min(reward.timeout_seconds, max(DRY_RUN_LEAST_SECONDS, DRY_RUN_SHARE * reward.timeout_seconds))
            try:
                values.append(reward.evaluate(groups, seconds))
            except TookTooLong:
                raise ConfigError(
                    f"reward {reward.name!r} took longer than {seconds:g} s for {len(groups)} completions in a dry "
                    f"run; if it is slow but sound, raise its timeout_seconds (now {reward.timeout_seconds:g})"
                ) from None
            except (CallFailed, WrongResults, Hanging) as error:
                raise ConfigError(f"reward {reward.name!r}, in a dry run on the right answer: {error}") from None
            for value in values[-1]:
                if value is not None and not math.isfinite(value):
                    raise ConfigError(f"reward {reward.name!r} returned {value}, in a dry run on the right answer")
        if any(all(value is None for value in row) for row in zip(*values, strict=True)):
            names = ", ".join(repr(reward.name) for reward in self.rewards)
            raise ConfigError(f"reward {names} returned None, in a dry run on the right answer: nothing to learn from")

    def close(self) -> None:
        """End the processes of the reward functions."""
        for reward in self.rewards:
            reward.caller.close()

    def _verdicts(self, reward: WeightedReward, groups: list[Group]) -> list[Verdict]:
        """One call for all; if that fails, one for each group, so that one bad answer costs its own group only."""
        try:
            return self._call(reward, groups)
        except CallFailed as error:
            log.warning("reward %r failed on a whole step, trying it group by group: %s", reward.name, error)
        return self._group_by_group(reward, groups)

    def _call(self, reward: WeightedReward, groups: list[Group]) -> list[Verdict]:
        try:
            return [_verdict(value) for value in reward.evaluate(groups, reward.timeout_seconds)]
        except (WrongResults, Hanging) as error:
            raise GradingError(f"reward {reward.name!r} {error}") from None

    def _group_by_group(self, reward: WeightedReward, groups: list[Group]) -> list[Verdict]:
        total = sum(len(group.rollouts) for group in groups)
        verdicts: list[Verdict] = []
        for group in groups:
            try:
                verdicts += self._call(reward, [group])
            except CallFailed as error:
                verdicts += [Verdict(None, str(error))] * len(group.rollouts)
            failed = sum(bool(verdict.error) for verdict in verdicts)
            if failed > FAILURES_ALLOWED * total:  # do not wait for the others' deadlines
                _, why = _first_error({reward.name: verdicts})
                raise _too_many(reward.name, f"at least {failed}", total, why)
        return verdicts


def build_grader(
    rewards: Sequence[RewardConfig | WeightedReward | Callable[..., Any]], default: Sequence[RewardConfig]
) -> RewardGrader:
    """The grader of a run: `rewards` may mix config tables, functions and weighted functions.

    >>> build_grader([my_reward, RewardConfig(name="format", pattern="-?[0-9]+", weight=0.2)], task.default_rewards)

    Args:
        rewards: where empty, `default` is taken.
        default: the task's own rewards.

    Raises:
        ConfigError: if a reward is impossible.
    """
    return RewardGrader([_weighted(reward) for reward in rewards or default])


def _weighted(reward: RewardConfig | WeightedReward | Callable[..., Any]) -> WeightedReward:
    if isinstance(reward, WeightedReward):
        return reward
    return (
        WeightedReward.from_config(reward) if isinstance(reward, RewardConfig) else WeightedReward.from_function(reward)
    )


def _completion(start: Start, rollout: Rollout) -> Any:
    """As TRL shows it: messages where the prompt is messages, else a string."""
    return rollout.text if isinstance(start.prompt, str) else [{"role": "assistant", "content": rollout.text}]


def _right_rollout(start: Start) -> Rollout:
    text = str(start.columns.get("answer", "0"))
    return Rollout(context=(), actions=(0,), behavior_logprobs=(0.0,), end=EndReason.STOP, text=text)


def _verdict(value: float | None) -> Verdict:
    if value is not None and not math.isfinite(value):
        return Verdict(None, f"returned {value}")
    return Verdict(value)


def _first_error(verdicts: Mapping[str, Sequence[Verdict]]) -> tuple[str, str]:
    """The first reward that failed, and why; where none did, all returned None."""
    for name, of_rollouts in verdicts.items():
        for verdict in of_rollouts:
            if verdict.error:
                return name, verdict.error
    return ", ".join(verdicts), "returned None"


def _too_many(name: str, failed: str, total: int, why: str) -> GradingError:
    return GradingError(f"{failed} of {total} rollouts could not be graded, more than 20 %: reward {name!r}: {why}")
