"""The calls of reward functions for the groups of a step: started while groups are sampled, waited for afterwards."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from covey.config import RunError
from covey.data import Group
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.runner import FAILURES_ALLOWED, RewardHung
from covey.llm.rewards.weighted_reward import RewardResult, WeightedReward
from covey.runtime.worker.child import InvalidResult
from covey.runtime.worker.process import CallError

Call = tuple[list[Group], Future[Results] | None]  # None: a function that is called when its turn comes

log = logging.getLogger(__name__)


class GradingError(RunError):
    """Grading cannot continue; one line that names the reward and its fault."""


class RewardCalls:
    """Calls of the rewards of a run."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self.rewards = rewards
        self._started: dict[tuple[str, int], Future[Results]] = {}  # by the reward's name and the id of the group

    def start(self, group: Group) -> None:
        """Start the calls for a sampled group in the background; `grade` waits for them.

        Functions that run in this process, and step rewards, are called by `grade`.
        """
        for reward in self.rewards:
            if not reward.per_step and (call := reward.start([group])) is not None:
                self._started[reward.name, id(group)] = call

    def results(self, groups: list[Group], total: int) -> dict[str, list[RewardResult]]:
        """The results of all rollouts, by the name of the reward. All calls start before the first is waited for.

        Args:
            groups: of this rank.
            total: number of rollouts of all ranks.

        Raises:
            GradingError: if more than 20 % of `total` rollouts failed, or a function returned an invalid result.
        """
        calls = [self._calls(reward, groups) for reward in self.rewards]
        return {reward.name: self._results(reward, total, own) for reward, own in zip(self.rewards, calls, strict=True)}

    def _calls(self, reward: WeightedReward, groups: list[Group]) -> deque[Call]:
        """The calls that `start` started; if there are none, calls for all groups, in equal parts for the workers."""
        started = [self._started.pop((reward.name, id(group)), None) for group in groups]
        if any(started):
            return deque(([group], call) for group, call in zip(groups, started, strict=True))
        return deque((part, reward.start(part)) for part in _parts(groups, reward.caller.workers))

    def _results(self, reward: WeightedReward, total: int, calls: deque[Call]) -> list[RewardResult]:
        """Wait for the calls. One on several groups that fails is repeated group by group, so that only failing groups
        have no reward.
        """
        results: list[RewardResult] = []
        while calls:
            part, call = calls.popleft()
            try:
                results += _placed(part, self._wait(reward, part, call))
            except CallError as error:
                if len(part) > 1:
                    log.warning("reward %r failed on a whole step, trying it group by group: %s", reward.name, error)
                    calls.extendleft(([group], None) for group in reversed(part))
                    continue
                results += _placed(part, [RewardResult(None, str(error))] * len(part[0].rollouts))
            failed = sum(bool(verdict.error) for verdict in results)
            if len(part) == 1 and failed > FAILURES_ALLOWED * total:  # do not wait for the others' deadlines
                _, why = first_error({reward.name: results})
                raise too_many(reward.name, f"at least {failed}", total, why)
        return results

    def _wait(self, reward: WeightedReward, groups: list[Group], call: Future[Results] | None) -> list[RewardResult]:
        try:
            if call is None:
                return reward.evaluate(groups, reward.timeout_seconds)
            return reward.received(call.result(), groups)
        except (InvalidResult, RewardHung) as error:
            where = _place(groups[0]) if len(groups) == 1 else ""
            raise GradingError(f"reward {reward.name!r} {error}{where}") from None


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


def first_error(results: Mapping[str, Sequence[RewardResult]]) -> tuple[str, str]:
    """The first reward that failed and the reason; if none failed, all returned None."""
    for name, of_rollouts in results.items():
        for verdict in of_rollouts:
            if verdict.error:
                return name, verdict.error
    return ", ".join(results), "returned None"


def too_many(name: str, failed: str, total: int, why: str) -> GradingError:
    return GradingError(f"{failed} of {total} rollouts could not be graded, more than 20 %: reward {name!r}: {why}")
