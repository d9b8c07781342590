"""The command `covey plan`: its options, and the report for one process; covey-cluster plans ranks and clusters."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from covey.cli.numbers import number
from covey.config import ConfigError
from covey.config.named_modules import entry_points_of

ALGORITHMS = "grpo,ppo"  # columns without --ranks
MOST_RANKS, MOST_TOKENS = 4096, 1_000_000
DEFAULT_PROMPT_TOKENS = 64


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `covey plan`; covey-cluster adds those of devices."""
    command.usage = (
        "covey plan MODEL [--algorithm NAME,NAME] [options] [--field value ...]\n"
        "       covey plan MODEL --ranks N [--device-memory SIZE] [options] [--field value ...]\n"
        "       covey plan MODEL --ranks N --cluster --mean-tokens N [options] [--field value ...]"
    )
    command.add_argument(
        "model", metavar="MODEL", help="a model's name, folder, config.json or .gguf file, or a run folder"
    )
    command.add_argument("--algorithm", metavar="NAMES", help=f"algorithms to show side by side ({ALGORITHMS})")
    command.add_argument(
        "--prompt-tokens",
        type=number(int, 1, MOST_TOKENS),
        metavar="N",
        default=DEFAULT_PROMPT_TOKENS,
        help=f"length of a prompt, in tokens ({DEFAULT_PROMPT_TOKENS})",
    )
    command.add_argument(
        "--critic-trunk", choices=("own", "policy", "adapter"), help="decoder of ppo's critic (show two of them)"
    )
    command.add_argument("--reward-model", metavar="MODEL", help="reward model whose weights are counted too")
    ranks = command.add_argument_group("memory of one rank (torchrun), with whole and with sharded weights")
    ranks.add_argument(
        "--ranks", type=number(int, 1, MOST_RANKS), metavar="N", help="number of ranks, a power of two; one device each"
    )
    planner = _planner()
    if planner:
        planner.add_options(command, ranks)


def _planner() -> Any:
    """The module of covey-cluster that plans ranks; None if it is not installed."""
    module = entry_points_of("covey.planners").get("cluster", "").partition(":")[0]
    return importlib.import_module(module) if module else None


def plan_command(arguments: argparse.Namespace, fields_given: list[str]) -> None:
    """`covey plan`."""
    planner = _planner()
    if arguments.ranks is not None and planner is None:
        raise ConfigError('--ranks needs the package covey-cluster: pip install "covey[cluster]"')
    report = planner and planner.plan(arguments, fields_given, arguments.algorithm or "grpo")
    if report is None:
        from covey.experiment.plan import plan_memory

        report = plan_memory(
            arguments.model,
            fields_given,
            algorithms=(ALGORITHMS if arguments.algorithm is None else arguments.algorithm).split(","),
            critic_trunk=arguments.critic_trunk,
            prompt_tokens=arguments.prompt_tokens,
            reward_model=arguments.reward_model,
        )
    print(report)
