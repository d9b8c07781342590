"""The command `covey export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from covey.config import ConfigError
from covey.config.faults import faults_of
from covey.config.fields import command
from covey.config.files import user_path
from covey.config.model_sources import locate_model
from covey.config.terminal import say


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `covey export`."""
    parser.usage = "covey export MODEL FOLDER"
    parser.epilog = (
        "The folder has the weights (safetensors), the config, the tokenizer and the chat template. It is loaded by\n"
        "transformers' from_pretrained, by covey and by other programs."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a run folder, RUN@STEP for one of its checkpoints, or another model's name"
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new folder")


def export_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey export`."""
    locate_model(arguments.model)
    folder = user_path(arguments.folder)
    check_new_folder(folder)
    from covey.experiment.export import export_model

    exported = export_model(arguments.model, folder)
    precision = str(exported.dtype).removeprefix("torch.")
    say(f"{exported.folder} has a model of {exported.parameters / 1e6:,.1f} million weights in {precision}")
    say(f"Next: {command('sample', exported.folder, 'What is 3 + 4?')}")


def check_new_folder(folder: Path) -> None:
    """Refuse a folder in which something would be replaced, or that cannot be created.

    Raises:
        ConfigError: naming the fix.
    """
    with faults_of(folder):
        if folder.is_dir() and not any(folder.iterdir()):
            return
        if folder.exists() or folder.is_symlink():
            raise ConfigError(f"{folder} is there already, and is not replaced: name a new folder")
        if not folder.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {folder.parent}: create it, or name another")
