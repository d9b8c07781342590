"""The command `covey`; `COMMANDS` lists its commands.

Each command parses its arguments, calls one function and prints the result. Heavy modules are imported inside the
commands, so that a mistake is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.cli.diagnose import diagnose_command
from covey.cli.export import export_command
from covey.cli.logs import set_up_output
from covey.cli.options import MACHINE_FIELDS, OVERVIEW, TRUNCATION, parse
from covey.cli.plan import plan_command
from covey.cli.report import report_command
from covey.cli.reward_model import reward_model_command
from covey.cli.runs import runs_command
from covey.cli.serve import serve_command
from covey.cli.show import show_command
from covey.cli.watch import watch_command
from covey.config import (
    TASK_CONFIGS,
    ConfigError,
    ControlConfig,
    DatasetConfig,
    RunConfig,
    RunError,
    SamplingConfig,
)
from covey.config.chat import check_stop
from covey.config.faults import machine_error, path_error
from covey.config.fields import check_fields, check_text, command, printable
from covey.config.files import user_path
from covey.config.model_sources import find_origin, locate_model
from covey.config.recipe import (
    apply_overrides,
    config_from_dict,
    read_recipe,
    read_tables,
    root_of,
    split_overrides,
    training_command,
)
from covey.config.recipe_files import describe_recipe, find_recipe, packaged_recipes
from covey.config.recipe_writing import config_to_dict, config_to_toml
from covey.config.terminal import fitted, say
from covey.config.validate import validate
from covey.runtime.interrupts import EXIT_CODE, leave, patient, say_last_words, watched
from covey.runtime.ranks import check_ranks, is_echo, own_rank, world_size
from covey.tracking.output import outlasting_output
from covey.tracking.reports import return_report, score_report
from covey.tracking.run_folder import check_new_file, check_run_dir, next_run_dir
from covey.tracking.run_store import CONFIG_FILE, write_records

EXAMPLES = {"train": "arithmetic_grpo", "iterate": "my.toml"}  # recipes
EVALUATED = (
    "model",
    "task",
    "rewards",
    "sampling",
    "chat",
)  # the tables of a language model's run that `covey eval` uses
LANGUAGE_OPTIONS = (
    "task", "reward", "problems", "samples", "temperature", "max_new_tokens", "output", *TRUNCATION, *MACHINE_FIELDS[1:]
)  # fmt: skip
LONGEST_MESSAGE, TAIL = 1500, 300  # characters of an error
WIDTHS = (20, 1000)  # valid columns of a terminal; COLUMNS is ignored outside this range
FAILED, MISTAKE, MACHINE, INTERRUPTED = 1, 2, 3, EXIT_CODE  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    set_up_output(silent=own_rank() > 0)  # the other ranks print errors alone
    with outlasting_output(), watched(lambda: f"interrupted. Start again with: {command(*words)}"):
        return _execute([word for word in words if word != "--debug"], debug)


def _execute(words: list[str], debug: bool) -> int:
    try:
        check_surroundings()
        if not words:
            print(OVERVIEW)
            return 0
        arguments, fields = parse(words)
        if world_size() > 1 and arguments.command != "train":
            raise ConfigError(f"torchrun is for {command('train')}: start {command(arguments.command)} without it")
        return COMMANDS[arguments.command](arguments, fields) or 0
    except KeyboardInterrupt:
        say_last_words()
        return INTERRUPTED
    except (ConfigError, RunError) as error:
        if debug:
            raise
        _say_error(one_line(error))
        return MISTAKE if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        if debug:
            raise
        if fault := machine_error(error):
            _say_error(one_line(fault))
            return MACHINE
        _say_error(f"unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)")
        return FAILED


def _say_error(text: str) -> None:
    if not is_echo():
        say(f"error: rank {own_rank()}: {text}" if world_size() > 1 else f"error: {text}", sys.stderr)


def one_line(error: Exception) -> str:
    """An error's message without line breaks and control characters; the middle of a very long one is left out."""
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - TAIL]} ... {text[-TAIL:]}"


def check_surroundings() -> None:
    """Check that the working directory exists, and ignore an unusable $COLUMNS.

    Raises:
        ConfigError: if the working directory no longer exists.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise path_error(error, "the working directory cannot be used, change to another one") from error
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isdecimal() and WIDTHS[0] <= int(columns[:9]) <= WIDTHS[1]):
        del os.environ["COLUMNS"]


def check_data(config: RunConfig | ControlConfig) -> None:
    """Read the data of a run, so that a mistake in it is reported before torch is loaded.

    Raises:
        ConfigError: naming file and line.
    """
    if isinstance(config, RunConfig) and isinstance(config.task, DatasetConfig):
        from covey.config.data_file import read_data

        read_data(config.task)


def train_command(arguments: argparse.Namespace, fields: list[str]) -> int | None:
    """`covey train` and `covey iterate`; returns the exit code of a stopped run, which has printed how to continue."""
    if arguments.resume and (arguments.recipe or fields):
        what = arguments.recipe or fields[0]
        raise ConfigError(f"a resumed run keeps the settings that it began with: leave out {what}")
    if arguments.resume:
        run_dir = user_path(arguments.resume)
        if not own_rank():
            check_run_dir(run_dir, resume=True)
        from covey.experiment.run import resume

        return INTERRUPTED if resume(run_dir) is None else None
    if not arguments.recipe:
        raise ConfigError(f"name a recipe, such as: {command(arguments.command, EXAMPLES[arguments.command])}")
    config = read_recipe(arguments.recipe, fields)
    if arguments.command == "iterate" and training_command(config) != "iterate":
        raise ConfigError(
            f"{arguments.recipe} is no iterative run: set iteration.steps to the number of training steps between two "
            f"trainings of its reward model, or use {command('train', arguments.recipe)}"
        )
    if not own_rank():
        check_run_dir(config.run_dir or next_run_dir(find_recipe(arguments.recipe).stem))
    check_ranks(config)
    check_data(config)
    from covey.experiment.advice import Launch
    from covey.experiment.run import run

    launch = Launch.of_command(arguments.recipe, fields)
    return INTERRUPTED if run(config, recipe_name=arguments.recipe, launch=launch) is None else None


def check_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey check`."""
    config = read_recipe(arguments.recipe, fields)
    check_run_dir(config.run_dir or next_run_dir(find_recipe(arguments.recipe).stem))
    check_data(config)
    from covey.experiment.run import check

    notes = check(config)
    print(config_to_toml(config))
    if isinstance(config, RunConfig):
        from covey.experiment.plan import check_memory

        print(check_memory(config) + "\n")
    for note in notes:
        say(note)
    say(f"all is well. Next: {command(training_command(config), arguments.recipe, *fields)}")


def eval_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey eval`."""
    origin = find_origin(arguments.model)
    if origin is not None and root_of(read_tables(origin.run_dir / CONFIG_FILE)) is ControlConfig:
        named = user_path(arguments.model) / CONFIG_FILE  # the user's own path, because the advice repeats it
        evaluate_control(arguments, fields, named if named.is_file() else origin.run_dir / CONFIG_FILE)
        return
    if arguments.episodes is not None or arguments.render:
        option = "--render" if arguments.render else "--episodes"
        raise ConfigError(f"{option} is for the run folder of a recipe for control, which {arguments.model} is not")
    config = evaluation_config(arguments, fields)
    samples, temperature = arguments.samples, arguments.temperature
    samples = 1 if samples is None else samples
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if samples > 1 and temperature == 0:
        raise ConfigError(f"{samples} greedy answers are all the same: raise --temperature, or leave out --samples")
    truncation = truncation_of(arguments, temperature, config.sampling.max_new_tokens)
    output = user_path(arguments.output, "--output: ") if arguments.output else None
    if output is not None:
        check_new_file(output, "--output")
    from covey.experiment.inference import evaluate_model
    from covey.llm.generation.truncation import Truncation

    result = evaluate_model(config, samples=samples, temperature=temperature, truncation=Truncation(**truncation))
    if output is not None:
        write_records(output, result.records())
    for note in result.notes:
        say(note)
    say(score_report(result.scores, result.kind))
    if output is not None:
        say(f"the answers are in {output}")


def evaluation_config(arguments: argparse.Namespace, fields: list[str]) -> RunConfig:
    """Config of `covey eval`, checked by the same rules as a recipe. Task, rewards and precision default to the run's.

    Raises:
        ConfigError: for a mistake in the options.
    """
    origin = find_origin(arguments.model)
    tables: dict[str, Any] = {}
    problems, machine = arguments.problems, {}
    if origin is not None:
        check_own_parts(arguments, origin.run_dir)
        run = config_to_dict(config_from_dict(read_tables(origin.run_dir / CONFIG_FILE)))  # with every default
        machine = {"precision": run["precision"]}  # greedy answers differ in another precision
        tables = {"sampling": {name: run["sampling"][name] for name in ("max_new_tokens", "long_prompts", "stop")}}
        tables["chat"] = run.get("chat", {})
        if "task" in run:
            tables["task"] = run["task"]
        if "task" in run and arguments.task in (None, run["task"]["name"]):
            tables["rewards"] = run["rewards"]
            problems = problems or str(run["evaluation"]["problems"])
    tables["model"] = arguments.model
    if not arguments.task and "task" not in tables:
        raise ConfigError(f"name a task, such as --task arithmetic ({', '.join(TASK_CONFIGS)})")
    task = [("task", arguments.task)] if arguments.task else []
    apply_overrides(tables, [*task, *split_overrides(fields)])
    for name, table in tables.items():
        if name not in EVALUATED:
            field = next(iter(table)) if isinstance(table, dict) else name
            raise ConfigError(f"an evaluation does not use {field}: leave it out")
    own = {
        "evaluation.problems": problems,
        "sampling.max_new_tokens": arguments.max_new_tokens,
        **{name: getattr(arguments, name) for name in MACHINE_FIELDS},
    }
    tables |= machine
    apply_overrides(tables, [(name, value) for name, value in own.items() if value is not None])
    if arguments.binary and arguments.reward is None:
        raise ConfigError("--binary belongs to a --reward of your own: name one, or leave it out")
    if arguments.reward is not None:
        kind = {"binary": True} if arguments.binary else {}
        tables["rewards"] = [{"function" if ":" in arguments.reward else "name": arguments.reward, **kind}]
    config = config_from_dict(tables)
    assert isinstance(config, RunConfig)
    validate(config)
    check_data(config)
    return config


def check_own_parts(arguments: argparse.Namespace, run_dir: Path) -> None:
    """Refuse to evaluate a run whose task or rewards were given in Python, unless the command names others.

    Raises:
        ConfigError: if the command does not name the task or the reward.
    """
    from covey.experiment.advice import read_launch

    launch = read_launch(run_dir)
    if launch is not None and launch.own_task and arguments.task is None:
        raise ConfigError(f"the run in {run_dir} was given its task in Python: name the one to measure with --task")
    if launch is not None and launch.own_rewards and arguments.reward is None:
        names = ", ".join(filter(None, launch.own_rewards)) or "unnamed"
        raise ConfigError(
            f"the run in {run_dir} was given its rewards in Python ({names}): name the one to evaluate with "
            "--reward, a built-in one or file.py:function"
        )


def evaluate_control(arguments: argparse.Namespace, fields: list[str], saved: Path) -> None:
    """`covey eval` of a control run: the mean return of its agent, and with --render a picture of one episode.

    Raises:
        ConfigError: for an option that has no meaning here.
    """
    given = [f"--{name.replace('_', '-')}" for name in LANGUAGE_OPTIONS if getattr(arguments, name) is not None]
    if given or fields:
        raise ConfigError(f"an evaluation of a control run does not use {[*given, *fields][0]}: leave it out")
    tables = read_tables(saved)
    trained = config_from_dict(tables)
    own = {"evaluation.episodes": arguments.episodes, "seed": arguments.seed}
    apply_overrides(tables, [(name, value) for name, value in own.items() if value is not None])
    config = config_from_dict(tables)
    assert isinstance(config, ControlConfig)
    validate(config)
    from covey.experiment.advice import after_evaluation
    from covey.experiment.control import evaluate_run

    result = evaluate_run(
        saved.parent,
        episodes=config.evaluation.episodes,
        render=arguments.render,
        seed=None if arguments.seed is None else config.seed,
    )
    say(return_report(result, config.evaluation.expected_return))
    if advice := after_evaluation(saved.parent, trained, drawable=result["drawable"], drawn=arguments.render):
        say(advice)


def truncation_of(arguments: argparse.Namespace, temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """The fields of `Truncation` that a command sets.

    Raises:
        ConfigError: for one that has no effect on greedy answers, and for a minimum length above the largest.
    """
    given = {name: getattr(arguments, name) for name in TRUNCATION if getattr(arguments, name) is not None}
    if temperature == 0 and (without_effect := [name for name in given if name != "min_new_tokens"]):
        option = f"--{without_effect[0].replace('_', '-')}"
        raise ConfigError(f"{option} changes no greedy answer: raise --temperature, or leave it out")
    if given.get("min_new_tokens", 0) >= max_new_tokens:
        raise ConfigError(
            f"--min-new-tokens must be below --max-new-tokens, {max_new_tokens} (is {given['min_new_tokens']})"
        )
    return given


def sampling_config(model: str, max_new_tokens: int, seed: int) -> RunConfig:
    """Config of samples from a model. If it is from a run, precision, [chat] table and stop strings are the run's."""
    origin = find_origin(model)
    run = None if origin is None else config_from_dict(origin.config_tables)
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    if not isinstance(run, RunConfig):
        return RunConfig(model=model, seed=seed, sampling=sampling)
    sampling = replace(sampling, stop=run.sampling.stop)
    return RunConfig(model=model, seed=seed, sampling=sampling, chat=run.chat, precision=run.precision)


def compare_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey compare`."""
    from covey.comparison.compare import compare

    with patient():  # after Ctrl-C its runs need time to save checkpoints
        compare(
            arguments.recipes,
            seeds=arguments.seeds,
            output=user_path(arguments.output, "--output: ") if arguments.output else None,
            jobs=arguments.jobs,
            threshold=arguments.threshold,
            overrides=fields,
        )


def sample_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey sample`."""
    check_text(arguments.prompt, "the prompt")
    locate_model(arguments.model)
    truncation = truncation_of(arguments, arguments.temperature, arguments.max_new_tokens)
    config = sampling_config(arguments.model, arguments.max_new_tokens, arguments.seed)
    if arguments.stop is not None:
        config = replace(config, sampling=replace(config.sampling, stop=tuple(arguments.stop)))
    if arguments.system_prompt is not None:
        config = replace(config, chat=replace(config.chat, system_prompt=arguments.system_prompt))
    check_fields(config)
    check_stop(config.sampling.stop)
    from covey.experiment.inference import sample_model
    from covey.llm.generation.truncation import Truncation
    from covey.tracking.console import printable

    texts = sample_model(
        config, arguments.prompt, arguments.n, arguments.temperature, truncation=Truncation(**truncation)
    )
    for number, text in enumerate(texts, start=1):
        print(f"[{number}] {printable(text)}")


def recipes_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey recipes`."""
    if arguments.recipe:
        print(find_recipe(arguments.recipe).read_text(encoding="utf-8"), end="")
        return
    width = shutil.get_terminal_size().columns  # as for --help, also if the output is no terminal
    for root, title in ((ControlConfig, "Agents in environments"), (RunConfig, "Language models")):
        names = [name for name in packaged_recipes() if root_of(read_tables(name)) is root]
        longest = max(map(len, names))
        print(f"{title}:")
        for name in names:
            print(fitted(f"  {name:<{longest}}  {describe_recipe(name)}", width, indent=" " * (longest + 2)))
        print()
    say(f"Next: {command('train', 'cartpole_grpo')}, or read one: {command('recipes', 'cartpole_grpo')}")


def completion_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey completion`."""
    from argcomplete import shellcode

    print(shellcode(["covey"], shell=arguments.shell))


COMMANDS = {
    "train": train_command,
    "iterate": train_command,
    "check": check_command,
    "plan": plan_command,
    "eval": eval_command,
    "compare": compare_command,
    "diagnose": diagnose_command,
    "sample": sample_command,
    "export": export_command,
    "watch": watch_command,
    "serve": serve_command,
    "reward-model": reward_model_command,
    "runs": runs_command,
    "show": show_command,
    "report": report_command,
    "recipes": recipes_command,
    "completion": completion_command,
}


if __name__ == "__main__":
    leave(main())
