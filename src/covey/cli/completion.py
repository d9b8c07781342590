"""`covey completion`, and the words for a shell's completion with Tab: commands, options, recipes, fields, choices."""

import argparse
from collections.abc import Sequence

from covey.cli.options import Command, Parser, field_options, option
from covey.config import TASK_CONFIGS, ControlConfig, RunConfig
from covey.config.model_sources import EMBEDDED_MODELS
from covey.config.recipe import packaged_recipes

SHELLS = ("bash", "zsh", "fish")
COMPLETION = """\
To have it in every shell, add one line to the file that your shell reads when it starts:
  bash   ~/.bashrc                      eval "$(covey completion bash)"
  zsh    ~/.zshrc, after compinit       eval "$(covey completion zsh)"
  fish   ~/.config/fish/config.fish     covey completion fish | source"""

FILES = (
    "path", "held_out_path", "run_dir", "output", "resume", "model", "recipe", "recipes", "run", "runs", "folder",
    "file",
)  # fmt: skip  # may name a file


def _options(parser: Parser) -> None:
    parser.usage = "covey completion SHELL"
    parser.epilog = COMPLETION
    option(parser, "SHELL", ", ".join(SHELLS), choices=SHELLS)


def completion_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey completion`."""
    from argcomplete import shellcode

    print(shellcode(["covey"], shell=arguments.shell))


COMMAND = Command("completion", "print a shell's code for completion with Tab", _options, completion_command)


def answer() -> None:
    """Print the possible next words for the shell and exit. argcomplete's variables hold the line so far."""
    import argcomplete

    from covey.cli.main import build_parser

    parser, commands = build_parser()
    for command in commands.values():
        if command.get_default("chosen").takes_fields:
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
        from argcomplete.completers import FilesCompleter

        return [*self.words, *(FilesCompleter()(prefix, **rest) if self.files else ())]


def _add_fields(command: Parser) -> None:
    for root in (RunConfig, ControlConfig):
        for name, row in field_options(root):
            if name.startswith("--") and name not in command._option_string_actions:
                choices = row.type.split(" | ") if " | " in row.type else None
                command.add_argument(name, dest=row.name, choices=choices, help=row.text)


def _words_of(action: argparse.Action) -> Sequence[str]:
    if action.choices:
        return list(action.choices)
    if action.dest in ("recipe", "recipes"):
        return packaged_recipes()
    return {"model": EMBEDDED_MODELS, "task": tuple(TASK_CONFIGS)}.get(action.dest, ())
