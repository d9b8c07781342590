"""Which lines the charts of a report have, and what is drawn of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from covey.tracking.report import charts, result
from covey.tracking.report.charts import Axes, Line, chart
from covey.tracking.report.html import Html
from covey.tracking.report.run_data import RunData
from helpers.run_folders import BEFORE, language_run


def test_evaluations_are_joined_from_the_one_before_training(tmp_path: Path) -> None:
    lines, _ = result._main_lines([RunData(language_run(tmp_path / "run"), "run", "", 0)], "score/mean", "step")
    (evaluated,) = [line for line in lines if line.points]
    assert (list(evaluated.x), list(evaluated.y)) == ([0, 2], [BEFORE["score"], 0.5])


def test_a_schedule_is_drawn_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a noisy metric with its running mean."""
    drawn: list[Line] = []

    def collected(lines: Sequence[Line], axes: Axes, *rest: Any) -> Html:
        drawn.extend(lines)
        return chart(lines, axes, *rest)

    figures: list[Figure] = []
    monkeypatch.setattr(result, "chart", collected)
    monkeypatch.setattr(charts, "Figure", lambda **given: figures.append(Figure(**given)) or figures[-1])
    run = RunData(language_run(tmp_path / "run"), "run", "", 0)
    for record, rate in zip(range(4), (1.0, 0.0, 1.0, 0.0), strict=True):
        for name in ("learning_rate", "grad_norm"):
            run.metrics.columns.setdefault(name, [None] * 4)[record] = rate
    for name in ("learning_rate", "grad_norm"):
        assert result._panel([run], "", name, name, "", (0, None)) is not None
    assert [line.exact for line in drawn] == [True, False]
    shown = [[list(line.get_ydata()) for line in figure.axes[0].lines] for figure in figures]
    assert shown[0] == [[1.0, 0.0, 1.0, 0.0]]
    assert len(shown[1]) == 2
