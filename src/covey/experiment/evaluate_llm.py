"""Evaluates a language model by greedy answers to held-out problems."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from covey.config import EvaluationConfig, RunError
from covey.config.fields import plural
from covey.data import Group, Rollout, SamplerWeights, Start, Team, decode_groups, encode_groups
from covey.experiment.build import Evaluation
from covey.llm.grader import RewardGrader
from covey.llm.sampler import LanguageSampler, greedy
from covey.runtime.distributed import ALONE
from covey.runtime.sharding import WHOLE
from covey.tracking.console import Display
from covey.tracking.records import answer_record
from covey.tracking.run_store import RunStore
from covey.tracking.score_kinds import SCORE_KINDS, ScoreKind
from covey.tracking.statistics import Estimate
from covey.train.gather import lost_together

PIECE = 128  # problems per call of the sampler


class HeldOut:
    """Greedy answers to the held-out problems, at one or more token limits."""

    def __init__(
        self,
        config: EvaluationConfig,
        starts: Sequence[Start],
        grader: RewardGrader,
        sampler: LanguageSampler,
        display: Display,
        store: RunStore,
        team: Team = ALONE,
        weights: SamplerWeights = WHOLE,
    ) -> None:
        self.every = config.every
        # The token limit of training is first, because the curve and the advice refer to it.
        self.limits = list(dict.fromkeys([sampler.max_new_tokens, *config.token_limits]))
        self.starts, self.grader, self.sampler, self.display, self.store = starts, grader, sampler, display, store
        self.team, self.weights = team, weights
        self._latest: dict[int, Evaluation] = {}  # by token limit, for the version of the weights below
        self._answers: dict[int, list[Group]] = {}  # by token limit too
        self._version = sampler.version

    def measure(self, label: str) -> list[Evaluation]:
        """One result per token limit: the score, its 95 % interval, mean length, seconds."""
        return self._at(self.limits, label)

    def due(self, step: int) -> dict[str, float]:
        """The metric `eval/score` after a step at which the config requests an evaluation."""
        if not self.every or step % self.every:
            return {}
        (result,) = self._at(self.limits[:1], f"after step {step}")
        return {"eval/score": result["score"]}

    def _at(self, limits: list[int], label: str) -> list[Evaluation]:
        if self._version != self.sampler.version:
            self._latest, self._answers, self._version = {}, {}, self.sampler.version
        new = [limit for limit in limits if limit not in self._latest]  # the last step may have been evaluated already
        if new:
            self._measure(new, f"held-out {self.grader.score_kind} {label}, at most {plural(max(new), 'token')}")
            self.store.record_evaluation(self._version, answer_records(self._version, self._answers))
        return [self._latest[limit] for limit in limits]

    def _measure(self, limits: list[int], label: str) -> None:
        """Sample answers with the largest limit and truncate them: a greedy answer is a prefix of a longer one."""
        began = time.perf_counter()
        sampler = greedy(self.sampler, max(limits))
        graded: dict[int, list[Group]] = {limit: [] for limit in limits}
        own = _places(len(self.starts), self.team.rank, self.team.size)
        with self.display.progress(label, len(own)) as advance, self.weights.gathered():
            for piece in answers(sampler, self.starts, 1, self.team):
                for limit in limits:
                    graded[limit] += self.grader.grade(sampler.truncated(piece, limit))
                advance(len(piece))
        graded = {limit: self._gathered(groups) for limit, groups in graded.items()}
        seconds = (time.perf_counter() - began) / len(limits)
        for limit, groups in graded.items():
            self._answers[limit] = groups
            self._latest[limit] = self._result(limit, groups) | {"seconds": seconds}

    def _gathered(self, groups: list[Group]) -> list[Group]:
        """The answers of all ranks, in the order of the problems."""
        if self.team.size == 1:
            return groups
        placed: dict[int, Group] = {}
        for rank, message in enumerate(self.team.exchange(encode_groups(groups))):
            places = _places(len(self.starts), rank, self.team.size)
            found = decode_groups(message, [self.starts[place] for place in places])
            placed |= zip(places, found, strict=True)
        return [placed[place] for place in sorted(placed)]

    def _result(self, limit: int, groups: list[Group]) -> Evaluation:
        rollouts = [group.rollouts[0] for group in groups]
        scores = scores_of(rollouts)
        if not scores:
            raise RunError(nothing_scored(self.grader))
        if len(scores) < len(rollouts):
            self.display.note(f"{unscored(len(rollouts) - len(scores), len(rollouts))}")
        kind = SCORE_KINDS[self.grader.score_kind].within(self.grader.score_range)
        return {
            "max_new_tokens": limit,
            **kind.estimate(scores),
            **by_kind(groups, kind),
            "unscored": len(rollouts) - len(scores),
            "mean_tokens": sum(rollout.decisions for rollout in rollouts) / len(rollouts),
        }


def answers(
    sampler: LanguageSampler, starts: Sequence[Start], samples: int, team: Team = ALONE
) -> Iterator[list[Group]]:
    """Sample answers to this rank's part of `starts`, `samples` each, PIECE problems at a time. Their random numbers
    are those of step 0, because training begins at 1. Every rank samples equally often, if necessary for no problem.
    """
    places, most = _places(len(starts), team.rank, team.size), _places(len(starts), 0, team.size)
    for i in range(0, len(most), PIECE):
        with lost_together(team):
            piece = sampler.sample([starts[place] for place in places[i : i + PIECE]], samples, step=0)
        if piece:
            yield piece


def _places(problems: int, rank: int, ranks: int) -> list[int]:
    """The problems of a rank: every so many pieces one, so that a piece is the same for any number of ranks."""
    return [place for place in range(problems) if place // PIECE % ranks == rank]


def answer_records(step: int, graded: dict[int, list[Group]]) -> list[dict[str, Any]]:
    """The records of a file of answers, from the graded groups by token limit."""
    return [
        answer_record(step, limit, group.start, rollout)
        for limit, groups in graded.items()
        for group in groups
        for rollout in group.rollouts
    ]


def scores_of(rollouts: Sequence[Rollout]) -> list[float]:
    """The scores of the graded rollouts; a failed grading is not a wrong answer."""
    return [rollout.score for rollout in rollouts if rollout.score is not None]


def by_kind(groups: Sequence[Group], kind: ScoreKind) -> dict[str, dict[str, Estimate]]:
    """{"by_kind": the mean score of every kind of problem}; {} if there are not at least two kinds. The scores of the
    answers to one problem are averaged first.
    """
    scores: dict[str, list[float]] = {}
    for group in groups:
        if found := scores_of(group.rollouts):
            scores.setdefault(group.start.kind, []).append(fmean(found))
    if len(scores) < 2:
        return {}
    single = all(len(group.rollouts) == 1 for group in groups)
    estimate = kind.estimate if single else kind.estimate_best
    return {"by_kind": {name: estimate(scores[name]) for name in sorted(scores)}}


def unscored(count: int, total: int) -> str:
    """Message about answers without a score."""
    return f"{count} of {plural(total, 'answer')} without a score, because their reward failed or was None: left out"


def nothing_scored(grader: RewardGrader) -> str:
    """Message for an evaluation without any score."""
    return (
        f"no held-out answer has a score, because the reward {grader.score_name!r} was None for each: set score = true "
        "for another reward"
    )
