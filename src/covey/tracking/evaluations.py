"""Held-out evaluations of a run: their scores, and the answers of two of them beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from covey.tracking.plain_files import Refused, TooLarge
from covey.tracking.run_reader import RunReader, kind_of_run, number, prompt_text, table, text
from covey.tracking.score_kinds import SCORE_KINDS, ScoreKind
from covey.tracking.turns import conversation_turns, searched_text

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
    kind = SCORE_KINDS.get(kind_of_run(config, summary)[1] or "score", SCORE_KINDS["score"])
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
    with suppress(OSError, Refused, TooLarge):
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
