"""Exact divergences over the vocabulary, in chunks: against the whole matrix, by enumeration and by sampling."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from covey.algorithms import KLFromOutput, KLPenalty, grpo
from covey.core import kl, schedules
from covey.data import Batch, Start, collate
from covey.llm.generation.backend import find_kernels
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model import logprobs as heads
from covey.llm.model.chat import Chat
from covey.llm.model.logprobs import exact_divergence
from covey.llm.policy import KLToReference, LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.train.prepare import prepare_batch
from helpers.plain_passes import Kept
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.updates import one_update

DECISIONS, WIDTH, VOCABULARY = 13, 7, 11
DOUBLE = {"dtype": torch.float64}

KERNELS = find_kernels(torch.device("cpu"))


def inputs(with_bias: bool, seed: int = 0) -> tuple[Tensor, SimpleNamespace, Tensor, SimpleNamespace]:
    torch.manual_seed(seed)
    hidden, weight = torch.randn(DECISIONS, WIDTH, **DOUBLE), torch.randn(VOCABULARY, WIDTH, **DOUBLE)
    other, other_weight = torch.randn(DECISIONS, WIDTH + 2, **DOUBLE), torch.randn(VOCABULARY, WIDTH + 2, **DOUBLE)
    bias, other_bias = (torch.randn(VOCABULARY, **DOUBLE) if with_bias else None for _ in range(2))
    for tensor in (hidden, weight, bias):
        if tensor is not None:
            tensor.requires_grad_()
    return (
        hidden,
        SimpleNamespace(weight=weight, bias=bias),
        other,
        SimpleNamespace(weight=other_weight, bias=other_bias),
    )


def dense(hidden: Tensor, head, other: Tensor, other_head, temperature: float, beta: float = 1.0) -> Tensor:
    """The same from the whole matrix of logits, by the definition in core."""
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) / temperature
    others = torch.nn.functional.linear(other, other_head.weight, other_head.bias) / temperature
    common = min(logits.shape[1], others.shape[1])
    return kl.jensen_shannon(logits[:, :common].log_softmax(-1), others[:, :common].log_softmax(-1), beta)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradients_are_those_of_the_whole_matrix(monkeypatch, with_bias, temperature):
    monkeypatch.setattr(heads, "CHUNK", 5)
    compare_with_the_whole_matrix(with_bias, temperature)


@pytest.mark.parametrize(
    ("beta", "fewer"),
    [(0.0, 0), (0.3, 0), (0.5, 2), (1.0, -2)],
    ids=["forward", "mixed", "padded policy", "padded other"],
)
def test_each_divergence_is_that_of_the_whole_matrix(monkeypatch, beta, fewer):
    """Of vocabularies of different sizes the common tokens count."""
    monkeypatch.setattr(heads, "CHUNK", 5)
    compare_with_the_whole_matrix(True, 0.7, beta, fewer)


def compare_with_the_whole_matrix(with_bias: bool, temperature: float, beta: float = 1.0, fewer: int = 0) -> None:
    hidden, head, other, other_head = inputs(with_bias)
    if fewer:
        smaller = other_head if fewer > 0 else head
        smaller.weight, smaller.bias = (
            tensor.detach()[: -abs(fewer)].clone().requires_grad_(smaller is head) for tensor in vars(smaller).values()
        )
    learned = [tensor for tensor in (hidden, head.weight, head.bias) if tensor is not None]
    expected = dense(hidden, head, other, other_head, temperature, beta)
    found = exact_divergence(hidden, head, other, other_head, temperature, KERNELS, beta=beta)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    weights = torch.linspace(-1, 2, DECISIONS, **DOUBLE)
    for gradient, truth in zip(
        torch.autograd.grad((weights * found).sum(), learned),
        torch.autograd.grad((weights * expected).sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(gradient, truth, rtol=0, atol=1e-13)

    def function(*tensors: Tensor) -> Tensor:
        bias = tensors[2] if with_bias else None
        own = SimpleNamespace(weight=tensors[1], bias=bias)
        return exact_divergence(tensors[0], own, other, other_head, temperature, KERNELS, beta=beta)

    assert torch.autograd.gradcheck(function, learned)


def test_zero_without_a_gradient_where_the_policies_are_one():
    hidden, head, *_ = inputs(True)
    found = exact_divergence(hidden, head, hidden, head, 0.7, KERNELS)
    assert found.tolist() == [0.0] * DECISIONS
    gradients = torch.autograd.grad(found.sum(), [hidden, head.weight, head.bias])
    assert all(float(gradient.abs().max()) < 1e-15 for gradient in gradients)


def test_the_mean_of_k1_over_many_samples_comes_near_it():
    hidden, head, other, other_head = inputs(False)
    logprobs = torch.nn.functional.linear(hidden, head.weight).detach().log_softmax(-1)[0]
    others = torch.nn.functional.linear(other, other_head.weight).log_softmax(-1)[0]
    drawn = torch.multinomial(logprobs.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(1))
    sampled = kl.k1(logprobs[drawn], others[drawn])
    truth = exact_divergence(hidden, head, other, other_head, 1.0, KERNELS)[0]
    assert float(sampled.mean()) == pytest.approx(float(truth.detach()), abs=4 * float(sampled.std()) / 200_000**0.5)


def test_no_more_logits_than_a_chunk_exist_at_a_time(monkeypatch):
    """What is allocated does not grow with the number of decisions, but for what is as small as the hidden states."""
    monkeypatch.setattr(heads, "CHUNK", 8)
    sizes = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(tensor.numel() for tensor in torch.utils._pytree.tree_leaves(made) if torch.is_tensor(tensor))
            return made

    many, vocabulary = 64, 500
    torch.manual_seed(0)
    hidden = torch.randn(many, 4, requires_grad=True)
    head = torch.nn.Linear(4, vocabulary)
    other, other_head = torch.randn(many, 4), torch.nn.Linear(4, vocabulary)
    with Watching():
        exact_divergence(hidden, head, other, other_head, 1.0, KERNELS).sum().backward()
    assert max(sizes) <= 8 * vocabulary


# ---- on a policy ----


def sampled_batch(policy: LanguagePolicy) -> Batch:
    sampler = LanguageSampler(
        LocalGenerator(policy), Chat(tiny_tokenizer(), frozenset(range(1, 85, 6))), seed=5, max_new_tokens=10,
        temperature=policy.temperature,
    )  # fmt: skip
    groups = sampler.sample([Start(0, "12+34"), Start(1, "a quick brown fox")], 4, step=1)
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            rollout.reward = float(number)
    return collate(groups)


def with_kl(kind: str = "llama", **options) -> LanguagePolicy:
    torch.set_num_threads(1)
    policy = LanguagePolicy(tiny_model(kind), **options)
    return policy.with_outputs(KLToReference(reference_of(kind, **options)))


def reference_of(kind: str = "llama", **options) -> LanguagePolicy:
    return LanguagePolicy(tiny_model(kind, seed=1).requires_grad_(False), **options)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_only_what_has_a_gradient_is_asked_for_the_kl(kind):
    policy = with_kl(kind)
    with torch.no_grad():
        assert policy.evaluate(sampled_batch(policy)).kl_BT is None
    assert LanguagePolicy(policy.module).evaluate(sampled_batch(policy)).kl_BT is None


class Uncalled(LanguagePolicy):
    def evaluate(self, batch):
        raise AssertionError("the reference was evaluated twice")


def test_the_exact_kl_is_in_the_loss_and_in_the_metrics_and_the_reference_is_read_once():
    policy = with_kl(microbatch_tokens=60)
    batch = sampled_batch(policy)
    batch = replace(batch, valid_B=batch.valid_B & (torch.arange(len(batch)) != 2))  # its grading failed
    algorithm = grpo(kl=KLPenalty(schedules.constant(0.5), KLFromOutput()))
    ready, found = prepare_batch(batch, policy, algorithm, reference=Uncalled(tiny_model(seed=1)), kl_coefficient=0.5)
    assert "kl" not in found
    kept = Kept(policy.module)
    learned = one_update(policy, kept, algorithm, ready, learning_rate=0.1, kl_coefficient=0.5, seed=0, step=1)
    gradient = kept.found[0]["model.embed_tokens.weight"]
    evaluation = policy.evaluate(ready)
    assert learned["kl"] == pytest.approx(float(evaluation.kl_BT[ready.mask_BT].mean().detach()), rel=1e-4)

    # The same by hand: without the KL, plus the KL's own gradient.
    bare = replace(algorithm, kl=KLPenalty())
    bare.loss(policy.evaluate(ready), ready, 0.0).loss.backward()
    (0.5 * (ready.loss_weights_BT * policy.evaluate(ready).kl_BT).sum()).backward()
    torch.testing.assert_close(gradient, policy.module.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-7)


def test_a_reference_that_is_a_copy_gives_zero():
    policy = LanguagePolicy(tiny_model())
    policy = policy.with_outputs(KLToReference(LanguagePolicy(copy.deepcopy(policy.module).requires_grad_(False))))
    assert float(policy.evaluate(sampled_batch(policy)).kl_BT.abs().max().detach()) < 1e-6
