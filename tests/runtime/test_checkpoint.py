"""Checkpoints: exact round trips, damage found, the disk's end, and what is kept."""

import errno
import json
import logging
import math
import os
import shutil
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from covey.config import ConfigError, MachineError
from covey.runtime import checkpoint
from covey.runtime.checkpoint import CheckpointError, CheckpointFolder


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def small_state(value=0):
    return {"model": {"weight": torch.full((3, 2), float(value))}, "step": value}


def checkpoint_names(folder):
    return sorted(entry.name for entry in folder.path.iterdir())


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def test_round_trip_is_bitwise(folder):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    state = {
        "masters": {
            "fp32": words.view(torch.float32).clone(),  # arbitrary bits: NaN payloads, subnormals, -0.0
            "bf16": words.view(torch.bfloat16).clone().reshape(8, 20),
            "fp16": words.view(torch.float16).clone(),
            "fp64": words.view(torch.float64).clone(),
            "int64": words,
            "int32": words.view(torch.int32).clone(),
            "uint8": words.view(torch.uint8)[:7].clone(),
            "bool": words > 0,
            "scalar": torch.tensor(1.5),
            "empty": torch.zeros(0, 3),
            "transposed": torch.arange(6.0).reshape(2, 3).T,
            "slice": torch.arange(6.0)[1::2],
            "parameter": torch.nn.Parameter(torch.ones(2)),
        },
        "plain": {"int": 2**70, "float": 0.1 + 0.2, "inf": -math.inf, "bool": True, "none": None, "text": "ü\n\u2028"},
        "lists": [1, 2.0, [None, "x"], {"a": False}],
        "empty": {},
    }
    folder.save(7, state)
    loaded = folder.load(7)
    assert loaded["masters"].keys() == state["masters"].keys()
    for name, tensor in state["masters"].items():
        assert loaded["masters"][name].dtype == tensor.dtype, name
        assert loaded["masters"][name].shape == tensor.shape, name
        assert bits(loaded["masters"][name]) == bits(tensor.detach()), name
    for name in ("plain", "lists", "empty"):
        assert repr(loaded[name]) == repr(state[name])


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
STATES = st.dictionaries(
    st.text().filter(lambda key: key != "$tensor"),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/"), inner)),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(STATES)
def test_any_plain_state_comes_back(tmp_path_factory, state):
    folder = CheckpointFolder(tmp_path_factory.mktemp("plain"))
    folder.save(1, state)
    assert repr(folder.load(1)) == repr(state)


def test_other_programs_can_read_the_tensors(folder):
    folder.save(1, small_state(3))
    with safe_open(folder.folder(1) / "tensors.safetensors", framework="np") as file:
        assert list(file.keys()) == ["model/weight"]
        assert file.get_tensor("model/weight").tolist() == [[3.0] * 2] * 3


def test_loaded_tensors_can_be_changed_without_touching_the_file(folder):
    folder.save(1, small_state(3))
    folder.load(1)["model"]["weight"].zero_()
    assert folder.load(1)["model"]["weight"].unique().tolist() == [3.0]


def test_what_a_checkpoint_counts_on_is_saved_first(tmp_path):
    seen = []
    folder = CheckpointFolder(tmp_path, before_save=lambda: seen.append(folder.steps()))
    folder.save(1, small_state())
    folder.save(2, small_state())
    assert seen == [[], [1]]


def test_nothing_yet(folder):
    assert folder.latest() is None
    with pytest.raises(CheckpointError, match="missing"):
        folder.load(1)


def test_keeps_the_newest(folder):
    for step in (5, 10, 15, 20):
        folder.save(step, small_state(step))
    assert checkpoint_names(folder) == ["step-00000015", "step-00000020"]
    assert folder.latest() == 20
    assert folder.load(15)["step"] == 15


def test_keep_below_two_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep"):
        CheckpointFolder(tmp_path, keep=1)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def remove(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [truncate, flip_a_byte, remove, empty])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_gives_way_to_the_one_before(folder, caplog, harm, name):
    folder.save(1, small_state(1))
    folder.save(2, small_state(2))
    harm(folder.folder(2) / name)
    with caplog.at_level(logging.WARNING):
        assert folder.latest() == 1
    assert len(caplog.records) == 1
    assert "step-00000002" in caplog.text
    with pytest.raises(CheckpointError, match="step-00000002"):
        folder.load(2)
    assert folder.load(1)["step"] == 1


def test_a_damaged_one_does_not_push_out_a_good_one(folder):
    folder.save(1, small_state(1))
    folder.save(2, small_state(2))
    truncate(folder.folder(2) / "tensors.safetensors")
    folder.save(3, small_state(3))
    assert checkpoint_names(folder) == ["step-00000001", "step-00000003"]


def test_a_run_that_went_back_replaces_what_it_repeats(folder):
    for step in (1, 2, 3):
        folder.save(step, small_state(step))
    folder.save(2, small_state(22))
    assert folder.latest() == 2
    assert folder.load(2)["step"] == 22
    assert checkpoint_names(folder) == ["step-00000002"]


def test_leftovers_of_a_crash_are_ignored_and_removed(folder):
    folder.save(1, small_state(1))
    shutil.copytree(folder.folder(1), folder.path / ".unfinished-00000002")
    assert folder.latest() == 1
    folder.save(3, small_state(3))
    assert checkpoint_names(folder) == ["step-00000001", "step-00000003"]


def test_full_disk_is_seen_before_writing(folder, monkeypatch):
    folder.save(1, small_state(1))
    usage = namedtuple("usage", "total used free")(10, 9, 50_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(checkpoint, "write_file", lambda *args: pytest.fail("wrote to a full disk"))
    with pytest.raises(MachineError, match=r"needs 81 MB .* 50 MB free"):
        folder.save(2, {"weight": torch.zeros(20_000_000)})
    assert checkpoint_names(folder) == ["step-00000001"]


@pytest.mark.parametrize("failing", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_the_older_ones_alone(folder, monkeypatch, failing, number):
    folder.save(1, small_state(1))
    folder.save(2, small_state(2))
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    real_write = checkpoint.write_file

    def write(path, pieces):
        if path.name == failing:
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number))
        return real_write(path, pieces)

    monkeypatch.setattr(checkpoint, "write_file", write)
    with pytest.raises(MachineError, match=os.strerror(number)):
        folder.save(3, small_state(3))
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    folder.save(3, small_state(3))
    assert folder.latest() == 3


def test_order_of_writing(folder, monkeypatch):
    """Every file reaches the disk before the manifest, all before the rename, the rename before an old one goes."""
    folder.save(1, small_state(1))
    folder.save(2, small_state(2))
    events = []
    real_write, real_sync, real_rmtree, real_publish = (
        checkpoint.write_file, checkpoint.sync, shutil.rmtree, CheckpointFolder._publish,
    )  # fmt: skip
    real_fsync = os.fsync

    def note(event, function):
        def noted(*args, **kwargs):
            result = function(*args, **kwargs)
            events.append(event(*args))
            return result

        return noted

    monkeypatch.setattr(checkpoint, "write_file", note(lambda path, pieces: path.name, real_write))
    monkeypatch.setattr(checkpoint, "sync", note(lambda path: f"sync {path.name}", real_sync))
    monkeypatch.setattr(os, "fsync", note(lambda descriptor: "fsync", real_fsync))
    monkeypatch.setattr(shutil, "rmtree", note(lambda path, **_: f"remove {path.name}", real_rmtree))
    monkeypatch.setattr(CheckpointFolder, "_publish", note(lambda *_: "published", real_publish))
    folder.save(3, small_state(3))
    assert events == [
        "fsync", "tensors.safetensors", "fsync", "state.json", "fsync", "manifest.json",
        "fsync", "sync .unfinished-00000003", "fsync", "sync checkpoints", "published",
        "remove .unfinished-removed-00000001",
    ]  # fmt: skip


def test_tied_weights_are_refused(folder):
    weight = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"model/embed and model/head are the same tensor"):
        folder.save(1, {"model": {"embed": weight, "head": weight.T}})
    assert folder.latest() is None


@pytest.mark.parametrize(
    "bad",
    [
        {"a": (1, 2)},
        {"a": {1: "x"}},
        {"a": {"$tensor": 1}},
        {"a": object()},
        {"a": {1, 2}},
        {"a": b"bytes"},
        {"a": [torch.ones(1)]},
        {"a": torch.ones(1, dtype=torch.complex64)},
        {"a": torch.ones(2).to_sparse()},
    ],
)
def test_what_would_not_come_back_exactly_is_refused(folder, bad):
    with pytest.raises(TypeError, match="cannot store"):
        folder.save(1, bad)
    assert folder.latest() is None


def test_two_tensors_with_one_path_are_refused(folder):
    with pytest.raises(ValueError, match="a/b"):
        folder.save(1, {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}})


@pytest.fixture
def pinning(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2, keep_best=True)


def named_best(folder):
    path = folder.path / "best.json"
    return json.loads(path.read_text())["step"] if path.exists() else None


def test_the_best_checkpoint_is_kept_beside_the_newest(pinning):
    kept = []
    for step, best in [(1, 0), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6), (7, 6), (8, 6), (9, 6)]:
        pinning.save(step, small_state(step), best)
        kept.append((pinning.steps(), named_best(pinning)))
    assert kept == [
        ([1], None), ([1, 2], 2), ([2, 3], 2), ([2, 3, 4], 2), ([2, 4, 5], 2), ([5, 6], 6), ([6, 7], 6), ([6, 7, 8], 6),
        ([6, 8, 9], 6),
    ]  # fmt: skip
    assert pinning.load(6)["step"] == 6


def test_the_name_of_the_best_checkpoint_follows_a_rewind(tmp_path):
    """A run that is resumed from an earlier checkpoint, because the newest is damaged, has an earlier best step."""
    pinning = CheckpointFolder(tmp_path / "checkpoints", keep=3, keep_best=True)
    for step, best in [(2, 2), (3, 2), (4, 4)]:
        pinning.save(step, small_state(step), best)
    assert named_best(pinning) == 4
    pinning.tidy(3, 2)
    assert (pinning.steps(), named_best(pinning)) == ([2, 3], 2)
    pinning.tidy(3, 1)  # its checkpoint is gone
    assert (pinning.steps(), named_best(pinning)) == ([2, 3], None)
    (pinning.path / "best.json").write_text("{")  # a damaged one is written again
    pinning.tidy(3, 2)
    assert named_best(pinning) == 2


def test_without_pinning_nothing_is_named(folder):
    for step in (1, 2, 3):
        folder.save(step, small_state(step), 1)
    assert checkpoint_names(folder) == ["step-00000002", "step-00000003"]
