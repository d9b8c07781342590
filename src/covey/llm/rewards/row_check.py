"""Checks of the rows of a data set before a run: the right answers of all, and rows with which rewards are tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from covey.config import ConfigError
from covey.config.files import shortened
from covey.llm.rewards.weighted_reward import WeightedReward

MISSING = object()


class PromptRow(Protocol):
    """A row of a data set, or a start."""

    @property
    def place(self) -> str: ...

    @property
    def prompt(self) -> Any: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


Row = TypeVar("Row", bound=PromptRow)


def check_answers(rewards: Iterable[WeightedReward], rows: Sequence[PromptRow]) -> None:
    """Check the right answers of all rows for the built-in rewards that read them.

    Raises:
        ConfigError: for the first row that a reward cannot grade, with the number of such rows.
    """
    for reward in rewards:
        if reward.check is None:
            continue
        known: dict[Any, str] = {}  # rows often have the same answer
        faults = [(row, fault) for row in rows if (fault := _fault_of(reward, row, known))]
        if faults:
            row, fault = faults[0]
            more = f" ({len(faults):,} such rows)" if len(faults) > 1 else ""
            raise ConfigError(f"{row.place or 'a prompt of the task'}: reward {reward.name!r}: {fault}{more}")


def _fault_of(reward: WeightedReward, row: PromptRow, known: dict[Any, str]) -> str:
    """The reason why a reward cannot grade completions of a row; "" if it can."""
    columns = row.columns
    column, *_ = reward.gold
    if columns.get(column) is None:
        if column in columns:
            return f"the column {column!r} is null"
        there = ", ".join(map(shortened, list(columns)[:8])) or "none"
        return f"there is no column {column!r} (columns: {there}); name another in [[rewards]], or remove the row"
    values = tuple(map(columns.get, reward.gold))
    key = values if set(map(type, values)) <= {str} else repr(values)  # 1 and True are equal, as keys too
    if key not in known:
        try:
            known[key] = ""
            reward.check(*values)  # type: ignore[misc]
        except ValueError as error:
            known[key] = str(error)
    return known[key]


def rows_of_every_kind(rows: Iterable[Row]) -> list[Row]:
    """The first row with each kind of value of each column: a reward that fails on a kind fails on one of them.

    A kind is a type, or that the value is null, empty or missing. Rows whose kinds all occur in others are left out.
    """
    first: dict[Any, Row] = {}
    for row in rows:
        kinds = (*map(_kind, row.columns.values()), type(row.prompt))
        first.setdefault((tuple(row.columns), kinds), row)
    names = dict.fromkeys(name for columns, _ in first for name in columns)
    found: list[Row] = []
    seen: set[Any] = set()
    for (columns, kinds), row in first.items():
        there = dict(zip((*columns, MISSING), kinds, strict=True))
        pairs = {(name, there.get(name, MISSING)) for name in (*names, MISSING)}
        if not pairs <= seen:
            found.append(row)
            seen |= pairs
    return found


def _kind(value: Any) -> Any:
    """The type of a value, or the value if it is an empty text, list or dict."""
    return repr(value) if isinstance(value, (str, list, dict)) and not value else type(value)
