"""The probe of a server at its start: real servers, whose updates do not take in one way or another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from covey.config import RunError
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client
from covey.llm.remote.proof import probe
from covey.llm.remote.weights import FileTransport
from helpers.samplers import TOKEN, Serving, serving
from helpers.tiny_models import tiny_folder, tiny_model

ENDS = frozenset({1})
SECONDS = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Serving]:
    (folder / "weights").mkdir()
    with serving(tiny_folder(folder / "model"), folder, 1, ["--folder", str(folder / "weights")]) as (one,):
        yield one


class Keeping(FileTransport):
    """Sends some tensors as they were first, as a server does on which an update changes only a part."""

    def __init__(self, folder: str, old: tuple[str, ...], from_version: str) -> None:
        super().__init__(folder)
        object.__setattr__(self, "kept", {})
        object.__setattr__(self, "old", old)
        object.__setattr__(self, "from_version", from_version)

    @contextmanager
    def offered(self, tensors, name):
        for key in self.old:
            matching = [one for one in tensors if key in one]
            assert matching
            for one in matching:
                self.kept.setdefault(one, tensors[one].clone())
        sent = dict(tensors) | (self.kept if name >= self.from_version else {})
        with super().offered(sent, name) as offer:
            yield offer


def policy_of(seed: int = 0) -> LanguagePolicy:
    return LanguagePolicy(tiny_model(seed=seed).requires_grad_(False))


def probed(server: Serving, policy: LanguagePolicy, transport: FileTransport):
    return probe(Client(server.address, TOKEN, SECONDS), policy, transport, ENDS, covey=True)


def test_a_server_that_takes_updates_is_accepted(server, folder):
    policy = policy_of()
    result = probed(server, policy, FileTransport(str(folder / "weights")))
    assert max(result.before, result.changed, result.after) < 2e-5
    assert all(torch.equal(*pair) for pair in zip(policy.module.parameters(), tiny_model().parameters(), strict=True))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", ["", "lm_head", "embed_tokens", "layers.1.mlp.down_proj", "layers.0.self_attn.k_proj"])
def test_a_part_that_does_not_change_is_refused(server, folder, part):
    policy = policy_of()
    transport = Keeping(str(folder / "weights"), (part,), "probe-1")
    with pytest.raises(RunError, match="is refused: after an update of its weights"):
        probed(server, policy, transport)
    assert all(torch.equal(*pair) for pair in zip(policy.module.parameters(), tiny_model().parameters(), strict=True))


def test_a_server_that_does_not_change_back_is_refused(server, folder):
    """Its last weights are others than the first."""
    changed = Keeping(str(folder / "weights"), (), "")
    with (
        _scaled_at("probe-2", changed),
        pytest.raises(RunError, match="is refused: after an update of its weights"),
    ):
        probed(server, policy_of(), changed)


@contextmanager
def _scaled_at(version: str, transport: Keeping):
    """The transport sends other weights at this version."""
    plain = transport.offered

    def offered(tensors, name):
        factor = 1.05 if name == version else 1.0
        return plain({key: tensor * factor for key, tensor in tensors.items()}, name)

    object.__setattr__(transport, "offered", offered)
    yield


def test_another_model_is_refused_before_any_update(server, folder):
    """The first weights that are given do not arrive either: those of another model serve."""
    other = policy_of(seed=1)
    transport = Keeping(str(folder / "weights"), ("",), "probe-0")
    transport.kept.update({name: tensor.detach() for name, tensor in tiny_model().named_parameters()})
    with pytest.raises(RunError, match="before any update"):
        probed(server, other, transport)


def test_a_server_that_does_not_answer_is_one_line(folder):
    nobody = Serving(None, "http://127.0.0.1:9")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"cannot be probed: http://127\.0\.0\.1:9 did not answer"):
        probed(nobody, policy_of(), FileTransport(str(folder)))
