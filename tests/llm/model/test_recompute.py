"""Recomputed layers against layers that keep their activations: the same bits, also beside a critic and an exact KL."""

import pytest
import torch
from torch import nn

from covey.config import ConfigError
from covey.llm.model import recompute
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from helpers.recomputing import batch_of, check_same_bits
from helpers.tiny_models import PLAIN, SHARED, tiny_model
from helpers.zoo import zoo_model


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [*SHARED, *PLAIN])
def test_the_gradient_has_the_bits_of_layers_that_keep_their_activations(kind: str, dtype: torch.dtype) -> None:
    check_same_bits(tiny_model(kind, dtype=dtype))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["granitemoe_swa", "granitemoehybrid"])
def test_a_cache_that_a_model_makes_unasked_is_not_written_twice(kind: str) -> None:
    check_same_bits(zoo_model(kind))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_values_and_the_exact_kl_have_the_same_bits_too(kind: str) -> None:
    check_same_bits(tiny_model(kind), outputs=True)


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
