"""Weights are verified whole before vLLM's model is touched: files and process groups, names, shapes, numbers."""

import hashlib
import json
import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save, save_file
from torch.distributed import TCPStore

from covey.llm.remote.weights import make_group
from covey_vllm.checkpoint import BadWeights, Expected, expected_of
from covey_vllm.transports import FileTransport, GlooTransport, allowed_folders

EXPECTED = Expected({"a.weight": (3, 2), "b.weight": (4,)}, torch.float32)
SECONDS = 60


def tensors():
    return {"a.weight": torch.arange(6.0).reshape(3, 2), "b.weight": torch.ones(4)}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "weights"
    found.mkdir()
    return found


def announced(path, sha256: str) -> SimpleNamespace:
    return SimpleNamespace(path=str(path), sha256=sha256)


def received(folder, content: bytes, name="w.safetensors", sha256=""):
    path = folder / name
    path.write_bytes(content)
    return FileTransport(folder.resolve()).receive(announced(path, sha256 or digest(content)), EXPECTED)


def test_a_file_is_received(folder):
    found = received(folder, save(tensors()))
    assert {name: one.tolist() for name, one in found.items()} == {n: t.tolist() for n, t in tensors().items()}


def test_damaged_files_are_refused(folder):
    content = save(tensors())
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for damaged in (content[:-1], bytes(flipped), b"", b"x"):
        with pytest.raises(BadWeights, match="checksum"):
            received(folder, damaged, sha256=digest(content))
    for damaged in (content[:-1], b"", b"x"):  # with the checksum of what arrived
        with pytest.raises(BadWeights, match="not a safetensors file"):
            received(folder, damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight": torch.zeros(2, 3)}, r"shape \(2, 3\), the served model has \(3, 2\)"),
        ({"b.weight": torch.zeros(4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"c.weight": torch.zeros(1)}, "no tensor 'c.weight'"),
        ({"b.weight": torch.tensor([1.0, float("nan"), 0.0, 0.0])}, "b.weight has numbers that are not finite"),
        ({"b.weight": torch.tensor([1.0, float("inf"), float("-inf"), 0.0])}, "not finite"),
    ],
)
def test_other_tensors_are_refused(folder, change, message):
    with pytest.raises(BadWeights, match=message):
        received(folder, save(tensors() | change))


def test_a_missing_tensor_is_refused(folder):
    with pytest.raises(BadWeights, match=r"a\.weight is missing"):
        received(folder, save({"b.weight": torch.ones(4)}))


def test_finite_numbers_whose_sum_is_large_are_taken(folder):
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert received(folder, save(tensors() | {"b.weight": largest}))["b.weight"].equal(largest)


def test_files_elsewhere_are_refused(folder, tmp_path):
    content = save(tensors())
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(content)
    link = folder / "link"
    link.symlink_to(outside)
    inside = folder / "inside"
    inside.symlink_to(folder / "real")
    (folder / "real").write_bytes(content)
    transport = FileTransport(folder.resolve())
    for path in (outside, link, folder / ".." / "outside.safetensors", "/etc/passwd", folder):
        with pytest.raises(BadWeights, match="below"):
            transport.receive(announced(path, digest(content)), EXPECTED)
    assert transport.receive(announced(inside, digest(content)), EXPECTED)  # a link inside the folder stays inside


def test_what_is_no_file_is_refused(folder):
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    transport = FileTransport(folder.resolve())
    for name in ("pipe", "folder", "loop", "missing", "null\0byte"):
        with pytest.raises(BadWeights):
            transport.receive(announced(f"{folder}/{name}", "0" * 64), EXPECTED)


def test_folders_are_fixed_at_the_start(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COVEY_WEIGHTS_FOLDERS", os.pathsep.join([str(folder), str(tmp_path / "other")]))
    allowed = allowed_folders()
    (folder / "below").mkdir()
    assert FileTransport.below(str(folder), allowed).folder == folder.resolve()
    assert FileTransport.below(str(folder / "below"), allowed).folder == (folder / "below").resolve()
    (folder / "out").symlink_to(tmp_path)
    for path in (tmp_path, folder / "out", folder / "..", "/etc", ""):
        with pytest.raises(BadWeights, match="start the server with --folder"):
            FileTransport.below(str(path), allowed)
    monkeypatch.delenv("COVEY_WEIGHTS_FOLDERS")
    with pytest.raises(BadWeights, match="no folder"):
        FileTransport.below(str(folder), allowed_folders())


def test_the_checkpoint_says_what_is_expected(tmp_path):
    save_file({"embed.weight": torch.zeros(5, 2), "lm_head.weight": torch.zeros(5, 2)}, tmp_path / "model.safetensors")
    assert dict(expected_of(tmp_path, torch.float32, tied=True).shapes) == {"embed.weight": (5, 2)}
    assert set(expected_of(tmp_path, torch.float32, tied=False).shapes) == {"embed.weight", "lm_head.weight"}


def test_shards_of_a_checkpoint(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert dict(expected_of(tmp_path, torch.float32, tied=False).shapes) == {"a": (1,), "b": (2,)}
    with pytest.raises(BadWeights, match="no safetensors files"):
        expected_of(tmp_path / "nothing", torch.float32, tied=False)


def test_a_process_group_delivers():
    """Two members of a real group, in threads: the trainer broadcasts, the worker verifies."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    joined = []
    joining = threading.Thread(target=lambda: joined.append(GlooTransport("127.0.0.1", store.port, 1, 2, SECONDS)))
    joining.start()
    group = make_group(store, 0, "127.0.0.1", SECONDS)  # the trainer's end
    joining.join()
    (transport,) = joined
    sent = tensors()
    content = b"".join(tensor.numpy().tobytes() for tensor in sent.values())
    names, shapes = list(sent), [list(tensor.shape) for tensor in sent.values()]
    info = {"names": names, "dtypes": ["float32", "float32"], "shapes": shapes}

    def receive(sha256):
        found: list = []

        def work():
            try:
                found.append(transport.receive(SimpleNamespace(**info, sha256=sha256), EXPECTED))
            except BadWeights as error:
                found.append(error)

        receiving = threading.Thread(target=work)
        receiving.start()
        for tensor in sent.values():
            group.broadcast(tensor, 0).wait()
        receiving.join()
        return found[0]

    assert all(torch.equal(one, sent[name]) for name, one in receive(digest(content)).items())
    assert "checksum" in str(receive("0" * 64))
    sent["b.weight"] = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    assert "not finite" in str(receive(digest(b"".join(tensor.numpy().tobytes() for tensor in sent.values()))))
    # Announcements that do not fit are refused before anything is received: nobody sends here.
    for change in ({"names": names[:1]}, {"dtypes": ["float32", "bfloat16"]}, {"dtypes": ["load", "float32"]},
                   {"shapes": [[3, 2], [5]]}, {"names": [names[0], names[0]]},
                   {"dtypes": ["float32"]}, {"names": "ab"}):  # fmt: skip
        with pytest.raises(BadWeights):
            transport.receive(SimpleNamespace(**info | change, sha256="0" * 64), EXPECTED)
