"""Reading of run folders: whole ones, old ones, damaged ones, and ones that are being written."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.files import Refused
from covey.tracking.run_reader import RunReader, kind_of_run, number, prompt_text, ranges, scores_of_run
from covey.tracking.wording import SCORE


def write(folder: Path, name: str, *lines: dict[str, Any] | bytes) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    content = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
    (folder / name).write_bytes(b"".join(content))


def rollout(group: int, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"step": 1, "group": group, "prompt": "2+2=", "text": "4", "reward": reward, "end": "stop", **more}


def test_groups_are_in_order_with_the_places_of_their_lines(tmp_path: Path) -> None:
    lines = [rollout(1, 0.0), rollout(0, 1.0, text="é\n"), rollout(1, 1.0), rollout(0, 1.0, dropped=True)]
    write(tmp_path, "rollouts/step_000001.jsonl", *lines)
    groups, damaged = RunReader(tmp_path).groups(1)
    assert damaged == 0
    assert [(group.number, group.rewards) for group in groups] == [(0, [1.0, 1.0]), (1, [0.0, 1.0])]
    assert [group.has_signal for group in groups] == [False, True]
    assert [group.is_dropped for group in groups] == [True, False]
    content = (tmp_path / "rollouts" / "step_000001.jsonl").read_bytes()
    for group in groups:
        for line, (begin, length) in zip(group.rollouts, group.places, strict=True):
            assert json.loads(content[begin : begin + length]) == line


@pytest.mark.parametrize("spaces", [True, False])
def test_one_group_is_read_as_among_all(tmp_path: Path, spaces: bool) -> None:
    lines = [rollout(group, float(group)) for group in (0, 1, 10, 1)] + [{"group": 1, "step": 1, "text": "other order"}]
    separators = (", ", ": ") if spaces else (",", ":")
    content = [json.dumps(line, separators=separators).encode() + b"\n" for line in lines]
    write(tmp_path, "rollouts/step_000001.jsonl", *content, b"damaged\n")
    reader = RunReader(tmp_path)
    (group,), _ = reader.groups(1, 1)
    assert group.rollouts == reader.groups(1)[0][1].rollouts
    assert [line["text"] for line in group.rollouts] == ["4", "4", "other order"]
    assert reader.groups(1, 2)[0] == []


def test_damaged_lines_are_counted_and_a_line_that_is_being_written_is_not(tmp_path: Path) -> None:
    write(tmp_path, "rollouts/step_000001.jsonl", rollout(0, 1.0), b"{\n", b"[1]\n", {"no": "group"},
          {"group": "0"}, {"group": True}, b'{"step": 1, "group": 0, "te')  # fmt: skip
    groups, damaged = RunReader(tmp_path).groups(1)
    assert ([len(group.rollouts) for group in groups], damaged) == ([1], 5)


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([1.0, 1.0], False), ([0.0, 0.0], False), ([1.0, None], False), ([None], False), ([], False), ([0.0, 1.0], True),
     ([1e6, 1e6 + 1e-3], False), ([-2.0, 1.0, None], True), (["x", 1.0], False)],
)  # fmt: skip
def test_groups_without_signal(tmp_path: Path, rewards: list[Any], signal: bool) -> None:
    write(tmp_path, "rollouts/step_000001.jsonl", *(rollout(0, reward) for reward in rewards or [None]))
    ((group,), _) = RunReader(tmp_path).groups(1)
    assert group.has_signal is group.has_spread is signal


def test_equal_rewards_with_advantages_of_a_critic_are_a_signal(tmp_path: Path) -> None:
    write(tmp_path, "rollouts/step_000001.jsonl", rollout(0, 1.0, advantage=-0.2), rollout(1, 1.0, advantage=0.0))
    (one, other), _ = RunReader(tmp_path).groups(1)
    assert (one.has_signal, one.has_spread, other.has_signal) == (True, False, False)


def test_a_missing_step_and_a_link_differ(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    with pytest.raises(FileNotFoundError):
        reader.groups(1)
    write(tmp_path, "outside.jsonl", rollout(0, 1.0))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(Refused):
        reader.groups(1)
    assert reader.rollout_steps() == []


def test_steps_by_the_names_of_files(tmp_path: Path) -> None:
    names = ["step_000010", "step_000002", "step_1234567", "step_00001", "step_x", "step_000003.tmp", "step_000004"]
    for name in names:
        write(tmp_path, f"rollouts/{name}.jsonl")
    (tmp_path / "rollouts" / "step_000004.jsonl").unlink()
    (tmp_path / "rollouts" / "step_000004.jsonl").mkdir()
    assert RunReader(tmp_path).rollout_steps() == [2, 10, 1234567]
    assert RunReader(tmp_path).held_out_steps() == []


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        reader = RunReader(folder)
        assert (reader.config(), reader.summary(), reader.origin()) == (None, None, {})
        assert (reader.iterations(), reader.rollout_steps(), reader.held_out_steps()) == ([], [], [])
        assert not reader.has_tokens(1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 10_000, b'{"a": 1} x'])
def test_damaged_documents_are_like_missing_ones(tmp_path: Path, content: bytes) -> None:
    for name in ("summary.json", "origin.json", "config.toml"):
        (tmp_path / name).write_bytes(content)
    reader = RunReader(tmp_path)
    assert (reader.summary(), reader.origin()) == (None, {})
    assert not reader.config()


def test_a_stopped_run_has_its_summary_so_far(tmp_path: Path) -> None:
    (tmp_path / "stopped.json").write_text('{"state": "stopped", "step": 3}')
    assert RunReader(tmp_path).summary() == {"state": "stopped", "step": 3}
    (tmp_path / "summary.json").write_text('{"steps": 60, "seconds": NaN}')
    summary = RunReader(tmp_path).summary()
    assert summary is not None
    assert summary["steps"] == 60


def test_tables_of_tokens(tmp_path: Path) -> None:
    write(tmp_path, "rollouts/step_000001.jsonl", rollout(0, 1.0, tokens={"ids": [1]}))
    write(tmp_path, "rollouts/step_000002.jsonl", rollout(0, 1.0))
    assert [RunReader(tmp_path).has_tokens(step) for step in (1, 2, 3)] == [True, False, False]


NUMERIC = {"rewards": [{"name": "numeric"}]}


@pytest.mark.parametrize(
    ("config", "summary", "kind"),
    [
        (None, None, (None, None)),
        (None, {"domain": "control", "score_kind": "return"}, ("control", "return")),
        ({"environment": {"id": "CartPole-v1"}}, None, ("control", "return")),
        (NUMERIC, None, ("language", "accuracy")),
        (NUMERIC, {"state": "stopped"}, ("language", "accuracy")),
        ({"rewards": [{"name": "digits"}]}, None, ("language", "score")),
        ({"rewards": [{"name": "digits"}, {"name": "numeric", "score": True}]}, None, ("language", "accuracy")),
        ({"rewards": [{"name": "digits"}, {"name": "numeric"}]}, None, ("language", "score")),
        ({}, None, ("language", None)),  # rewards in Python
        ({"from_a_later_version": 1}, None, ("language", None)),
        ({"rewards": 3}, None, ("language", None)),
    ],
)
def test_the_kind_of_a_run(config: Any, summary: Any, kind: tuple[Any, Any]) -> None:
    assert kind_of_run(config, summary) == kind


def test_values_of_other_types_are_none() -> None:
    assert [number(value) for value in (1, 2.5, True, "1", None, [], float("nan"), float("inf"), 10**400)] == [
        1.0, 2.5, None, None, None, None, None, None, None
    ]  # fmt: skip
    chat = [{"role": "user", "content": "a"}, {"content": "b"}, {"content": 3}, "c"]
    assert [prompt_text(prompt) for prompt in ("x", chat, None, 7, {})] == ["x", "a\nb\n\n", "", "7", "{}"]
    assert ranges([1, 2, 3, 7, 9, 10]) == [[1, 3], [7, 7], [9, 10]]
    assert ranges([]) == []


@pytest.mark.parametrize(("reward", "limited"), [({"name": "digits"}, True), ({"function": "rewards.py:f"}, False)])
def test_an_interval_of_recorded_scores_ends_at_the_possible_maximum(reward: dict[str, str], limited: bool) -> None:
    scores, config = [1.0] * 9 + [0.2], {"rewards": [reward]}
    unlimited = SCORE.estimate(scores)
    assert unlimited["high"] > 1
    right = {**unlimited, "high": 1.0} if limited else unlimited
    for summary in (None, {"domain": "language", "score_kind": "score"}):
        assert scores_of_run(config, summary).estimate(scores) == right
    assert scores_of_run(None, None).estimate(scores) == unlimited
