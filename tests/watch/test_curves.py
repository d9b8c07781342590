"""Curves with a bounded number of points."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.tracking.run_reader import MetricTable
from covey.watch.answers import curves


def table_of(folder: Path, records: list[dict[str, Any]]) -> MetricTable:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = MetricTable(folder)
    table.update()
    return table


def test_few_steps_are_shown_as_they_are(tmp_path: Path) -> None:
    table = table_of(tmp_path, [{"step": 1, "a": 1.5}, {"step": 3, "a": None, "b": 2}, {"step": 4, "b": math.inf}])
    assert curves(table, None, 10, 0, None) == {
        "last_step": 4, "generation": 0, "downsampled": False, "steps": [1, 3, 4], "first_steps": [1, 3, 4],
        "series": {"a": {"mean": [1.5, None, None]}, "b": {"mean": [None, 2.0, None]}},
    }  # fmt: skip
    assert curves(table, ["b", "unknown", "b"], 10, 1, 4)["series"] == {"b": {"mean": [2.0, None]}}


def test_buckets_have_mean_and_extremes(tmp_path: Path) -> None:
    values = [1.0, 5.0, None, 3.0, None, None, 2.0]
    table = table_of(tmp_path, [{"step": 10 * (at + 1), "a": value} for at, value in enumerate(values)])
    found = curves(table, ["a"], 3, 0, None)
    assert found["downsampled"]
    assert (found["first_steps"], found["steps"]) == ([10, 30, 50], [20, 40, 70])
    assert found["series"]["a"] == {"mean": [3.0, 3.0, 2.0], "low": [1.0, 3.0, 2.0], "high": [5.0, 3.0, 2.0]}


@pytest.mark.parametrize(("after", "last"), [(5, 4), (3, None), (100, None), (0, 0)])
def test_an_empty_choice_of_steps(tmp_path: Path, after: int, last: int | None) -> None:
    table = table_of(tmp_path, [{"step": step, "a": step} for step in (1, 2, 3)])
    found = curves(table, ["a"], 2, after, last)
    assert (found["steps"], found["first_steps"], found["series"]) == ([], [], {"a": {"mean": []}})


def test_a_run_without_steps(tmp_path: Path) -> None:
    assert curves(MetricTable(tmp_path), None, 600, 0, None)["steps"] == []


@settings(max_examples=60)
@example(values=[1.0, 2.0, None, 4.0, 5.0], points=2, after=1, length=3)
@given(
    values=st.lists(st.one_of(st.none(), st.integers(-9, 9).map(float)), max_size=40),
    points=st.integers(2, 12),
    after=st.integers(0, 12),
    length=st.integers(0, 40),
)
def test_buckets_divide_the_steps(
    tmp_path_factory: pytest.TempPathFactory, values: list[float | None], points: int, after: int, length: int
) -> None:
    """Each chosen step is in one bucket, buckets differ by at most one step, and each has the numbers of its steps."""
    table = table_of(
        tmp_path_factory.mktemp("run"), [{"step": at + 1, "a": value, "b": 0} for at, value in enumerate(values)]
    )
    last = after + length
    chosen = [step for step in range(1, len(values) + 1) if after < step <= last]
    found = curves(table, ["a", "b"], points, after, last)
    spans = list(zip(found["first_steps"], found["steps"], strict=True))
    assert [step for first, end in spans for step in range(first, end + 1)] == chosen
    assert len(spans) <= points
    sizes = {end - first + 1 for first, end in spans}
    assert not sizes or max(sizes) - min(sizes) <= 1
    if found["downsampled"] and values:
        for place, (first, end) in enumerate(spans):
            known = [value for value in values[first - 1 : end] if value is not None]
            expected = (sum(known) / len(known), min(known), max(known)) if known else (None, None, None)
            series = found["series"].get("a", {"mean": [None] * 99, "low": [None] * 99, "high": [None] * 99})
            assert (series["mean"][place], series["low"][place], series["high"][place]) == pytest.approx(expected)
