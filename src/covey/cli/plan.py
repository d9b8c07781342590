"""The command `covey plan`: its options, and the reports for one process, for ranks and for a cluster."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from covey.cli.options import (
    MOST_TOKENS,
    Command,
    Parser,
    add_fields,
    field_line,
    field_options,
    given_fields,
    number,
    option,
    option_of,
)
from covey.config import ConfigError, RunConfig
from covey.config.named_modules import entry_points_of
from covey.config.planning import DevicesConfig, SimulationConfig

ALGORITHMS = "grpo,ppo"  # columns without --ranks
MOST_RANKS = 4096
PLANNED_FIELDS = (
    "device", "precision", "prompts_per_step", "group_size", "max_new_tokens", "microbatch_tokens", "recompute",
    "eight_bit_moments",
)  # fmt: skip


def _options(parser: Parser) -> None:
    parser.usage = (
        "covey plan MODEL [--algorithm NAME,NAME] [options] [--field value ...]\n"
        "       covey plan MODEL --ranks N [--device-memory SIZE] [options] [--field value ...]\n"
        "       covey plan MODEL --ranks N --cluster --mean-tokens N [options] [--field value ...]"
    )
    lines = {row.name: field_line(option, row) for option, row in field_options(RunConfig)}
    parser.epilog = "\n".join(
        ["fields of a recipe that matter most; the others (`covey train --help`) are options too:"]
        + [lines[name] for name in PLANNED_FIELDS]
    )
    option(parser, "MODEL", "a model's name, folder, config.json or .gguf file, or a run folder")
    option(parser, "--algorithm NAMES", f"algorithms to show side by side ({ALGORITHMS})")
    option(parser, "--prompt-tokens N", "length of a prompt, in tokens", number(int, 1, MOST_TOKENS), 64)
    option(parser, "--critic-trunk own|policy|adapter", "decoder of ppo's critic (show two of them)")
    option(parser, "--reward-model MODEL", "reward model whose weights are counted too")
    ranks = parser.add_argument_group("memory of one rank (torchrun), with whole and with sharded weights")
    option(ranks, "--ranks N", "number of ranks, a power of two; one device each", number(int, 1, MOST_RANKS))
    add_fields(ranks, DevicesConfig, without=("external_sampler",))
    option(ranks, "--external-sampler", DevicesConfig.__dataclass_fields__["external_sampler"].metadata["help"])
    cluster = parser.add_argument_group("throughput, predicted by a simulation")
    option(cluster, "--cluster", "simulate the ranks and servers that sample for them")
    add_fields(cluster, SimulationConfig)


def plan_command(arguments: argparse.Namespace, fields_given: list[str]) -> None:
    """`covey plan`."""
    devices, simulated = given_fields(arguments, DevicesConfig), given_fields(arguments, SimulationConfig)
    devices |= {"external_sampler": True} if arguments.external_sampler or arguments.cluster else {}
    if simulated and not arguments.cluster:
        raise ConfigError(f"{option_of(next(iter(simulated)))} belongs to --cluster, which simulates a run: add it")
    if arguments.cluster and arguments.ranks is None:
        raise ConfigError("--cluster needs the number of ranks that train: add --ranks N")
    if devices and arguments.ranks is None:
        raise ConfigError(f"{option_of(next(iter(devices)))} belongs to --ranks N: add it")
    if arguments.ranks is None:
        from covey.experiment.plan import plan_memory

        report = plan_memory(
            arguments.model,
            fields_given,
            algorithms=(ALGORITHMS if arguments.algorithm is None else arguments.algorithm).split(","),
            critic_trunk=arguments.critic_trunk,
            prompt_tokens=arguments.prompt_tokens,
            reward_model=arguments.reward_model,
        )
    else:
        report = _report_of_ranks(arguments, fields_given, devices, simulated)
    print(report)


def _report_of_ranks(
    arguments: argparse.Namespace, fields_given: list[str], devices: dict[str, Any], simulated: dict[str, Any]
) -> str:
    algorithm = "grpo" if arguments.algorithm is None else arguments.algorithm
    if "," in algorithm:
        raise ConfigError("--ranks plans one algorithm at a time: name one with --algorithm")
    planner = entry_points_of("covey.planners").get("cluster", "")
    if not planner:
        raise ConfigError('--ranks needs the package covey-cluster: pip install "covey[cluster]"')
    module, _, plan = planner.partition(":")
    report: str = getattr(importlib.import_module(module), plan)(
        arguments.model,
        fields_given,
        algorithm=algorithm,
        critic_trunk=arguments.critic_trunk,
        reward_model=arguments.reward_model,
        prompt_tokens=arguments.prompt_tokens,
        ranks=arguments.ranks,
        devices=DevicesConfig(**devices),
        simulation=SimulationConfig(**simulated) if arguments.cluster else None,
    )
    return report


COMMAND = Command("plan", "predict memory, and the throughput of a cluster, without loading the model", _options,
                  plan_command, takes_fields=True)  # fmt: skip
