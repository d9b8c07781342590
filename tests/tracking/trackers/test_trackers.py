"""The parts of trackers that are the same for all packages: fields, rows, threads, positions."""

import html
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.config import ArithmeticConfig, ConfigError, ControlConfig, EnvironmentConfig, RunConfig
from covey.config.rules import validate
from covey.data import Group
from covey.experiment.advice import Launch
from covey.experiment.job import _trackers
from covey.tracking import trackers as observer
from covey.tracking.console import Display
from covey.tracking.run_store import RunStore
from covey.tracking.trackers import (
    CHARACTERS,
    COLUMNS,
    NEW,
    Position,
    Row,
    TensorBoardTracker,
    TrackedRun,
    Trackers,
    as_markdown,
    flat,
    has_table,
    rows_of,
)
from helpers.graded import group, start
from helpers.step_records import step_record

AGENT = ControlConfig(steps=5, environment=EnvironmentConfig("CartPole-v1"), trackers=("tensorboard",))


@pytest.mark.parametrize("config", [RunConfig(task=ArithmeticConfig()), AGENT])
def test_a_missing_package_is_refused_with_its_extra(config: RunConfig | ControlConfig) -> None:
    with pytest.raises(ConfigError, match=r'^trackers: mlflow needs a package: pip install "covey\[mlflow\]"$'):
        validate(replace(config, trackers=("tensorboard", "mlflow")))


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes to a folder `wandb` of the working folder."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="wandb needs a package"):
        validate(replace(AGENT, trackers=("wandb",)))


def test_a_tracker_is_named_once_and_known() -> None:
    validate(AGENT)
    with pytest.raises(ConfigError, match="trackers has tensorboard twice"):
        validate(replace(AGENT, trackers=("tensorboard", "tensorboard")))
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        validate(replace(AGENT, trackers=("tensorbord",)))


def test_only_rank_0_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunStore(tmp_path / "run") as store:
        for rank, expected in (("0", ["tensorboard"]), ("1", [])):
            monkeypatch.setenv("RANK", rank)
            trackers = _trackers(AGENT, store, Launch.from_python("x", None, ()), Display())
            assert list(trackers._adapters) == expected


def graded(of: int, rewards: Sequence[float | None]) -> Group:
    made = group(start(of), *(f"text {reward}" for reward in rewards))
    for rollout, reward in zip(made.rollouts, rewards, strict=True):
        rollout.reward = reward
    return made


def test_rows_are_the_best_and_the_worst_of_the_groups_that_differ_most() -> None:
    groups = [graded(0, [1, 1, 1]), graded(1, [0.5, None, 0, 2]), graded(2, [None]), graded(3, [0, 1])]
    shown = [
        (row[COLUMNS.index("group")], row[COLUMNS.index("reward")]) for row in rows_of(step_record(7, groups=groups))
    ]
    assert shown == [(1, 2), (1, 0), (3, 1), (3, 0), (0, 1)]
    assert {row[0] for row in rows_of(step_record(7, groups=groups))} == {7}
    assert len(rows_of(step_record(7, groups=[graded(index, [0, 1]) for index in range(30)]))) == 8
    groups[1].rollouts[3].text = "x" * 10_000
    assert len(rows_of(step_record(7, groups=groups))[0][COLUMNS.index("completion")]) == CHARACTERS


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (12, 12), (50, 50), (60, 31), (10_000, 51)])
def test_the_number_of_tables_is_bounded(steps: int, count: int) -> None:
    shown = [step for step in range(1, steps + 1) if has_table(step, steps)]
    assert len(shown) == count
    assert shown[0] == 1
    assert shown[-1] == steps


HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a | b |\n| c |", "**b** _i_ `c` ~~d~~", "# head",
    "[x](javascript:alert(1))", "![x](http://127.0.0.1/x)", "http://127.0.0.1/x", "&lt;b&gt; &amp; \\",
    "```\ncode\n```",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")  # TensorBoard's copy of bleach
@pytest.mark.parametrize("text", HOSTILE)
def test_tensorboard_shows_a_completion_as_it_is(text: str) -> None:
    """Rendered by TensorBoard's own function."""
    from tensorboard.plugin_util import markdown_to_safe_html

    shown = markdown_to_safe_html(as_markdown(("step", "completion"), [(1, text)]).encode())
    assert set(re.findall(r"<\s*/?\s*([a-z0-9]+)", shown)) == {"table", "thead", "tbody", "tr", "th", "td"}
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", shown, re.DOTALL)]
    assert cells == ["1", text.replace("\n", " ⏎ ")]


def test_tensorboard_reads_a_step_once_if_the_position_is_a_step_old(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = TrackedRun(tmp_path, "run", "recipe", {"seed": 1})
    for position, steps in ((None, (0, 1, 2, 3)), (Position("tensorboard", 2), (3, 4))):
        writer = TensorBoardTracker()
        writer.start(run, position)
        for step in steps:
            writer.log(step, {"a/b": step / 4}, [])
        writer.finish(None)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a/b")] == [(step, step / 4) for step in range(5)]


def test_nested_tables_become_one() -> None:
    tables = {"a": 1, "b": {"c": [1, 2], "d": {}}, "rewards": [{"name": "x"}, {"name": "y"}]}
    assert flat(tables) == {"a": 1, "b.c": [1, 2], "rewards.1.name": "x", "rewards.2.name": "y"}


class Listing:
    """A tracker that lists what it is given, or blocks, or fails, at a step."""

    def __init__(self, *, at: int = -2, do: Callable[[], Any] = lambda: None) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.begun: Position | None = None
        self.ended: list[Any] = []
        self.at, self.do = at, do

    def start(self, run: TrackedRun, position: Position | None) -> Position:
        self.begun = position
        return position or Position("own")

    def log(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        self.steps.append((step, dict(metrics)))
        if step == self.at:
            self.do()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.ended.append(summary)


def fail(summary: Any = None) -> None:
    raise OSError("no space")


SUMMARY = {"steps": 5, "evaluations": [{"before": {"score": 0.25}, "after": {"score": 0.75}}]}


def track(folder: Path, tracker: Listing, steps: range, *, begun: int = 0, summary: Any = None) -> list[str]:
    """Record steps, with the run store before the tracker as in a run; returns the notes for the user."""
    notes: list[str] = []
    with RunStore(folder, resume=begun > 0) as store:
        (folder / "config.toml").touch()
        run = TrackedRun(folder / "trackers", "run", "recipe", {})
        with Trackers({"listing": tracker}, run, store, AGENT, notes.append) as trackers:
            trackers.begin({"eval/score": 0.25}, begun)
            for step in steps:
                metrics = {"reward/mean": step / 8, "odd": float("nan")}
                for one in (store, trackers):
                    one.record(step_record(step, metrics, [graded(0, [0, 1])]))
            if summary:
                trackers.finish(summary, {"eval/score": 0.75})
    return notes


def test_every_step_is_logged_once_from_the_evaluation_before_to_the_one_after(tmp_path: Path) -> None:
    tracker = Listing()
    assert track(tmp_path / "run", tracker, range(1, 6), summary=SUMMARY) == []
    steps = [(0, {"eval/score": 0.25}), *((step, {"reward/mean": step / 8}) for step in range(1, 6))]
    assert tracker.steps == [*steps, (5, {"eval/score": 0.75})]
    assert tracker.ended == [SUMMARY]
    assert observer.read_position(tmp_path / "run/trackers/listing.json") == Position("own", 5, True)


def test_a_run_that_goes_on_sends_what_the_tracker_lacks(tmp_path: Path) -> None:
    first, second = Listing(at=2, do=fail), Listing()
    notes = track(tmp_path / "run", first, range(1, 4))
    assert len(notes) == 1
    assert "the tracker listing failed" in notes[0]
    assert "OSError: no space" in notes[0]
    assert first.ended == []
    assert track(tmp_path / "run", second, range(4, 6), begun=3, summary=SUMMARY) == []
    assert second.begun == Position("own", 1)
    assert [step for step, _ in second.steps] == [2, 3, 4, 5, 5]


def test_steps_that_a_resumed_run_repeats_are_not_logged_again(tmp_path: Path) -> None:
    first, second = Listing(), Listing()
    track(tmp_path / "run", first, range(1, 5))
    assert first.ended == [None]
    with RunStore(tmp_path / "run", resume=True) as store:
        store.rewind(2)
    track(tmp_path / "run", second, range(3, 6), begun=2, summary=SUMMARY)
    assert [step for step, _ in second.steps] == [5, 5]
    third = Listing()
    track(tmp_path / "run", third, range(0), begun=5, summary=SUMMARY)
    assert third.steps == [], "the evaluation after training was logged"


def test_the_evaluation_after_training_is_logged_once_if_the_end_is_repeated(tmp_path: Path) -> None:
    """A process that is killed while its tracker uploads the summary: the resumed run evaluates again."""
    first, second = Listing(), Listing()
    first.finish = fail  # type: ignore[method-assign]
    track(tmp_path / "run", first, range(1, 6), summary=SUMMARY)
    assert track(tmp_path / "run", second, range(0), begun=5, summary=SUMMARY) == []
    assert first.steps[-1] == (5, {"eval/score": 0.75})
    assert second.steps == []
    assert second.ended == [SUMMARY]


def test_a_damaged_position_begins_a_new_run_with_all_steps(tmp_path: Path) -> None:
    track(tmp_path / "run", Listing(), range(1, 4))
    for damage in ("", "[]", '{"id": 3, "step": 2, "evaluated": false}', '{"id": "x"', '{"id": "x", "step": "2"}'):
        (tmp_path / "run/trackers/listing.json").write_text(damage)
        tracker = Listing()
        track(tmp_path / "run", tracker, range(0), begun=3)
        assert tracker.begun is None
        assert [step for step, _ in tracker.steps] == [0, 1, 2, 3]


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(observer, "CLOSING_SECONDS", 0.1)
    try:
        notes = track(tmp_path / "run", Listing(at=1, do=go.wait), range(1, 6), summary=SUMMARY)
        assert len(notes) == 1
        assert "has not taken all steps" in notes[0]
        monkeypatch.setattr(observer, "WAITING_STEPS", 2)
        notes = track(tmp_path / "other", Listing(at=0, do=go.wait), range(1, 30), summary=SUMMARY)
        assert len(notes) == 1
        assert "steps behind" in notes[0]
    finally:
        go.set()


def test_a_tracker_that_exits_does_not_end_the_run(tmp_path: Path) -> None:
    def leave() -> None:
        raise SystemExit(3)

    notes = track(tmp_path / "run", Listing(at=NEW + 1, do=leave), range(1, 3))
    assert len(notes) == 1
    assert "SystemExit" in notes[0]
