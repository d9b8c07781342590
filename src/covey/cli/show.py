"""The command `covey show`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from covey.cli.options import Command, Parser, number, option, option_of
from covey.cli.runs import named_run
from covey.config import ConfigError
from covey.config.terminal import say
from covey.tracking.output import plain_console

if TYPE_CHECKING:
    from covey.tracking.evaluations import Answers, Found
    from covey.tracking.rollout_text import RolloutPrinter
    from covey.tracking.run_reader import RunReader

FILTERS = ("best", "worst", "failed", "truncated", "no_signal", "text")
EPILOG = """\
Without options it shows the most informative group of the last step: the one with the largest spread of rewards. A
filter searches the whole run, the last step first, or the step of --step. Several filters must all hold. --held-out
shows the held-out problems whose score changed most, before training and in the last evaluation (or that after
--step). A run may still be running. For pages: covey show RUN --best --limit 100 | less"""


def _options(parser: Parser) -> None:
    parser.usage = "covey show RUN [--step N] [--group K]\n       covey show RUN [--held-out] [filters]"
    parser.epilog = EPILOG
    option(parser, "RUN", "a run folder")
    option(parser, "--step N", "the training step (the last)", number(int, 0, 10**12))
    option(parser, "--group K", "the group, as the step numbers it", number(int, 0, 10**12))
    option(parser, "--best", "the rollouts with the highest rewards")
    option(parser, "--worst", "the rollouts with the lowest rewards")
    option(parser, "--failed", "rollouts that could not be graded")
    option(parser, "--truncated", "rollouts that a limit ended")
    option(parser, "--no-signal", "groups whose advantages are all 0")
    option(parser, "--text WORDS", "rollouts with these words in the prompt or the completion")
    option(parser, "--held-out", "answers to held-out problems, before and after")
    option(parser, "--limit N", "how many are shown", number(int, 1, 10**9), 5)
    option(parser, "--full", "long texts as a whole")
    option(parser, "--json", "the records as JSON, for other programs")


def show_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey show`."""
    filters = [option_of(name) for name in FILTERS if getattr(arguments, name)]
    if arguments.best and arguments.worst:
        raise ConfigError("--best and --worst are opposites: name one of them")
    if arguments.group is not None and (filters or arguments.held_out):
        other = [*filters, "--held-out"][0]
        raise ConfigError(f"--group names one group, and {other} searches for others: leave out one of them")
    if arguments.held_out and (arguments.failed or arguments.no_signal):
        raise ConfigError("held-out answers have no groups: use --best, --worst, --truncated or --text with --held-out")
    run = named_run(arguments.run)
    from covey.tracking.run_reader import RunReader

    reader = RunReader(run)
    if arguments.held_out:
        _show_held_out(reader, arguments)
    elif filters:
        _show_found(reader, arguments)
    else:
        _show_group(reader, arguments)


def _show_group(reader: RunReader, arguments: argparse.Namespace) -> None:
    from covey.tracking.evaluations import choose_group, last_recorded, read_groups

    step = last_recorded(reader) if arguments.step is None else arguments.step
    groups = read_groups(reader, step)
    group, why = choose_group(groups, arguments.group)
    if arguments.json:
        _print_json({"run": str(reader.run_dir), "step": step, "group": group.number, "rollouts": group.rollouts})
        return
    _printer(reader, arguments).group(step, group, len(groups), why)


def _show_found(reader: RunReader, arguments: argparse.Namespace) -> None:
    from covey.tracking import evaluations as choice
    from covey.tracking.run_reader import is_failed, is_truncated

    conditions: list[Callable[[Found], bool]] = []
    conditions += [lambda found: is_failed(found.line)] if arguments.failed else []
    conditions += [lambda found: is_truncated(found.line)] if arguments.truncated else []
    conditions += [lambda found: not found.group.has_signal] if arguments.no_signal else []
    conditions += [lambda found: found.contains(arguments.text)] if arguments.text else []
    others = ("best", "worst", "failed", "truncated", "text")
    whole_groups = arguments.no_signal and not any(getattr(arguments, name) for name in others)
    conditions += [lambda found: found.index == 0] if whole_groups else []
    if arguments.step is not None:
        choice.read_groups(reader, arguments.step)  # its message names the steps that there are
    choice.last_recorded(reader)
    steps = reader.rollout_steps() if arguments.step is None else [arguments.step]
    keep = partial(_all_hold, conditions)
    if arguments.best or arguments.worst:
        found = choice.extremes(reader, steps, keep, arguments.limit, best=arguments.best)
    else:
        found = choice.search(reader, steps, keep, arguments.limit)
    if arguments.json:
        _print_json([_record(each, whole_groups) for each in found])
        return
    if not found:
        say("no rollout is like that" + ("" if arguments.step is None else f" in step {arguments.step}"))
    printer = _printer(reader, arguments)
    for each in found:
        if whole_groups:
            printer.group(each.step, each.group)
            printer.console.print()
        else:
            printer.found(each)


def _all_hold(conditions: list[Callable[[Found], bool]], found: Found) -> bool:
    return all(condition(found) for condition in conditions)


def _record(found: Found, whole_group: bool) -> dict[str, Any]:
    if whole_group:
        return {"step": found.step, "group": found.group.number, "rollouts": found.group.rollouts}
    return {"rollout": found.index, **found.line}


def _show_held_out(reader: RunReader, arguments: argparse.Namespace) -> None:
    from covey.tracking.evaluations import compare_answers, read_answers, token_limits

    steps = reader.held_out_steps()
    if not steps:
        raise ConfigError(
            f"the run in {reader.run_dir} has no held-out answers: only runs of language models write them"
        )
    if len(steps) == 1 and arguments.step is None:
        say("there is one evaluation so far, so both answers are the same\n")
    last = steps[-1] if arguments.step is None else arguments.step
    if last not in steps:
        from covey.tracking.evaluations import steps_text

        raise ConfigError(f"there are no held-out answers after step {last}: there are some after {steps_text(steps)}")
    before, after = read_answers(reader, steps[0]), read_answers(reader, last)
    limit = token_limits([after, before])[0]
    order = "better" if arguments.best else "worse" if arguments.worst else "problem"
    result = compare_answers(
        before.get(limit, {}), after.get(limit, {}), order="better" if order == "problem" else order,
        kind="truncated" if arguments.truncated else "", wanted=arguments.text or "", offset=0, limit=10**9,
    )  # fmt: skip
    rows = result["answers"]
    if order == "problem":
        rows = sorted(rows, key=lambda row: -abs(row["change"] or 0.0))
    if arguments.json:
        _print_json(rows[: arguments.limit])
        return
    counts = result["changes"]
    say(
        f"held-out problems, at most {limit} tokens: {counts['better']} better, {counts['worse']} worse, "
        f"{counts['same']} the same from step {steps[0]} to step {last}\n"
    )
    _show_kinds(reader, before.get(limit, {}), after.get(limit, {}))
    printer = _printer(reader, arguments)
    labels = ("before training" if steps[0] == 0 else f"after step {steps[0]}", f"after step {last}")
    for row in rows[: arguments.limit]:
        printer.answers(row, labels)


def _show_kinds(reader: RunReader, before: Answers, after: Answers) -> None:
    """Print the scores by kind of problem, if there are kinds."""
    from covey.tracking.console import by_kind_table
    from covey.tracking.evaluations import kinds_of_answers
    from covey.tracking.run_reader import scores_of_run

    kind = scores_of_run(reader.config(), reader.summary())
    if kinds := kinds_of_answers(before, after, kind):
        console = plain_console()
        console.print(by_kind_table(kinds, kind))
        console.print()


def _printer(reader: RunReader, arguments: argparse.Namespace) -> RolloutPrinter:
    from covey.tracking.rollout_text import RolloutPrinter

    in_control = "environment" in (reader.config() or {})
    return RolloutPrinter(plain_console(), whole=arguments.full, in_control=in_control)


def _print_json(document: Any) -> None:
    """Print JSON in ASCII, so that no character of a model reaches the terminal as it is."""
    print(json.dumps(document, indent=2))


COMMAND = Command("show", "show rollouts of a run: siblings with their rewards, or a search", _options, show_command)
