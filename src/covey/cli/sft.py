"""The command `covey sft`."""

import argparse

from covey.cli.options import RECIPE, Command, Parser, field_line, field_options, option
from covey.cli.train import resumed_run
from covey.config import ConfigError, RunConfig
from covey.config.fields import command
from covey.config.recipe import find_recipe, read_sft_recipe, split_overrides
from covey.config.sft import EXAMPLES_BY_NAME, SFT_TABLE, is_function, is_run
from covey.runtime.interrupts import EXIT_CODE
from covey.runtime.variables import own_rank
from covey.tracking.run_folder import check_run_dir, claim_run_dir, next_run_dir

# Fields of other tables that a supervised training uses.
OTHER_FIELDS = (
    "model", "seed", "time_budget", "run_dir", "device", "precision", "threads", "chat.system_prompt",
    "update.weight_decay", "update.max_grad_norm", "update.eight_bit_moments", "update.microbatch_tokens",
    "update.recompute", "checkpoint.every", "checkpoint.keep", "checkpoint.best", "checkpoint.model_if_stopped",
    "trackers", "cluster.shards", "cluster.weights", "cluster.exact",
)  # fmt: skip


def _options(parser: Parser) -> None:
    parser.usage = "covey sft RECIPE [--field value ...]\n       covey sft --resume RUN_DIR [--epochs N]"
    option(parser, "[RECIPE]", RECIPE)
    resume = "continue a stopped training from its last checkpoint; a finished one with --epochs N"
    option(parser, "--resume RUN_DIR", resume)
    options = {f"{row.section}.{row.name}".lstrip("."): (option, row) for option, row in field_options(RunConfig)}
    own = {option.replace(f"{SFT_TABLE}.", ""): row for option, row in options.values() if row.section == SFT_TABLE}
    others = [(f"--{name}" if options[name][0] in own else options[name][0], options[name][1]) for name in OTHER_FIELDS]
    parser.epilog = "\n".join(
        [
            "Trains the recipe's model on given completions, before covey train. A prompt, a tool's reply and the text",
            "of the chat template are not trained. Every field can be given as --field value.",
            "",
            "[sft]",
            *(field_line(option, row) for option, row in own.items()),
            "",
            "fields of other tables that are used",
            *(field_line(option, row) for option, row in others),
        ]
    )


def sft_command(arguments: argparse.Namespace, fields: list[str]) -> int | None:
    """`covey sft`; returns the exit code of a stopped training, which has printed how to continue."""
    if arguments.resume:
        run_dir, limits = resumed_run(arguments.resume, arguments.recipe), dict(split_overrides(fields))
        from covey.experiment.sft import SFTBuilder

        return EXIT_CODE if SFTBuilder.resume(run_dir, limits) is None else None
    if not arguments.recipe:
        raise ConfigError(f"name a recipe, such as: {command('sft', 'my.toml')}")
    config = read_sft_recipe(arguments.recipe, fields)
    name = f"{find_recipe(arguments.recipe).stem.removesuffix('_sft')}_sft"
    if not own_rank():
        check_run_dir(config.run_dir or next_run_dir(name))
    sft = config.sft
    from covey.llm.data.sft_examples import read_rows, split_examples

    is_file = sft.data not in EXAMPLES_BY_NAME and not is_function(sft.data) and not is_run(sft.data)
    examples = split_examples(sft, read_rows(sft, sft.data)) if is_file else None  # before torch is loaded
    from covey.experiment.advice import Launch
    from covey.experiment.sft import train_sft

    launch = Launch.of_command(arguments.recipe, fields)

    folder = config.run_dir or (lambda: claim_run_dir(name))
    return EXIT_CODE if train_sft(config, folder, launch, examples) is None else None


COMMAND = Command("sft", "train a language model on given completions, as a warm start", _options, sft_command,
                  takes_fields=True, lasting=True)  # fmt: skip
