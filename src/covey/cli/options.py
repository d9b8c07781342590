"""The parser of each command, and the help on the fields of a recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import takewhile
from typing import Any, NoReturn

from covey.cli.diagnose import add_diagnose_options
from covey.cli.export import add_export_options
from covey.cli.field_help import field_line, field_options, fields_help
from covey.cli.numbers import number
from covey.cli.report import add_report_options
from covey.cli.reward_model_options import add_actions
from covey.cli.runs import DEFAULT_ACTION, add_runs_options
from covey.cli.sample import add_problem_options
from covey.cli.serve import add_serve_options
from covey.cli.sft import add_sft_options
from covey.cli.show import add_show_options
from covey.cli.truncation import MOST_TOKENS, add_chat_options, add_truncation
from covey.cli.watch import add_watch_options
from covey.config import TASK_CONFIGS, ConfigError, ControlConfig, RunConfig
from covey.config.fields import command, did_you_mean
from covey.config.files import shortened
from covey.config.recipe import describe_fields, packaged_recipes, split_overrides
from covey.config.terminal import fitted, width_of

MACHINE_FIELDS = ("seed", "device", "precision", "threads")
LARGEST_SEED = 2**32 - 1
COLDEST, HOTTEST = 1e-4, 1e4  # limits of a temperature above 0
TAKE_FIELDS = (
    "train",
    "iterate",
    "sft",
    "check",
    "plan",
    "eval",
    "compare",
)  # commands with --field value for fields of a recipe
PLANNED_FIELDS = (
    "device",
    "precision",
    "prompts_per_step",
    "group_size",
    "max_new_tokens",
    "microbatch_tokens",
    "recompute",
    "eight_bit_moments",
)


def temperature(text: str) -> float:
    """argparse type of --temperature: 0 for greedy answers, or a valid [sampling] temperature."""
    value: float = number(float, 0, HOTTEST)(text)
    if 0 < value < COLDEST:
        raise argparse.ArgumentTypeError(f"must be 0 or at least {COLDEST:g} (is {value})")
    return value


OVERVIEW = """\
covey trains a language model or an agent by reinforcement: attempts are
compared with each other (GRPO) or with a critic (PPO).

see it work:
  covey train cartpole_grpo      an agent balances a pole, in seconds
  covey train arithmetic_grpo    a language model learns to add and subtract
  covey recipes                  all packaged recipes, one line each

train on prompts and rewards of your own:
  covey recipes arithmetic_grpo > my.toml     a recipe to change
  covey check my.toml                         find mistakes, predict memory
  covey train my.toml                         writes to runs/my-001
  covey watch                                 see your runs in the browser
  covey eval runs/my-001                      score on held-out problems
  covey sample runs/my-001 "What is 3 + 4?"   answers to one prompt

look at runs:
  covey runs                     state, result and size of each
  covey show runs/my-001         rollouts with their rewards
  covey report runs/my-001       one HTML file with everything

covey --help lists the commands, covey train --help the fields of a recipe."""

EPILOG = """\
first steps:
  covey train cartpole_grpo, then covey train arithmetic_grpo;
  covey without a command shows more examples

completion with Tab:
  eval "$(covey completion bash)", also for zsh and fish

exit codes:
  0    success
  1    the run cannot continue
  2    a mistake in the command, the recipe or the data
  3    a fault of the machine: disk, memory or permission
  130  stopped by Ctrl-C"""


SHELLS = ("bash", "zsh", "fish")
COMPLETION = """\
To have it in every shell, add one line to the file that your shell reads when it starts:
  bash   ~/.bashrc                      eval "$(covey completion bash)"
  zsh    ~/.zshrc, after compinit       eval "$(covey completion zsh)"
  fish   ~/.config/fish/config.fish     covey completion fish | source"""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are ConfigErrors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own arguments; returns them and the `--field value` words of the config.

    Raises:
        ConfigError: for arguments that the command does not have.
    """
    parser, commands = build_parser()
    if not words or words[0] in parser._option_string_actions:
        parser.parse_args(words[:1])  # --help or --version ends here
        parser.error("name a command")
    if words[0] not in commands:
        parser.error(_no_command(words[0], [name for name in commands if " " not in name], parser))
    leaf = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0]
    rest = words[len(leaf.split()) :]
    if leaf in DEFAULT_ACTION:
        leaf = f"{leaf} {DEFAULT_ACTION[leaf]}"
    own, fields = _split(rest, commands[leaf])
    arguments, extra = parser.parse_known_args([*leaf.split(), *own])
    if extra:
        commands[leaf].error(_extra_word(extra[0], rest, commands[leaf]))
    _check_fields(fields, commands[leaf], arguments.takes_fields)
    return arguments, fields


def _no_command(word: str, commands: list[str], parser: Parser) -> str:
    if word.startswith("-"):
        return f"unknown option {shortened(word)}{did_you_mean(word, list(parser._option_string_actions))}"
    near = did_you_mean(word, commands)
    if not near and (word in packaged_recipes() or word.endswith(".toml")):
        return f"{word} is a recipe, not a command: write {command('train', word)}"
    return f"there is no command {shortened(word) or repr(word)}{near}; commands: {', '.join(commands)}"


def _extra_word(word: str, words: Sequence[str], parser: Parser) -> str:
    """The error for a word that no option or positional takes, such as the second of `--targets q_proj, v_proj`."""
    told = f"extra word {shortened(word)}"
    place = words.index(word) if word in words else 0
    option = words[place - 2] if place >= 2 else ""
    action = parser._option_string_actions.get(option)
    if not option.startswith("--") or option == "--" or "=" in option or (action and action.nargs == 0):
        return told
    values = takewhile(lambda one: not one.startswith("--"), words[place - 1 :])
    written = ",".join(value.strip(",") for value in values)
    return f"{told}: an option has one value, so write a list as {option} {written}, and a text with spaces in quotes"


def _check_fields(fields: list[str], parser: Parser, takes_fields: bool) -> None:
    """Refuse a misspelt option of the command itself, before it is interpreted as a field of a recipe."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    if fields and not takes_fields:
        option = f"--{fields[0].lstrip('-').partition('=')[0].replace('_', '-')}"
        parser.error(f"unknown option {shortened(option)}{did_you_mean(option, options)}")
    for name, _ in split_overrides(fields) if takes_fields else []:
        option = f"--{name.replace('_', '-')}"
        near = did_you_mean(option, options, likeness=0.8)
        if near and name.replace("-", "_") not in _field_names():
            parser.error(f"unknown option {shortened(option)}{near}")


def _field_names() -> set[str]:
    return {row.name for root in (RunConfig, ControlConfig) for row in describe_fields(root)}


def _split(words: Sequence[str], command: Parser) -> tuple[list[str], list[str]]:
    """Separate a command's own options and positionals from `--field value` and `--field=value`.

    argparse alone would interpret a value that begins with a minus, as in `--operators -,+`, as an option. Options come
    first, because argparse takes an optional positional for missing if an option stands before it.
    """
    options: list[str] = []
    own: list[str] = []
    fields: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*options, *own, word, *words], fields
        name, equals, value = word.partition("=")
        option = command._option_string_actions.get(name.replace("_", "-"))
        following = []
        takes_value = word.startswith("--") if option is None else option.nargs != 0
        if takes_value and not equals and words:
            following = [words.pop(0)]
        if option:
            options.append("=".join([name.replace("_", "-"), *([value] if equals else following)]))
        else:
            (fields if word.startswith("--") else own).extend([word, *following])
    return [*options, *own], fields


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of the command line; returns it and the parser of each command by name."""
    parser = Parser(
        prog="covey",
        description="Train a language model or an agent by comparing attempts with each other.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"covey {version('covey')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parsers: dict[str, Parser] = {}
    options: tuple[tuple[str, Callable[[Parser], dict[str, Any] | None], str], ...] = (
        ("train", _train_options, "train a language model, or an agent in an environment"),
        ("iterate", _iterate_options, "train a policy and its reward model in turn (iterative GRPO)"),
        ("sft", add_sft_options, "train a language model on given completions, as a warm start"),
        ("check", _check_options, "check a recipe without training"),
        ("plan", _plan_options, "predict memory, and the throughput of a cluster, without loading the model"),
        ("eval", _eval_options, "measure a model on held-out problems, or an agent over many episodes"),
        ("compare", _compare_options, "train several recipes over several seeds and report the differences"),
        ("diagnose", add_diagnose_options, "find faults in runs, with evidence and remedies"),
        ("sample", _sample_options, "let a language model answer one prompt"),
        ("export", add_export_options, "write a trained model as a transformers folder"),
        ("watch", add_watch_options, "show runs on a page in the browser, while they train and after"),
        ("serve", add_serve_options, "generate completions for runs in other processes"),
        ("reward-model", add_actions, "train, evaluate and use models that score completions"),
        ("runs", add_runs_options, "list runs, remove old checkpoints, export rollouts"),
        ("show", add_show_options, "show rollouts of a run: siblings with their rewards, or a search"),
        ("report", add_report_options, "write a report of runs: one HTML file"),
        ("recipes", _recipes_options, "list the packaged recipes, or print one"),
        ("completion", _completion_options, "print a shell's code for completion with Tab"),
    )
    for name, add_options, text in options:
        layout = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=text, description=text, formatter_class=layout, allow_abbrev=False)
        command.set_defaults(command=name, takes_fields=name in TAKE_FIELDS)
        actions = add_options(command) or {}
        command.epilog = command.epilog and fitted(command.epilog, width_of(sys.stdout))
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        parsers[name] = command
        for action, leaf in actions.items():
            leaf.set_defaults(command=name)
            leaf.add_argument("--debug", action="store_true", help="show the traceback of an error")
            parsers[f"{name} {action}"] = leaf
    return parser, parsers


def _train_options(command: Parser) -> None:
    _add_run_options(command, "train")


def _iterate_options(command: Parser) -> None:
    _add_run_options(command, "iterate")


def _add_run_options(command: Parser, name: str) -> None:
    command.usage = f"covey {name} RECIPE [--field value ...]\n       covey {name} --resume RUN_DIR"
    _add_fields_help(command)
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file, or the name of a packaged recipe")
    command.add_argument("--resume", metavar="RUN_DIR", help="continue a stopped run, exactly from its last checkpoint")


def _check_options(command: Parser) -> None:
    command.usage = "covey check RECIPE [--field value ...]"
    _add_fields_help(command)
    command.add_argument("recipe", metavar="RECIPE", help="a TOML file, or the name of a packaged recipe")


def _plan_options(command: Parser) -> None:
    from covey.cli.plan import add_plan_options

    lines = {row.name: field_line(option, row) for option, row in field_options(RunConfig)}
    command.epilog = "\n".join(
        ["fields of a recipe that matter most; the others (`covey train --help`) are options too:"]
        + [lines[name] for name in PLANNED_FIELDS]
    )
    add_plan_options(command)


def _eval_options(command: Parser) -> None:
    command.usage = (
        "covey eval MODEL --task TASK [--task-field value ...] [options]\n"
        "       covey eval RUN [--episodes N] [--render] [--seed SEED]      (the run of a recipe for control)"
    )
    command.epilog = (
        "The task's own fields are options too, such as --digits 1,2 for arithmetic.\n"
        "An agent plays the evaluation episodes of its run; --seed selects others.\n"
        "With --samples above 1 it reports pass@k, the probability that at least one of k answers is right. If the\n"
        "reward is not always 1 or 0, it reports best@k, the expected best score of k answers; best@1 is the mean."
    )
    command.add_argument("model", metavar="MODEL", help="a model's name, folder or .gguf file, or a run folder")
    command.add_argument("--task", help=f"{', '.join(TASK_CONFIGS)}; default: the run's own")
    command.add_argument("--reward", help="reward that scores the answers: a built-in one or file.py:function")
    command.add_argument(
        "--binary", action="store_true", help="the function of --reward returns 1 (right) or 0 (wrong)"
    )
    command.add_argument("--problems", help="held-out problems, at most all (256, or the number of the run)")
    command.add_argument("--samples", type=number(int, 1, 10_000), help="answers to each problem (1)")
    command.add_argument("--temperature", type=temperature, help="0 is greedy (0, or 1 with several samples)")
    command.add_argument("--max-new-tokens", help="longest answer, in tokens (64, or the run's own)")
    add_truncation(command)
    texts = {row.name: row.text for row in describe_fields() if not row.section}
    for name in MACHINE_FIELDS:
        command.add_argument(f"--{name}", help=texts[name])
    command.add_argument("--output", metavar="FILE", help="write prompts, answers and their scores to this JSONL file")
    command.add_argument("--episodes", help="control: number of episodes (the run's own)")
    command.add_argument("--render", action="store_true", help="control: also write an animation of one episode")


def _compare_options(command: Parser) -> None:
    command.usage = "covey compare RECIPE [RECIPE ...] [options] [--field value ...]"
    command.epilog = (
        "--field value changes a field of every recipe; `covey train --help` lists them. A quoted recipe can have\n"
        "fields of its own: covey compare cartpole_grpo 'cartpole_grpo --group-size 16'. The same command continues\n"
        "an interrupted comparison with its missing runs."
    )
    command.add_argument("recipes", nargs="+", metavar="RECIPE", help="TOML files, or names of packaged recipes")
    command.add_argument(
        "--seeds", type=number(int, 1, 10_000), default=10, help="runs of every recipe, each from its own seed (10)"
    )
    command.add_argument("--output", metavar="DIR", help="folder of the runs, the figures and the report")
    command.add_argument(
        "--jobs", type=number(int, 0, 1000), default=0, help="runs at the same time; 0: one per core (0)"
    )
    command.add_argument(
        "--threshold", type=number(float, -1e30, 1e30), help="return to reach (the recipes' expected_return)"
    )


def _sample_options(command: Parser) -> None:
    command.add_argument("model", metavar="MODEL", help="a model's name, folder or .gguf file, or a run folder")
    command.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the user's message (a held-out problem of the run)"
    )
    command.add_argument("--n", type=number(int, 1, 10_000), default=4, help="number of answers (4)")
    command.add_argument("--temperature", type=temperature, default=1.0, help="0 is greedy (1.0)")
    command.add_argument(
        "--max-new-tokens",
        type=number(int, 1, MOST_TOKENS),
        help="longest answer, or turn of a conversation, in tokens (64, or the run's own)",
    )
    add_problem_options(command)
    add_chat_options(command)
    add_truncation(command)
    command.add_argument(
        "--seed", type=number(int, 0, LARGEST_SEED), default=0, help="the same seed gives the same answers (0)"
    )


def _recipes_options(command: Parser) -> None:
    command.usage = "covey recipes [RECIPE]"
    command.epilog = "A recipe of your own can begin as a copy: covey recipes arithmetic_grpo > my.toml"
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="print this one as it is, comments included")


def _completion_options(command: Parser) -> None:
    command.usage = "covey completion SHELL"
    command.epilog = COMPLETION
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


class _HelpAll(argparse.Action):
    """`--help-all`: the help of a command with every field of a recipe."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.epilog = fields_help(advanced=True)
        parser.print_help()
        parser.exit()


def _add_fields_help(command: Parser) -> None:
    command.epilog = fields_help(advanced=False)
    command.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every field of a recipe and exit")
