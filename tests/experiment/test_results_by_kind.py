"""Held-out results by kind of problem."""

import pytest

from covey.data import EndReason, Group, Rollout, Start
from covey.experiment.evaluation import by_kind
from covey.tracking.console import by_kind_tables
from covey.tracking.wording import SCORE_KINDS


def group(index, kind, *scores):
    rollouts = [Rollout((1,), [1], [0.0], EndReason.STOP, reward=score, score=score) for score in scores]
    return Group(Start(index, "p", kind=kind), rollouts)


def test_each_kind_has_its_mean_and_its_number_of_problems():
    groups = [group(0, "b", 1.0), group(1, "a", 1.0), group(2, "a", 0.0), group(3, "a", None)]
    found = by_kind(groups, SCORE_KINDS["accuracy"])["by_kind"]
    assert list(found) == ["a", "b"]
    assert [(one["score"], one["count"]) for one in found.values()] == [(0.5, 2), (1.0, 1)]


def test_answers_to_one_problem_are_averaged_first():
    groups = [group(0, "a", 1.0, 0.0), group(1, "b", 1.0, 1.0), group(2, "a", 0.0, 0.0)]
    found = by_kind(groups, SCORE_KINDS["accuracy"])["by_kind"]
    assert [(one["score"], one["count"]) for one in found.values()] == [(0.25, 2), (1.0, 1)]


def test_one_kind_is_no_table():
    assert by_kind([group(0, "a", 1.0), group(1, "a", 0.0)], SCORE_KINDS["accuracy"]) == {}


@pytest.mark.parametrize("before", [{}, {"by_kind": {"a": {"score": 0.25, "low": 0.1, "high": 0.5, "count": 4}}}])
def test_the_table_at_the_end_of_a_run(before):
    after = by_kind([group(0, "a", 1.0), group(1, "b", 0.0)], SCORE_KINDS["accuracy"])
    summary = {"domain": "language", "score_kind": "accuracy", "evaluations": [{"before": before, "after": after}]}
    (table,) = by_kind_tables(summary)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[0] == ["a", "b"]
    assert cells[1] == ["1", "1"]
    assert cells[2] == (["25.0%", "-"] if before else ["-", "-"])
    assert by_kind_tables({**summary, "evaluations": [{"before": {}, "after": {}}]}) == []
