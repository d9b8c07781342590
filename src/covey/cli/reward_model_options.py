"""The parser of `covey reward-model` and its actions; the options of a training are the fields of its config."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from covey.config.fields import describe_type, get_type_hints
from covey.config.sft import RewardModelTraining
from covey.config.terminal import fitted, width_of

# Fields of a training that its evaluation uses too.
EVALUATION_FIELDS = ("grade_loss", "grade_column", "max_tokens", "long_examples", "device", "precision", "threads")

# Fields of a training that have options of their own, or none.
OF_THE_RUN = ("data", "held_out", "run_dir", "algorithm", "steps")

DATA = """\
The data are a JSONL file with one JSON object on each line, of one of these kinds:
  prompt, chosen, rejected        preference pairs, optionally with a margin; an outcome reward model
  prompt, completion, grade       graded completions (true and false, or numbers); an outcome reward model
  prompt, completions, labels     step labels (a list of texts, a list of labels); a process reward model
Prompts and completions are strings or chat messages."""


RECIPE = """\
The recipe has the task, the model, the limits of sampling and the verifier: a reward that is always 1 or 0. Its fields
are options too, such as --model and --max-new-tokens. The file is data for covey reward-model train."""


def add_actions(command: Any) -> dict[str, Any]:
    """Add the actions of `covey reward-model`; returns their parsers by name."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    parsers: dict[str, Any] = {}
    for name, add_options, text in (
        ("train", _train_options, "train a reward model on preference pairs, grades or step labels"),
        ("eval", _eval_options, "measure accuracy, AUC and calibration of a reward model"),
        ("label", _label_options, "write training data from completions of a policy, which a verifier grades"),
    ):
        layout = argparse.RawDescriptionHelpFormatter
        parsers[name] = actions.add_parser(
            name, help=text, description=text, formatter_class=layout, allow_abbrev=False
        )
        parsers[name].epilog = fitted(RECIPE if name == "label" else DATA, width_of(sys.stdout))
        parsers[name].set_defaults(action=name, takes_fields=name == "label")
        add_options(parsers[name])
    return parsers


def _train_options(action: argparse.ArgumentParser) -> None:
    action.usage = "covey reward-model train DATA [options]\n       covey reward-model train --resume RUN_DIR"
    action.add_argument("data", nargs="?", metavar="DATA", help="JSONL file")
    action.add_argument("--held-out", metavar="FILE", help="JSONL file for the evaluation (a part of DATA)")
    action.add_argument("--run-dir", metavar="DIR", help="folder of the training (runs/reward_model-<number>)")
    action.add_argument("--resume", metavar="RUN_DIR", help="continue a stopped training from its last checkpoint")
    for item in fields(RewardModelTraining):
        if item.name not in OF_THE_RUN:
            _add_field(action, item)


def _eval_options(action: argparse.ArgumentParser) -> None:
    action.usage = "covey reward-model eval MODEL DATA [options]"
    action.add_argument(
        "model", metavar="MODEL", help="a reward model's folder, the run of its training, or a hub name"
    )
    action.add_argument("data", metavar="DATA", help="JSONL file")
    action.add_argument("--picture", metavar="FILE", help="write the reliability diagram to this PNG file")
    for item in fields(RewardModelTraining):
        if item.name in EVALUATION_FIELDS:
            _add_field(action, item)


def _label_options(action: argparse.ArgumentParser) -> None:
    action.usage = "covey reward-model label RECIPE --output FILE [options] [--field value ...]"
    action.add_argument("recipe", metavar="RECIPE", help="a TOML file, or the name of a packaged recipe")
    action.add_argument("--output", metavar="FILE", required=True, help="JSONL file to write")
    for name, default, text in (
        ("prompts", 64, "training prompts of the task"),
        ("completions", 4, "completions of each prompt"),
        ("continuations", 8, "continuations from the end of each step, at most 256"),
    ):
        action.add_argument(f"--{name}", default=str(default), metavar="N", help=f"{text} ({default})")
    action.add_argument(
        "--data",
        choices=("steps", "pairs", "grades"),
        default="steps",
        help="steps with labels by continuation, for a process reward model; pairs of a right and a wrong completion, "
        "or graded completions, for an outcome one (steps)",
    )
    action.add_argument(
        "--estimate",
        choices=("hard", "soft"),
        default="hard",
        help="labels of steps: whether any continuation is right, or the share of right ones (hard)",
    )
    action.add_argument(
        "--completer",
        default="",
        metavar="MODEL",
        help="model that continues the steps, with the tokenizer of the recipe's model (the recipe's model)",
    )


def _add_field(action: argparse.ArgumentParser, item: Any) -> None:
    hint = get_type_hints(RewardModelTraining)[item.name]
    choices = " | ".join(item.metadata["choices"])
    text = f"{item.metadata['help']} ({choices or describe_type(hint)}) [{item.default!r}]".replace("%", "%%")
    action.add_argument(f"--{item.name.replace('_', '-')}", dest=item.name, metavar="VALUE", help=text)
