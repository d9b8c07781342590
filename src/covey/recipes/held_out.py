"""Accuracy on problems that training never sees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from covey.config import EvaluationConfig
from covey.data import Group, Start, Task
from covey.llm.grader import RewardGrader
from covey.llm.sampler import LanguageSampler, greedy
from covey.observe.display import Display
from covey.observe.statistics import mean_score
from covey.recipes.build import Evaluation

PIECE = 128  # problems answered between two moves of the progress bar


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
        self._latest: dict[tuple[int, int], Evaluation] = {}  # by token limit and version of the weights

    def measure(self, label: str) -> list[Evaluation]:
        """One result per token limit: accuracy, its 95 % interval, mean length, seconds."""
        return [self._at(limit, f"{label}, at most {limit} tokens") for limit in self.limits]

    def due(self, step: int) -> dict[str, float]:
        """The metric `eval/score` after a step where the config asks for it."""
        if not self.every or step % self.every:
            return {}
        result = self._at(self.limits[0], f"held-out accuracy after step {step}")
        return {"eval/score": result["score"]}

    def _at(self, limit: int, label: str) -> Evaluation:
        asked = limit, self.sampler.version
        if asked not in self._latest:  # a run may end where an evaluation was due
            self._latest = {asked: self._measure(limit, label)}
        return self._latest[asked]

    def _measure(self, limit: int, label: str) -> Evaluation:
        began = time.perf_counter()
        starts = self.task.held_out(self.problems)
        with self.display.progress(label, len(starts)) as advance:
            groups = answer(greedy(self.sampler, limit), self.grader, starts, 1, advance)
        rollouts = [group.rollouts[0] for group in groups]
        return {
            "max_new_tokens": limit,
            **mean_score([rollout.score or 0.0 for rollout in rollouts]),
            "mean_tokens": sum(len(rollout.actions) for rollout in rollouts) / len(rollouts),
            "seconds": time.perf_counter() - began,
        }


def answer(
    sampler: LanguageSampler, grader: RewardGrader, starts: Sequence[Start], samples: int, advance: Any
) -> list[Group]:
    """Graded answers to `starts`, `samples` each. Step 0 names their random numbers: training begins at 1."""
    groups: list[Group] = []
    for i in range(0, len(starts), PIECE):
        piece = grader.grade(sampler.sample(starts[i : i + PIECE], samples, step=0))
        groups += piece
        advance(len(piece))
    return groups
