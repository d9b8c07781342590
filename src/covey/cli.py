"""The command `covey`: train, check, plan, eval, compare, sample.

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
from pathlib import Path
from typing import Any

from covey.command_line import MACHINE_FIELDS, parse
from covey.config import TASK_CONFIGS, ConfigError, ControlConfig, RunConfig, RunError
from covey.config.checks import validate
from covey.config.origins import Origin, check_origin
from covey.config.reader import (
    apply_overrides,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    find_recipe,
    read_recipe,
    read_tables,
    root_of,
    split_overrides,
)
from covey.observe.run_store import CONFIG_FILE, MODEL_FOLDER, check_run_dir, next_run_dir

EVALUATED = ("model", "task", "rewards", "sampling")  # the tables that `covey eval` looks at in a language model's run
LANGUAGE_OPTIONS = ("task", "reward", "problems", "samples", "temperature", "max_new_tokens", *MACHINE_FIELDS[1:])
MISTAKE, FAILED, INTERRUPTED = 2, 1, 130  # exit codes; 130 is what shells use after Ctrl-C


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
        COMMANDS[arguments.command](arguments, fields)
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
    if isinstance(config, RunConfig):
        from covey.recipes.plan import check_memory

        print(check_memory(config) + "\n")
    print(f"all is well. Next: {shlex.join(['covey', 'train', arguments.recipe, *fields])}")


def plan_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey plan`."""
    from covey.recipes.plan import plan_memory

    print(
        plan_memory(
            model_of(arguments.model),
            fields,
            algorithms=arguments.algorithm.split(","),
            critic_trunk=arguments.critic_trunk,
            prompt_tokens=arguments.prompt_tokens,
        )
    )


def eval_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey eval`."""
    saved = Path(arguments.model).expanduser() / CONFIG_FILE
    if saved.is_file() and root_of(read_tables(saved)) is ControlConfig:
        evaluate_control(arguments, fields, saved)
        return
    if arguments.episodes is not None or arguments.render:
        option = "--render" if arguments.render else "--episodes"
        raise ConfigError(f"{option} is for the run folder of a recipe for control, which {arguments.model} is not")
    config = evaluation_config(arguments, fields)
    samples, temperature = arguments.samples, arguments.temperature
    samples = 1 if samples is None else samples
    if samples < 1:
        raise ConfigError(f"--samples must be at least 1 (is {samples})")
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature must be 0 or more (is {temperature})")
    if samples > 1 and temperature == 0:
        raise ConfigError(f"{samples} greedy answers are all the same: raise --temperature, or leave out --samples")
    from covey.recipes.language import evaluate_model

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
        run = config_to_dict(config_from_dict(read_tables(saved)))  # resolved, with every default
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
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def evaluate_control(arguments: argparse.Namespace, fields: list[str], saved: Path) -> None:
    """`covey eval` of a control run: the mean return of its agent, and where asked a picture of one episode.

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
    from covey.recipes.control import evaluate_run

    result = evaluate_run(
        saved.parent,
        episodes=config.evaluation.episodes,
        render=arguments.render,
        seed=None if arguments.seed is None else config.seed,
    )
    print(return_report(result, config.evaluation.expected_return))
    if arguments.render:
        seed = trained.seed + 1
        words = ["covey", "train", str(saved), "--seed", str(seed), "--run-dir", f"{saved.parent}-seed-{seed}"]
        print(f"Next, the same from another seed: {shlex.join(words)}")
    else:
        print(f"Next, see the agent act: {shlex.join(['covey', 'eval', arguments.model, '--render'])}")


def return_report(result: dict[str, Any], expected: float | None) -> str:
    """The mean return with its 95 % interval, beside the return that the recipe names, and the picture's place."""
    lines = [
        f"mean return {result['score']:.1f} (95 % interval {result['low']:.1f} to {result['high']:.1f}) "
        f"over {result['count']} episodes"
    ]
    if expected is not None:
        lines.append(f"expected {expected:g}: {'reached' if result['score'] >= expected else 'not reached'}")
    if result.get("picture"):
        lines.append(f"a picture of one episode is in {result['picture']}")
    return "\n".join(lines)


def model_of(name: str) -> str:
    """The model that a name means: that of a run folder is in it; of a run that was stopped, in its checkpoints.

    Raises:
        ConfigError: for a run that has saved nothing yet, or that trained an agent.
    """
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        return name
    if root_of(read_tables(folder / CONFIG_FILE)) is ControlConfig:
        raise ConfigError(
            f"the run in {name} trained an agent, no language model: see it with covey eval {name} --render"
        )
    origin = Origin(folder)
    check_origin(origin, name)
    return name if origin.from_checkpoint else str(folder / MODEL_FOLDER)


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


def compare_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey compare`."""
    from covey.recipes.compare import compare

    compare(
        arguments.recipes,
        seeds=arguments.seeds,
        output=Path(arguments.output).expanduser() if arguments.output else None,
        jobs=arguments.jobs,
        threshold=arguments.threshold,
        overrides=fields,
    )


def sample_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey sample`."""
    if arguments.n < 1 or arguments.max_new_tokens < 1 or arguments.seed < 0:
        raise ConfigError("--n and --max-new-tokens must be at least 1, --seed at least 0")
    if not 0 <= arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature must be 0 or more (is {arguments.temperature})")
    from covey.config.checks import check_model

    model = model_of(arguments.model)
    check_model(model)
    from covey.observe.display import printable
    from covey.recipes.language import sample_model

    texts = sample_model(
        model, arguments.prompt, arguments.n, arguments.temperature, arguments.max_new_tokens, arguments.seed
    )
    for number, text in enumerate(texts, start=1):
        print(f"[{number}] {printable(text)}")


COMMANDS = {
    "train": train_command,
    "check": check_command,
    "plan": plan_command,
    "eval": eval_command,
    "compare": compare_command,
    "sample": sample_command,
}


if __name__ == "__main__":
    sys.exit(main())
