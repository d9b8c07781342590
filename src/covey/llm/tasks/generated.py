"""Base of the generated tasks: draws that are a function of their arguments, and a held-out split.

A hash of a problem's content decides its side of the split; about 1 in 10 is held out. So the two sides are disjoint
for all seeds, also between differently configured tasks of one kind.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from covey.config import ConfigError, RewardConfig
from covey.config.data_file import stable_hash
from covey.config.fields import check_fields
from covey.data import Start

Config = TypeVar("Config")

HELD_OUT_ONE_IN = 10
GIVE_UP_AFTER = 50_000  # consecutive draws without a new problem
HURRY_AFTER = 2_000  # the same for problems among which the held-out ones are chosen by kind
POOL = 2  # times as many are there to choose from
SHARES_OF = 4096  # problems from which the shares of the kinds are estimated


@dataclass(frozen=True)
class Problem:
    """One question with the columns for its reward."""

    key: str  # the content that decides the side; equal for equivalent problems, as 3 + 5 and 5 + 3
    question: str
    columns: dict[str, Any]
    examples: tuple[tuple[str, str], ...] = ()  # questions and answers before it, as earlier turns of the chat
    kind: str = ""  # of problem, for the selection of prompts and for results by kind
    hidden: str = ""  # what differs between problems with the same question, as the number to guess


def is_held_out(key: str) -> bool:
    """True if the problem with this key is held out from training."""
    return stable_hash("side", key) % HELD_OUT_ONE_IN == 0


class GeneratedTask(ABC):
    """A task that generates its problems; implements `covey.data.Task`."""

    name: str
    default_rewards: tuple[RewardConfig, ...]

    @abstractmethod
    def problem(self, rng: random.Random) -> Problem:
        """A random problem of either side."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` training starts; each is a function of (seed, step, its index) alone; `before` is ignored."""
        return [
            _start(index, self._training_problem(random.Random(stable_hash("draw", seed, step, index))))
            for index in range(first, first + count)
        ]

    def held_out(self, count: int) -> list[Start]:
        """`count` of this task's fixed sequence of different held-out problems, or all if it has fewer.

        They are the first of every kind, as many as its share of the problems that the task draws.

        Raises:
            ConfigError: if it has none.
        """
        pool = self._held_out_pool(count)
        numbers = divide_by_share(count, self._shares(), Counter(problem.kind for problem in pool))
        chosen = []
        for problem in pool:
            if numbers[problem.kind]:
                numbers[problem.kind] -= 1
                chosen.append(problem)
        return [_start(index, problem) for index, problem in enumerate(chosen)]

    def _held_out_pool(self, count: int) -> list[Problem]:
        """The first held-out problems, without repetitions: POOL times `count`, if they are found quickly."""
        rng = random.Random(stable_hash("held out"))
        found: dict[tuple[str, str], Problem] = {}
        fruitless = 0
        while len(found) < POOL * count and fruitless <= (GIVE_UP_AFTER if len(found) < count else HURRY_AFTER):
            problem = self.problem(rng)
            fruitless += 1
            if is_held_out(problem.key) and (problem.question, problem.hidden) not in found:
                found[problem.question, problem.hidden] = problem
                fruitless = 0
        if not found:
            raise ConfigError(f"task {self.name} has no problem that is held out: make the task larger")
        return list(found.values())

    def _shares(self) -> dict[str, float]:
        """The share of every kind among the problems that the task draws."""
        rng = random.Random(stable_hash("shares"))
        if not (first := self.problem(rng).kind):
            return {first: 1.0}
        drawn = Counter(self.problem(rng).kind for _ in range(SHARES_OF))
        return {kind: times / SHARES_OF for kind, times in sorted(drawn.items())}

    def _training_problem(self, rng: random.Random) -> Problem:
        for _ in range(GIVE_UP_AFTER):
            problem = self.problem(rng)
            if not is_held_out(problem.key):
                return problem
        raise ConfigError(f"task {self.name} has no problem left for training: make the task larger")


def divide_by_share(count: int, shares: Mapping[str, float], most: Mapping[str, int]) -> Counter[str]:
    """`count` divided by the shares of kinds, of which each has at most a number; what one lacks goes to the others.

    Largest remainders are rounded up. Kinds without a share get what is left at the end.

    >>> dict(divide_by_share(10, {"a": 0.5, "b": 0.5}, {"a": 9, "b": 2}))
    {'a': 8, 'b': 2}
    """
    numbers: Counter[str] = Counter()
    while (left := min(count, sum(most.values())) - numbers.total()) > 0:
        open_kinds = [kind for kind in most if numbers[kind] < most[kind]]
        weights = {kind: shares.get(kind, 0.0) for kind in open_kinds}
        total = sum(weights.values())
        exact = {kind: left * (weights[kind] / total if total else 1 / len(open_kinds)) for kind in open_kinds}
        whole = {kind: int(share) for kind, share in exact.items()}
        for kind in sorted(exact, key=lambda kind: whole[kind] - exact[kind])[: left - sum(whole.values())]:
            whole[kind] += 1
        for kind in open_kinds:
            numbers[kind] += min(whole[kind], most[kind] - numbers[kind])
    return numbers


def _start(index: int, problem: Problem) -> Start:
    prompt = []
    for question, answer in problem.examples:
        prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    prompt.append({"role": "user", "content": problem.question})
    return Start(index=index, prompt=prompt, columns=dict(problem.columns), kind=problem.kind)


def checked(config_type: type[Config], fields: dict[str, Any]) -> Config:
    """Build a task's config from its fields; lists become tuples.

    Raises:
        ConfigError: if a value is invalid.
    """
    config = config_type(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    check_fields(config, "task.")
    return config
