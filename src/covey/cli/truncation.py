"""Options of `covey eval` and `covey sample` for prompts, and for tokens that may not be drawn."""

from __future__ import annotations

import argparse
from typing import Any

from covey.cli.numbers import number
from covey.config import ConfigError, SamplingConfig

TRUNCATION = ("top_k", "top_p", "min_p", "min_new_tokens")  # fields of `Truncation`
MOST_TOKENS = 1_000_000  # limit of an answer or a prompt


def add_truncation(command: argparse.ArgumentParser) -> None:
    """Options for tokens that may not be drawn. A recipe has the last one alone, because an update needs
    log-probabilities of the distribution that was sampled.
    """
    command.add_argument("--top-k", type=number(int, 1, MOST_TOKENS), help="draw from the K most probable tokens (all)")
    command.add_argument(
        "--top-p", type=number(float, 1e-6, 1), help="draw from the most probable tokens that add up to P (1)"
    )
    command.add_argument(
        "--min-p", type=number(float, 0, 1), help="draw from tokens with at least P times the largest probability (0)"
    )
    command.add_argument(
        "--min-new-tokens",
        type=number(int, 0, MOST_TOKENS),
        help="tokens before the first end token (the run's)",
    )


def add_chat_options(command: argparse.ArgumentParser) -> None:
    """Options of `covey sample` that `covey eval` has as fields of a recipe."""
    command.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends an answer; several times for more (the run's)"
    )
    command.add_argument("--system-prompt", metavar="TEXT", help="system message before the prompt (the run's)")


def truncation_of(arguments: argparse.Namespace, temperature: float, sampling: SamplingConfig) -> dict[str, Any]:
    """The fields of `Truncation` that a command sets, and the minimum length of `sampling`.

    Raises:
        ConfigError: for one that has no effect on greedy answers, and for a minimum length above the largest.
    """
    given = {name: getattr(arguments, name) for name in TRUNCATION if getattr(arguments, name) is not None}
    if temperature == 0 and (without_effect := [name for name in given if name != "min_new_tokens"]):
        option = f"--{without_effect[0].replace('_', '-')}"
        raise ConfigError(f"{option} changes no greedy answer: raise --temperature, or leave it out")
    is_of_run = "min_new_tokens" not in given
    shortest = given.setdefault("min_new_tokens", sampling.min_new_tokens)
    if shortest >= sampling.max_new_tokens:
        if is_of_run:
            raise ConfigError(
                f"--max-new-tokens must be above the run's minimum length, {shortest} (is {sampling.max_new_tokens}): "
                "raise it, or add --min-new-tokens 0"
            )
        raise ConfigError(f"--min-new-tokens must be below --max-new-tokens, {sampling.max_new_tokens} (is {shortest})")
    return given
