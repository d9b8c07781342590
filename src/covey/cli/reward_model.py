"""The command `covey reward-model`: train, eval, label."""

import argparse
from dataclasses import fields
from pathlib import Path

from covey.cli.options import (
    RECIPE,
    Command,
    Parser,
    add_fields,
    given_fields,
    number,
    option,
    option_of,
)
from covey.cli.train import check_data, resumed_run
from covey.config import ConfigError, RunConfig
from covey.config.fields import command
from covey.config.files import user_path
from covey.config.model_sources import locate_model
from covey.config.recipe import read_recipe, split_overrides
from covey.config.sft import RewardModelTraining, check_training, reward_model_fault
from covey.config.terminal import say
from covey.runtime.interrupts import EXIT_CODE
from covey.runtime.variables import own_rank
from covey.tracking.run_folder import check_new_file, check_run_dir, claim_run_dir, next_run_dir

RUN_NAME = "reward_model"  # first part of a run folder's name
MOST = 10**9  # prompts, completions
MOST_CONTINUATIONS = 256  # for which there are random numbers


# Fields of a training that its evaluation uses too.
EVALUATION_FIELDS = ("grade_loss", "grade_column", "max_tokens", "long_examples", "device", "precision", "threads")

# Fields of a training that have options of their own, or none.
OF_THE_RUN = ("data", "held_out", "run_dir", "algorithm", "steps", "schedule_restarts")

DATA = """\
The data are a JSONL file with one JSON object on each line, of one of these kinds:
  prompt, chosen, rejected        preference pairs, optionally with a margin; an outcome reward model
  prompt, completion, grade       graded completions (true and false, or numbers); an outcome reward model
  prompt, completions, labels     step labels (a list of texts, a list of labels); a process reward model
Prompts and completions are strings or chat messages."""

LABELLED = """\
The recipe has the task, the model, the limits of sampling and the verifier: a reward that is always 1 or 0. Its fields
are options too, such as --model and --max-new-tokens. The file is data for covey reward-model train."""


def _train_options(parser: Parser) -> None:
    parser.usage = (
        "covey reward-model train DATA [options]\n       covey reward-model train --resume RUN_DIR [--epochs N]"
    )
    parser.epilog = DATA
    option(parser, "[DATA]", "JSONL file")
    option(parser, "--held-out FILE", "JSONL file for the evaluation (a part of DATA)")
    option(parser, "--run-dir DIR", "folder of the training (runs/reward_model-<number>)")
    resume = "continue a stopped training from its last checkpoint; a finished one with --epochs N"
    option(parser, "--resume RUN_DIR", resume)
    add_fields(parser, RewardModelTraining, flags=False, without=OF_THE_RUN)


def _eval_options(parser: Parser) -> None:
    parser.usage = "covey reward-model eval MODEL DATA [options]"
    parser.epilog = DATA
    option(parser, "MODEL", "a reward model's folder, the run of its training, or a hub name")
    option(parser, "DATA", "JSONL file")
    option(parser, "--picture FILE", "write the reliability diagram to this PNG file")
    add_fields(parser, RewardModelTraining, only=EVALUATION_FIELDS)


def _label_options(parser: Parser) -> None:
    parser.usage = "covey reward-model label RECIPE --output FILE [options] [--field value ...]"
    parser.epilog = LABELLED
    option(parser, "RECIPE", RECIPE)
    option(parser, "--output FILE", "JSONL file to write", required=True)
    option(parser, "--prompts N", "training prompts of the task", number(int, 1, MOST), 64)
    option(parser, "--completions N", "completions of each prompt", number(int, 1, MOST), 4)
    count = number(int, 1, MOST_CONTINUATIONS)
    option(parser, "--continuations N", "continuations from the end of each step, at most 256", count, 8)
    data = "steps with labels by continuation, for a process reward model; pairs of a right and a wrong completion, or "
    option(parser, "--data steps|pairs|grades", data + "graded completions, for an outcome one", default="steps")
    labels = "labels of steps: whether any continuation is right, or the share of right ones"
    option(parser, "--estimate hard|soft", labels, default="hard")
    other = "model that continues the steps, with the tokenizer of the recipe's model (the recipe's model)"
    option(parser, "--completer MODEL", other, default="")


def train_action(arguments: argparse.Namespace, _fields: list[str]) -> int | None:
    """`covey reward-model train`."""
    texts = {item.name: getattr(arguments, item.name, None) for item in fields(RewardModelTraining)}
    words = [word for name, text in texts.items() if text and name != "data" for word in (option_of(name), text)]
    if arguments.resume:
        run_dir, limits = resumed_run(arguments.resume, arguments.data), dict(split_overrides(words))
        from covey.experiment.reward_models import RewardModelBuilder

        return EXIT_CODE if RewardModelBuilder.resume(run_dir, limits) is None else None
    if not arguments.data:
        raise ConfigError(f"name the data, such as: {command('reward-model', 'train', 'pairs.jsonl')}")
    config = _config(arguments)
    from covey.llm.data.reward_examples import read_examples

    for name in filter(None, (config.data, config.held_out)):
        read_examples(name, config.grade_column)  # before torch is loaded
    if not own_rank():
        check_run_dir(config.run_dir or next_run_dir(RUN_NAME))
    from covey.experiment.advice import Launch
    from covey.experiment.reward_models import train_reward_model

    folder = config.run_dir or (lambda: claim_run_dir(RUN_NAME))
    finished = train_reward_model(config, folder, Launch(config.data, tuple(words)))
    return EXIT_CODE if finished is None else None


def eval_action(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey reward-model eval`."""
    name = arguments.model
    config = _config(arguments)
    if fault := reward_model_fault(name, per_step=False):
        raise ConfigError(fault)
    from covey.llm.data.reward_examples import read_examples

    read_examples(arguments.data, config.grade_column)
    picture: Path | None = None
    if arguments.picture:
        picture = user_path(arguments.picture, "--picture: ")
        if picture.suffix.lower() != ".png":
            raise ConfigError(f"--picture {arguments.picture}: name a file that ends with .png")
        check_new_file(picture, "--picture")
    from covey.experiment.reward_models import evaluate_reward_model

    quality, count = evaluate_reward_model(name, arguments.data, config=config, picture=picture)
    say(f"{count:,} examples: {quality.describe()}")
    for key, value in sorted(quality.metrics.items()):
        say(f"  {key:<20} {value:.4g}")
    if picture is not None:
        say(
            f"the reliability diagram is in {picture}"
            if quality.reliability is not None
            else "there is no reliability diagram, because the scores are not probabilities"
        )


def label_action(arguments: argparse.Namespace, fields_given: list[str]) -> None:
    """`covey reward-model label`."""
    counts = {name: getattr(arguments, name) for name in ("prompts", "completions", "continuations")}
    output = user_path(arguments.output, "--output: ")
    check_new_file(output, "--output")
    config = read_recipe(arguments.recipe, fields_given, labels=True)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{arguments.recipe} is a recipe for control, which has no reasoning steps: name another")
    if arguments.completer and arguments.data != "steps":
        raise ConfigError(f"--completer continues steps, and --data {arguments.data} needs no continuations: remove it")
    if arguments.completer:
        locate_model(arguments.completer)
    check_data(config)
    from covey.experiment.reward_models import LabelOptions, label_completions

    options = LabelOptions(**counts, data=arguments.data, estimate=arguments.estimate, completer=arguments.completer)
    found = label_completions(config, options, output)
    left_out = f" ({found.left_out} left out, because the verifier failed)" if found.left_out else ""
    examples = {
        "steps": f"{found.steps:,} steps, {found.right_steps:,} of them with a right continuation",
        "pairs": f"{found.examples:,} pairs",
        "grades": f"{found.examples:,} grades",
    }
    say(
        f"{found.completions:,} completions{left_out}, {found.right:,} of them right; {examples[options.data]}; all "
        f"are in {output}"
    )
    say(f"Next: {command('reward-model', 'train', output, '--model', config.model)}")


def _config(arguments: argparse.Namespace) -> RewardModelTraining:
    """The config with the fields that the command sets, checked.

    Raises:
        ConfigError: for the first value that cannot be read, or is out of range.
    """
    values = given_fields(arguments, RewardModelTraining)
    if "step_separator" in values:
        values["step_separator"] = values["step_separator"].replace("\\n", "\n")
    config = RewardModelTraining(**values)
    check_training(config)
    return config


COMMAND = Command("reward-model", "train, evaluate and use models that score completions", lambda parser: None,
                  lambda *_: None, lasting=True, actions=(
    Command("train", "train a reward model on preference pairs, grades or step labels", _train_options, train_action),
    Command("eval", "measure accuracy, AUC and calibration of a reward model", _eval_options, eval_action),
    Command("label", "write training data from completions of a policy, which a verifier grades", _label_options,
            label_action, takes_fields=True),
))  # fmt: skip
