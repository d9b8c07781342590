"""Recomputed layers against layers that keep their activations: the same bits, also beside a critic and an exact KL."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch
from torch import nn

from covey.config import ConfigError
from covey.data import Batch, PolicyOutput
from covey.llm.critic import LanguageCritic, SharedTrunkValues
from covey.llm.model import recompute
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import KLToReference, LanguagePolicy
from helpers.batches import batch_of
from helpers.tiny_models import PLAIN, SHARED, tiny_model
from helpers.zoo import FAMILIES, zoo_model

KEPT = "blt cpmant prophetnet reformer xlm xlnet"  # refused by LanguagePolicy itself (tests/parity/test_zoo.py)


def gradients(policy: LanguagePolicy, batch: Batch) -> tuple[PolicyOutput, dict[str, torch.Tensor]]:
    """The output and the gradient of a weighted sum of all outputs."""
    output = policy.evaluate(batch)
    total = torch.zeros(())
    for number, item in enumerate(fields(PolicyOutput), start=1):
        value = getattr(output, item.name)
        if value is not None:
            total = total + number * (value * torch.arange(value.shape[1])).sum()
    total.backward()
    return output, {name: part.grad for name, part in policy.module.named_parameters() if part.grad is not None}


def check_same_bits(module: nn.Module, *, outputs: bool = False) -> None:
    batch, results = batch_of(), []
    for recomputed in (False, True):
        policy = LanguagePolicy(copy.deepcopy(module))  # type: ignore[arg-type]
        if recomputed:
            recompute_layers(policy.module)
        if outputs:
            reference = LanguagePolicy(copy.deepcopy(policy.module).requires_grad_(False), backend=policy.backend)
            with torch.no_grad():
                for part in reference.module.parameters():
                    part.mul_(0.9)
            critic = LanguageCritic(policy, own_trunk=False)
            nn.init.ones_(critic.head.linear.weight)
            policy = policy.with_outputs(SharedTrunkValues(critic), KLToReference(reference))
        results.append(gradients(policy, batch))
    (plain, of_plain), (again, of_again) = results
    assert torch.equal(plain.logprobs_BT, again.logprobs_BT)
    assert of_plain.keys() == of_again.keys()
    assert any(gradient.any() for gradient in of_plain.values())
    for name, gradient in of_plain.items():
        assert torch.equal(gradient, of_again[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [*SHARED, *PLAIN])
def test_the_gradient_has_the_bits_of_layers_that_keep_their_activations(kind: str, dtype: torch.dtype) -> None:
    check_same_bits(tiny_model(kind, dtype=dtype))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_values_and_the_exact_kl_have_the_same_bits_too(kind: str) -> None:
    check_same_bits(tiny_model(kind), outputs=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - set(KEPT.split())))
def test_every_family_has_the_same_bits_or_is_refused(kind: str) -> None:
    torch.set_num_threads(1)
    try:
        module = zoo_model(kind)
        LanguagePolicy(copy.deepcopy(module))
    except Exception as error:  # cannot be built here, or is refused: tests/parity/test_zoo.py
        pytest.skip(str(error))
    try:
        check_same_bits(module)
    except ConfigError as error:
        assert type(module).__name__ in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_each_layer_is_computed_once_more_in_the_backward_pass_and_once_without_gradients(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    own = recompute.checkpoint

    def counted(compute, *inputs, **options):
        def call(*parts):
            calls.append(torch.is_grad_enabled())
            return compute(*parts)

        return own(call, *inputs, **options)

    monkeypatch.setattr(recompute, "checkpoint", counted)
    policy, batch = LanguagePolicy(tiny_model(kind)), batch_of()
    recompute_layers(policy.module)
    with torch.no_grad():
        policy.evaluate(batch)
    assert not calls, "nothing is kept without gradients, so nothing is computed twice"
    output = policy.evaluate(batch)
    assert policy.shares_prompts is (kind != "bloom")
    if policy.shares_prompts:
        assert len(calls) == 2
    output.logprobs_BT.sum().backward()
    assert len(calls) == (2 * 2 if policy.shares_prompts else 6 * 2 * 3), "rows are recomputed as a whole too"


def test_a_model_without_marked_layers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the layers of Sequential cannot be recomputed: leave update\.recompute out"
    ):
        recompute_layers(nn.Sequential(nn.Linear(2, 2)))
