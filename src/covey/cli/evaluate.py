"""The command `covey eval`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.options import MODEL, MOST_TOKENS, Command, Parser, number, option, temperature
from covey.cli.train import check_data
from covey.config import TASK_CONFIGS, ConfigError, ControlConfig, RunConfig, RunError, SamplingConfig
from covey.config.fields import command, plural
from covey.config.files import user_path
from covey.config.model_sources import CONFIG_FILE, find_origin, locate_model
from covey.config.recipe import (
    apply_overrides,
    config_from_dict,
    config_to_dict,
    describe_fields,
    read_tables,
    root_of,
    split_overrides,
)
from covey.config.rules import validate
from covey.config.sft import RewardModelTraining
from covey.config.terminal import say
from covey.tracking.run_folder import check_new_file

if TYPE_CHECKING:
    from covey.tracking.wording import ScoreKind

MACHINE_FIELDS = ("seed", "device", "precision", "threads")
TRUNCATION = ("top_k", "top_p", "min_p", "min_new_tokens")  # fields of `Truncation`
EVALUATED = ("model", "task", "rewards", "sampling", "chat", "conversation")  # tables of a run that it uses
INHERITED = ("max_new_tokens", "min_new_tokens", "long_prompts", "stop")  # of [sampling] of a run
LANGUAGE_OPTIONS = (
    "task", "reward", "problems", "samples", "temperature", "max_new_tokens", "output", *TRUNCATION, *MACHINE_FIELDS[1:]
)  # fmt: skip


def add_truncation(parser: Parser) -> None:
    """Options for tokens that may not be drawn. A recipe has the last one alone, because an update needs
    log-probabilities of the distribution that was sampled.
    """
    option(parser, "--top-k K", "draw from the K most probable tokens (all)", number(int, 1, MOST_TOKENS))
    option(parser, "--top-p P", "draw from the most probable tokens that add up to P (1)", number(float, 1e-6, 1))
    least = "draw from tokens with at least P times the largest probability (0)"
    option(parser, "--min-p P", least, number(float, 0, 1))
    option(parser, "--min-new-tokens N", "tokens before the first end token (the run's)", number(int, 0, MOST_TOKENS))


def truncation_of(arguments: argparse.Namespace, temperature: float, sampling: SamplingConfig) -> dict[str, Any]:
    """The fields of `Truncation` that a command sets, and the minimum length of `sampling`.

    Raises:
        ConfigError: for one that has no effect on greedy answers, and for a minimum length above the largest.
    """
    given = {name: getattr(arguments, name) for name in TRUNCATION if getattr(arguments, name) is not None}
    if temperature == 0 and (without_effect := [name for name in given if name != "min_new_tokens"]):
        option = f"--{without_effect[0].replace('_', '-')}"
        raise ConfigError(f"{option} changes no greedy answer: raise --temperature, or leave it out")
    is_of_run = "min_new_tokens" not in given
    shortest = given.setdefault("min_new_tokens", sampling.min_new_tokens)
    if shortest >= sampling.max_new_tokens:
        if is_of_run:
            raise ConfigError(
                f"--max-new-tokens must be above the run's minimum length, {shortest} (is {sampling.max_new_tokens}): "
                "raise it, or add --min-new-tokens 0"
            )
        raise ConfigError(f"--min-new-tokens must be below --max-new-tokens, {sampling.max_new_tokens} (is {shortest})")
    return given


def _options(parser: Parser) -> None:
    parser.usage = (
        "covey eval MODEL --task TASK [--task-field value ...] [options]\n"
        "       covey eval RUN [--episodes N] [--render] [--seed SEED]      (the run of a recipe for control)"
    )
    parser.epilog = (
        "The task's own fields are options too, such as --digits 1,2 for arithmetic.\n"
        "An agent plays the evaluation episodes of its run; --seed selects others.\n"
        "With --samples above 1 it reports pass@k, the probability that at least one of k answers is right. If the\n"
        "reward is not always 1 or 0, it reports best@k, the expected best score of k answers; best@1 is the mean."
    )
    option(parser, "MODEL", MODEL)
    option(parser, "--task TASK", f"{', '.join(TASK_CONFIGS)}; default: the run's own")
    option(parser, "--reward REWARD", "reward that scores the answers: a built-in one or file.py:function")
    option(parser, "--binary", "the function of --reward returns 1 (right) or 0 (wrong)")
    option(parser, "--problems N", "held-out problems, at most all (256, or the number of the run)")
    option(parser, "--samples N", "answers to each problem (1)", number(int, 1, 10_000))
    option(parser, "--temperature T", "0 is greedy (0, or 1 with several samples)", temperature)
    option(parser, "--max-new-tokens N", "longest answer, in tokens (64, or the run's own)")
    add_truncation(parser)
    texts = {row.name: row.text for row in describe_fields() if not row.section}
    for name in MACHINE_FIELDS:
        option(parser, f"--{name} {name.upper()}", texts[name])
    option(parser, "--output FILE", "write prompts, answers and their scores to this JSONL file")
    option(parser, "--episodes N", "control: number of episodes (the run's own)")
    option(parser, "--render", "control: also write an animation of one episode")


def eval_command(arguments: argparse.Namespace, fields: list[str]) -> None:
    """`covey eval`."""
    origin = find_origin(arguments.model)
    root = None if origin is None else root_of(read_tables(origin.run_dir / CONFIG_FILE))
    if root is RewardModelTraining:
        better = command("reward-model", "eval", arguments.model, "DATA.jsonl")
        raise ConfigError(f"{arguments.model} is a reward model, which writes no answers: measure it with {better}")
    if origin is not None and root is ControlConfig:
        named = user_path(arguments.model) / CONFIG_FILE  # the user's own path, because the advice repeats it
        evaluate_control(arguments, fields, named if named.is_file() else origin.run_dir / CONFIG_FILE)
        return
    if arguments.episodes is not None or arguments.render:
        option = "--render" if arguments.render else "--episodes"
        raise ConfigError(f"{option} is for the run folder of a recipe for control, which {arguments.model} is not")
    locate_model(arguments.model)
    config = evaluation_config(arguments, fields)
    samples, temperature = arguments.samples, arguments.temperature
    samples = 1 if samples is None else samples
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if samples > 1 and temperature == 0:
        raise ConfigError(f"{samples} greedy answers are all the same: raise --temperature, or leave out --samples")
    truncation = truncation_of(arguments, temperature, config.sampling)
    output = user_path(arguments.output, "--output: ") if arguments.output else None
    if output is not None:
        check_new_file(output, "--output")
    from covey.experiment.evaluation import evaluate_model
    from covey.llm.generation.token_sampling import Truncation

    result = evaluate_model(config, samples=samples, temperature=temperature, truncation=Truncation(**truncation))
    if output is not None:
        from covey.tracking.run_store import write_records

        write_records(output, result.records())
    for note in result.notes:
        say(note)
    say(score_report(result.scores, result.kind))
    for name, found in result.by_kind.items():
        say(f"{name}: {result.kind.write_interval(found)}, {plural(found['count'], 'problem')}")
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
        tables = {"sampling": {name: run["sampling"][name] for name in INHERITED}}
        tables["chat"] = run.get("chat", {})
        if "task" in run:
            tables["task"] = run["task"]
        if "task" in run and arguments.task in (None, run["task"]["name"]):
            tables["rewards"] = run["rewards"]
            tables["conversation"] = run["conversation"]
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
        "sampling.min_new_tokens": arguments.min_new_tokens,
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


def return_report(result: dict[str, Any], expected: float | None) -> str:
    """The mean return with its 95 % interval, the recipe's expected return, and the path of the picture."""
    interval = "no interval from one episode"
    if result["low"] is not None:
        interval = f"95 % interval {result['low']:.1f} to {result['high']:.1f}"
    lines = [f"mean return {result['score']:.1f} ({interval}) over {plural(result['count'], 'episode')}"]
    if expected is not None:
        lines.append(f"expected {expected:g}: {'reached' if result['score'] >= expected else 'not reached'}")
    if result.get("picture"):
        lines.append(f"a picture of one episode is in {result['picture']}")
    return "\n".join(lines)


def score_report(scores: Sequence[Sequence[float]], kind: ScoreKind) -> str:
    """The mean score of one answer per problem, or pass@k or best@k of several, with 95 % intervals over problems.

    Args:
        scores: for every problem, the scores of its graded answers; problems without any are left out.
        kind: the kind of these scores.

    Raises:
        RunError: if nothing was scored.
    """
    scores = [problem for problem in scores if problem]
    count, samples = len(scores), min((len(problem) for problem in scores), default=0)
    if not samples:
        raise RunError("no problem was scored, so there is nothing to report")
    if max(len(problem) for problem in scores) == 1:
        result = kind.estimate([problem[0] for problem in scores])
        return f"{kind.name} {kind.write(result['score'])} ({kind.name_interval(result)}), {kind.describe_mean(result)}"
    lines = [f"{plural(count, 'problem')}, {plural(samples, 'answer')} each (95 % interval over problems)"]
    for k in [k for k in (2**i for i in range(samples.bit_length())) if k < samples] + [samples]:
        result = kind.estimate_best([kind.best_at_k(problem, k) for problem in scores])
        lines.append(f"  {f'{kind.best_of}@{k}':<9} {kind.write_interval(result)}")
    return "\n".join(lines)


COMMAND = Command("eval", "measure a model on held-out problems, or an agent over many episodes", _options,
                  eval_command, takes_fields=True)  # fmt: skip
