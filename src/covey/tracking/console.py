"""Live display of a run: a panel on a terminal or in a notebook, else one line per step; and the result in Python."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from covey.config.fields import command, plural, printable
from covey.config.terminal import fitted
from covey.tracking.diagnosis import Diagnosis, Finding, conclusion
from covey.tracking.evaluations import results_by_kind
from covey.tracking.output import NotebookOutput, in_notebook, plain_console
from covey.tracking.run_overview import folder_bytes, size_text
from covey.tracking.wording import ScoreKind, Shown, Wording, find_wording, is_above

if TYPE_CHECKING:  # covey.data imports torch, and a mistake in a recipe is reported before that
    from covey.data import Group as RolloutGroup
    from covey.data import Rollout, StepRecord

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24
LEAST_HEIGHT = 0.1  # of a sparkline, as a fraction of its largest value
PACE_STEPS = 20  # number of last steps that the remaining time is estimated from
KEPT = 30  # notes and sample rollouts that a notebook shows
LARGE_CHECKPOINTS = 10**9  # bytes
SHOWN_CHARACTERS = 400  # of a prompt or a completion
QUIET_SECONDS = 1.0  # minimum interval between lines of a log, for quick steps
PROGRESS_SECONDS = 30.0  # interval between lines of a log about an evaluation
SHOWN_ANSWERS = 3  # of the evaluation before training


class Display:
    """Shows a run. An `Observer` of the loop and a context manager.

    `domain` and `score_kind` select the texts (`covey.tracking.wording.find_wording`) unless `wording` gives them.
    `diagnosis` gets the metrics of every step, and what it finds is said once. With `total_steps` 0 there is no panel,
    only notes and progress bars, for commands that do not train.
    """

    def __init__(
        self,
        total_steps: int = 0,
        show_rollouts_every: int = 0,
        *,
        domain: str = "language",
        score_kind: str = "accuracy",
        wording: Wording | None = None,
        title: str = "covey",
        console: Console | None = None,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self.total_steps, self.show_rollouts_every = total_steps, show_rollouts_every
        self.wording = wording or find_wording({"domain": domain, "score_kind": score_kind})
        self.title = Text(printable(title))
        self.diagnosis = diagnosis or Diagnosis({}, checks=())
        self.step = 0
        self.console = console or plain_console()
        self._notebook = NotebookOutput() if console is None and in_notebook() else None
        self._kept: deque[RenderableType] = deque(maxlen=KEPT)  # in a notebook: the output below the panel
        on_terminal = self.console.is_terminal and not self.console.is_dumb_terminal and self._notebook is None
        self.is_live = on_terminal or self._notebook is not None
        self.metrics: dict[str, float] = {}  # last value of every measured metric
        self.history: dict[str, list[float]] = {name: [] for name in self.wording.drawn}
        self._last_line = -math.inf
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._last_record = time.monotonic()
        self._bars: list[_Bar] = []
        self.seconds_budgeted: Callable[[], float] = lambda: math.inf  # those left for training
        self._answers_left = SHOWN_ANSWERS if show_rollouts_every else 0
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self.is_live and self._notebook is None:
            self._live.start()
        self._last_record = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()  # no effect if it was not started
        self._draw()

    def record(self, record: StepRecord) -> None:
        """Show a finished step, and every `show_rollouts_every` steps two of its rollouts."""
        step, metrics = record.step, record.metrics
        now = time.monotonic()
        self._pace.append(now - self._last_record)
        self._last_record = now
        found = self._take_in(step, metrics)
        due = not self.wording.quick or now - self._last_line >= QUIET_SECONDS or step == self.total_steps
        if not self.is_live and (due or self.wording.held_out in metrics):
            self._last_line = now
            self.note(self.step_line(metrics))
        if self.show_rollouts_every and step % self.show_rollouts_every == 0:
            shown = sample_rollouts(step, record.groups, self.wording.prompt)
            self._print(shown, soft_wrap=not self.console.is_terminal)
        for finding in found:
            self.note(finding.line)
        self._draw(now=step == self.total_steps)

    def resume(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Continue after `step`, from the earlier steps' records of `covey.tracking.run_store.read_metrics`."""
        for record in records:
            self._take_in(record["step"], record)
        self.step = step

    def _take_in(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        measured = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self.step, self.metrics = step, self.metrics | measured
        for name, values in self.history.items():
            if name in measured:
                values.append(measured[name])
        return self.diagnosis.add(step, metrics)

    def note(self, text: str) -> None:
        """Print a permanent line, such as a warning, wrapped between words without breaking commands."""
        self._print(Text(fitted(text, self.console.width if self.console.is_terminal else None)), soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar for `total` items; call the yielded function with the number of items just finished."""
        bar = _Bar(label, total, self._moved)
        self._bars.append(bar)
        if not self.is_live and not self.wording.quick:
            self.note(f"{label} ...")
        try:
            yield bar.advance
        finally:
            self._bars.remove(bar)
        seconds = time.monotonic() - bar.began
        if not self.is_live and (not self.wording.quick or seconds >= QUIET_SECONDS):
            self.note(f"{label}: done in {seconds:.1f} s")
        self._last_record += seconds  # an evaluation does not count as time of a step

    def _moved(self, bar: _Bar) -> None:
        now = time.monotonic()
        if self.is_live:
            self._draw(now=False)
        elif now - bar.told >= PROGRESS_SECONDS and bar.done < bar.total:
            bar.told = now
            self.note(f"{bar.label}: {bar.state()}")

    def show_answer(self, group: RolloutGroup) -> None:
        """Show one of the first answers of a run, while others are sampled. They are not graded yet."""
        if self._answers_left and not self.step:
            self._answers_left -= 1
            question, answer = readable(last_turn(group.start.prompt)), readable(group.rollouts[0].text)
            text = Text().append(f"  {self.wording.prompt:<9} {question}\n", "dim").append(f"  {'answer':<9} ", "dim")
            self._print(text.append(answer or "(nothing)"), soft_wrap=not self.console.is_terminal)

    def show_summary(self, summary: dict[str, Any], advice: str) -> None:
        """Show the end of a run: evaluations before and after, cost, diagnosis, and advice."""
        self._print(Group(before_after_table(summary), *by_kind_tables(summary)))
        for line in (cost_line(summary), conclusion(summary), advice):
            self.note(line)

    def seconds_left(self) -> float | None:
        """Remaining time, estimated from the last steps; None before the first."""
        if not self._pace:
            return None
        by_steps = (self.total_steps - self.step) * sum(self._pace) / len(self._pace)
        return min(by_steps, self.seconds_budgeted())

    def step_line(self, metrics: Mapping[str, float]) -> str:
        """One line for the last step, from its metrics."""
        width = len(str(self.total_steps))
        parts = [f"step {self.step:>{width}}/{self.total_steps}"]
        parts += [f"{shown.label} {text}" for shown in self.wording.shown if (text := written(shown, metrics))]
        left = self.seconds_left()
        return "  ".join(parts + ([f"left {clock(left)}"] if left is not None else []))

    def _print(self, what: RenderableType, *, soft_wrap: bool = False) -> None:
        if self._notebook is not None:
            self._kept.append(what)
            self._draw()
            return
        self.console.print(what, soft_wrap=soft_wrap)
        if not self.is_live:
            self.console.file.flush()  # so that `tail -f` on a log shows a finished step

    def _draw(self, *, now: bool = True) -> None:
        if self._notebook is not None:
            self._notebook.draw(self._render(), now=now)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._panel()] if self.total_steps else []
        return Group(*parts, *(bar.render() for bar in self._bars), *self._kept)

    def _panel(self) -> Panel:
        left = self.seconds_left()
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_row(
            Text(f"step {self.step}/{self.total_steps}", "bold"),
            ProgressBar(total=self.total_steps, completed=self.step, complete_style="green", finished_style="green"),
            Text("time left --:--" if left is None else f"time left {clock(left)}", "cyan"),
        )
        numbers = Table.grid(padding=(0, 2))
        for _ in range(3):
            numbers.add_column(style="dim", no_wrap=True)
            numbers.add_column(justify="right", no_wrap=True, min_width=7)
        texts = [(shown.label, written(shown, self.metrics)) for shown in self.wording.shown]
        cells = [(label, Text(text or "-", "bold")) for label, text in texts if text or not self.metrics]
        for row in range(0, len(cells), 3):
            numbers.add_row(*(part for cell in cells[row : row + 3] for part in cell))
        body: list[RenderableType] = [head, Text(), numbers]
        drawn = [(name, shown) for name in self.history for shown in self.wording.shown if shown.metrics == (name,)]
        for (name, shown), color in zip(drawn, ("green", "blue"), strict=True):
            values = self.history[name]
            if len(values) > 1:
                line = Text().append(f"{shown.label:<11}", "dim").append(sparkline(values), color)
                body.append(line.append(f"  from {shown.write(values[0])} to {shown.write(values[-1])}", "dim"))
        return Panel(Group(*body), title=self.title, title_align="left", border_style="dim", padding=(0, 1))


class _Bar:
    """A progress bar below the panel."""

    def __init__(self, label: str, total: int, moved: Callable[[_Bar], None]) -> None:
        self.label, self.total, self.done, self._moved = label, total, 0, moved
        self.began = self.told = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        self._moved(self)

    def state(self) -> str:
        """Items done, and the time left."""
        left = clock((time.monotonic() - self.began) / self.done * (self.total - self.done)) if self.done else "--:--"
        return f"{self.done}/{self.total}  left {left}"

    def render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(Text(self.label), ProgressBar(self.total, self.done), Text(self.state(), "cyan"))
        return grid


def written(shown: Shown, metrics: Mapping[str, float]) -> str:
    """The text of a number; empty if it was not measured."""
    values = [metrics[name] for name in shown.metrics if name in metrics]
    return shown.write(sum(values)) if len(values) == len(shown.metrics) else ""


def sample_rollouts(step: int, groups: Sequence[RolloutGroup], prompt: str = "prompt") -> Text:
    """The best and the worst rollout of the group with the largest spread of rewards."""
    graded = [(group, [r for r in group.rollouts if r.reward is not None]) for group in groups]
    graded = [(group, rollouts) for group, rollouts in graded if rollouts]
    if not graded:
        return Text(f"  step {step}: no rollout was graded")
    group, rollouts = max(graded, key=lambda pair: _spread(pair[1]))
    best, worst = max(rollouts, key=_reward), min(rollouts, key=_reward)
    text = Text().append(f"  {prompt:<9} {readable(last_turn(group.start.prompt))}\n", "dim")
    shown = [("best", best, "green"), ("worst", worst, "red")] if best is not worst else [("all", best, "yellow")]
    for number, (label, rollout, style) in enumerate(shown):
        text.append(f"  {label:<9} ", "dim")
        text.append(readable(rollout.text) or "(nothing)", style)
        text.append(f"  reward {_reward(rollout):g}", "bold")
        text.append("\n" if number + 1 < len(shown) else "")
    return text


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.reward is None else rollout.reward


def _spread(rollouts: Sequence[Rollout]) -> float:
    rewards = [_reward(rollout) for rollout in rollouts]
    return max(rewards) - min(rewards)


def last_turn(prompt: Any) -> str:
    """The question: the last user message of a chat, or the prompt itself."""
    if isinstance(prompt, (list, tuple)):
        turns = [turn for turn in prompt if isinstance(turn, dict)]
        asked = [turn for turn in turns if turn.get("role") == "user"] or turns
        return str(asked[-1].get("content", "")) if asked else ""
    return str(prompt)


def readable(text: str) -> str:
    """A model's text on one line, truncated, without control characters."""
    text = printable(" ⏎ ".join(text.strip().splitlines()))
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 2] + " …"


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draw values in at most `width` characters, each the mean of an equal part of the values.

    The height is their range, and at least a tenth of the largest, so that noise does not look like a change.
    """
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means)
    height = max(max(means) - low, LEAST_HEIGHT * max(map(abs, means))) or 1.0
    return "".join(BLOCKS[min(int((mean - low) / height * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


def clock(seconds: float) -> str:
    """372.4 as 6:12."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def before_after_table(summary: dict[str, Any]) -> Table:
    """The evaluations before and after training, one row each."""
    wording = find_wording(summary)
    measured = wording.count_measured(summary["evaluations"][0]["after"]["count"])
    table = Table(title=wording.table_title.format(measured=measured), title_style="bold")
    table.add_column(wording.case, justify="right")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    table.add_column("change", justify="right")
    for evaluation in summary["evaluations"]:
        before, after = evaluation["before"], evaluation["after"]
        style = "green" if is_above(after, before) else "red" if is_above(before, after) else "yellow"
        table.add_row(
            wording.case_of(summary, evaluation),
            wording.kind.write_interval(before),
            wording.kind.write_interval(after),
            Text(wording.kind.write_change(after["score"] - before["score"]), style),
        )
    return table


def by_kind_tables(summary: dict[str, Any]) -> list[Table]:
    """A table with the scores of every kind of problem at the token limit of training; [] if there are no kinds."""
    evaluation, kind = summary["evaluations"][0], find_wording(summary).kind
    kinds = results_by_kind(*(evaluation[when].get("by_kind") for when in ("before", "after")))
    return [by_kind_table(kinds, kind)] if kinds else []


def by_kind_table(kinds: Sequence[Mapping[str, Any]], kind: ScoreKind) -> Table:
    """The scores of every kind of problem, as `results_by_kind` gives them, before and after training."""
    table = Table("kind of problem", title="By kind of problem", title_style="bold")
    for name in ("problems", "before", "after"):
        table.add_column(name, justify="right", style="bold" if name == "after" else None)
    for each in kinds:
        before, after = each["before"], each["after"]
        table.add_row(
            Text(printable(each["kind"])),
            count_of_kind(each),
            "-" if before is None else kind.write(before["score"]),
            "-" if after is None else kind.write_interval(after),
        )
    return table


def count_of_kind(result: Mapping[str, Any]) -> str:
    """The number of problems of one of `results_by_kind`."""
    count = (result["after"] or result["before"])["count"]
    return "-" if count is None else f"{count:,.0f}"


def cost_line(summary: dict[str, Any]) -> str:
    """Time, decisions and memory of the run, and its folder."""
    return (
        f"{plural(summary['steps'], 'step')} in {clock(summary['seconds'])}, {find_wording(summary).cost(summary)}, "
        f"peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB. Everything is in {summary['run_dir']}"
        f"{describe_size(Path(summary['run_dir']))}"
    )


def describe_size(run_dir: Path) -> str:
    """The size of a large run folder, and how to reduce it."""
    size, checkpoints = folder_bytes(run_dir)
    if checkpoints < LARGE_CHECKPOINTS:
        return ""
    return (
        f" ({size_text(size)}, of which {size_text(checkpoints)} checkpoints: {command('runs', 'prune')} keeps the "
        "newest)"
    )


def verdict(summary: dict[str, Any]) -> str:
    """Outcome of a run: reached or short (of the expected return), better, worse or unclear."""
    expected = summary.get("expected_return")
    before, after = summary["evaluations"][0]["before"], summary["evaluations"][0]["after"]
    if expected is not None and after["score"] >= expected:
        return "reached"
    if is_above(after, before):
        return "better" if expected is None else "short"
    return "worse" if is_above(before, after) else "unclear"


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
        counts = [evaluation["after"]["count"] for evaluation in self["evaluations"]]
        title = wording.table_title.format(measured=wording.count_measured(counts[0] if counts else 0))
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
