"""Steps that a resumed run samples again are compared with their records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.data import EndReason, Group, Rollout, Start
from covey.tracking.run_store import RepeatedSteps, RunStore, digests
from helpers.step_records import step_record


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
