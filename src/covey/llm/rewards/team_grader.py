"""Grading by several ranks, each of which grades its own groups."""

from __future__ import annotations

from dataclasses import dataclass

from covey.data import Group, Team
from covey.llm.grader import Failures, RewardGrader
from covey.llm.rewards.group_calls import GradingError, too_many
from covey.runtime.distributed import exchange_json


@dataclass(frozen=True)
class TeamGrader:
    """A `covey.data.Grader` that counts the failed gradings of all ranks; every rank calls it."""

    grader: RewardGrader
    team: Team

    def grade(self, groups: list[Group]) -> list[Group]:
        """As `RewardGrader.grade`, for the groups of this rank.

        Raises:
            GradingError: on every rank, if more than 20 % of the rollouts of all ranks failed.
        """
        own = sum(len(group.rollouts) for group in groups)
        total = sum(exchange_json(self.team, own))
        failures, fault = Failures(0, "", ""), ""
        try:
            failures = self.grader.grade_part(groups, total)
        except GradingError as error:  # this rank alone has too many: the others are told before any of them ends
            fault = str(error)
        faults = exchange_json(self.team, fault)
        if any(faults):
            raise GradingError(next(filter(None, faults)))
        found = [Failures(**one) for one in exchange_json(self.team, vars(failures))]
        count = sum(one.count for one in found)
        if Failures(count, "", "").exceed(total):
            first = next(one for one in found if one.count)
            raise too_many(first.reward, str(count), total, first.why)
        return groups
