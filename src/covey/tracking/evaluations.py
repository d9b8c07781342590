"""Held-out evaluations of a run: their scores, and answers of two beside each other; rollouts chosen by filters."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

from covey.config import ConfigError
from covey.config.fields import plural
from covey.config.files import Refused
from covey.tracking.run_reader import (
    Group,
    RunReader,
    conversation_turns,
    kind_of_run,
    number,
    prompt_text,
    ranges,
    scores_of_run,
    searched_text,
    table,
    text,
)
from covey.tracking.wording import LOSS, ScoreKind

Answers = dict[int, dict[str, Any]]  # of one evaluation at one token limit, by problem
ORDERS = ("problem", "better", "worse")
KINDS = ("better", "worse", "same", "truncated")


def evaluations_of(
    reader: RunReader, config: Mapping[str, Any] | None, summary: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Before and after training by token limit, the training's first.

    They are those of the summary; before there is one, they are computed from the first and the last held-out answers.
    Without answers the run knows its evaluation before training only.
    "kinds" has the results of every kind of problem; [] if there are not at least two kinds.
    """
    written = (summary or {}).get("evaluations")
    if isinstance(written, list) and written:
        return [
            {
                "max_new_tokens": number(one.get("max_new_tokens")),
                "before": _estimate(one.get("before")),
                "after": _estimate(one.get("after")),
                "kinds": results_by_kind(*(table(one.get(when)).get("by_kind") for when in ("before", "after"))),
            }
            for one in map(table, written)
        ]
    steps = reader.held_out_steps()
    kind = scores_of_run(config, summary)
    if not steps:
        recorded = reader.origin().get("before")
        given = table(recorded[0]) if isinstance(recorded, list) and recorded else {}
        known = _estimate(given)
        limit = number(given.get("max_new_tokens"))
        return [{"max_new_tokens": limit, "before": known, "after": None, "kinds": []}] if known else []
    first, last = (read_answers(reader, step) for step in (steps[0], steps[-1]))

    found = []
    for limit in token_limits([first, last]):
        before = first.get(limit, {})
        after = last.get(limit, {}) if len(steps) > 1 else {}
        found.append({
            "max_new_tokens": limit,
            "before": _estimate(_mean(before.values(), kind)),
            "after": _estimate(_mean(after.values(), kind)),
            "kinds": kinds_of_answers(before, after, kind),
        })  # fmt: skip
    return found


def kinds_of_answers(before: Answers, after: Answers, kind: ScoreKind) -> list[dict[str, Any]]:
    """The results by kind of problem of two evaluations, as `results_by_kind`, computed from their answers."""
    found: list[dict[str, Any]] = []
    for answers in (before, after):
        lines: dict[str, list[dict[str, Any]]] = {}
        for line in answers.values():
            lines.setdefault(text(line.get("kind")), []).append(line)
        found.append({name: _mean(of_kind, kind) for name, of_kind in lines.items()})
    return results_by_kind(*found)


def results_by_kind(before: Any, after: Any) -> list[dict[str, Any]]:
    """[{"kind": its name, "before": ESTIMATE | None, "after": ESTIMATE | None}, ...] from the tables "by_kind" of two
    evaluations; [] if there are not at least two kinds.
    """
    results = [{name: _estimate(value) for name, value in table(one).items()} for one in (before, after)]
    names = sorted({name for one in results for name, value in one.items() if value is not None})
    if len(names) < 2:
        return []
    return [{"kind": name, "before": results[0].get(name), "after": results[1].get(name)} for name in names]


def _mean(answers: Iterable[Mapping[str, Any]], kind: ScoreKind) -> dict[str, Any] | None:
    scores = [score for one in answers if (score := number(one.get("score"))) is not None]
    return kind.estimate(scores) if scores else None


def _estimate(value: Any) -> dict[str, Any] | None:
    """A table with "score" as an ESTIMATE of the API; None if it is none."""
    given = table(value)
    if number(given.get("score")) is None:
        return None
    return {name: number(given.get(name)) for name in ("score", "low", "high", "count")}


def read_answers(reader: RunReader, step: int) -> dict[int, Answers]:
    """The held-out answers of the weights after a step, by token limit and problem; {} if they cannot be read."""
    found: dict[int, Answers] = {}
    with suppress(OSError):
        for line in reader.held_out(step).lines:
            limit, problem = line.get("max_new_tokens"), line.get("problem")
            if type(limit) is int and type(problem) is int:
                found.setdefault(limit, {})[problem] = line
    return found


def token_limits(evaluations: Iterable[Mapping[int, Answers]]) -> list[int]:
    """The token limits of evaluations, in the order in which they occur: the training's is first."""
    return list(dict.fromkeys(limit for answers in evaluations for limit in answers))


def compare_answers(
    first: Answers, last: Answers, *, order: str, kind: str, wanted: str, offset: int, limit: int
) -> dict[str, Any]:
    """Two evaluations beside each other: a part of the list of problems, and the counts over all of them.

    Args:
        order: one of `ORDERS`.
        kind: one of `KINDS`, or "" for all.
        wanted: a text that the prompt or an answer must contain, in any case; "" for all.
    """
    rows = [_row(problem, first.get(problem), last.get(problem)) for problem in sorted(first.keys() | last.keys())]

    def matches(problem: int) -> bool:
        lines = filter(None, (first.get(problem), last.get(problem)))
        return not wanted or any(_contains(line, wanted.casefold()) for line in lines)

    counts = {name: sum(_direction(row) == name for row in rows) for name in ("better", "worse", "same", "unknown")}
    shown = [row for row in rows if _is_kind(row, kind) and matches(row["problem"])]
    if order != "problem":
        sign = -1 if order == "better" else 1
        shown.sort(key=lambda row: (row["change"] is None, sign * (row["change"] or 0), row["problem"]))
    following = offset + limit
    return {
        "count": len(rows),
        "total": len(shown),
        "offset": offset,
        "next_offset": following if following < len(shown) else None,
        "changes": counts,
        "answers": shown[offset:following],
    }


def _row(problem: int, first: dict[str, Any] | None, last: dict[str, Any] | None) -> dict[str, Any]:
    known = last or first or {}
    before, after = _answer(first), _answer(last)
    both = before is not None and after is not None and None not in (before["score"], after["score"])
    return {
        "problem": problem,
        "prompt": known.get("prompt"),
        "columns": table(known.get("columns")),
        "first": before,
        "last": after,
        "change": after["score"] - before["score"] if both and before is not None and after is not None else None,
    }


def _answer(line: dict[str, Any] | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {
        "text": text(line.get("text")),
        "reward": number(line.get("reward")),
        "score": number(line.get("score")),
        "reward_parts": table(line.get("reward_parts")),
        "tokens": number(line.get("tokens")),
        "truncated": line.get("truncated") is True,
        "extra": table(line.get("extra")) or None,
        "turns": conversation_turns(line) or None,
        "failure": text(line.get("failure")) or None,
    }


def _direction(row: dict[str, Any]) -> str:
    change = row["change"]
    if change is None:
        return "unknown"
    return "better" if change > 0 else "worse" if change < 0 else "same"


def _is_kind(row: dict[str, Any], kind: str) -> bool:
    if kind == "truncated":
        return any(answer is not None and answer["truncated"] for answer in (row["first"], row["last"]))
    return not kind or _direction(row) == kind


def _contains(line: dict[str, Any], wanted: str) -> bool:
    return any(wanted in one.casefold() for one in (prompt_text(line.get("prompt")), searched_text(line)))


Keep = Callable[["Found"], bool]


@dataclass(frozen=True)
class Found:
    """One rollout of a run."""

    step: int
    group: Group
    index: int  # within the group, from 0
    line: dict[str, Any]

    @property
    def reward(self) -> float | None:
        return number(self.line.get("reward"))

    def contains(self, words: str) -> bool:
        """True if the completion or the prompt has these words, in any case."""
        texts = (searched_text(self.line), prompt_text(self.line.get("prompt")))
        return any(words.casefold() in one.casefold() for one in texts)


def last_recorded(reader: RunReader) -> int:
    """The last step with rollouts.

    Raises:
        ConfigError: if there is none.
    """
    steps = reader.rollout_steps()
    if not steps:
        on_examples = kind_of_run(reader.config(), reader.summary())[1] == LOSS.name
        why = ": a training on examples samples none" if on_examples else " yet"
        raise ConfigError(f"the run in {reader.run_dir} has no rollouts{why}")
    return steps[-1]


def read_groups(reader: RunReader, step: int) -> list[Group]:
    """The groups of a step.

    Raises:
        ConfigError: if it has none that can be read; the message names the steps that have.
    """
    try:
        groups, _ = reader.groups(step)
    except OSError as error:
        steps = reader.rollout_steps()
        known = f"it has those of {steps_text(steps)}" if steps else "it has none yet"
        reason = f" ({error})" if isinstance(error, Refused) else ""
        raise ConfigError(f"the run in {reader.run_dir} has no rollouts of step {step}{reason}: {known}") from None
    if not groups:
        raise ConfigError(f"the rollouts of step {step} in {reader.run_dir} are damaged: name another step")
    return groups


def choose_group(groups: Sequence[Group], number: int | None) -> tuple[Group, str]:
    """The group with a number or, without one, the most informative: that with the largest spread of rewards.

    Returns:
        The group, and the reason why it was chosen; the reason is empty for a group that the user named.

    Raises:
        ConfigError: if there is no group with that number.
    """
    if number is not None:
        for group in groups:
            if group.number == number:
                return group, ""
        raise ConfigError(
            f"there is no group {number}: the step has the groups {steps_text([g.number for g in groups])}"
        )
    chosen = max(groups, key=information)
    return chosen, "the largest spread of rewards" if chosen.has_spread else "no group has different rewards"


def search(reader: RunReader, steps: Sequence[int], keep: Keep, limit: int) -> list[Found]:
    """The first rollouts that match, from the last of the steps backwards."""
    found: list[Found] = []
    for each in _all(reader, reversed(steps)):
        if keep(each):
            found.append(each)
            if len(found) == limit:
                break
    return found


def extremes(reader: RunReader, steps: Sequence[int], keep: Keep, limit: int, *, best: bool) -> list[Found]:
    """The graded rollouts with the highest rewards (or the lowest) among those that match; of equal ones the latest."""
    sign = 1.0 if best else -1.0
    graded = (each for each in _all(reader, reversed(steps)) if each.reward is not None and keep(each))
    return heapq.nlargest(limit, graded, key=lambda found: sign * (found.reward or 0.0))


def steps_text(steps: Sequence[int]) -> str:
    """[1, 2, 3, 7] as '1 to 3, 7'."""
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in ranges(steps)]
    return ", ".join(parts if len(parts) <= 6 else [*parts[:5], f"{plural(len(parts) - 5, 'other range')}"])


def information(group: Group) -> tuple[bool, float, int]:
    """The order of groups by what they teach: those that were trained on, then those with a large spread of rewards."""
    return not group.is_dropped, pstdev(group.rewards) if group.rewards else -1.0, -group.number


def _all(reader: RunReader, steps: Iterator[int]) -> Iterator[Found]:
    for step in steps:
        with suppress(OSError):  # deleted in between, or damaged
            for group in reader.groups(step)[0]:
                for index, line in enumerate(group.rollouts):
                    yield Found(step, group, index, line)
