"""The rollouts that trackers show: the best and the worst of a few groups, at a bounded number of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from covey.config.fields import printable
from covey.tracking.console import last_turn
from covey.tracking.records import rollout_record

if TYPE_CHECKING:
    from covey.data import StepRecord

Row = tuple[Any, ...]
COLUMNS = ("step", "group", "prompt", "completion", "reward", "score", "decisions", "end")

TABLES = 50  # most steps of a run with a table of rollouts
GROUPS = 4  # groups in a table, of each the best and the worst rollout
CHARACTERS = 2_000  # of a prompt or a completion


def has_table(step: int, steps: int) -> bool:
    """True for the first step, the last one, and about TABLES steps at equal distances."""
    return step in (1, steps) or step % max(1, -(-steps // TABLES)) == 0


def rows_of(record: StepRecord) -> list[Row]:
    """The table of a step's rollouts."""
    return select_rows(rollout_record(record.step, *rollout) for rollout in record.rollouts())


def select_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The best and the worst graded rollout of the groups whose rewards differ most, from lines of a rollouts file."""
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        if record["reward"] is not None:
            groups[record["group"]].append(record)
    ends = [(min(group, key=_reward), max(group, key=_reward)) for group in groups.values()]
    ends.sort(key=lambda pair: _reward(pair[0]) - _reward(pair[1]))  # stable, so groups alike keep their order
    return [
        _row(record) for worst, best in ends[:GROUPS] for record in ((best, worst) if best is not worst else (best,))
    ]


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"])


def _row(record: Mapping[str, Any]) -> Row:
    shown = {"prompt": _clip(last_turn(record["prompt"])), "completion": _clip(record["text"])}
    return tuple({**record, **shown}[column] for column in COLUMNS)


def _clip(text: str) -> str:
    text = printable(text)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 2] + " …"
