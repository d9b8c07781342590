"""Grades completions: calls every reward function, sums the rewards with their weights, and separates failures.

A failed call is not a wrong answer: a rollout that could not be graded has the reward None and is removed from its
group. Reward functions are the user's own trusted code; there is no sandbox for them, only for the programs of `code`.
"""

import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from covey.config import ConfigError, RewardConfig, RunError
from covey.config.fields import plural
from covey.config.files import shortened
from covey.data import EndReason, Group, Rollout, Start, Team
from covey.llm.data.rows import Row as DataRow
from covey.llm.model.chat import Chat
from covey.llm.rewards.runner import FAILURES_ALLOWED, RewardHung
from covey.llm.rewards.step_splitter import StepSplitter
from covey.llm.rewards.weighted_reward import RewardResult, Wait, WeightedReward
from covey.runtime.distributed import ALONE, exchange_json
from covey.runtime.worker.child import InvalidResult
from covey.runtime.worker.process import CallError, CallTimeout

log = logging.getLogger(__name__)

BOUNDARY = "process.boundary"  # name of the boundary function in messages
CALL_FILE = "unfinished_call.json"
MISREADINGS = ("TypeError", "AttributeError", "KeyError", "IndexError")  # from a wrong form of completions


class GradingError(RunError):
    """Grading cannot continue; one line that names the reward and its fault."""


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
        by_preference = sorted(
            self.rewards, key=lambda reward: (not reward.score, reward.caller.by_group, reward.per_step)
        )
        own = [reward for reward in by_preference if not reward.shaping]
        if own and own[0].caller.by_group:
            raise ConfigError(
                f"reward {own[0].name!r} compares the completions of a group, and an evaluation has one answer "
                "to a prompt: let another reward have score = true (weight = 0: it is only measured)"
            )
        self.score_name = by_preference[0].name
        self.score_kind = "accuracy" if by_preference[0].binary else "score"  # a key of tracking's SCORE_KINDS
        self.score_range = by_preference[0].range
        self.splitter = StepSplitter(boundary) if any(reward.per_step for reward in self.rewards) else None
        self._started: dict[tuple[str, int], Wait] = {}  # calls, by the reward's name and the id of the group

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward in the sum, by its name in `Rollout.reward_parts`."""
        return {reward.name: reward.weight for reward in self.rewards}

    def use_chat(self, chat: Chat) -> None:
        """Set the chat of the model, with which `grade` also computes the tokens at which steps end."""
        if self.splitter is not None:
            self.splitter.chat = chat

    def start(self, group: Group) -> None:
        """Start the calls for a sampled group in the background; `grade` waits for them.

        Functions that run in this process, and step rewards, are called by `grade`.
        """
        for reward in self.rewards:
            if reward.caller.early and not reward.per_step:
                self._started[reward.name, id(group)] = reward.start([group])

    def grade(self, groups: list[Group], team: Team = ALONE) -> list[Group]:
        """Fill in `reward`, `reward_parts` and `score` of every rollout, and with a step reward its steps.

        Args:
            groups: of this rank.
            team: ranks that call this at the same time; their failures are counted together.

        Raises:
            GradingError: on every rank, if more than 20 % of the rollouts failed, or a function returned an invalid
                result.
        """
        total = sum(exchange_json(team, sum(len(group.rollouts) for group in groups)))
        failures, fault = (0, "", ""), ""
        try:
            failures = self.grade_part(groups, total)
        except GradingError as error:  # the other ranks are told before any of them ends
            fault = str(error)
        found = exchange_json(team, [*failures, fault])
        if faults := [fault for *_, fault in found if fault]:
            raise GradingError(faults[0])
        failed = sum(count for count, *_ in found)
        if failed > FAILURES_ALLOWED * total:
            raise next(_too_many(name, f"{failed}", total, why) for count, name, why, _ in found if count)
        return groups

    def grade_part(self, groups: list[Group], total: int) -> tuple[int, str, str]:
        """As `grade`, for a part of `total` rollouts. Returns the number of failures, reward and reason of the first.

        Raises:
            GradingError: if the failures of this part alone are more than 20 % of `total`, so that calls need not be
                waited for, or a function returned an invalid result.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return 0, "", ""
        uncut = self._cut(rollouts, total)
        calls = [self._calls(reward, groups) for reward in self.rewards]  # all start before the first is waited for
        results = {
            reward.name: self._results(reward, total, own) for reward, own in zip(self.rewards, calls, strict=True)
        }
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
        return failed, *_first_error(results | ({BOUNDARY: list(uncut.values())} if uncut else {}))

    def _calls(self, reward: WeightedReward, groups: list[Group]) -> deque[tuple[list[Group], Wait]]:
        """The calls that `start` started; if there are none, calls for all groups, in equal parts for the workers."""
        started = [self._started.pop((reward.name, id(group)), None) for group in groups]
        if any(started):
            return deque(([group], wait or reward.start([group])) for group, wait in zip(groups, started, strict=True))
        return deque((part, reward.start(part)) for part in _parts(groups, reward.caller.workers))

    def _results(
        self, reward: WeightedReward, total: int, calls: deque[tuple[list[Group], Wait]]
    ) -> list[RewardResult]:
        """Wait for the calls. One on several groups that fails is repeated group by group, so that only failing groups
        have no reward. Errors as of `grade_part`.
        """
        results: list[RewardResult] = []
        while calls:
            part, wait = calls.popleft()
            try:
                found = wait()
            except CallError as error:
                if len(part) > 1:
                    log.warning("reward %r failed on a whole step, trying it group by group: %s", reward.name, error)
                    calls.extendleft(([group], partial(reward.evaluate, [group])) for group in reversed(part))
                    continue
                found = [RewardResult(None, str(error))] * len(part[0].rollouts)
            except (InvalidResult, RewardHung) as error:
                where = _place(part[0]) if len(part) == 1 else ""
                raise GradingError(f"reward {reward.name!r} {error}{where}") from None
            results += _placed(part, found)
            failed = sum(bool(verdict.error) for verdict in results)
            if len(part) == 1 and failed > FAILURES_ALLOWED * total:  # do not wait for the others' deadlines
                _, why = _first_error({reward.name: results})
                raise _too_many(reward.name, f"at least {failed}", total, why)
        return results

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
        if any(
            all(verdict.value is None and not verdict.error for verdict in row) for row in zip(*values, strict=True)
        ):
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
        if reward.caller.by_group:  # beside an empty completion
            groups = [Group(one.start, [*one.rollouts, replace(one.rollouts[0], text="")]) for one in groups]
        try:
            verdicts = reward.evaluate(groups)
        except CallTimeout:
            raise ConfigError(
                f"reward {reward.name!r} took longer than {reward.timeout_seconds:g} s, its timeout_seconds, for "
                f"{plural(len(groups), 'completion')} in a dry run; if it is slow but sound, raise it"
            ) from None
        except (CallError, InvalidResult, RewardHung) as error:
            form = _form_of_completions(groups[0].start) if str(error).startswith(MISREADINGS) else ""
            raise ConfigError(f"reward {reward.name!r}, in a dry run on the right answer: {error}{form}") from None
        errors = [verdict.error for verdict in verdicts if verdict.error]
        if errors and (len(errors) == len(verdicts) or not reward.caller.by_model):
            raise ConfigError(f"reward {reward.name!r} {errors[0]}, in a dry run on the right answer")
        return verdicts[:: 1 + reward.caller.by_group]

    def close(self) -> None:
        """End the processes of the reward functions."""
        for reward in self.rewards:
            reward.caller.close()
        if self.splitter is not None:
            self.splitter.close()


def _placed(groups: Sequence[Group], results: Sequence[RewardResult]) -> list[RewardResult]:
    """The results, in whose errors the row of the prompt is named."""
    of_rollouts = (group for group in groups for _ in group.rollouts)
    return [
        replace(result, error=f"{result.error}{_place(group)}") if result.error else result
        for group, result in zip(of_rollouts, results, strict=True)
    ]


def _place(group: Group) -> str:
    return f" ({group.start.place})" if group.start.place else ""


def _parts(groups: list[Group], count: int) -> list[list[Group]]:
    """The groups in at most `count` consecutive parts of almost equal size."""
    size = -(-len(groups) // count)
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def _first_error(results: Mapping[str, Sequence[RewardResult]]) -> tuple[str, str]:
    """The first reward that failed and the reason; if none failed, all returned None."""
    for name, of_rollouts in results.items():
        for verdict in of_rollouts:
            if verdict.error:
                return name, verdict.error
    return ", ".join(results), "returned None"


def _too_many(name: str, failed: str, total: int, why: str) -> GradingError:
    return GradingError(f"{failed} of {total} rollouts could not be graded, more than 20 %: reward {name!r}: {why}")


@dataclass(frozen=True)
class RunGrader:
    """The grader of a run, with all its ranks; implements `covey.data.Grader`.

    `file` exists during a call, and so remains if a reward function ends the process: the resumed run reports it.
    """

    grader: RewardGrader
    team: Team
    file: Path

    def grade(self, groups: list[Group]) -> list[Group]:
        """As `RewardGrader.grade`."""
        self.file.write_text(json.dumps([reward.name for reward in self.grader.rewards]))
        try:
            return self.grader.grade(groups, self.team)
        finally:
            self.file.unlink(missing_ok=True)

    def unfinished(self) -> str:
        """One line about a call that ended the process before, whose file is deleted; empty if there was none."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            names = json.loads(self.file.read_text())
            self.file.unlink()
            return (
                f"the process of this run ended while its rewards were computed ({', '.join(map(str, names))}): unless "
                "it was stopped from outside, a reward function ended it, by os._exit or a signal, and may do so again"
            )
        return ""


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


# ---- checks of the rows of a data set before a run ----

MISSING = object()
Row = TypeVar("Row", bound=DataRow | Start)


def check_answers(rewards: Iterable[WeightedReward], rows: Sequence[DataRow | Start]) -> None:
    """Check the right answers of all rows for the built-in rewards that read them.

    Raises:
        ConfigError: for the first row that a reward cannot grade, with the number of such rows.
    """
    for reward in rewards:
        if reward.check is None:
            continue
        known: dict[Any, str] = {}  # rows often have the same answer
        faults = [(row, fault) for row in rows if (fault := _fault_of(reward, row, known))]
        if faults:
            row, fault = faults[0]
            more = f" ({len(faults):,} such rows)" if len(faults) > 1 else ""
            raise ConfigError(f"{row.place or 'a prompt of the task'}: reward {reward.name!r}: {fault}{more}")


def _fault_of(reward: WeightedReward, row: DataRow | Start, known: dict[Any, str]) -> str:
    """The reason why a reward cannot grade completions of a row; "" if it can."""
    columns = row.columns
    column, *_ = reward.gold
    if columns.get(column) is None:
        if column in columns:
            return f"the column {column!r} is null; remove the row"
        there = ", ".join(map(shortened, list(columns)[:8])) or "none"
        return f"there is no column {column!r} (columns: {there}); give it the name in task.columns, or remove the row"
    values = tuple(map(columns.get, reward.gold))
    key = values if set(map(type, values)) <= {str} else repr(values)  # 1 and True are equal, as keys too
    if key not in known:
        try:
            known[key] = ""
            reward.check(*values)  # type: ignore[misc]
        except ValueError as error:
            known[key] = str(error)
    return known[key]


def rows_of_every_kind(rows: Iterable[Row]) -> list[Row]:
    """The first row with each kind of value of each column: a reward that fails on a kind fails on one of them.

    A kind is a type, or that the value is null, empty or missing. Rows whose kinds all occur in others are left out.
    """
    first: dict[Any, Row] = {}
    for row in rows:
        kinds = (*map(_kind, row.columns.values()), type(row.prompt))
        first.setdefault((tuple(row.columns), kinds), row)
    names = dict.fromkeys(name for columns, _ in first for name in columns)
    found: list[Row] = []
    seen: set[Any] = set()
    for (columns, kinds), row in first.items():
        there = dict(zip((*columns, MISSING), kinds, strict=True))
        pairs = {(name, there.get(name, MISSING)) for name in (*names, MISSING)}
        if not pairs <= seen:
            found.append(row)
            seen |= pairs
    return found


def _kind(value: Any) -> Any:
    """The type of a value, or the value if it is an empty text, list or dict."""
    return repr(value) if isinstance(value, (str, list, dict)) and not value else type(value)
