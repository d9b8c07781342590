"""The result of a run in Python: the content of `summary.json`, with a table and a picture for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config.fields import printable
from covey.tracking.console import clock
from covey.tracking.wording import find_wording

if TYPE_CHECKING:
    from covey.tracking.curve import RunFigure

MIB = 2**20


class RunResult(dict[str, Any]):
    """The content of `summary.json`. A notebook displays it as a table."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self["run_dir"])

    def figure(self) -> RunFigure:
        """The curves of the run as a matplotlib figure, the one in `curve.png`. It needs no pyplot.

        Raises:
            ConfigError: if the run folder has no metrics any more.
        """
        from covey.tracking.curve import run_figure  # matplotlib takes a second to import

        return run_figure(self.run_dir)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        wording = find_wording(self)
        measured = wording.count_measured(self["evaluations"][0]["after"]["count"])
        title = wording.table_title.format(measured=measured)
        rows = [
            "<tr>" + "".join(f"<th{_LEFT if place == 0 else ''}>{_text(name)}</th>" for place, name in enumerate(_HEAD))
            + "</tr>"
        ]  # fmt: skip
        for evaluation in self["evaluations"]:
            before, after = evaluation["before"], evaluation["after"]
            cells = (
                f"{wording.case}: {wording.case_of(self, evaluation)}",
                wording.kind.write_interval(before),
                wording.kind.write_interval(after),
                wording.kind.write_change(after["score"] - before["score"]),
            )
            rows.append("<tr>" + "".join(_cell(cell, place == 0) for place, cell in enumerate(cells)) + "</tr>")
        for name, value in self._facts():
            rows.append(f'<tr>{_cell(name, True)}<td style="text-align:left" colspan="3">{_text(value)}</td></tr>')
        return f'<table><caption style="text-align:left"><b>{_text(title)}</b></caption>{"".join(rows)}</table>'

    def _facts(self) -> Iterator[tuple[str, str]]:
        """The rows below the evaluations."""
        yield "recipe", f"{self['recipe']}, {self['algorithm']}, seed {self['seed']}"
        yield "training", f"{self['steps']:,} steps in {clock(self['seconds'])}, {find_wording(self).cost(self)}"
        yield "peak memory", f"{self['peak_memory_bytes'] / MIB:,.0f} MiB"
        if self.get("expected_return") is not None:
            yield "expected return", f"{self['expected_return']:g}"
        yield "folder", str(self["run_dir"])


_HEAD = ("", "before", "after", "change")
_LEFT = ' style="text-align:left"'


def _cell(value: str, left: bool) -> str:
    return f"<td{_LEFT if left else ''}>{_text(value)}</td>"


def _text(value: object) -> str:
    """Text in HTML, without markup and control characters."""
    return escape(printable(str(value)))
