"""The run folder: what is written can be read, and a crash leaves nothing that stops a resumed run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from covey.config import ConfigError
from covey.data import EndReason, Group, Rollout, Start
from covey.observe import run_store
from covey.observe.run_store import RunStore, check_run_dir, next_run_dir, read_metrics


def group(index: int = 0) -> Group:
    start = Start(index, [{"role": "user", "content": "What is 2 + 2?"}], {"answer": "4", "hidden": object()})
    rollouts = [
        Rollout((1, 2), [5, 6, 7], [-0.1, -0.2, -0.3], EndReason.STOP, text="4", reward=1.0, score=1.0, version=3,
                reward_parts={"numeric": 1.0}),
        Rollout((1, 2), [5], [-0.1], EndReason.LENGTH, text="\ud83d ü\u2028", reward=None,
                reward_parts={"numeric": math.nan}),
    ]  # fmt: skip
    return Group(start, rollouts)


def test_a_step_is_written_and_read_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    store.record(12, {"reward/mean": 0.5, "kl": math.nan, "loss": math.inf}, [group(0), group(4)])
    assert read_metrics(store.run_dir) == [{"step": 12, "reward/mean": 0.5, "kl": None, "loss": None}]
    path = store.run_dir / "rollouts" / "step_000012.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert lines[0] == {
        "step": 12,
        "group": 0,
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "text": "4",
        "reward": 1.0,
        "reward_parts": {"numeric": 1.0},
        "score": 1.0,
        "end": "stop",
        "decisions": 3,
        "version": 3,
        "answer": "4",
    }
    assert [line["group"] for line in lines] == [0, 0, 4, 4]
    assert lines[1]["reward"] is None
    assert lines[1]["reward_parts"] == {"numeric": None}
    assert lines[1]["text"] == "\ud83d ü\u2028"
    assert lines[1]["end"] == "length"


def fill(store: RunStore, steps: range) -> None:
    for step in steps:
        store.record(step, {"reward/mean": float(step)}, [group()])


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


def test_a_run_cut_at_any_byte_resumes_to_the_same_file(tmp_path: Path) -> None:
    whole = RunStore(tmp_path / "whole")
    fill(whole, range(1, 6))
    expected = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    two_steps = len(b"".join(expected.splitlines(keepends=True)[:2]))
    for length in range(two_steps - 1, len(expected)):
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "metrics.jsonl").write_bytes(expected[:length])
        store = RunStore(tmp_path / "cut", resume=True)
        store.rewind(2)
        fill(store, range(3, 6))
        assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == expected


def test_what_was_synced_is_enough_to_resume(tmp_path: Path) -> None:
    whole = RunStore(tmp_path / "whole")
    fill(whole, range(1, 6))
    expected = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    kept = b"".join(expected.splitlines(keepends=True)[:2])
    for lost in (b"", b"\0\0\n\0\n{", b'{"step": 3, "rew\n{"step": 4}\n'):  # what a power cut may leave of later steps
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "metrics.jsonl").write_bytes(kept + lost)
        store = RunStore(tmp_path / "cut", resume=True)
        store.rewind(2)
        fill(store, range(3, 6))
        assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == expected


def test_syncing_waits_for_every_file_since_the_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(run_store, "_sync", lambda path: synced.append(path.name))
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
    store.record(
        1, {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan")}, [Group(Start(0, np.int64(9)), [])]
    )
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": 3, "c": None}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    fill(store, range(1, 4))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        store.rewind(3)


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    fill(RunStore(tmp_path / "run"), range(1, 2))
    with pytest.raises(ConfigError, match="covey train --resume"):
        RunStore(tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 1
    RunStore(tmp_path / "run", resume=True)


def test_a_folder_whose_run_never_made_a_step_is_free(tmp_path: Path) -> None:
    RunStore(tmp_path / "run")
    RunStore(tmp_path / "run")
    with pytest.raises(ConfigError, match="no run to resume"):
        RunStore(tmp_path / "run", resume=True)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/covey")):
        with pytest.raises(ConfigError, match="cannot write the run folder"):
            check_run_dir(place)
        with pytest.raises(ConfigError, match="cannot write the run folder"):
            RunStore(place)


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_run_dir(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_run_folders_are_numbered(tmp_path: Path) -> None:
    assert next_run_dir("grpo", tmp_path / "runs") == tmp_path / "runs" / "grpo-001"
    for name in ("grpo-001", "grpo-009", "grpo-x", "other-050", "grpo-2-077"):
        (tmp_path / name).mkdir()
    assert next_run_dir("grpo", tmp_path) == tmp_path / "grpo-010"


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_summary({"score": 0.5, "kl": math.nan})
    store.write_summary({"score": 0.6, "kl": math.nan})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"score": 0.6, "kl": None}
    assert not list(tmp_path.glob("*.tmp"))
