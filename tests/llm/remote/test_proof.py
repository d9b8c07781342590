"""The comparison of a sampler's log-probabilities with the trainer's: its level, its limit, its few decisions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from covey.config import RunError
from covey.llm.generation.generator import Completion, GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client
from covey.llm.remote.proof import EXPECTED, LEAST, MOST_DECISIONS, PRIOR_DECISIONS, Proof, probe
from covey.llm.remote.weights import FileTransport
from helpers.samplers import TOKEN, Serving, serving
from helpers.tiny_models import tiny_folder, tiny_model

ENDS = frozenset({1})
FP32 = EXPECTED[tiny_model().dtype]  # type: ignore[index]


def sampled(
    policy: LanguagePolicy,
    off: float = 0.0,
    version: int = 0,
    temperature: float = 1.0,
    tokens: int = 12,
    count: int = 4,
) -> list[tuple[GenerationRequest, Completion]]:
    """Completions whose log-probabilities are alternately too high and too low by `off` nats."""
    settings = GenerationSettings(tokens, temperature, ENDS, version)
    requests = [
        GenerationRequest(tuple(range(3 + group, 13 + group)), 2, RandomKey(1, 1, group), settings)
        for group in range(count)
    ]
    return [
        (request, Completion(one.tokens, [p + off * (-1) ** i for i, p in enumerate(one.logprobs)], one.end, version))
        for request, made in zip(requests, LocalGenerator(policy, version).generate(requests), strict=True)
        for one in made  # type: ignore[union-attr]
    ]


@pytest.fixture
def policy() -> LanguagePolicy:
    return LanguagePolicy(tiny_model(), temperature=0.7)


def test_a_server_with_the_weights_passes_and_one_that_is_off_does_not(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    right, wrong = sampled(policy, temperature=0.7), sampled(policy, 0.01, temperature=0.7)
    refused = proof.refused({0: right, 4: wrong})
    assert list(refused) == [4]
    assert "0.01 nats" in refused[4]


def test_nothing_and_nan_are_told_apart(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    assert proof.refused({}) == {}
    assert list(proof.refused({2: sampled(policy, float("nan"), temperature=0.7)})) == [2]


def test_the_level_is_that_of_the_first_version(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    assert proof.level(greedy=False) == FP32
    first = sampled(policy, 5e-5, temperature=0.7)
    assert proof.refused({0: first, 1: sampled(policy, 0.5, temperature=0.7)}).keys() == {1}
    decisions = sum(len(one.tokens) for _, one in first)
    level = proof.level(greedy=False)
    expected = (5e-5 * decisions + FP32 * PRIOR_DECISIONS) / (decisions + PRIOR_DECISIONS)
    assert level == pytest.approx(expected, rel=0.02)
    later = sampled(policy, 2.9 * level, version=1, temperature=0.7)
    assert proof.refused({0: later}) == {}
    assert proof.level(greedy=False) == level
    assert proof.refused({0: sampled(policy, 3.0 * level * 1.6, version=1, temperature=0.7)})
    assert proof.level(greedy=True) == FP32


def test_greedy_completions_are_compared_at_temperature_one(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    assert proof.refused({0: sampled(policy, temperature=0.0)}) == {}
    assert proof.level(greedy=True) < FP32
    assert proof.level(greedy=False) == FP32


@pytest.mark.slow
def test_the_level_is_at_least_the_noise(policy: LanguagePolicy) -> None:
    proof = Proof(policy, 3.0)
    for _ in range(20):
        assert proof.refused({0: sampled(policy, temperature=0.7)}) == {}
    assert proof.level(greedy=False) == LEAST[policy.module.dtype]


def test_few_decisions_need_a_larger_difference(policy: LanguagePolicy) -> None:
    few = sampled(policy, 4 * FP32, temperature=0.7, tokens=2, count=1)
    assert Proof(policy, 3.0).refused({0: few}) == {}
    many = sampled(policy, 4 * FP32, temperature=0.7, tokens=40, count=8)
    assert Proof(policy, 3.0).refused({0: many})


def test_only_the_first_decisions_are_evaluated(policy: LanguagePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    evaluate = policy.evaluate
    monkeypatch.setattr(policy, "evaluate", lambda batch: sizes.append(int(batch.mask_BT.sum())) or evaluate(batch))  # type: ignore[func-returns-value]
    whole = sampled(policy, temperature=0.7, tokens=100, count=6)
    assert sum(len(one.tokens) for _, one in whole) > MOST_DECISIONS
    Proof(policy, 3.0).refused({0: whole, 1: whole[:1]})
    policy.microbatch_tokens = 30
    Proof(policy, 3.0).refused({0: whole, 1: whole})
    assert sizes[0] == MOST_DECISIONS + len(whole[0][1].tokens)
    assert 2 <= sizes[1] <= 30


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
