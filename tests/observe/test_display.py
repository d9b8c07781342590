"""What a person sees: plain lines in a log, a panel on a terminal, and nothing from a model that commands either."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from covey.config import ConfigError
from covey.data import EndReason, Group, Rollout, Start
from covey.observe.curve import draw_curve, smooth
from covey.observe.display import Display, clock, last_turn, next_step, printable, readable, sparkline
from covey.observe.run_store import RunStore

METRICS = {
    "reward/mean": 0.4375,
    "score/mean": 0.375,
    "kl": 0.0123,
    "entropy": 0.81,
    "length/mean": 6.25,
    "groups/dead_share": 0.5,
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
        display.record(3, METRICS, groups())
        display.record(4, {"reward/mean": 0.5}, groups())
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
        display.record(1, METRICS, groups())
        assert "best" not in written(display)
        display.record(2, METRICS, groups())
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
        display.record(1, {}, failed)
    assert "no rollout was graded" in written(display)


def test_a_terminal_gets_a_panel_with_the_numbers() -> None:
    display = Display(20, console=console(terminal=True), title="covey · demo")
    with display:
        display.record(1, {**METRICS, "score/mean": 0.1}, groups())
        display.record(2, {**METRICS, "eval/score": 0.61}, groups())
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
        "world": "language",
        "run_dir": "runs/demo-001",
        "recipe": "demo",
        "seed": 0,
        "steps": 60,
        "seconds": 1310.2,
        "decisions_sampled": 184320,
        "peak_memory_bytes": 3 * 2**30,
        "evaluations": [{"max_new_tokens": 12, "before": first, "after": second}],
    }


def test_the_end_shows_before_and_after_and_what_to_try() -> None:
    display = Display(60, console=console())
    display.show_summary(summary((0.09, 0.06, 0.13), (0.62, 0.56, 0.68)))
    text = written(display)
    for part in ("256 problems", "9.0% (6.0 to 13.0)", "62.0% (56.0 to 68.0)", "+53.0 points", "60 steps in 21:50",
                 "184,320 tokens", "3.0 GiB", "runs/demo-001"):  # fmt: skip
        assert part in text
    assert "covey eval runs/demo-001" in text.splitlines()[-1]


def test_the_suggestion_depends_on_the_result() -> None:
    assert "got better" in next_step(summary((0.1, 0.05, 0.2), (0.5, 0.4, 0.6)))
    assert "got worse" in next_step(summary((0.5, 0.4, 0.6), (0.1, 0.05, 0.2)))
    assert "--steps 120" in next_step(summary((0.3, 0.2, 0.4), (0.35, 0.25, 0.45)))


def test_small_writers() -> None:
    assert clock(372.4) == "6:12"
    assert clock(3725) == "1:02:05"
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(list(range(1000)), width=24)) == 24
    assert sparkline([0, 0, 8, 8], width=2) == "▁█"
    assert last_turn("just text") == "just text"
    assert readable("a\nb") == "a ⏎ b"
    assert len(readable("x" * 5000)) == 400
    assert printable("a\n\tb\x1b[31m\x07") == "a\n\tb�[31m�"


def test_smoothing_is_a_mean_that_shrinks_at_the_ends() -> None:
    assert smooth([0.0, 3.0, 6.0, 9.0]) == [1.5, 3.0, 6.0, 7.5]
    assert smooth([5.0]) == [5.0]


def test_the_curve_is_drawn_with_and_without_a_summary(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        draw_curve(tmp_path / "nowhere")
    for step in range(1, 4):
        store.record(step, {"reward/mean": 0.1 * step, "kl": float("nan")}, [])
    unscored = draw_curve(tmp_path).read_bytes()
    assert unscored[:8] == b"\x89PNG\r\n\x1a\n"
    for step in range(4, 9):
        store.record(step, {**METRICS, "score/mean": 0.1 * step, "eval/score": 0.5}, [])
    scored = draw_curve(tmp_path).read_bytes()
    store.write_summary(json.loads(json.dumps(summary((0.09, 0.06, 0.13), (0.62, 0.56, 0.68)))))
    finished = draw_curve(tmp_path).read_bytes()
    assert len({unscored, scored, finished}) == 3  # each adds something that can be seen
