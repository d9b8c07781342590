"""Checkpoints that others have touched: damage, other versions, weights that are not finite, foreign files."""

import hashlib
import json
import logging
import re
import shutil
from importlib.metadata import version

import pytest
import torch

from covey.config import MachineError
from covey.runtime.checkpoint import CheckpointError, CheckpointFolder, OtherVersion


def small_state(value=0):
    return {"optimizer": {"masters": {"weight": torch.full((3, 2), float(value))}}, "step": value}


@pytest.fixture
def folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        folder.save(step, small_state(step))
    return folder


def manifest_of(folder, step):
    return json.loads((folder.folder(step) / "manifest.json").read_text())


def write_manifest(folder, step, manifest):
    (folder.folder(step) / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))


MANIFESTS = {
    "nesting": "[" * 100_000,
    "null": "null",
    "list": "[]",
    "number": "5",
    "twice": '{"format": 1, "format": 1}',
    "no format": {"step": 2, "files": {}},
    "format as text": {"format": "1", "step": 2, "files": {}},
    "no files": {"format": 1, "step": 2},
    "files as a list": {"format": 1, "step": 2, "files": ["tensors.safetensors", "state.json"]},
    "sizes as text": {"format": 1, "step": 2, "files": {"tensors.safetensors": "x", "state.json": "y"}},
    "step as text": {"format": 1, "step": "2", "files": {"tensors.safetensors": {}, "state.json": {}}},
    "another step": {"format": 1, "step": 3, "files": {"tensors.safetensors": {}, "state.json": {}}},
    "a path": {"format": 1, "step": 2, "files": {"../../x": {"bytes": 1, "sha256": ""}, "state.json": {}}},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_none_gives_way_to_the_checkpoint_before(folder, name, caplog):
    write_manifest(folder, 2, MANIFESTS[name])
    with caplog.at_level(logging.WARNING):
        assert folder.latest() == 1
    assert "step-00000002 is damaged (" in caplog.text
    assert len(caplog.text.splitlines()) == 1
    with pytest.raises(CheckpointError):
        folder.load(2)


def test_a_copy_under_another_name_is_no_checkpoint_of_that_step(folder):
    shutil.copytree(folder.folder(2), folder.folder(7))
    assert folder.latest() == 2


def test_another_version_is_named_with_both_versions_and_never_deleted(folder):
    write_manifest(folder, 2, manifest_of(folder, 2) | {"format": 7, "covey": "9.8.7"})
    ours = f"covey {version('covey')} (format 1)"
    expected = re.escape(f"was written by covey 9.8.7 (format 7), and this is {ours}: use that version")
    for use in (folder.latest, lambda: folder.load(2), lambda: folder.tensors(2, "optimizer/masters")):
        with pytest.raises(OtherVersion, match=expected):
            use()
    for step in (3, 4, 5):
        folder.save(step, small_state(step))
    assert folder.steps() == [2, 4, 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_give_way_to_the_checkpoint_before(folder, value, caplog):
    state = small_state(3)
    state["optimizer"]["masters"]["weight"][1, 1] = value
    folder.save(3, state)
    with caplog.at_level(logging.WARNING):
        assert folder.latest() == 2
    assert "step-00000003 is damaged (the weights weight are not finite); trying the one before" in caplog.text
    for use in (lambda: folder.load(3), lambda: folder.tensors(3, "optimizer/masters")):
        with pytest.raises(CheckpointError, match="the weights weight are not finite"):
            use()


def test_other_tensors_may_be_anything(folder):
    folder.save(3, {"sampler": {"limit": torch.tensor([float("inf")])}, "optimizer": {"exp_avg": torch.tensor(1.0)}})
    assert folder.latest() == 3


def forge(folder, step, state=None, tensors=None):
    """Other files with a manifest that fits them."""
    manifest = manifest_of(folder, step)
    for name, content in (("state.json", state), ("tensors.safetensors", tensors)):
        if content is not None:
            (folder.folder(step) / name).write_bytes(content)
            manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, step, manifest)


@pytest.mark.parametrize(
    "state", [b"{", b"[" * 100_000, b'{"a": {"$tensor": "no/such"}}', b'{"a": {"$tensor": {}}}', b"\xff"]
)
def test_a_state_that_covey_does_not_write_is_one_line(folder, state):
    forge(folder, 2, state=state)
    with pytest.raises(CheckpointError, match="is not one that covey writes") as caught:
        folder.load(2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tensors", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}x", (10**9).to_bytes(8, "little")])
def test_tensors_that_cannot_be_read_give_way_to_the_checkpoint_before(folder, tensors):
    forge(folder, 2, tensors=tensors)
    assert folder.latest() == 1


def litter(folder, elsewhere):
    """What a person or a program may leave among checkpoints."""
    path = folder.path
    (path / "notes.txt").write_text("mine")
    (path / "step-00000009").write_text("a file")
    (path / "step-00000003").write_text("a file where the next checkpoint goes")
    (path / "step-00000003.foreign").write_text("the name that it would get is taken")
    (path / "step-00000004").symlink_to(elsewhere)
    (path / "step-00000005").symlink_to(path / "nowhere")
    (path / "step-00000006").symlink_to("step-00000006")
    (path / "step-0000000000001").mkdir()
    (path / "step-００００００１２").mkdir()
    (path / "step-99999999999999999999").mkdir()
    (path / "step-99999999999999999999" / "thesis.txt").write_text("mine")
    (path / "sub" / "step-00000008").mkdir(parents=True)
    (path / ".unfinished-file").write_text("")
    (path / ".unfinished-link").symlink_to(elsewhere)


def test_foreign_files_links_and_folders_are_survived_and_kept(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    litter(folder, elsewhere)
    assert folder.latest() == 2
    for step in range(3, 8):
        folder.save(step, small_state(step))
        assert folder.latest() == step
        assert folder.load(step)["step"] == step
    assert (elsewhere / "precious").read_text() == "mine"
    names = {entry.name for entry in folder.path.iterdir()}
    assert names == {
        "notes.txt", "sub", "step-00000009", "step-0000000000001", "step-００００００１２", "step-99999999999999999999",
        "step-00000003.foreign", "step-00000003.foreign1", "step-00000004.foreign", "step-00000005.foreign",
        "step-00000006.foreign", "step-00000006", "step-00000007",
    }  # fmt: skip
    assert (folder.path / "step-00000003.foreign1").read_text() == "a file where the next checkpoint goes"


def test_a_checkpoint_behind_a_link_is_read_and_not_deleted(folder, tmp_path):
    folder.folder(2).rename(tmp_path / "other disk")
    folder.folder(2).symlink_to(tmp_path / "other disk")
    assert folder.load(2)["step"] == 2
    for step in (3, 4, 5):
        folder.save(step, small_state(step))
    assert (tmp_path / "other disk" / "manifest.json").is_file()
    assert folder.steps() == [2, 4, 5]


def test_a_file_in_place_of_the_folder_of_checkpoints_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.latest() is None
    with pytest.raises(MachineError, match="something else has that name, move it away"):
        folder.save(1, small_state(1))
