"""The run folder: what is written can be read, and a crash leaves nothing that stops a resumed run.
Steps that are sampled again after a resume are compared with what was recorded."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config import ConfigError
from covey.data import EndReason, Group, Rollout, Start
from covey.tracking import run_store
from covey.tracking.run_store import RepeatedSteps, RunStore, answer_record, digests, read_metrics
from helpers.step_records import step_record

HIDDEN = object()


def group(index: int = 0) -> Group:
    start = Start(index, [{"role": "user", "content": "What is 2 + 2?"}], {"answer": "4", "hidden": HIDDEN})
    rollouts = [
        Rollout((1, 2), [5, 6, 7], [-0.1, -0.2, -0.3], EndReason.STOP, text="4", reward=1.0, score=1.0, version=3,
                reward_parts={"numeric": 1.0}),
        Rollout((1, 2), [5], [-0.1], EndReason.LENGTH, text="\ud83d ü\u2028", reward=None,
                reward_parts={"numeric": math.nan}),
    ]  # fmt: skip
    return Group(start, rollouts)


def test_a_step_is_written_and_read_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    store.record(step_record(12, {"reward/mean": 0.5, "kl": math.nan, "loss": math.inf}, [group(0), group(4)]))
    assert read_metrics(store.run_dir) == [{"step": 12, "reward/mean": 0.5, "kl": None, "loss": None}]
    path = store.run_dir / "rollouts" / "step_000012.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert lines[0] == {
        "step": 12,
        "group": 0,
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "columns": {"answer": "4", "hidden": str(HIDDEN)},
        "text": "4",
        "reward": 1.0,
        "reward_parts": {"numeric": 1.0},
        "score": 1.0,
        "end": "stop",
        "decisions": 3,
        "version": 3,
        "advantage": None,
        "baseline": None,
    }
    assert [line["group"] for line in lines] == [0, 0, 4, 4]
    assert lines[1]["reward"] is None
    assert lines[1]["reward_parts"] == {"numeric": None}
    assert lines[1]["text"] == "\ud83d ü\u2028"
    assert lines[1]["end"] == "length"


def fill(store: RunStore, steps: range) -> None:
    for step in steps:
        store.record(step_record(step, {"reward/mean": float(step)}, [group()]))


def cut_run(folder: Path, metrics: bytes) -> Path:
    """The folder of a run that was killed, with these metrics."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_bytes(metrics)
    return folder


def test_rewind_forgets_later_steps_only(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    fill(store, range(1, 8))
    before = store.rollouts_path(4).read_bytes()
    store.rewind(4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        f"step_{i:06d}.jsonl" for i in range(1, 5)
    ]
    assert store.rollouts_path(4).read_bytes() == before


def test_a_run_cut_at_any_byte_or_by_a_power_cut_resumes_to_the_same_file(tmp_path: Path) -> None:
    with RunStore(tmp_path / "whole") as whole:
        fill(whole, range(1, 6))
    expected = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    kept = b"".join(expected.splitlines(keepends=True)[:2])
    lost = (b"", b"\0\0\n\0\n{", b'{"step": 3, "rew\n{"step": 4}\n')  # what a power cut may leave of later steps
    for left in (*(kept + rest for rest in lost), *(expected[:end] for end in range(len(kept) - 1, len(expected)))):
        cut = cut_run(tmp_path / "cut", left)
        with RunStore(cut, resume=True) as store:
            store.rewind(2)
            fill(store, range(3, 6))
        assert (cut / "metrics.jsonl").read_bytes() == expected


def test_syncing_waits_for_every_file_since_the_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(run_store, "sync", lambda path: synced.append(path.name))
    store = RunStore(tmp_path / "run")
    fill(store, range(1, 3))
    assert synced == []  # a step of control takes less time than the disk
    store.sync()
    assert sorted(synced) == ["metrics.jsonl", "rollouts", "run", "step_000001.jsonl", "step_000002.jsonl"]
    fill(store, range(3, 4))
    synced.clear()
    store.sync()
    assert sorted(synced) == ["metrics.jsonl", "rollouts", "run", "step_000003.jsonl"]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    metrics = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan")}
    store.record(step_record(1, metrics, [Group(Start(0, np.int64(9)), [])]))
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": 3, "c": None}]


NOT_A_STEP = [
    b"{",
    b"",
    b"null",
    b"[" * 100_000,
    b'{"step": true}',
    b'{"step": -1}',
    b'{"step": 2, "loss": "x"}',
    b"\xff\0",
]


@pytest.mark.parametrize("damage", NOT_A_STEP)
def test_a_damaged_line_costs_its_step_and_the_file_is_kept(damage: bytes, tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        fill(store, range(1, 6))
        path = store.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines()
        lines[1] = damage
        path.write_bytes(b"\n".join(lines) + b"\n")
        with pytest.raises(ConfigError, match="line 2 is damaged"):
            read_metrics(store.run_dir)
        (note,) = store.rewind(4)
        assert note == (
            "metrics.jsonl has lost the numbers of step 2; training does not need them (the damaged file is kept as "
            "metrics.jsonl.damaged)"
        )
        assert [line["step"] for line in read_metrics(store.run_dir)] == [1, 3, 4]
        assert (store.run_dir / "metrics.jsonl.damaged").read_bytes() == b"\n".join(lines) + b"\n"


def test_records_that_are_missing_are_named(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        fill(store, range(1, 13))
        assert store.rewind(12) == []
        assert store.last_recorded() == 12
        for step in (2, 5, 6, 7):
            store.rollouts_path(step).unlink()
        store.rollouts_path(9).write_bytes(store.rollouts_path(9).read_bytes()[:-5])
        store.rollouts_path(11).write_bytes(store.rollouts_path(12).read_bytes())
        (store.run_dir / "rollouts" / "step_000099.jsonl").mkdir()
        lines = (store.run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (store.run_dir / "metrics.jsonl").write_bytes(b"".join(lines[3:]))
        assert store.rewind(12) == [
            "metrics.jsonl has lost the numbers of steps 1 to 3; training does not need them",
            "rollouts/ has lost those of steps 2, 5 to 7, 9 and 11; training does not need them",
        ]
        (store.run_dir / "metrics.jsonl").unlink()
        shutil.rmtree(store.run_dir / "rollouts")
        (store.run_dir / "config.toml").write_text("")
        (store.run_dir / "checkpoints" / "step-00000012").mkdir(parents=True)
    with RunStore(tmp_path / "run", resume=True) as store:
        assert len(store.rewind(12)) == 2
        fill(store, range(13, 15))
        assert [line["step"] for line in read_metrics(store.run_dir)] == [13, 14]


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_summary({"score": 0.5, "kl": math.nan})
    store.write_summary({"score": 0.6, "kl": math.nan})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"score": 0.6, "kl": None}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("marks", "undecided"),
    [
        ("ddddd", None),
        ("d..dd", [[1, 3]]),
        ("..dd.", [[0, 2], [4, 5]]),
        (".d.d.", [[0, 1], [2, 3], [4, 5]]),
        ("....d", [[0, 4]]),
    ],
)
def test_undecided_tokens_are_recorded_as_stretches(marks: str, undecided: list[list[int]] | None, tmp_path: Path):
    decided = np.array([mark == "d" for mark in marks])
    plain = Rollout((1,), [5] * 5, [-0.1] * 5, EndReason.STOP, text="4", reward=1.0)
    masked = Rollout((1,), [5] * 5, [-0.1] * 5, EndReason.STOP, text="4", reward=1.0, decided=decided)
    start = Start(0, "2+2=")
    store = RunStore(tmp_path / "run")
    store.record(step_record(1, {"loss": 0.5}, [Group(start, [plain, masked])]))
    store.record_evaluation(1, [answer_record(1, 8, start, rollout) for rollout in (plain, masked)])
    store.close()
    for path, count in ((store.rollouts_path(1), "decisions"), (store.held_out_path(1), "tokens")):
        without, with_mask = map(json.loads, path.read_text().splitlines())
        assert with_mask[count] == int(decided.sum())
        spans = with_mask.pop("undecided", None)
        assert spans == undecided
        assert "undecided" not in without
        assert without[count] == 5
        assert with_mask | {count: 5} == without
        assert [not any(a <= t < b for a, b in spans or []) for t in range(5)] == decided.tolist()


def record(store: RunStore, step: int, repeated: RepeatedSteps | None = None, **changes: Any) -> None:
    """A step with other objects of the user's in its columns and extras every time."""
    start = Start(0, "What is 2 + 2?", {"answer": "4", "mine": object()})
    rollout = Rollout((1, 2), [5, 6], [-0.1, -0.2], EndReason.STOP, text="4", reward=1.0, score=1.0)
    rollout.extras = {"mine": object()}
    one = step_record(step, {}, [Group(start, [rollout, replace(rollout, **changes)])])
    for observer in (store, repeated):
        if observer:
            observer.record(one)


def resumed(store: RunStore, step: int) -> tuple[RepeatedSteps, list[str]]:
    notes: list[str] = []
    store.rewind(step)
    return RepeatedSteps(store.removed, store.rollouts_path, notes.append), notes


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path)
    for step in range(1, 7):
        record(store, step)
    return store


def test_repeated_steps_and_new_ones_are_not_mentioned(store: RunStore) -> None:
    repeated, notes = resumed(store, 3)
    assert set(store.removed) == {4, 5, 6}
    for step in range(4, 9):
        record(store, step, repeated)
    assert not notes


@pytest.mark.parametrize(
    ("changes", "keys"), [({"text": "other"}, "text"), ({"reward": 7.0, "score": 7.0}, "reward, score")]
)
def test_the_first_different_step_is_named_with_what_differs(
    store: RunStore, changes: dict[str, object], keys: str
) -> None:
    repeated, notes = resumed(store, 3)
    record(store, 4, repeated)
    record(store, 5, repeated, **changes)
    record(store, 6, repeated, **changes)
    assert len(notes) == 1
    assert notes[0].startswith("step 5 was sampled again, and its rollouts differ from those that were recorded before")
    assert f"(in {keys})" in notes[0]


def test_the_order_of_rollouts_is_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"text": "1"}\n{"text": "2"}\n')
    (tmp_path / "b").write_text('{"text": "2"}\n{"text": "1"}\n')
    assert digests(tmp_path / "a") != digests(tmp_path / "b")


def test_what_is_damaged_missing_or_not_complete_is_not_compared(store: RunStore) -> None:
    store.rollouts_path(4).write_text('{"step": 4}\n{"st')
    store.rollouts_path(5).unlink()
    store.rollouts_path(7).write_text('{"step": 7}\n')  # no metrics of the step follow
    repeated, notes = resumed(store, 3)
    for step in range(4, 8):
        record(store, step, repeated)
    assert not notes
