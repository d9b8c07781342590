"""Grades completions: calls every reward function, sums the rewards with their weights, and separates failures.

A failed call is not a wrong answer: a rollout that could not be graded has the reward None and is removed from its
group. Reward functions are the user's own trusted code; there is no sandbox for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config import ConfigError, RewardConfig, RunError
from covey.config.fields import check_fields, plural
from covey.config.validate import check_reward
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.model.chat import Chat
from covey.llm.rewards import builtin
from covey.llm.rewards.reward_call import InvalidRewardOutput, RewardCallError, RewardTimeout
from covey.llm.rewards.runner import InProcess, RewardHung, RewardProcess, RewardRunner
from covey.llm.rewards.step_splitter import StepSplitter

LARGEST_REWARD = 1e18  # absolute value; its square is finite in float32
FAILURES_ALLOWED = 0.2  # fraction of a step's rollouts
BOUNDARY = "process.boundary"  # name of the boundary function in messages
# The dry run has two completions, a step has hundreds, so its deadline is a tenth, and a hang is found early.
DRY_RUN_FRACTION = 0.1
DRY_RUN_LEAST_SECONDS = 1.0
MISREADINGS = ("TypeError", "AttributeError", "KeyError", "IndexError")  # from a wrong form of completions

log = logging.getLogger(__name__)

BUILT_IN: dict[str, Callable[..., list[Any]]] = {
    "numeric": builtin.numeric,
    "digits": builtin.digits,
    "exact": builtin.exact,
    "countdown": builtin.countdown,
    "step_numbers": builtin.step_numbers,
}


class GradingError(RunError):
    """Grading cannot continue; one line that names the reward and its fault."""


@dataclass(frozen=True)
class WeightedReward:
    """One term of a rollout's reward."""

    name: str
    caller: RewardRunner
    options: Mapping[str, Any]  # arguments from the config, not from the data
    weight: float = 1.0
    score: bool = False  # evaluations average this reward
    timeout_seconds: float = 10.0
    shaping: bool = False  # added by the run: counts only if one of the user's rewards has a value
    per_step: bool = False  # a number for each reasoning step of a completion
    binary: bool = False  # always 1 (right) or 0 (wrong), so its mean is an accuracy

    @staticmethod
    def from_function(
        function: Callable[..., Any],
        *,
        weight: float = 1.0,
        score: bool = False,
        timeout_seconds: float = 60.0,
        per_step: bool = False,
        binary: bool = False,
    ) -> WeightedReward:
        """A reward from a Python callable with TRL's signature, called in a thread of this process.

        Args:
            score: evaluations average this reward; without one, the first of the run.
            per_step: it returns a list for each completion, with one number for each reasoning step.
            binary: it returns 1 (right) or 0 (wrong), so that its mean is an accuracy; else it is a score.

        Raises:
            ConfigError: if both binary and per_step are set.
        """
        if per_step and binary:
            raise ConfigError("a reward per step is not binary: leave out per_step or binary")
        name = getattr(function, "__name__", type(function).__name__)
        return WeightedReward(
            name, InProcess(function), {}, weight, score, timeout_seconds, per_step=per_step, binary=binary
        )

    @staticmethod
    def from_config(config: RewardConfig) -> WeightedReward:
        """A reward from its config: a built-in one, or a function by its name in a process of its own.

        Raises:
            ConfigError: if a field is invalid or the file is missing. The function itself is not loaded yet.
        """
        name = config.name or config.function.rpartition(":")[2]
        check_reward(config, f"reward {name or '(no name)'}")
        check_fields(config, f"reward {name}: ")
        caller: RewardRunner
        options: dict[str, Any] = {}
        if config.function:
            caller = RewardProcess(config.function, config.timeout_seconds)
        elif config.name == "format":  # a regular expression may take exponential time
            caller, options = RewardProcess(f"{builtin.__name__}:format_match"), {"pattern": config.pattern}
        else:
            caller = InProcess(BUILT_IN[config.name])
            if config.name != "countdown":
                options = {"answer_column": config.answer_column}
        return WeightedReward(
            name,
            caller,
            options,
            config.weight,
            config.score,
            config.timeout_seconds,
            per_step=config.is_per_step,
            binary=config.is_binary,
        )

    @staticmethod
    def overlong(max_new_tokens: int, overlong_tokens: int) -> WeightedReward:
        """DAPO's length penalty of completions near the token limit, which a run adds to its rewards."""
        options = {"max_new_tokens": max_new_tokens, "overlong_tokens": overlong_tokens}
        return WeightedReward("overlong", InProcess(builtin.overlong), options, shaping=True)

    def evaluate(self, groups: Sequence[Group], seconds: float) -> list[RewardResult]:
        """Call the function once for all rollouts of `groups`; returns the results, and stores logs in the groups."""
        rows = [(group.start, rollout) for group in groups for rollout in group.rollouts]
        columns = dict.fromkeys(name for start, _ in rows for name in start.columns)
        arguments = {
            "prompts": [start.prompt for start, _ in rows],
            "completions": [_completion(start, rollout) for start, rollout in rows],
            "completion_ids": [list(rollout.actions) for _, rollout in rows],
            **{name: [start.columns.get(name) for start, _ in rows] for name in columns},
            **self.options,
        }
        counts = None
        if self.per_step:
            steps = [list(rollout.step_texts or [rollout.text]) for _, rollout in rows]
            arguments["steps"], counts = steps, [len(texts) for texts in steps]
        results = self.caller.call(arguments, rows[0][1].version, seconds, counts)
        for metric, numbers in results.metrics.items():
            groups[0].logged.setdefault(f"{self.name}/{metric}", []).extend(numbers)
        for column, values in results.extras.items():
            for (_, rollout), value in zip(rows, values, strict=True):
                rollout.extras.setdefault(self.name, {})[column] = value
        return [_result_of(result, binary=self.binary) for result in results.values]


@dataclass(frozen=True)
class RewardResult:
    """Result of one reward for one rollout: a value, None on purpose, or an error."""

    value: float | None
    error: str = ""
    steps: Sequence[float] = ()  # of a step reward: the reward of each step; `value` is their sum

    @property
    def score(self) -> float | None:
        """The number that evaluations average: the value, or the mean over the steps of a step reward."""
        return self.value / len(self.steps) if self.value is not None and self.steps else self.value


class RewardGrader:
    """Implements `covey.data.Grader` with a weighted sum of rewards.

    If a reward returns None for a rollout, its term is left out, as in TRL. Grading of a rollout fails, and its reward
    is None, if all its rewards are None, or one is NaN or infinite, raised an exception or timed out.

    With a step reward, completions are split into steps. The reward of a step belongs to the decision that ends it, a
    reward of the whole completion to the last decision; `reward` is the sum of all.
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

    def use_chat(self, chat: Chat) -> None:
        """Set the chat of the model, with which `grade` also computes the tokens at which steps end."""
        if self.splitter is not None:
            self.splitter.chat = chat

    def grade(self, groups: list[Group]) -> list[Group]:
        """Fill in `reward`, `reward_parts` and `score` of every rollout, and with a step reward its steps.

        Raises:
            GradingError: if more than 20 % of the rollouts failed, or a function returned an invalid result.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return groups
        uncut = self._cut(rollouts)
        results = {reward.name: self._results(reward, groups) for reward in self.rewards}
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
        if failed > FAILURES_ALLOWED * len(rollouts):
            name, why = _first_error(results | ({BOUNDARY: list(uncut.values())} if uncut else {}))
            raise _too_many(name, str(failed), len(rollouts), why)
        return groups

    def _cut(self, rollouts: Sequence[Rollout]) -> dict[int, RewardResult]:
        """Split completions into steps; returns those for which the user's boundary function failed, by row."""
        failed: dict[int, RewardResult] = {}
        if self.splitter is None:
            return failed
        for row, rollout in enumerate(rollouts):
            try:
                rollout.step_texts = self.splitter.split(rollout)
            except RewardCallError as error:
                failed[row] = RewardResult(None, str(error))
            except InvalidRewardOutput as error:
                raise GradingError(f"{BOUNDARY} {self.splitter.boundary} {error}") from None
            if len(failed) > FAILURES_ALLOWED * len(rollouts):  # do not wait for the others' deadlines
                count, why = f"at least {len(failed)} of {plural(len(rollouts), 'completion')}", failed[row].error
                raise GradingError(f"{BOUNDARY} {self.splitter.boundary} failed on {count}: {why}")
        return failed

    def _assign_step_rewards(self, rollout: Rollout, parts: Mapping[str, RewardResult]) -> None:
        """Fill in the reward of each decision, if the decisions that end a step are known."""
        if rollout.step_ends is None:
            return
        earned = [0.0] * len(rollout.actions)
        for reward in self.rewards:
            verdict = parts[reward.name]
            if verdict.steps:
                for end, number in zip(rollout.step_ends, verdict.steps, strict=True):
                    earned[end] += reward.weight * number
            elif verdict.value is not None:
                earned[rollout.step_ends[-1]] += reward.weight * verdict.value
        rollout.step_rewards = earned

    def check(self, starts: Sequence[Start]) -> None:
        """Call the rewards on up to two starts, with the right answer (or "0") as the completion.

        Raises:
            ConfigError: if a function cannot be loaded, raises, hangs, or returns something unusable.
        """
        groups = [Group(start, [_right_rollout(start)]) for start in starts[:2]]
        try:
            self._cut([group.rollouts[0] for group in groups])
        except GradingError as error:
            raise ConfigError(f"{error}, in a dry run on the right answer") from None
        values = []
        own = [reward for reward in self.rewards if not reward.shaping]
        for reward in own:
            seconds = min(reward.timeout_seconds, max(DRY_RUN_LEAST_SECONDS, DRY_RUN_FRACTION * reward.timeout_seconds))
            try:
                values.append(reward.evaluate(groups, seconds))
            except RewardTimeout:
                raise ConfigError(
                    f"reward {reward.name!r} took longer than {seconds:g} s for {plural(len(groups), 'completion')} in "
                    f"a dry run; if it is slow but sound, raise its timeout_seconds (now {reward.timeout_seconds:g})"
                ) from None
            except (RewardCallError, InvalidRewardOutput, RewardHung) as error:
                form = _form_of_completions(groups[0].start) if str(error).startswith(MISREADINGS) else ""
                raise ConfigError(f"reward {reward.name!r}, in a dry run on the right answer: {error}{form}") from None
            for verdict in values[-1]:
                if verdict.error:
                    raise ConfigError(f"reward {reward.name!r} {verdict.error}, in a dry run on the right answer")
        if any(all(verdict.value is None for verdict in row) for row in zip(*values, strict=True)):
            names = ", ".join(repr(reward.name) for reward in own)
            raise ConfigError(f"reward {names} returned None, in a dry run on the right answer: nothing to learn from")

    def close(self) -> None:
        """End the processes of the reward functions."""
        for reward in self.rewards:
            reward.caller.close()
        if self.splitter is not None:
            self.splitter.close()

    def _results(self, reward: WeightedReward, groups: list[Group]) -> list[RewardResult]:
        """One call for all groups; if it fails, one call for each group, so that only failing groups have no reward."""
        try:
            return self._call(reward, groups)
        except RewardCallError as error:
            log.warning("reward %r failed on a whole step, trying it group by group: %s", reward.name, error)
        return self._group_by_group(reward, groups)

    def _call(self, reward: WeightedReward, groups: list[Group]) -> list[RewardResult]:
        try:
            return reward.evaluate(groups, reward.timeout_seconds)
        except (InvalidRewardOutput, RewardHung) as error:
            raise GradingError(f"reward {reward.name!r} {error}") from None

    def _group_by_group(self, reward: WeightedReward, groups: list[Group]) -> list[RewardResult]:
        total = sum(len(group.rollouts) for group in groups)
        results: list[RewardResult] = []
        for group in groups:
            try:
                results += self._call(reward, [group])
            except RewardCallError as error:
                results += [RewardResult(None, str(error))] * len(group.rollouts)
            failed = sum(bool(verdict.error) for verdict in results)
            if failed > FAILURES_ALLOWED * total:  # do not wait for the others' deadlines
                _, why = _first_error({reward.name: results})
                raise _too_many(reward.name, f"at least {failed}", total, why)
        return results


def build_grader(
    rewards: Sequence[RewardConfig | WeightedReward | str | Callable[..., Any]],
    default: Sequence[RewardConfig],
    shaping: Sequence[WeightedReward] = (),
    boundary: str = "line",
) -> RewardGrader:
    """Build the grader of a run; `rewards` may mix config tables, names, functions and weighted functions.

    >>> build_grader([my_reward, RewardConfig(name="format", pattern="-?[0-9]+", weight=0.2)], task.default_rewards)

    Args:
        rewards: if empty, `default` is used.
        default: the task's own rewards.
        shaping: terms that the run adds to them.
        boundary: end of a reasoning step, for step rewards (`ProcessConfig.boundary`).

    Raises:
        ConfigError: if a reward is invalid.
    """
    return RewardGrader([*(_weighted(reward) for reward in rewards or default), *shaping], boundary)


def _weighted(reward: RewardConfig | WeightedReward | str | Callable[..., Any]) -> WeightedReward:
    if isinstance(reward, WeightedReward):
        return reward
    if isinstance(reward, str):
        reward = RewardConfig(function=reward) if ":" in reward else RewardConfig(name=reward)
    if isinstance(reward, RewardConfig):
        return WeightedReward.from_config(reward)
    if callable(reward):
        return WeightedReward.from_function(reward)
    raise ConfigError(
        f"a reward is of type {type(reward).__name__}: give a function, a built-in reward's name, file.py:function or "
        "a RewardConfig"
    )


def _completion(start: Start, rollout: Rollout) -> Any:
    """A completion in TRL's form: messages if the prompt is messages, else a string."""
    return rollout.text if isinstance(start.prompt, str) else [{"role": "assistant", "content": rollout.text}]


def _form_of_completions(start: Start) -> str:
    """Hint for a function that expects completions in another form."""
    if isinstance(start.prompt, str):
        return "; a completion is a string here, because the prompt is one"
    return "; a completion is a list with one message here, because the prompt is a chat: completion[0]['content']"


def _right_rollout(start: Start) -> Rollout:
    text = str(start.columns.get("answer", "0"))
    return Rollout(context=(), actions=(0,), behavior_logprobs=(0.0,), end=EndReason.STOP, text=text)


def _result_of(result: float | list[float] | None, *, binary: bool) -> RewardResult:
    if result is None:
        return RewardResult(None)
    if binary and math.isfinite(result) and result not in (0, 1):  # type: ignore[arg-type]  # steps are not binary
        return RewardResult(
            None, f"returned {result:g}, but it is binary: let it return 0 or 1, or take out binary = true"
        )
    numbers = result if isinstance(result, list) else [result]
    for number in numbers:
        if not abs(number) <= LARGEST_REWARD:  # True for NaN
            return RewardResult(None, f"returned {number}")
    return RewardResult(math.fsum(numbers), steps=numbers) if isinstance(result, list) else RewardResult(result)


def _first_error(results: Mapping[str, Sequence[RewardResult]]) -> tuple[str, str]:
    """The first reward that failed and the reason; if none failed, all returned None."""
    for name, of_rollouts in results.items():
        for verdict in of_rollouts:
            if verdict.error:
                return name, verdict.error
    return ", ".join(results), "returned None"


def _too_many(name: str, failed: str, total: int, why: str) -> GradingError:
    return GradingError(f"{failed} of {total} rollouts could not be graded, more than 20 %: reward {name!r}: {why}")
