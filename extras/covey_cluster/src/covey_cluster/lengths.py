"""Distributions of the lengths of completions, for the simulation of a cluster."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.random import Generator

from covey.config import ConfigError
from covey.config.files import faults_of, read_below, user_path
from covey.tracking.run_folder import ROLLOUTS_FOLDER


class Lengths(Protocol):
    """A distribution of the number of tokens of a completion."""

    @property
    def mean(self) -> float:
        """Mean number of tokens, within the limit."""

    def draw(self, generator: Generator, count: int) -> list[int]:
        """Lengths of `count` completions, each at least 1."""

    def describe(self) -> str:
        """In words, for a report."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Lognormal lengths, cut at a limit.

    exp(mu + sigma z) with z ~ N(0, 1) and mu = log(mean_tokens) - sigma^2 / 2, so that `mean_tokens` is the mean
    without the limit. `sigma` is the standard deviation of the logarithm; 0: all completions have `mean_tokens`.
    """

    mean_tokens: float
    sigma: float
    limit: int

    @property
    def mean(self) -> float:
        """E[min(X, limit)] = m Phi(d - sigma) + limit (1 - Phi(d)), d = (log limit - mu) / sigma."""
        if not self.sigma:
            return min(self.mean_tokens, self.limit)
        d = (math.log(self.limit) - self._mu) / self.sigma
        return self.mean_tokens * _normal_cdf(d - self.sigma) + self.limit * (1 - _normal_cdf(d))

    @property
    def _mu(self) -> float:
        return math.log(self.mean_tokens) - self.sigma**2 / 2

    def draw(self, generator: Generator, count: int) -> list[int]:
        """See `Lengths`. Lengths are rounded to the nearest integer."""
        tokens = np.exp(self._mu + self.sigma * generator.standard_normal(count))
        return [max(1, round(min(one, self.limit))) for one in tokens.tolist()]

    def describe(self) -> str:
        """See `Lengths`."""
        return f"lognormal lengths, mean {self.mean_tokens:,.0f}, sigma {self.sigma:g}, at most {self.limit:,} tokens"


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths of the completions of a run, drawn with replacement."""

    tokens: tuple[int, ...]
    source: str

    @property
    def mean(self) -> float:
        """See `Lengths`."""
        return sum(self.tokens) / len(self.tokens)

    def draw(self, generator: Generator, count: int) -> list[int]:
        """See `Lengths`."""
        return [self.tokens[int(at)] for at in generator.integers(len(self.tokens), size=count)]

    def describe(self) -> str:
        """See `Lengths`."""
        return (
            f"lengths of the {len(self.tokens):,} completions of {self.source}, mean {self.mean:,.0f}, at most "
            f"{max(self.tokens):,} tokens"
        )


def recorded_lengths(run_dir: str) -> RecordedLengths:
    """The lengths of all completions that a run has recorded.

    Raises:
        ConfigError: if the folder holds no rollouts of a language model.
    """
    folder = user_path(run_dir, "--lengths: ")
    paths = sorted((folder / ROLLOUTS_FOLDER).glob("step_*.jsonl"))
    tokens = [length for path in paths for length in _lengths_of(path)]
    if not tokens:
        raise ConfigError(
            f"--lengths: {run_dir} holds no rollouts: name the folder of a run that has made a step, such as "
            "runs/arithmetic_grpo-001, or give --mean-tokens and --sigma"
        )
    return RecordedLengths(tuple(tokens), run_dir)


def _lengths_of(path: Path) -> list[int]:
    with faults_of(path):
        lines = read_below(path.parent, path.name).decode("utf-8", "replace").splitlines()
    lengths = []
    for number, line in enumerate(lines, start=1):
        try:
            decisions = json.loads(line)["decisions"]
            if not isinstance(decisions, int) or decisions < 1:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"--lengths: line {number} of {path} is not a rollout of a run: leave the folder's files as they are"
            ) from None
        lengths.append(decisions)
    return lengths


def _normal_cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2
