"""The command `covey reward-model`: train, eval, label."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from covey.cli.reward_model_options import OF_THE_RUN
from covey.config import ConfigError, DatasetConfig, RunConfig
from covey.config.fields import command, get_type_hints
from covey.config.files import user_path
from covey.config.model_sources import locate_model
from covey.config.recipe import parse_value, read_recipe
from covey.config.reward_models import RewardModelTraining, check_training, reward_model_fault
from covey.config.terminal import say
from covey.llm.data.reward_examples import read_examples
from covey.llm.data.rows import read_data
from covey.runtime.interrupts import EXIT_CODE
from covey.tracking.run_folder import check_new_file, check_run_dir, claim_run_dir, next_run_dir

RUN_NAME = "reward_model"  # first part of a run folder's name
MOST_CONTINUATIONS = 256  # for which there are random numbers


def reward_model_command(arguments: argparse.Namespace, fields_given: list[str]) -> int | None:
    """`covey reward-model ACTION`; returns the exit code of a stopped training, which has printed how to continue."""
    return ACTIONS[arguments.action](arguments, fields_given)


def train_action(arguments: argparse.Namespace, _fields: list[str]) -> int | None:
    """`covey reward-model train`."""
    given = _given(arguments)
    if arguments.resume:
        if arguments.data or arguments.held_out or arguments.run_dir or given:
            raise ConfigError("a resumed training keeps the settings that it began with: leave out the other words")
        run_dir = user_path(arguments.resume, "--resume: ")
        check_run_dir(run_dir, resume=True)
        from covey.experiment.reward_models import RewardModelBuilder

        return EXIT_CODE if RewardModelBuilder.resume(run_dir) is None else None
    if not arguments.data:
        raise ConfigError(f"name the data, such as: {command('reward-model', 'train', 'pairs.jsonl')}")
    named = {name: getattr(arguments, name) for name in ("held_out", "run_dir") if getattr(arguments, name)}
    config = replace(_config(given), data=arguments.data, **named)
    for name in filter(None, (config.data, config.held_out)):
        read_examples(name, config.grade_column)  # before torch is loaded
    check_run_dir(config.run_dir or next_run_dir(RUN_NAME))
    from covey.experiment.advice import Launch
    from covey.experiment.reward_models import train_reward_model

    words = [word for name, text in {**named, **given}.items() for word in (f"--{name.replace('_', '-')}", text)]
    folder = config.run_dir or (lambda: claim_run_dir(RUN_NAME))
    finished = train_reward_model(config, folder, Launch(config.data, tuple(words)))
    return EXIT_CODE if finished is None else None


def eval_action(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey reward-model eval`."""
    name = arguments.model
    config = _config({key: value for key, value in _given(arguments).items() if key != "model"})
    if fault := reward_model_fault(name, per_step=False):
        raise ConfigError(fault)
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
    counts = {name: _count(name, getattr(arguments, name)) for name in ("prompts", "completions", "continuations")}
    if counts["continuations"] > MOST_CONTINUATIONS:
        raise ConfigError(f"--continuations must be at most {MOST_CONTINUATIONS} (is {counts['continuations']})")
    output = user_path(arguments.output, "--output: ")
    check_new_file(output, "--output")
    config = read_recipe(arguments.recipe, fields_given, labels=True)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{arguments.recipe} is a recipe for control, which has no reasoning steps: name another")
    if arguments.completer and arguments.data != "steps":
        raise ConfigError(f"--completer continues steps, and --data {arguments.data} needs no continuations: remove it")
    if arguments.completer:
        locate_model(arguments.completer)
    if isinstance(config.task, DatasetConfig):
        read_data(config.task)  # before torch is loaded
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


def _count(name: str, text: str) -> int:
    value: int = parse_value(text, int, f"--{name}")
    if value < 1:
        raise ConfigError(f"--{name} must be at least 1 (is {value})")
    return value


ACTIONS: dict[str, Any] = {"train": train_action, "eval": eval_action, "label": label_action}


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    """The fields of the config that the command sets, as text."""
    names = {item.name for item in fields(RewardModelTraining)} - set(OF_THE_RUN)
    values = {name: getattr(arguments, name, None) for name in sorted(names)}
    return {name: value for name, value in values.items() if value is not None}


def _config(given: dict[str, str]) -> RewardModelTraining:
    """The config with the given fields, checked.

    Raises:
        ConfigError: for the first value that cannot be read, or is out of range.
    """
    hints = get_type_hints(RewardModelTraining)
    values = {name: parse_value(text, hints[name], f"--{name.replace('_', '-')}") for name, text in given.items()}
    if "step_separator" in values:
        values["step_separator"] = values["step_separator"].replace("\\n", "\n")
    if "trackers" in values:
        values["trackers"] = tuple(values["trackers"])
    config = RewardModelTraining(**values)
    check_training(config)
    return config
