"""Which rollouts are shown: the most informative group, the best and worst, and those that match filters."""

from pathlib import Path

import pytest

from covey.config import ConfigError
from covey.tracking import evaluations as choice
from covey.tracking.run_reader import RunReader, is_failed, is_truncated
from helpers.run_folders import language_run, rollout


def reader_of(folder: Path, *lines: dict[str, object]) -> RunReader:
    return RunReader(language_run(folder, steps=3, rollouts=lines or None))


def test_the_group_with_the_largest_spread_is_the_most_informative(tmp_path: Path) -> None:
    """Groups 0 (one right of four), 1 (two of four) and 2 (all right)."""
    reader = reader_of(tmp_path / "run")
    group, why = choice.choose_group(choice.read_groups(reader, 3), None)
    assert (group.number, why) == (1, "the largest spread of rewards")
    assert choice.choose_group(choice.read_groups(reader, 3), 2)[0].number == 2
    with pytest.raises(ConfigError, match="no group 7: the step has the groups 0 to 2"):
        choice.choose_group(choice.read_groups(reader, 3), 7)


def test_a_dropped_group_is_chosen_last_and_of_equal_groups_the_first(tmp_path: Path) -> None:
    lines = [rollout(1, 0, value, dropped=True) for value in (-9.0, 9.0)]
    lines += [rollout(1, number, value) for number in (1, 2) for value in (0.0, 1.0)]
    assert choice.choose_group(choice.read_groups(reader_of(tmp_path / "run", *lines), 1), None)[0].number == 1


def test_without_differences_the_reason_says_so(tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "run", *(rollout(1, 0, reward) for reward in (None, None, None)))
    assert choice.choose_group(choice.read_groups(reader, 1), None)[1] == "no group has different rewards"


def found(
    reader: RunReader, *, best: bool, limit: int, keep: choice.Keep = lambda each: True
) -> list[tuple[int, float]]:
    rollouts = choice.extremes(reader, reader.rollout_steps(), keep, limit, best=best)
    return [(each.step, each.reward or 0.0) for each in rollouts]


def test_the_best_and_the_worst_of_the_run(tmp_path: Path) -> None:
    rewards = {1: (3.0, -1.0, None), 2: (5.0, 0.5), 3: (-2.0, 5.0)}
    reader = reader_of(tmp_path / "run", *(rollout(step, 0, r) for step, row in rewards.items() for r in row))
    assert found(reader, best=True, limit=3) == [(3, 5.0), (2, 5.0), (1, 3.0)]
    assert found(reader, best=False, limit=2) == [(3, -2.0), (1, -1.0)]
    assert found(reader, best=False, limit=9, keep=lambda found: is_failed(found.line)) == []


def test_filters_find_the_latest_first(tmp_path: Path) -> None:
    lines = [
        rollout(1, 0, None, text="could not be graded"),
        rollout(2, 0, 1.0, end="length", advantage=0.0),
        rollout(2, 1, 1.0, end="truncated", text="A STRASSE", advantage=0.0),
        rollout(3, 0, 0.0, prompt=[{"role": "user", "content": "straße?"}]),
        rollout(3, 0, 1.0),
    ]
    reader = reader_of(tmp_path / "run", *lines)

    def search(keep: choice.Keep, limit: int = 9) -> list[tuple[int, int, int]]:
        return [(e.step, e.group.number, e.index) for e in choice.search(reader, [1, 2, 3], keep, limit)]

    assert search(lambda found: is_failed(found.line)) == [(1, 0, 0)]
    assert search(lambda found: is_truncated(found.line)) == [(2, 0, 0), (2, 1, 0)]
    assert search(lambda found: is_truncated(found.line), 1) == [(2, 0, 0)]
    assert search(lambda found: not found.group.has_signal) == [(2, 0, 0), (2, 1, 0), (1, 0, 0)]
    assert search(lambda each: each.contains("straße")) == [(3, 0, 0), (2, 1, 0)]


def test_a_missing_step_is_one_line_that_names_the_others(tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="no rollouts of step 9: it has those of 1 to 3"):
        choice.read_groups(reader, 9)
    (reader.run_dir / "rollouts" / "step_000002.jsonl").write_text("damaged\n")
    with pytest.raises(ConfigError, match=r"rollouts of step 2 .* are damaged"):
        choice.read_groups(reader, 2)
    empty = RunReader(language_run(tmp_path / "empty", rollouts=()))
    with pytest.raises(ConfigError, match="has no rollouts yet"):
        choice.last_recorded(empty)


def test_a_link_in_the_place_of_the_records_is_not_read(tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "run")
    file = reader.run_dir / "rollouts" / "step_000003.jsonl"
    file.rename(tmp_path / "elsewhere.jsonl")
    file.symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(ConfigError, match=r"no rollouts of step 3 \(.*(link|plain file)"):
        choice.read_groups(reader, 3)
