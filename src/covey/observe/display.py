"""What a person sees while a run goes on: a live panel on a terminal, one line a step anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # covey.data imports torch, which a mistake in a recipe must not wait for
    from covey.data import Group as RolloutGroup
    from covey.data import Rollout

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24
PACE_STEPS = 20  # the time left is told from the pace of the last steps
SHOWN_CHARACTERS = 400  # of a prompt or a completion

# metric, label, how to write its value
SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", lambda value: f"{value:.3f}"),
    ("score/mean", "accuracy", lambda value: f"{value:.1%}"),
    ("kl", "KL", lambda value: f"{value:.4f}"),
    ("entropy", "entropy", lambda value: f"{value:.3f}"),
    ("length/mean", "length", lambda value: f"{value:.1f}"),
    ("groups/dead_share", "dead groups", lambda value: f"{value:.0%}"),
    ("decisions_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
)
DRAWN = ("score/mean", "reward/mean")  # those with a sparkline in the panel


class Display:
    """Shows a run. An `Observer` of the loop and a context manager.

    With `total_steps` 0 there is no panel: only notes and progress bars, for commands that do not train.
    """

    def __init__(
        self,
        total_steps: int = 0,
        show_rollouts_every: int = 0,
        *,
        title: str = "covey",
        finished_steps: int = 0,
        console: Console | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.show_rollouts_every = show_rollouts_every
        self.title = title
        self.step = finished_steps
        self.console = console or Console()
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.metrics: dict[str, float] = {}
        self.history: dict[str, list[float]] = {name: [] for name in DRAWN}
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._last_record = time.monotonic()
        self._bars: list[_Bar] = []
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self.is_live:
            self._live.start()
        self._last_record = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self._live.stop()

    def record(self, step: int, metrics: dict[str, float], groups: Sequence[RolloutGroup]) -> None:
        """Show a finished step, and every `show_rollouts_every` steps two of its rollouts."""
        now = time.monotonic()
        self._pace.append(now - self._last_record)
        self._last_record = now
        self.step, self.metrics = step, metrics
        for name, values in self.history.items():
            if math.isfinite(metrics.get(name, math.nan)):
                values.append(metrics[name])
        if not self.is_live:
            self._print(Text(self.step_line()))
        if self.show_rollouts_every and step % self.show_rollouts_every == 0:
            self._print(sample_rollouts(step, groups))

    def note(self, text: str) -> None:
        """A line that stays: what the run is doing, or what went wrong."""
        self._print(Text(text))

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for `total` items of work; call what it yields with the number of items just finished."""
        bar = _Bar(label, total)
        self._bars.append(bar)
        if not self.is_live:
            self._print(Text(f"{label} ..."))
        try:
            yield bar.advance
        finally:
            self._bars.remove(bar)
        seconds = time.monotonic() - bar.began
        if not self.is_live:
            self._print(Text(f"{label}: done in {seconds:.1f} s"))
        self._last_record += seconds  # an evaluation is no part of a step's pace

    def show_summary(self, summary: dict[str, Any]) -> None:
        """The end of a run: before and after, what it cost, and what to try next."""
        self.console.print(before_after_table(summary))
        self._print(Text(cost_line(summary)))
        self._print(Text(next_step(summary)))

    def seconds_left(self) -> float | None:
        """By the pace of the last steps; None before the first."""
        if not self._pace:
            return None
        return (self.total_steps - self.step) * sum(self._pace) / len(self._pace)

    def step_line(self) -> str:
        """The last step on one line."""
        width = len(str(self.total_steps))
        parts = [f"step {self.step:>{width}}/{self.total_steps}"]
        parts += [f"{label} {write(self.metrics[name])}" for name, label, write in SHOWN if name in self.metrics]
        if "eval/score" in self.metrics:
            parts.append(f"held-out {self.metrics['eval/score']:.1%}")
        left = self.seconds_left()
        return "  ".join(parts + ([f"left {clock(left)}"] if left is not None else []))

    def _print(self, what: RenderableType) -> None:
        self.console.print(what, soft_wrap=True)  # a command that is too long for the window can still be copied
        if not self.is_live:
            self.console.file.flush()  # a log that is followed shows a step when it is finished

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._panel()] if self.total_steps else []
        return Group(*parts, *(bar.render() for bar in self._bars))

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
        cells = [
            (label, Text(write(self.metrics[name]) if name in self.metrics else "-", "bold"))
            for name, label, write in SHOWN
        ]
        if "eval/score" in self.metrics:
            cells.append(("held-out", Text(f"{self.metrics['eval/score']:.1%}", "bold green")))
        for row in range(0, len(cells), 3):
            numbers.add_row(*(part for cell in cells[row : row + 3] for part in cell))
        body: list[RenderableType] = [head, Text(), numbers]
        labels = {name: label for name, label, _ in SHOWN}
        for name in DRAWN:
            if len(self.history[name]) > 1:
                line = Text().append(f"{labels[name]:<9}", "dim")
                values = self.history[name]
                line.append(sparkline(values), "green" if name == "score/mean" else "blue")
                body.append(line.append(f"  from {values[0]:.2f} to {values[-1]:.2f}", "dim"))
        return Panel(Group(*body), title=self.title, title_align="left", border_style="dim", padding=(0, 1))


class _Bar:
    """One line of progress under the panel."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.began = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count

    def render(self) -> RenderableType:
        seconds = time.monotonic() - self.began
        left = clock(seconds / self.done * (self.total - self.done)) if self.done else "--:--"
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(
            Text(self.label), ProgressBar(self.total, self.done), Text(f"{self.done}/{self.total}  left {left}", "cyan")
        )
        return grid


def sample_rollouts(step: int, groups: Sequence[RolloutGroup]) -> Text:
    """The best and the worst rollout of the group whose rewards differ most: what the step could learn from."""
    graded = [(group, [r for r in group.rollouts if r.reward is not None]) for group in groups]
    graded = [(group, rollouts) for group, rollouts in graded if rollouts]
    if not graded:
        return Text(f"  step {step}: no rollout was graded")
    group, rollouts = max(graded, key=lambda pair: _spread(pair[1]))
    best, worst = max(rollouts, key=_reward), min(rollouts, key=_reward)
    text = Text().append(f"  prompt    {readable(last_turn(group.start.prompt))}\n", "dim")
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
    """What was asked: the last user message of a chat, or the prompt itself."""
    if isinstance(prompt, (list, tuple)):
        turns = [turn for turn in prompt if isinstance(turn, dict)]
        asked = [turn for turn in turns if turn.get("role") == "user"] or turns
        return str(asked[-1].get("content", "")) if asked else ""
    return str(prompt)


def readable(text: str) -> str:
    """Text from a model on one line, short, and without characters that could command the terminal."""
    text = printable(" ⏎ ".join(text.strip().splitlines()))
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 2] + " …"


def printable(text: str) -> str:
    """Text from a model without characters that could command the terminal; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """The course of a number in a few characters: at most `width`, each the mean of its share of the values."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[min(int((mean - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


def clock(seconds: float) -> str:
    """372.4 as 6:12."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(result: dict[str, float]) -> str:
    """An accuracy with its 95 % interval: '9.4% (6.4 to 13.6)'."""
    return f"{result['score']:.1%} ({100 * result['low']:.1f} to {100 * result['high']:.1f})"


def before_after_table(summary: dict[str, Any]) -> Table:
    """Held-out accuracy before and after training, at every token limit that was reported."""
    evaluations = summary["evaluations"]
    problems = evaluations[0]["after"]["count"] if evaluations else 0
    table = Table(title=f"Held-out accuracy on {problems} problems, greedy answers (95 % interval)", title_style="bold")
    table.add_column("token limit", justify="right")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    table.add_column("change", justify="right")
    for evaluation in evaluations:
        before, after = evaluation["before"], evaluation["after"]
        change = 100 * (after["score"] - before["score"])
        style = "green" if after["low"] > before["high"] else "red" if after["high"] < before["low"] else "yellow"
        table.add_row(
            str(evaluation["max_new_tokens"]), percent(before), percent(after), Text(f"{change:+.1f} points", style)
        )
    return table


def cost_line(summary: dict[str, Any]) -> str:
    """What the run took, and where it lies."""
    return (
        f"{summary['steps']} steps in {clock(summary['seconds'])}, {summary['decisions_sampled']:,} tokens sampled, "
        f"peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB. Everything is in {summary['run_dir']}"
    )


def next_step(summary: dict[str, Any]) -> str:
    """One suggestion, by what the first evaluation showed."""
    run_dir, recipe, steps = summary["run_dir"], summary["recipe"], summary["steps"]
    before, after = summary["evaluations"][0]["before"], summary["evaluations"][0]["after"]
    if after["low"] > before["high"]:
        return f"The policy got better. Next: see how sure it is with: covey eval {run_dir} --samples 16"
    if after["high"] < before["low"]:
        return f"The policy got worse. Next: lower the learning rate: covey train {recipe} --learning-rate 3e-6"
    return (
        "The intervals overlap, so the change may be chance. Next: train for longer: "
        f"covey train {recipe} --steps {2 * steps}"
    )
