"""Base of the generated tasks: draws that are a function of their arguments, and a held-out split.

A hash of a problem's content decides its side of the split; about 1 in 10 is held out. So the two sides are disjoint
for all seeds, also between differently configured tasks of one kind.
"""

import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from covey.config import ConfigError, RewardConfig
from covey.config.fields import check_fields
from covey.data import Start
from covey.llm.data.rows import stable_hash

Config = TypeVar("Config")

HELD_OUT_ONE_IN = 10
GIVE_UP_AFTER = 50_000  # consecutive draws without a new problem
KIND_GIVES_UP_AFTER = 2_000  # the same for a held-out problem of one kind of several
SHARES_OF = 2048  # problems from which the shares of the kinds are estimated


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


class GeneratedTask(ABC, Generic[Config]):
    """A task that generates its problems; implements `covey.data.Task`."""

    name: str
    config_type: type[Config]
    default_rewards: tuple[RewardConfig, ...] = ()

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of `config_type`."""
        self.config = checked(self.config_type, fields)

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
        """The first `count` of this task's fixed sequence of different held-out problems, or all if it has fewer.

        Every kind has the share in it that it has among the problems that the task draws.

        Raises:
            ConfigError: if it has none.
        """
        sequence = _HeldOutSequence(self.problem)
        found = list(itertools.islice(sequence.in_proportion(self._shares()), count))
        if not found:
            raise ConfigError(f"task {self.name} has no problem that is held out: make the task larger")
        return [_start(index, problem) for index, problem in enumerate(found)]

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


class _HeldOutSequence:
    """Different held-out problems, in the order in which they are drawn, or in proportion to their kinds."""

    def __init__(self, draw: Callable[[random.Random], Problem]) -> None:
        self._draw, self._rng = draw, random.Random(stable_hash("held out"))
        self._found: set[tuple[str, str]] = set()
        self._waiting: dict[str, deque[Problem]] = defaultdict(deque)  # drawn, but not yet used

    def in_proportion(self, shares: Mapping[str, float]) -> Iterator[Problem]:
        """Problems of which each beginning has the shares of the kinds, as far as they have enough problems."""
        left, taken = dict(shares), Counter[str]()
        while left:
            kind = max(left, key=lambda kind: left[kind] * (taken.total() + 1) - taken[kind])
            problem = self._next(kind, GIVE_UP_AFTER if len(shares) == 1 else KIND_GIVES_UP_AFTER)
            if problem is None:
                del left[kind]
            else:
                taken[kind] += 1
                yield problem
        while (problem := self._next("", GIVE_UP_AFTER, any_kind=True)) is not None:
            yield problem

    def _next(self, kind: str, give_up_after: int, *, any_kind: bool = False) -> Problem | None:
        """The next problem of a kind; None if none comes in so many draws."""
        for waiting in self._waiting.values() if any_kind else [self._waiting[kind]]:
            if waiting:
                return waiting.popleft()
        for _ in range(give_up_after):
            problem = self._draw(self._rng)
            if is_held_out(problem.key) and (problem.question, problem.hidden) not in self._found:
                self._found.add((problem.question, problem.hidden))
                if any_kind or problem.kind == kind:
                    return problem
                self._waiting[problem.kind].append(problem)
        return None


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
