"""Accuracy on problems that training never sees."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from covey.config import EvaluationConfig
from covey.data import Group, Start, Task
from covey.llm.grader import RewardGrader
from covey.llm.sampler import LanguageSampler, greedy
from covey.observe.display import Display
from covey.observe.statistics import mean_score
from covey.recipes.build import Evaluation

PIECE = 128  # problems answered at a time


class HeldOut:
    """Greedy answers to the held-out problems, at one or more token limits."""

    def __init__(
        self, config: EvaluationConfig, task: Task, grader: RewardGrader, sampler: LanguageSampler, display: Display
    ) -> None:
        self.every = config.every
        self.problems = config.problems
        # The training's own limit comes first: it is the one that the curve and the advice are about.
        self.limits = list(dict.fromkeys([sampler.max_new_tokens, *config.token_limits]))
        self.task, self.grader, self.sampler, self.display = task, grader, sampler, display
        self._latest: dict[int, Evaluation] = {}  # by token limit, of the weights' version that follows
        self._version = sampler.version

    def measure(self, label: str) -> list[Evaluation]:
        """One result per token limit: accuracy, its 95 % interval, mean length, seconds."""
        return self._at(self.limits, label)

    def due(self, step: int) -> dict[str, float]:
        """The metric `eval/score` after a step where the config asks for it."""
        if not self.every or step % self.every:
            return {}
        (result,) = self._at(self.limits[:1], f"held-out accuracy after step {step}")
        return {"eval/score": result["score"]}

    def _at(self, limits: list[int], label: str) -> list[Evaluation]:
        if self._version != self.sampler.version:
            self._latest, self._version = {}, self.sampler.version
        new = [limit for limit in limits if limit not in self._latest]  # a run may end where an evaluation was due
        if new:
            self._latest |= self._measure(new, f"{label}, at most {max(new)} tokens")
        return [self._latest[limit] for limit in limits]

    def _measure(self, limits: list[int], label: str) -> dict[int, Evaluation]:
        """A greedy answer begins like the one with more room, so one is sampled and cut at each limit."""
        began = time.perf_counter()
        starts = self.task.held_out(self.problems)
        sampler = greedy(self.sampler, max(limits))
        graded: dict[int, list[Group]] = {limit: [] for limit in limits}
        with self.display.progress(label, len(starts)) as advance:
            for piece in answers(sampler, starts, 1):
                for limit in limits:
                    graded[limit] += self.grader.grade(sampler.shortened(piece, limit))
                advance(len(piece))
        seconds = (time.perf_counter() - began) / len(limits)
        return {limit: self._result(limit, groups, seconds) for limit, groups in graded.items()}

    def _result(self, limit: int, groups: list[Group], seconds: float) -> Evaluation:
        rollouts = [group.rollouts[0] for group in groups]
        return {
            "max_new_tokens": limit,
            **mean_score([rollout.score or 0.0 for rollout in rollouts]),
            "mean_tokens": sum(len(rollout.actions) for rollout in rollouts) / len(rollouts),
            "seconds": seconds,
        }


def answers(sampler: LanguageSampler, starts: Sequence[Start], samples: int) -> Iterator[list[Group]]:
    """Answers to `starts`, `samples` each, some problems at a time. Step 0 names their random numbers: training begins
    at 1.
    """
    for i in range(0, len(starts), PIECE):
        yield sampler.sample(starts[i : i + PIECE], samples, step=0)
