"""Selection of prompts: a step draws more candidates than it needs, and keeps those from which a signal is expected.

What is known of a kind of prompt comes from the rewards of earlier steps. Each candidate's signal is drawn from the
posterior of its kind (Thompson sampling), so a kind of which little is known is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from covey.core.prompt_signal import (
    back_to_the_data,
    discounted,
    draw_weights,
    draw_without_replacement,
    success_signal,
    variance_signal,
)
from covey.data import Group, Start, Stateless, Task
from covey.runtime.distributed import content_hash

# Observations that the prior of a kind is worth. One success and one failure: a uniform prior of the success rate.
PRIOR = 1.0


class PromptSelection(Stateless):
    """Chooses the prompts of a step; in this class they are those that the task draws."""

    def draw(self, task: Task, seed: int, step: int, count: int, *, first: int, before: int) -> list[Start]:
        """`count` starts of a step; the arguments are those of `Task.draw`."""
        return task.draw(seed, step, count, first=first, before=before)

    def after(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Learn from the graded groups of a finished step; returns metrics."""
        return {}


@dataclass
class Observed:
    """Rewards of a kind of prompt, each with a weight that falls with its age."""

    step: int  # to which the weights are discounted
    successes: float = 0.0
    failures: float = 0.0
    squares: float = 0.0  # squared deviations of rewards from the mean of their group
    freedom: float = 0.0  # their degrees of freedom

    def at(self, step: int, half_life: float) -> Observed:
        """The same with the weights of a later step."""
        numbers = (self.successes, self.failures, self.squares, self.freedom)
        return Observed(step, *(discounted(number, step - self.step, half_life) for number in numbers))

    def add(self, rewards: Sequence[float]) -> None:
        """Add the rewards of a group."""
        mean = fmean(rewards)
        self.successes += sum(rewards)
        self.failures += len(rewards) - sum(rewards)
        self.squares += sum((reward - mean) ** 2 for reward in rewards)
        self.freedom += len(rewards) - 1


class ByExpectedSignal(PromptSelection):
    """Draws several candidates for every prompt, and keeps those from which a signal is expected.

    A candidate is kept with a probability proportional to floor + (1 - floor) * signal. As long as all rewards are 0 or
    1, the signal is 4 p (1 - p), with a success rate p drawn from the Beta posterior of the candidate's kind (MoPPS,
    arXiv 2507.04632). After any other reward it is the variance within groups, drawn from its scaled inverse
    chi-squared posterior, relative to the largest of the candidates.

    The kind is `Start.kind`, or the prompt itself if the task names no kinds.
    """

    def __init__(
        self, *, candidates: int, floor: float = 0.1, half_life: float = 10.0, back_to_data: bool = False
    ) -> None:
        """
        Args:
            candidates: drawn for every prompt of a step.
            floor: weight of a candidate without signal beside that of one with the largest.
            half_life: steps after which a reward has half of its weight in the posterior.
            back_to_data: weight the groups in the loss so that the objective is that of the task's distribution.
        """
        self.candidates, self.floor, self.half_life, self.back_to_data = candidates, floor, half_life, back_to_data
        self._observed: dict[str, Observed] = {}
        self._binary = True

    def draw(self, task: Task, seed: int, step: int, count: int, *, first: int, before: int) -> list[Start]:
        """The prompts that are kept, in the order in which the task drew them."""
        many = self.candidates
        drawn = task.draw(seed, step, count * many, first=first * many, before=before * many)
        starts = _different(drawn, count)
        generator = np.random.default_rng([seed, step, first])
        weight_C = draw_weights(self._signals(starts, step, generator), self.floor)
        uniform_C = torch.from_numpy(1.0 - generator.random(len(starts)))  # in (0, 1]: no logarithm of 0
        kept = draw_without_replacement(weight_C, uniform_C, count)
        weights = back_to_the_data(weight_C[kept]).tolist() if self.back_to_data else [1.0] * count
        return [
            replace(starts[place], index=first + number, weight=weight)
            for number, (place, weight) in enumerate(zip(kept.tolist(), weights, strict=True))
        ]

    def _signals(self, starts: Sequence[Start], step: int, generator: np.random.Generator) -> torch.Tensor:
        """Expected signal of each candidate, relative to the largest possible; [C] from 0 to 1."""
        known = [self._known(kind_of(start), step) for start in starts]
        if self._binary:
            successes, failures = (np.array([getattr(o, name) for o in known]) for name in ("successes", "failures"))
            return success_signal(torch.from_numpy(generator.beta(PRIOR + successes, PRIOR + failures)))
        everything = [one.at(step, self.half_life) for one in self._observed.values()]
        mean = sum(one.squares for one in everything) / max(sum(one.freedom for one in everything), 1e-12)
        squares = np.array([one.squares for one in known]) + PRIOR * mean
        freedom = np.array([one.freedom for one in known]) + PRIOR
        return variance_signal(torch.from_numpy(squares / generator.chisquare(freedom)))

    def _known(self, kind: str, step: int) -> Observed:
        """Rewards of a kind, with their weights at a step."""
        return self._observed.get(kind, Observed(step)).at(step, self.half_life)

    def after(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Add the rewards of a step; those whose grading failed do not count."""
        for group in groups:
            rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            if not rewards:
                continue
            kind = kind_of(group.start)
            self._observed[kind] = found = self._known(kind, step)
            found.add(rewards)
            self._binary = self._binary and set(rewards) <= {0.0, 1.0}
        return {"selection/kinds": float(len(self._observed))}

    def state_dict(self) -> dict[str, Any]:
        """What was observed of every kind."""
        return {"binary": self._binary, "observed": {kind: vars(one) for kind, one in self._observed.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was observed."""
        self._binary = state["binary"]
        self._observed = {kind: Observed(**one) for kind, one in state["observed"].items()}


def kind_of(start: Start) -> str:
    """The kind of a start, or a hash of its prompt and columns if its task names no kinds."""
    return start.kind or _problem_hash(start)


def _problem_hash(start: Start) -> str:
    return content_hash([start.prompt, dict(start.columns)])


def _different(starts: Iterable[Start], count: int) -> list[Start]:
    """The starts without repetitions of a prompt, unless fewer than `count` are left."""
    different: dict[str, Start] = {}
    repeated = []
    for start in starts:
        key = _problem_hash(start)
        if key in different:
            repeated.append(start)
        else:
            different[key] = start
    found = list(different.values())
    return found + repeated[: max(count - len(found), 0)]
