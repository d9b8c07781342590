"""The command `covey plan`: its options, and the report for one process; covey-cluster plans ranks and clusters."""

import argparse
import importlib
from typing import Any

from covey.cli.options import MOST_TOKENS, Command, Parser, field_line, field_options, number, option
from covey.config import ConfigError, RunConfig
from covey.config.named_modules import entry_points_of

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
    option(parser, "--time GPU", "plan for a GPU by its name, such as H100 or 4090, and estimate the time of a step")
    ranks = parser.add_argument_group("memory of one rank (torchrun), with whole and with sharded weights")
    option(ranks, "--ranks N", "number of ranks, a power of two; one device each", number(int, 1, MOST_RANKS))
    if planner := _planner():
        planner.add_options(parser, ranks)


def _planner() -> Any:
    """The module of covey-cluster that plans ranks; None if it is not installed."""
    module = entry_points_of("covey.planners").get("cluster", "").partition(":")[0]
    try:
        return importlib.import_module(module) if module else None
    except ModuleNotFoundError:  # its metadata was found, but not its files
        return None


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
            card=arguments.time,
        )
    print(report)


COMMAND = Command("plan", "predict memory, and the throughput of a cluster, without loading the model", _options,
                  plan_command, takes_fields=True)  # fmt: skip
