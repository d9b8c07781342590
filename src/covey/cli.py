"""The command `covey`: train, eval, sample, check.

Thin: it reads what the user wrote, calls one function, prints. Everything heavy is imported inside the commands, so
that a mistake is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from covey.config import TASK_CONFIGS, ConfigError, RunConfig, RunError
from covey.config_checks import validate
from covey.config_reader import (
    FieldHelp,
    apply_overrides,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    describe_fields,
    find_recipe,
    read_recipe,
    read_tables,
    split_overrides,
)
from covey.observe.run_store import CONFIG_FILE, MODEL_FOLDER, check_run_dir, next_run_dir

EVALUATED = ("model", "task", "rewards", "sampling")  # the tables that `covey eval` looks at
MACHINE_FIELDS = ("seed", "device", "precision", "threads")
MISTAKE, FAILED, INTERRUPTED = 2, 1, 130  # exit codes; 130 is what shells use after Ctrl-C


class Parser(argparse.ArgumentParser):
    """Reports a mistake the way every other mistake is reported: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("covey").setLevel(logging.INFO)
    try:
        arguments, fields = parse([word for word in words if word != "--debug"])
        arguments.command(arguments, fields)
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, RunError) as error:
        if debug:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return MISTAKE if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        if debug:
            raise
        print(f"error: unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)", file=sys.stderr)
        return FAILED


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and the `--field value` words that belong to the config.

    Raises:
        ConfigError: for arguments that the command does not have.
    """
    parser, commands = build_parser()
    if not words or words[0] not in commands:
        arguments, rest = parser.parse_known_args(words)  # --help, --version, or a mistake
        parser.error(f"unknown arguments: {' '.join(rest)}")
    own, fields = _split(words[1:], commands[words[0]])
    arguments = parser.parse_args([words[0], *own])
    if fields and not arguments.takes_fields:
        commands[words[0]].error(f"unknown argument {fields[0]}")
    return arguments, fields


def _split(words: Sequence[str], command: Parser) -> tuple[list[str], list[str]]:
    """Separate a command's own options and positionals from `--field value` and `--field=value`.

    argparse alone would take a value that begins with a minus, as in `--operators -,+`, for an option.
    """
    own: list[str] = []
    fields: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*own, word, *words], fields
        name, equals, value = word.partition("=")
        option = command._option_string_actions.get(name.replace("_", "-"))
        target = own if option or not word.startswith("--") else fields
        target.append(name.replace("_", "-") + equals + value if option else word)
        takes_value = option is None or option.nargs != 0
        if word.startswith("--") and takes_value and not equals and words:
            target.append(words.pop(0))
    return own, fields


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and that of each command by its name."""
    parser = Parser(prog="covey", description="Train a language model by comparing its answers with each other.")
    parser.add_argument("--version", action="version", version=f"covey {version('covey')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers: dict[str, Parser] = {}
    for name, function, add_options, text in (
        ("train", train_command, _train_options, "train a model"),
        ("check", check_command, _check_options, "check a recipe without training"),
        ("eval", eval_command, _eval_options, "measure a model's accuracy on held-out problems"),
        ("sample", sample_command, _sample_options, "answer one prompt"),
    ):
        layout = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=text, description=text, formatter_class=layout, allow_abbrev=False)
        command.set_defaults(command=function, takes_fields=name != "sample")
        add_options(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        parsers[name] = command
    return parser, parsers


def _train_options(command: Parser) -> None:
    command.usage = "covey train RECIPE [--field value ...]\n       covey train --resume RUN_DIR"
    command.epilog = fields_help()
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file, or the name of a packaged recipe")
    command.add_argument("--resume", metavar="RUN_DIR", help="go on with a run that was stopped, exactly where it was")


def _check_options(command: Parser) -> None:
    command.usage = "covey check RECIPE [--field value ...]"
    command.epilog = fields_help()
    command.add_argument("recipe", metavar="RECIPE", help="a TOML file, or the name of a packaged recipe")


def _eval_options(command: Parser) -> None:
    command.usage = "covey eval MODEL --task TASK [--task-field value ...] [options]"
    command.epilog = (
        "The task's own fields are options too, such as --digits 1,2 for arithmetic.\n"
        "With --samples above 1 it reports pass@k, the chance that at least one of k answers is right."
    )
    command.add_argument("model", metavar="MODEL", help="a model's name, folder or .gguf file, or a run folder")
    command.add_argument("--task", help=f"{', '.join(TASK_CONFIGS)}; a run folder knows its own")
    command.add_argument("--reward", help="what counts as right: a built-in reward or file.py:function")
    command.add_argument("--problems", help="how many held-out problems (256)")
    command.add_argument("--samples", type=int, default=1, help="answers to each problem (1)")
    command.add_argument("--temperature", type=float, help="0 is greedy; 1 where there are several samples")
    command.add_argument("--max-new-tokens", help="longest answer, in tokens (64, or the run's own)")
    texts = {row.name: row.text for row in describe_fields() if not row.section}
    for name in MACHINE_FIELDS:
        command.add_argument(f"--{name}", help=texts[name])


def _sample_options(command: Parser) -> None:
    command.add_argument("model", metavar="MODEL", help="a model's name, folder or .gguf file, or a run folder")
    command.add_argument("prompt", metavar="PROMPT", help="what the user says")
    command.add_argument("--n", type=int, default=4, help="how many answers (4)")
    command.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    command.add_argument("--max-new-tokens", type=int, default=64, help="longest answer, in tokens (64)")
    command.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (0)")


def fields_help() -> str:
    """Every field of a recipe with its type, default and meaning, for `--help`."""
    rows = describe_fields()
    plain = [row for row in rows if not row.section.startswith(("task", "rewards"))]
    shared = {row.name for row in plain if sum(other.name == row.name for other in plain) > 1}
    top = {row.name for row in plain if not row.section}
    lines = ["fields of a recipe, each of which can be given as --field value (lists with commas):"]
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            where = {"": "top level", "rewards": "[[rewards]], in the recipe file only"}
            lines += ["", where.get(section, f"[{section}]")]
        lines.append(_field_line(row, dotted=bool(section) and row.name in shared | top))
    return "\n".join(lines)


def _field_line(row: FieldHelp, *, dotted: bool) -> str:
    name = row.name.replace("_", "-")
    shown = f"--{row.section.split()[0]}.{name}" if dotted else f"--{name}"
    if row.section == "rewards":
        shown = row.name
    default = f" [{row.default}]" if row.default not in ("", '""', "[]") else ""
    return f"  {shown:<28} {row.text} ({row.type}){default}"


def train_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey train`."""
    if arguments.resume and (arguments.recipe or fields):
        what = arguments.recipe or fields[0]
        raise ConfigError(f"a resumed run keeps the settings that it began with: leave out {what}")
    if arguments.resume:
        run_dir = Path(arguments.resume).expanduser()
        check_run_dir(run_dir, resume=True)
        from covey.recipes.run import resume

        if resume(run_dir) is None:
            raise KeyboardInterrupt
        return
    if not arguments.recipe:
        raise ConfigError("name a recipe, such as: covey train arithmetic_grpo")
    config = read_recipe(arguments.recipe, fields)
    config = replace(config, run_dir=config.run_dir or str(next_run_dir(find_recipe(arguments.recipe).stem)))
    check_run_dir(config.run_dir)
    from covey.recipes.run import run

    if run(config, recipe_name=arguments.recipe) is None:  # stopped by Ctrl-C; it has said how to go on
        raise KeyboardInterrupt


def check_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey check`."""
    config = read_recipe(arguments.recipe, fields)
    check_run_dir(config.run_dir or next_run_dir(find_recipe(arguments.recipe).stem))
    from covey.recipes.run import check

    check(config)
    print(config_to_toml(config))
    print(memory_report(config))
    print(f"\nall is well. Next: {shlex.join(['covey', 'train', arguments.recipe, *fields])}")


def memory_report(config: RunConfig) -> str:
    """The estimated memory by part, on the device and in the precision that this machine would choose."""
    import torch

    from covey.llm.memory import estimate_memory, find_model_config, peak_memory
    from covey.runtime.device import choose_device, choose_precision

    model_config = find_model_config(config.model)
    if model_config is None:
        return f"estimated memory: unknown until {config.model} has been downloaded"
    dtype = choose_precision(config.precision, choose_device(config.device))
    parts = estimate_memory(model_config, replace(config, precision="bf16" if dtype == torch.bfloat16 else "fp32"))
    lines = [f"  {name:<32} {size / 2**30:6.2f} GiB" for name, size in parts.items() if size]
    total = f"estimated memory: {peak_memory(parts) / 2**30:.1f} GiB at the most (sampling and update take turns)"
    return "\n".join([total, *lines])


def eval_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey eval`."""
    config = evaluation_config(arguments, fields)
    samples, temperature = arguments.samples, arguments.temperature
    if samples < 1:
        raise ConfigError(f"--samples must be at least 1 (is {samples})")
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature must be 0 or more (is {temperature})")
    if samples > 1 and temperature == 0:
        raise ConfigError(f"{samples} greedy answers are all the same: raise --temperature, or leave out --samples")
    from covey.recipes.run import evaluate_model

    result = evaluate_model(
        config.model,
        config.task,
        config.rewards,
        problems=config.evaluation.problems,
        samples=samples,
        temperature=temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.seed,
        device=config.device,
        precision=config.precision,
        threads=config.threads,
    )
    print(accuracy_report([problem["scores"] for problem in result["problems"]], config.seed))


def evaluation_config(arguments: argparse.Namespace, fields: list[str]) -> RunConfig:
    """What `covey eval` measures, checked by the same rules as a recipe. A run folder brings its task and rewards.

    Raises:
        ConfigError: for a mistake in the options.
    """
    saved = Path(arguments.model).expanduser() / CONFIG_FILE
    tables: dict[str, Any] = {}
    if saved.is_file():
        run = config_to_dict(config_from_dict(read_tables(saved)))
        tables = {"task": run["task"], "sampling": {"max_new_tokens": run["sampling"]["max_new_tokens"]}}
        if arguments.task in (None, run["task"]["name"]):
            tables["rewards"] = run["rewards"]
    tables["model"] = model_of(arguments.model)
    if not arguments.task and "task" not in tables:
        raise ConfigError(f"name a task, such as --task arithmetic ({', '.join(TASK_CONFIGS)})")
    task = [("task", arguments.task)] if arguments.task else []
    apply_overrides(tables, [*task, *split_overrides(fields)])
    for name, table in tables.items():
        if name not in EVALUATED:
            field = next(iter(table)) if isinstance(table, dict) else name
            raise ConfigError(f"an evaluation does not use {field}: leave it out")
    own = {
        "evaluation.problems": arguments.problems,
        "sampling.max_new_tokens": arguments.max_new_tokens,
        **{name: getattr(arguments, name) for name in MACHINE_FIELDS},
    }
    apply_overrides(tables, [(name, value) for name, value in own.items() if value is not None])
    if arguments.reward:
        tables["rewards"] = [{"function" if ":" in arguments.reward else "name": arguments.reward}]
    config = config_from_dict(tables)
    validate(config)
    return config


def model_of(name: str) -> str:
    """The model that a name means: that of a run folder is in it.

    Raises:
        ConfigError: for a run that has not saved its model.
    """
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        return name
    if not (folder / MODEL_FOLDER / "config.json").is_file():
        raise ConfigError(f"the run in {name} has not saved its model yet: finish it with covey train --resume {name}")
    return str(folder / MODEL_FOLDER)


def accuracy_report(scores: Sequence[Sequence[float]], seed: int) -> str:
    """Accuracy of one answer a problem, or pass@k of several, with 95 % intervals."""
    from covey.observe.statistics import bootstrap_interval, mean_score, pass_at_k

    count, samples = len(scores), min((len(problem) for problem in scores), default=0)
    if not samples:
        raise RunError("no problem was scored, so there is nothing to report")
    if samples == 1:
        result = mean_score([problem[0] for problem in scores], seed)
        right = sum(problem[0] for problem in scores)
        return (
            f"accuracy {result['score']:.1%} (95 % interval {result['low']:.1%} to {result['high']:.1%}), "
            f"{right:g} of {count} problems right"
        )
    sizes = [k for k in (2**i for i in range(samples.bit_length())) if k < samples] + [samples]
    lines = [f"{count} problems, {samples} answers each (95 % interval over problems)"]
    for k in sizes:
        values = [pass_at_k(len(problem), sum(score == 1 for score in problem), k) for problem in scores]
        low, high = bootstrap_interval(values, seed)
        lines.append(f"  pass@{k:<4} {sum(values) / count:6.1%} ({low:.1%} to {high:.1%})")
    return "\n".join(lines)


def sample_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey sample`."""
    if arguments.n < 1 or arguments.max_new_tokens < 1 or arguments.seed < 0:
        raise ConfigError("--n and --max-new-tokens must be at least 1, --seed at least 0")
    if not 0 <= arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature must be 0 or more (is {arguments.temperature})")
    from covey.config_checks import check_model

    model = model_of(arguments.model)
    check_model(model)
    from covey.observe.display import printable
    from covey.recipes.run import sample_model

    texts = sample_model(
        model, arguments.prompt, arguments.n, arguments.temperature, arguments.max_new_tokens, arguments.seed
    )
    for number, text in enumerate(texts, start=1):
        print(f"[{number}] {printable(text)}")


if __name__ == "__main__":
    sys.exit(main())
