"""Words for a shell's completion with Tab: commands, options, recipes, fields and their choices."""

from __future__ import annotations

from argparse import Action
from collections.abc import Sequence

import argcomplete
from argcomplete.completers import FilesCompleter

from covey.cli.options import TAKE_FIELDS, Parser, build_parser, field_options
from covey.config import TASK_CONFIGS, ControlConfig, RunConfig
from covey.config.model_sources import EMBEDDED_MODELS
from covey.config.recipe import packaged_recipes

FILES = (
    "path",
    "held_out_path",
    "run_dir",
    "output",
    "resume",
    "model",
    "recipe",
    "recipes",
    "run",
    "runs",
    "folder",
    "file",
)  # may name a file


def answer() -> None:
    """Print the possible next words for the shell and exit. argcomplete's variables hold the line so far."""
    parser, commands = build_parser()
    for name, command in commands.items():
        if name in TAKE_FIELDS:
            _add_fields(command)
        for action in command._actions:
            if action.nargs != 0:
                action.completer = _Words(_words_of(action), action.dest in FILES)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")


class _Words:
    """A completer of fixed words and, with `files`, of file names."""

    def __init__(self, words: Sequence[str], files: bool):
        self.words, self.files = words, files

    def __call__(self, prefix: str, **rest: object) -> list[str]:
        return [*self.words, *(FilesCompleter()(prefix, **rest) if self.files else ())]


def _add_fields(command: Parser) -> None:
    for root in (RunConfig, ControlConfig):
        for option, row in field_options(root):
            if option.startswith("--") and option not in command._option_string_actions:
                choices = row.type.split(" | ") if " | " in row.type else None
                command.add_argument(option, dest=row.name, choices=choices, help=row.text)


def _words_of(action: Action) -> Sequence[str]:
    if action.choices:
        return list(action.choices)
    if action.dest in ("recipe", "recipes"):
        return packaged_recipes()
    return {"model": EMBEDDED_MODELS, "task": tuple(TASK_CONFIGS)}.get(action.dest, ())
