"""The command `covey plan`: its options, and the reports for one process, for ranks and for a cluster."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import Field, fields
from typing import Any

from covey.cli.numbers import number
from covey.config import ConfigError
from covey.config.fields import get_type_hints, plain_type
from covey.config.named_modules import entry_points_of
from covey.config.planning import DevicesConfig, SimulationConfig

ALGORITHMS = "grpo,ppo"  # columns without --ranks
MOST_RANKS, MOST_TOKENS = 4096, 1_000_000
DEFAULT_PROMPT_TOKENS = 64
METAVARS = {"device_memory": "SIZE", "lengths": "RUN", "sampler_devices": "N,N", "staleness": "S,S"}


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `covey plan`; those of ranks and of a cluster are the fields of their configs."""
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
    _add_fields(ranks, DevicesConfig)
    cluster = command.add_argument_group("throughput, predicted by a simulation")
    cluster.add_argument("--cluster", action="store_true", help="simulate the ranks and servers that sample for them")
    _add_fields(cluster, SimulationConfig)


def _add_fields(group: Any, root: type) -> None:
    for item in fields(root):
        option, kind = f"--{item.name.replace('_', '-')}", _kind(root, item)
        text = item.metadata["help"].replace("%", "%%")
        if kind is bool:
            group.add_argument(option, action="store_const", const=True, help=text)
            continue
        limits = item.metadata["limits"]
        if item.default and not isinstance(item.default, str):
            shown = ",".join(map(str, item.default)) if isinstance(item.default, tuple) else f"{item.default:g}"
            text += f" ({shown})"
        parsed = str if kind is str else number(kind, limits["min"], limits["max"] or 1e9)
        group.add_argument(
            option,
            type=_listed(parsed) if isinstance(item.default, tuple) else parsed,
            metavar=METAVARS.get(item.name, "N"),
            help=text,
        )


def _kind(root: type, item: Field[Any]) -> type:
    return plain_type(get_type_hints(root)[item.name])[0]


def _listed(parsed: Any) -> Any:
    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(parsed(word) for word in text.split(","))

    return parse_list


def plan_command(arguments: argparse.Namespace, fields_given: list[str]) -> None:
    """`covey plan`."""
    devices, simulated = _given(arguments, DevicesConfig), _given(arguments, SimulationConfig)
    if simulated and not arguments.cluster:
        raise ConfigError(f"{_option(simulated)} belongs to --cluster, which simulates a run: add it")
    if arguments.cluster and arguments.ranks is None:
        raise ConfigError("--cluster needs the number of ranks that train: add --ranks N")
    if devices and arguments.ranks is None:
        raise ConfigError(f"{_option(devices)} belongs to --ranks N: add it")
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
    if arguments.cluster:
        devices = devices | {"external_sampler": True}
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


def _given(arguments: argparse.Namespace, root: type) -> dict[str, Any]:
    """The options of a config that the command has."""
    values = {item.name: getattr(arguments, item.name) for item in fields(root)}
    return {name: value for name, value in values.items() if value is not None}


def _option(given: dict[str, Any]) -> str:
    return f"--{next(iter(given)).replace('_', '-')}"
