"""What a person sees: plain lines in a log, a panel on a terminal, and nothing from a model that commands either."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from covey.data import EndReason, Group, Rollout, Start
from covey.tracking.console import Display, clock, last_turn, printable, readable, sparkline, verdict
from covey.tracking.curve import draw_curve, smooth, thinned
from covey.tracking.run_store import RunStore
from covey.tracking.wording import number
from helpers.step_records import step_record

METRICS = {
    "reward/mean": 0.4375,
    "score/mean": 0.375,
    "kl": 0.0123,
    "entropy": 0.81,
    "length/mean": 6.25,
    "groups/zero_advantage_fraction": 0.5,
    "decisions_per_second": 1234.0,
}


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, height=40, legacy_windows=False)


def written(display: Display) -> str:
    file = display.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def groups() -> list[Group]:
    def rollout(text: str, reward: float | None) -> Rollout:
        return Rollout((1,), [1], [-1.0], EndReason.STOP, text=text, reward=reward)

    alike = Group(Start(0, "boring"), [rollout("a", 0.5), rollout("b", 0.5)])
    chat = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "x"},
            {"role": "user", "content": "What is [bold]2 + 2[/bold]?"}]  # fmt: skip
    mixed = Group(Start(1, chat), [rollout("broken", None), rollout("\x1b[2J5", 0.0), rollout("4", 1.0)])
    return [alike, mixed]


def test_a_log_gets_one_line_a_step() -> None:
    display = Display(20, console=console())
    with display:
        display.record(step_record(3, METRICS, groups()))
        display.record(step_record(4, {"reward/mean": 0.5}, groups()))
    lines = written(display).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "step  3/20  reward 0.438  accuracy 37.5%  KL 0.0123  entropy 0.810  length 6.2  dead groups 50%"
    )
    assert lines[0].endswith("tokens/s 1,234  left 0:00")
    assert lines[1].startswith("step  4/20  reward 0.500  left")
    assert "\x1b" not in written(display)


def test_rollouts_are_shown_every_so_many_steps_and_cannot_command_the_terminal() -> None:
    display = Display(20, 2, console=console())
    with display:
        display.record(step_record(1, METRICS, groups()))
        assert "best" not in written(display)
        display.record(step_record(2, METRICS, groups()))
    text = written(display)
    assert "What is [bold]2 + 2[/bold]?" in text  # not taken for markup, and the last turn only
    assert "first" not in text
    assert "boring" not in text  # the group whose rewards differ is the one to see
    assert "best      4  reward 1\n" in text
    assert "worst     �[2J5  reward 0\n" in text
    assert "\x1b" not in text


def test_rollouts_without_any_grade_are_no_error() -> None:
    display = Display(2, 1, console=console())
    failed = [Group(Start(0, "x"), [Rollout((1,), [1], [-1.0], EndReason.STOP)])]
    with display:
        display.record(step_record(1, {}, failed))
    assert "no rollout was graded" in written(display)


def test_a_terminal_gets_a_panel_with_the_numbers() -> None:
    display = Display(20, console=console(terminal=True), title="covey · demo")
    with display:
        display.record(step_record(1, {**METRICS, "score/mean": 0.1}, groups()))
        display.record(step_record(2, {**METRICS, "eval/score": 0.61}, groups()))
        display.note("a note that stays")
    text = written(display)
    for part in ("covey · demo", "step 2/20", "time left", "37.5%", "0.0123", "61.0%", "a note that stays", "▁█"):
        assert part in text
    assert "\x1b" in text  # it was drawn live


def test_progress_bars_count_and_disappear() -> None:
    display = Display(console=console(terminal=True))
    with display, display.progress("held-out problems", 8) as advance:
        advance(3)
        display._live.refresh()
    assert "held-out problems" in written(display)
    assert "3/8" in written(display)
    assert display._bars == []
    plain = Display(console=console())
    with plain, plain.progress("held-out problems", 8):
        pass
    assert [line.split(":")[0] for line in written(plain).splitlines()] == [
        "held-out problems ...",
        "held-out problems",
    ]


def test_a_log_tells_how_far_a_long_evaluation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    display = Display(console=console())
    with display, display.progress("held-out problems", 8) as advance:
        for seconds in (10.0, 20.0, 29.0, 31.0, 40.0, 62.0, 63.0, 99.0):
            now.append(seconds)
            advance(1)
    lines = [line for line in written(display).splitlines() if "left" in line]
    assert lines == ["held-out problems: 4/8  left 0:31", "held-out problems: 6/8  left 0:21"]


@pytest.mark.parametrize(("every", "step", "shown"), [(10, 0, 3), (0, 0, 0), (10, 4, 0)])
def test_the_first_answers_of_a_run_are_shown(every: int, step: int, shown: int) -> None:
    display = Display(20, every, console=console())
    display.resume(step, [])
    for _ in range(5):
        display.show_answer(groups()[0])
    lines = written(display).splitlines()
    assert [sum(label in line for line in lines) for label in ("prompt ", "answer ")] == [shown, shown]


def test_the_time_left_is_at_most_that_of_the_budget() -> None:
    display = Display(10, console=console())
    display.seconds_budgeted = lambda: 5.0
    display._pace.extend([2.0, 4.0])
    assert display.seconds_left() == 5.0


def test_time_left_is_told_from_the_pace() -> None:
    display = Display(10, console=console())
    display.resume(6, [])
    assert display.seconds_left() is None
    display._pace.extend([2.0, 4.0])
    assert display.seconds_left() == pytest.approx(4 * 3.0)


def summary(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, object]:
    keys = ("score", "low", "high")
    first, second = ({**dict(zip(keys, values, strict=True)), "count": 256} for values in (before, after))
    return {
        "domain": "language",
        "score_kind": "accuracy",
        "run_dir": "runs/demo-001",
        "recipe": "demo",
        "seed": 0,
        "steps": 60,
        "seconds": 1310.2,
        "decisions_sampled": 184320,
        "peak_memory_bytes": 3 * 2**30,
        "evaluations": [{"max_new_tokens": 12, "before": first, "after": second}],
        "findings": [],
    }


def test_the_end_shows_before_and_after_and_what_to_try() -> None:
    display = Display(60, console=console())
    display.show_summary(summary((0.09, 0.06, 0.13), (0.62, 0.56, 0.68)), "Next: covey eval runs/demo-001")
    text = written(display)
    for part in ("256 problems", "9.0% (6.0 to 13.0)", "62.0% (56.0 to 68.0)", "+53.0 points", "60 steps in 21:50",
                 "184,320 tokens", "3.0 GiB", "runs/demo-001", "checks found a fault in 60 steps"):  # fmt: skip
        assert part in text
    assert "covey eval runs/demo-001" in text.splitlines()[-1]


CONTROL_METRICS = {
    "reward/mean": 3.5,
    "score/mean": 213.44,
    "environment/episodes": 120.0,
    "environment/steps": 12800.0,
    "entropy": 0.61,
    "clip/low": 0.01,
    "clip/high": 0.025,
    "decisions_per_second": 31000.0,
}


def control_summary(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, Any]:
    first, second = (dict(zip(("score", "low", "high"), values, strict=True), count=100) for values in (before, after))
    return {
        "domain": "control",
        "score_kind": "return",
        "run_dir": "runs/pole-001",
        "recipe": "my recipes/pole.toml",
        "seed": 7,
        "steps": 300,
        "seconds": 21.4,
        "decisions_sampled": 98304,
        "peak_memory_bytes": 2**29,
        "environment": "CartPole-v1",
        "environment_steps": 98304,
        "episodes": 1210,
        "expected_return": None,
        "evaluations": [{"before": first, "after": second}],
        "findings": [],
    }


def test_control_is_told_in_its_own_words() -> None:
    display = Display(300, domain="control", score_kind="return", console=console())
    with display:
        display.record(step_record(1, CONTROL_METRICS, groups()))
        display.record(step_record(2, CONTROL_METRICS, groups()))  # within the same second
        display.record(step_record(3, {"eval/score": 498.2, "entropy": 0.6}, groups()))
        display.record(step_record(300, {"entropy": 0.5}, groups()))
        with display.progress("evaluation after step 300", 8):
            pass
    lines = [line.partition("  left")[0] for line in written(display).splitlines()]
    assert lines == [
        "step   1/300  return 213.4  episodes 120  environment steps 12,800  entropy 0.610  clipped 3.5%  "
        "steps/s 31,000",
        "step   3/300  evaluation 498.2  entropy 0.600",
        "step 300/300  entropy 0.500",
    ]


def test_the_panel_of_control_keeps_the_last_value_of_what_is_not_measured_at_every_step() -> None:
    display = Display(300, domain="control", score_kind="return", console=console(terminal=True))
    with display:
        display.record(step_record(1, CONTROL_METRICS, groups()))
        display.record(step_record(2, {**CONTROL_METRICS, "score/mean": 300.0, "eval/score": 401.5}, groups()))
        display.record(step_record(3, {"entropy": 0.5}, groups()))
        display._live.refresh()
    last = written(display).rpartition("step 3/300")[2]
    for part in ("300.0", "401.5", "0.500", "from 213.4 to 300.0", "▁█"):
        assert part in last
    assert "KL" not in last


def test_samples_of_control_name_the_seed_and_the_return() -> None:
    def episode(steps: int) -> Rollout:
        text = f"{steps} steps, terminated"
        return Rollout(None, [0] * steps, [0.0] * steps, EndReason.TERMINATED, text, reward=float(steps))

    display = Display(2, 1, domain="control", score_kind="return", console=console())
    display.record(step_record(1, {}, [Group(Start(0, 4711), [episode(9), episode(53)])]))
    assert written(display).splitlines()[1:] == [
        "  seed      4711",
        "  best      53 steps, terminated  reward 53",
        "  worst     9 steps, terminated  reward 9",
    ]


def test_the_end_of_control_shows_returns_and_what_they_cost() -> None:
    display = Display(domain="control", score_kind="return", console=console())
    display.show_summary(control_summary((-1234.5, -1300.0, -1200.0), (0.5, 0.25, 9.0)), "Next: covey eval")
    text = written(display)
    for part in ("Mean return of 100 evaluation episodes", "CartPole-v1", "-1,234.5 (-1,300.0 to -1,200.0)",
                 "0.50 (0.25 to 9.00)", "+1,235.0", "300 steps in 0:21, 98,304 environment steps, 1,210 episodes",
                 "0.5 GiB", "runs/pole-001"):  # fmt: skip
        assert part in text
    assert text.splitlines()[-1] == "Next: covey eval"


def test_a_resumed_run_shows_its_whole_course() -> None:
    display = Display(20, console=console(terminal=True))
    display.resume(3, [{"step": step, "score/mean": step / 10, "kl": None} for step in range(1, 4)])
    with display:
        display.record(step_record(4, {"score/mean": 0.7}, groups()))
        display._live.refresh()
    assert display.history["score/mean"] == [0.1, 0.2, 0.3, 0.7]
    assert "from 10.0% to 70.0%" in written(display)


def test_small_writers() -> None:
    assert [number(value) for value in (0.125, -9.99, 10.0, -12345.67)] == ["0.12", "-9.99", "10.0", "-12,345.7"]
    assert [number(value) for value in (0.0, 0.0421, -0.0042, 1.2e-6)] == ["0.00", "0.042", "-0.0042", "1.20e-06"]
    assert clock(372.4) == "6:12"
    assert clock(3725) == "1:02:05"
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([1.0, 1.01, 1.0, 1.02]) == "▁▁▁▂", "noise"
    assert sparkline([1.0, 1.2]) == "▁█"
    assert len(sparkline(list(range(1000)), width=24)) == 24
    assert sparkline([0, 0, 8, 8], width=2) == "▁█"
    assert last_turn("just text") == "just text"
    assert readable("a\nb") == "a ⏎ b"
    assert len(readable("x" * 5000)) == 400
    assert printable("a\n\tb\x1b[31m\x07") == "a\n\tb�[31m�"


def scored(before: float, after: float, spread: float | None) -> dict[str, Any]:
    """The summary of a run whose reward is not an accuracy, with intervals of this half width, or of one problem."""

    def result(score: float) -> dict[str, Any]:
        ends = (None, None) if spread is None else (score - spread, score + spread)
        return {"score": score, "low": ends[0], "high": ends[1], "count": 1 if spread is None else 12}

    told = summary((0, 0, 0), (0, 0, 0)) | {"score_kind": "score"}
    return told | {"evaluations": [{"max_new_tokens": 12, "before": result(before), "after": result(after)}]}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("before", "after", "spread", "shown"),
    [
        (3900.0, 41.5, 100.25, ("3,900.0 (3,799.8 to 4,000.2)", "41.5 (-58.8 to 141.8)", "-3,858.5")),
        (-0.5, 0.75, 0.125, ("-0.50 (-0.62 to -0.38)", "0.75 (0.62 to 0.88)", "+1.25")),
        (1e-6, 2.5e-6, 1e-7, ("1.00e-06 (9.00e-07 to 1.10e-06)", "2.50e-06 (2.40e-06 to 2.60e-06)", "+1.50e-06")),
        (1e12, 2e12, 1e11, ("1.00e+12 (9.00e+11 to 1.10e+12)", "2.00e+12 (1.90e+12 to 2.10e+12)", "+1.00e+12")),
        (39.0, 12.0, None, ("39.0 (no interval)", "12.0 (no interval)", "-27.0")),
    ],
)
def test_a_score_is_told_as_a_score_at_any_magnitude(
    before: float, after: float, spread: float | None, shown: tuple[str, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    told = scored(before, after, spread)
    display = Display(20, score_kind="score", console=console())
    with display:
        display.record(step_record(1, {"reward/mean": before, "score/mean": before, "eval/score": after}, groups()))
    display.show_summary(told, "")
    store = RunStore(tmp_path)
    for step in range(1, 5):
        store.record(step_record(step, {"score/mean": before * step, "kl": 0.1}))
    store.write_summary(told)
    curve, figure = texts_of(lambda: draw_curve(tmp_path), monkeypatch)
    text = written(display) + curve
    for part in (
        *shown,
        f"score {number(before)}",
        f"held-out {number(after)}",
        "Held-out score on",
        "demo: score while",
    ):
        assert part in text
    assert "%" not in text.replace("95 % interval", "")
    assert "accuracy" not in text
    low, high = figure.axes[0].get_ylim()
    assert low < min(before, after) < max(before, after) < high
    assert ("1 problem," in text) == (spread is None)


def test_one_problem_decides_nothing_about_a_score() -> None:
    assert verdict(scored(39.0, 12.0, None)) == "unclear"
    assert verdict(scored(39.0, 12.0, 1.0)) == "worse"


def test_smoothing_is_a_mean_that_shrinks_at_the_ends() -> None:
    assert smooth([0.0, 3.0, 6.0, 9.0]) == [1.5, 3.0, 6.0, 7.5]
    assert smooth([5.0]) == [5.0]
    values = [float(step % 7) for step in range(50)]
    assert smooth(values)[20] == pytest.approx(sum(values[17:24]) / 7)


def test_a_long_line_keeps_its_peaks() -> None:
    values = [0.0] * 10_000
    values[4321], values[8765] = 5.0, -3.0
    x, kept = thinned(range(10_000), values)
    assert len(x) <= 2000
    assert list(x) == sorted(x)
    assert {(at, value) for at, value in zip(x, kept, strict=True) if value} == {(4321, 5.0), (8765, -3.0)}
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def texts_of(draw: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> tuple[str, Figure]:
    """Everything that is written in a picture, and the picture itself."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **settings: figures.append(figure))
    draw()
    found = [text for axes in figures[0].axes for text in axes.findobj(Text)]
    return "\n".join(text.get_text() for text in found), figures[0]


@pytest.mark.slow
def test_the_curve_of_control_goes_by_environment_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(tmp_path)
    for step in range(1, 9):
        later = {} if step % 2 else {"score/mean": 50.0 * step, "eval/score": 60.0 * step}
        store.record(
            step_record(step, {"environment/steps": 512.0 * step, "entropy": 0.5, "kl/behavior": 0.01, **later})
        )
    text, figure = texts_of(lambda: draw_curve(tmp_path), monkeypatch)
    for part in (
        "environment steps",
        "training return",
        "Entropy",
        "KL of an update",
        "Groups with equal rewards",
        "Time of a step",
        "Gradient norm",
    ):
        assert part in text
    assert "accuracy" not in text
    raw = figure.axes[0].lines[0]
    assert list(raw.get_xdata()) == [1024.0, 2048.0, 3072.0, 4096.0]  # where a return was measured
    store.write_summary(control_summary((20.0, 15.0, 25.0), (490.0, 480.0, 499.0)) | {"expected_return": 475.0})
    store.record(step_record(9, {"environment/steps": 4608.0, "value/explained_variance": -5.0}))
    text, figure = texts_of(lambda: draw_curve(tmp_path), monkeypatch)
    assert [0.0, 1024.0, 2048.0, 3072.0, 4096.0] in [list(line.get_xdata()) for line in figure.axes[0].lines], "joined"
    for part in (
        "expected return, 475",
        "best actions, 100 evaluation episodes",
        "490",
        "20.0",
        "Length of a rollout",
        "Explained variance",
    ):
        assert part in text
    assert figure.axes[5].get_ylim() == (-1.0, 1.0)
    assert figure.axes[0].get_ylim()[1] > 490
