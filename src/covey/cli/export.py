"""The command `covey export`."""

import argparse
from pathlib import Path

from covey.cli.options import Command, Parser, option
from covey.config import ConfigError
from covey.config.fields import command, or_list
from covey.config.files import faults_of, user_path
from covey.config.hub import new_repository, upload
from covey.config.model_sources import locate_model
from covey.config.terminal import say

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")


def _options(parser: Parser) -> None:
    parser.usage = "covey export MODEL FOLDER [--gguf TYPE | --adapter] [--push NAME [--public]]"
    parser.epilog = (
        "The folder has the weights (safetensors), the config, the tokenizer and the chat template. It is loaded by\n"
        "transformers' from_pretrained, by covey and by other programs. The model of a run also gets a model card,\n"
        "README.md: base model, recipe, evaluations before and after, and the command that trains it again."
    )
    option(parser, "MODEL", "a run folder, RUN@STEP or RUN@best for one of its checkpoints, or another model's name")
    option(parser, "FOLDER", "a new folder")
    also = f"also write a GGUF file for llama.cpp, with matrices in {or_list(GGUF_TYPES)}; for Llama-like models"
    option(parser, f"--gguf {'|'.join(GGUF_TYPES)}", also, default="")
    alone = "write the adapter of a run with LoRA alone, in peft's format, instead of the model with merged weights"
    option(parser, "--adapter", alone)
    push = "then upload the folder to the hub as USER/MODEL, a private model; hf auth login stores the access token"
    option(parser, "--push NAME", push, default="")
    option(parser, "--public", "with --push: the model may be seen by everybody")


def export_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey export`."""
    locate_model(arguments.model)
    folder = user_path(arguments.folder)
    check_new_folder(folder)
    if arguments.adapter and arguments.gguf:
        raise ConfigError("--gguf writes whole models: leave out --adapter or --gguf")
    if arguments.public and not arguments.push:
        raise ConfigError("--public belongs to --push NAME: add it, or leave out --public")
    if arguments.push:
        new_repository(arguments.push, public=arguments.public)
    _export(arguments, folder)
    if arguments.push:
        say(f"{upload(folder, arguments.push)} has the folder")


def _export(arguments: argparse.Namespace, folder: Path) -> None:
    """Write the folder, and say what is in it."""
    from covey.experiment.export import export_adapter, export_model

    if arguments.adapter:
        adapter = export_adapter(arguments.model, folder)
        size, kind = adapter.parameters / 1e6, str(adapter.dtype).removeprefix("torch.")
        say(f"{adapter.folder} has an adapter of {size:,.2f} million weights in {kind} for {adapter.base}")
        say("Next: peft's PeftModel.from_pretrained(base_model, folder), or covey train with lora.adapter")
        return
    exported = export_model(arguments.model, folder, arguments.gguf)
    precision = str(exported.dtype).removeprefix("torch.")
    say(f"{exported.folder} has a model of {exported.parameters / 1e6:,.1f} million weights in {precision}")
    if exported.gguf is not None:
        say(f"{exported.gguf} has the same model as GGUF")
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


COMMAND = Command("export", "write a trained model as a transformers folder", _options, export_command)
