"""The command `covey sample`: answers or conversations of a model, without training."""

import argparse
import json
from dataclasses import replace
from typing import Any

from covey.cli.evaluate import add_truncation, truncation_of
from covey.cli.options import MODEL, MOST_TOKENS, Command, Parser, number, option, temperature
from covey.config import ConfigError, ConversationConfig, EvaluationConfig, RunConfig, SamplingConfig
from covey.config.fields import check_fields, check_text
from covey.config.files import user_path
from covey.config.llm import check_stop
from covey.config.model_sources import find_origin, locate_model
from covey.config.recipe import config_from_dict, read_recipe
from covey.config.rules import validate
from covey.config.terminal import say

MAX_NEW_TOKENS = 64
LARGEST_SEED = 2**32 - 1
NO_ENVIRONMENT = "none"
EPILOG = """\
Without PROMPT the model answers a held-out problem of its run, or of --recipe, and the rewards are shown. If that run
has conversations, or with --environment, whole conversations are sampled: covey sample runs/guess_number_grpo-001"""


def _options(parser: Parser) -> None:
    parser.epilog = EPILOG
    option(parser, "MODEL", MODEL)
    option(parser, "[PROMPT]", "the user's message (a held-out problem of the run)")
    option(parser, "--image FILE", "image of PROMPT; several times for more", action="append")
    option(parser, "--n N", "number of answers", number(int, 1, 10_000), 4)
    option(parser, "--temperature T", "0 is greedy", temperature, 1.0)
    longest = "longest answer, or turn of a conversation, in tokens (64, or the run's own)"
    option(parser, "--max-new-tokens N", longest, number(int, 1, MOST_TOKENS))
    option(parser, "--recipe RECIPE", "task, rewards and conversation of a recipe (the run's)")
    option(parser, "--problem N", "the held-out problem, from 0, without PROMPT (0)", number(int, 0, 10**6))
    option(
        parser, "--environment NAME", "environment of conversations, as in a recipe; none: single answers (the run's)"
    )
    option(parser, "--columns JSON", "columns of the data for the environment of a PROMPT, such as '{\"secret\": 7}'")
    option(parser, "--json", "the records as JSON, one in a line, for other programs")
    stop = "text that ends an answer; several times for more (the run's)"
    option(parser, "--stop TEXT", stop, action="append")
    option(parser, "--system-prompt TEXT", "system message before the prompt (the run's)")
    add_truncation(parser)
    seed = "the same seed gives the same answers (0)"
    option(parser, "--seed SEED", seed, number(int, 0, LARGEST_SEED), 0)


def sample_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey sample`."""
    locate_model(arguments.model)
    run = _run_of(arguments)
    environment = _environment_of(arguments, run)
    if arguments.prompt is not None:
        check_text(arguments.prompt, "the prompt")
        if arguments.problem is not None:
            raise ConfigError("--problem is for samples without a PROMPT: leave out one of them")
    elif run is None or run.task is None:
        raise ConfigError(
            "there is no prompt: give one, or --recipe or the folder of a run with a [task], whose held-out problems "
            "are prompts"
        )
    elif run.has_conversations and not environment:
        raise ConfigError("--environment none is for a PROMPT, because held-out problems have a conversation: give one")
    elif arguments.recipe is None:
        _refuse_own_rewards(arguments.model)
    if arguments.image and (arguments.prompt is None or environment):
        raise ConfigError("--image is for a PROMPT without an environment: give a PROMPT, or leave --image out")
    columns = _columns_of(arguments, environment)
    config = _config_of(arguments, run, environment)
    truncation = truncation_of(arguments, arguments.temperature, config.sampling)
    check_fields(config)
    check_stop(config.sampling.stop)
    if arguments.prompt is not None and not environment:
        _answers(arguments, config, truncation)
        return
    validate(config, own_task=True)
    from covey.experiment.evaluation import sample_groups
    from covey.llm.generation.token_sampling import Truncation

    sampled = sample_groups(
        config, arguments.n, arguments.temperature, Truncation(**truncation),
        prompt=arguments.prompt, columns=columns, problem=arguments.problem or 0,
    )  # fmt: skip
    for note in sampled.notes:
        say(note)
    _show(sampled.records(), as_json=arguments.json)


def _run_of(arguments: argparse.Namespace) -> RunConfig | None:
    """The config of --recipe, else of the run that the model is from, if there is one."""
    if arguments.recipe is not None:
        config = read_recipe(arguments.recipe)
        if not isinstance(config, RunConfig):
            raise ConfigError(f"--recipe {arguments.recipe} trains no language model")
        return config
    origin = find_origin(arguments.model)
    run = None if origin is None else config_from_dict(origin.config_tables)
    return run if isinstance(run, RunConfig) else None


def _environment_of(arguments: argparse.Namespace, run: RunConfig | None) -> str:
    """The environment with which the model converses; "" for single answers."""
    if arguments.environment is None:
        return run.conversation.environment if run is not None else ""
    return "" if arguments.environment == NO_ENVIRONMENT else str(arguments.environment)


def _refuse_own_rewards(model: str) -> None:
    """Refuse held-out problems of a run whose rewards were given in Python, because they cannot be graded."""
    from covey.experiment.advice import read_launch

    origin = find_origin(model)
    launch = None if origin is None else read_launch(origin.run_dir)
    if launch is not None and launch.own_rewards:
        raise ConfigError(f"the run of {model} was given its rewards in Python: give a PROMPT, or --recipe")


def _columns_of(arguments: argparse.Namespace, environment: str) -> dict[str, Any]:
    if arguments.columns is None:
        return {}
    if arguments.prompt is None or not environment:
        raise ConfigError("--columns are for the environment of a PROMPT: give both, or leave --columns out")
    try:
        columns = json.loads(arguments.columns)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--columns is not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise ConfigError('--columns must be an object in JSON, such as {"secret": 7}')
    return columns


def _config_of(arguments: argparse.Namespace, run: RunConfig | None, environment: str) -> RunConfig:
    """Config of samples from a model, with a run's precision, chat, stop strings and conversations."""
    limit = arguments.max_new_tokens
    if limit is None:
        limit = MAX_NEW_TOKENS if run is None else run.sampling.max_new_tokens
    config = RunConfig(
        model=arguments.model, seed=arguments.seed, sampling=SamplingConfig(max_new_tokens=limit),
        conversation=ConversationConfig(environment),
    )  # fmt: skip
    if run is not None:
        config = replace(
            config,
            chat=run.chat,
            precision=run.precision,
            sampling=replace(config.sampling, stop=run.sampling.stop, min_new_tokens=run.sampling.min_new_tokens),
        )
        if environment:
            same = environment == run.conversation.environment
            options = run.conversation.options if same else ()
            config = replace(config, conversation=replace(run.conversation, environment=environment, options=options))
        if arguments.prompt is None:
            config = replace(
                config,
                task=run.task,
                rewards=run.rewards,
                evaluation=EvaluationConfig(problems=max(run.evaluation.problems, (arguments.problem or 0) + 1)),
            )
    if arguments.min_new_tokens is not None:
        config = replace(config, sampling=replace(config.sampling, min_new_tokens=arguments.min_new_tokens))
    if arguments.stop is not None:
        config = replace(config, sampling=replace(config.sampling, stop=tuple(arguments.stop)))
    if arguments.system_prompt is not None:
        config = replace(config, chat=replace(config.chat, system_prompt=arguments.system_prompt))
    return config


def _answers(arguments: argparse.Namespace, config: RunConfig, truncation: dict[str, Any]) -> None:
    """Print single answers to a prompt."""
    from covey.experiment.evaluation import sample_model
    from covey.llm.generation.token_sampling import Truncation
    from covey.tracking.console import printable

    texts = sample_model(
        config, arguments.prompt, arguments.n, arguments.temperature, truncation=Truncation(**truncation),
        images=[user_path(name) for name in arguments.image or ()],
    )  # fmt: skip
    for place, text in enumerate(texts, start=1):
        record = json.dumps({"prompt": arguments.prompt, "text": text})
        print(record if arguments.json else f"[{place}] {printable(text)}")


def _show(records: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print samples of one prompt, those of conversations by their turns."""
    if as_json:
        for record in records:
            print(json.dumps(record))
        return
    from covey.tracking.output import plain_console
    from covey.tracking.rollout_text import RolloutPrinter

    printer = RolloutPrinter(plain_console(), whole=True)
    printer.start(records[0])
    for place, record in enumerate(records, start=1):
        print()
        printer.rollout(place, record, own_baseline=False)


COMMAND = Command("sample", "let a language model answer one prompt", _options, sample_command)
