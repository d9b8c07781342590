"""Families of models in the kernels for GPUs: sampling and gradients are those of transformers' own layers in fp64.

The kernels are those of `helpers/gpu_kernels.py`; `test_triton_kernels.py` compares Triton's, with windows too.
"""

import importlib.util

import pytest
import torch

from covey.data import EndReason, Group, Rollout, Start, collate
from covey.llm.generation import backend
from covey.llm.model.architecture import FAMILIES, GPU_FEATURES, Feature, is_llama_like, obstacle
from covey.llm.policy import LanguagePolicy
from helpers.zoo import zoo_model

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# Fields besides those of the zoo, so that what a family has differs from what Llama has.
FIELDS = {
    "granite": {
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.6,
        "attention_multiplier": 0.5,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
PROMPTS = [tuple(range(5, 26)), (5, 6, 7, 8, 9, 10, 11, 12, 13, 30, 31)]
ACTIONS = [[9, 8, 7, 1, 4, 4, 30, 3], [9, 8, 3], [4, 1, 9], [9, 8, 7, 2, 5, 6, 7]]


def made(kind: str):
    model = zoo_model(kind, window=6, **FIELDS.get(kind, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.linspace(-0.4, 0.5, len(parameter))
    return model


def gradients(policy: LanguagePolicy):
    rollouts = [
        Rollout(context=PROMPTS[n // 2], actions=actions, behavior_logprobs=[-1.0] * len(actions), end=EndReason.STOP)
        for n, actions in enumerate(ACTIONS)
    ]
    groups = [Group(Start(n, "x"), rollouts[2 * n : 2 * n + 2]) for n in range(2)]
    output = policy.evaluate(collate(groups))
    weights = torch.linspace(-1, 1, output.logprobs_BT.numel(), device=policy.device).view_as(output.logprobs_BT)
    (output.logprobs_BT * weights + 0.3 * output.entropy_BT).sum().backward()
    return output.logprobs_BT, {name: parameter.grad for name, parameter in policy.module.named_parameters()}


@needs_triton
@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"gemma2"}))
def test_a_family_has_the_numbers_of_its_own_layers(kind, monkeypatch):
    """The trial of a backend compares the logits of decoding, with windows that prompts and completions exceed."""
    from helpers.gpu_kernels import PlainKernels

    kernels = PlainKernels()
    monkeypatch.setattr(backend, "kernels_for", lambda dtype, _: kernels if dtype == torch.float32 else None)
    policy = LanguagePolicy(made(kind), temperature=0.8)
    assert policy.backend.recorded() == {"update": "packed", "sampling": "native", "kernels": "covey's, Triton"}
    monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
    plain = LanguagePolicy(made(kind).double(), temperature=0.8)
    (found, ours), (right, exact) = gradients(policy), gradients(plain)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=2e-5)
    for name, gradient in exact.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_what_the_kernels_of_a_device_do_not_compute_is_named():
    model = made("gemma3_text")
    assert obstacle(model, frozenset(Feature)) == ""
    assert obstacle(model, frozenset(Feature) - {Feature.WINDOW}) == "attention to a window"
    assert "attention to a window" in LanguagePolicy(model).backend.describe()
    for kind, fields, fault in (
        ("gemma2", {}, "capped attention scores or logits"),
        ("phi3", {"rope_parameters": PARTIAL}, "a part of a head"),
        ("llama", {"hidden_act": "relu"}, "the activation relu"),
        ("gpt2", {}, "layers of the type gpt2"),
    ):
        assert fault in obstacle(zoo_model(kind, **fields), GPU_FEATURES)
    assert is_llama_like(zoo_model("phi3"))
    assert is_llama_like(zoo_model("mistral", sliding_window=None))
