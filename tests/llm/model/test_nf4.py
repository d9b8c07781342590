"""Frozen weights in 4 bits: bitsandbytes' numbers, and every user of a layer computes the same function."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from covey.config import ConfigError, LoRAConfig
from covey.config.model_sources import read_adapter_config
from covey.data import Start, collate
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.chat import Chat
from covey.llm.model.lora import (
    AdapterWeights,
    NF4Linear,
    adapted_layers,
    add_adapter,
    base_of,
    checksum_of_base,
    load_adapter,
    merge_adapter,
    merged_tensors,
    packed_bytes,
    quantize,
    quantized_share,
)
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from helpers.plain_passes import plain
from helpers.recomputing import batch_of
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.zoo import zoo_model

bitsandbytes = pytest.importorskip("bitsandbytes", reason="covey[4bit] is not installed")

CPU = torch.device("cpu")
LORA = LoRAConfig(rank=4, alpha=6.0, load_in_4bit=True)
CODE = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
        0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # fmt: skip  # the paper, appendix E


def adapted(module: nn.Module, lora: LoRAConfig = LORA) -> LanguagePolicy:
    """A policy in 4 bits with an adapter that was trained for a while."""
    quantize(module, CPU)  # type: ignore[arg-type]
    policy = LanguagePolicy(module)  # type: ignore[arg-type]
    adapter = add_adapter(policy.module, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in adapter.parameters.parameters():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return policy.with_outputs(trained=adapter.parameters)


def dense(policy: LanguagePolicy) -> nn.Module:
    """A copy of the policy's model with plain linear layers, whose weights are merged."""
    module = copy.deepcopy(policy.module)
    merge_adapter(module)
    return module


def test_the_weights_are_those_of_the_paper_by_its_table() -> None:
    """The nearest of the 16 numbers times the largest of 64 weights; the scales have 8 bits, so they are near."""
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(32, 24)
    layer.weight.data = weight.clone()
    found = NF4Linear(layer, CPU, "").weight.flatten().view(-1, 64)
    blocks, code = weight.view(-1, 64), torch.tensor(CODE)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = code[(blocks[..., None] / scales[..., None] - code).abs().argmin(-1)]
    torch.testing.assert_close(found / scales, nearest, atol=0.02, rtol=0)
    scales_found = found.abs().amax(1)
    assert not torch.equal(scales_found, scales[:, 0]), "double quantization"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_computes_with_its_weight_forward_and_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = NF4Linear(nn.Linear(33, 5, dtype=dtype), CPU, "")
    x, other = (torch.randn(2, 3, 33, dtype=dtype).requires_grad_() for _ in range(2))
    other.data.copy_(x.data)
    found, expected = layer(x), F.linear(other, layer.weight, layer.bias)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert layer.weight.dtype == dtype
    assert layer.packed.grad is None


KINDS = ["llama", "qwen2", "qwen3", "bloom", "mistral"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_has_the_numbers_of_the_dense_model(kind: str, recomputed: bool) -> None:
    policy = adapted(tiny_model(kind))
    expected_module, batch = dense(policy), batch_of()
    if recomputed:
        recompute_layers(policy.module)
    found, expected = policy.evaluate(batch).logprobs_BT, plain(expected_module, batch).logprobs_BT
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    merged = dict(expected_module.named_parameters())
    for path, layer in adapted_layers(policy.module).items():  # dB = s dW A', dA = s B' dW
        a_RN, b_MR, gradient = layer.lora_A.policy.weight, layer.lora_B.policy.weight, merged[f"{path}.weight"].grad
        assert gradient is not None
        for made, wanted in ((b_MR.grad, 1.5 * gradient @ a_RN.T), (a_RN.grad, 1.5 * b_MR.T @ gradient)):
            assert (made - wanted).norm() <= 1e-4 * wanted.norm().clamp(min=1), path
    assert not any(base_of(layer).packed.grad is not None for layer in adapted_layers(policy.module).values())


@pytest.mark.parametrize("fits", [True, False], ids=["copies", "no copies"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16), ("bloom", torch.float32)]
)
def test_the_sampler_has_the_function_of_the_update(
    kind: str, dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = adapted(tiny_model(kind, dtype=dtype))
    memory = sys.maxsize if fits else 1 << 16
    monkeypatch.setattr("covey.llm.generation.decoder.total_memory_bytes", lambda _: memory)
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    sampler = LanguageSampler(LocalGenerator(policy), chat, seed=5, max_new_tokens=6, temperature=1.0)
    groups = sampler.sample([Start(0, "12+34"), Start(1, "7")], 3, step=1)
    for rollout in (one for group in groups for one in group.rollouts):
        rollout.reward = 0.0
    batch = collate(groups)
    with torch.no_grad():
        found = policy.evaluate(batch).logprobs_BT
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(batch.behavior_logprobs_BT, found, atol=tolerance, rtol=0)


def test_without_its_adapter_it_is_the_quantized_base() -> None:
    policy = adapted(tiny_model())
    base, batch = tiny_model(), batch_of()
    for path, layer in adapted_layers(policy.module).items():
        base.get_submodule(path).weight.data = base_of(layer).weight
    with torch.no_grad():
        found = policy.with_outputs(weights=AdapterWeights(policy.module, None)).evaluate(batch).logprobs_BT
        torch.testing.assert_close(found, plain(base, batch).logprobs_BT, atol=2e-5, rtol=0)


@pytest.mark.parametrize("targets", [(), ("q_proj",)], ids=["all", "one"])
def test_merged_tensors_and_the_checksum_are_those_of_a_model_without_quantization(targets: tuple[str, ...]) -> None:
    first = checksum_of_base(tiny_model("qwen2"))  # type: ignore[arg-type]
    policy = adapted(tiny_model("qwen2"), LoRAConfig(rank=4, alpha=6.0, targets=targets))
    assert checksum_of_base(policy.module) == first
    expected = dense(policy).state_dict()
    for tensors in (policy.module.state_dict().items(), policy.module.named_parameters()):
        found = dict(merged_tensors(policy.module, tensors))
        assert found.keys() == expected.keys() - (set() if "lm_head.weight" in found else {"lm_head.weight"})
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_memory_is_counted() -> None:
    layer = NF4Linear(nn.Linear(256, 512), CPU, "")
    parts = layer.packed, layer.state.absmax, layer.state.state2.absmax
    assert packed_bytes(256 * 512) == sum(part.nbytes for part in parts)


def test_what_is_not_a_linear_layer_keeps_its_precision() -> None:
    """The experts of this model are one parameter."""
    module = zoo_model("mixtral")
    line = quantized_share(module)
    policy = adapted(module)
    kept = {name for name, one in policy.module.named_parameters() if "experts" in name}
    assert kept
    assert not any("packed" in name for name in kept)
    assert 0 < int(line.partition("%")[0]) < 50
    assert policy.evaluate(batch_of()).logprobs_BT.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_neox", "mamba", "opt", "qwen2_moe"])
def test_other_families(family: str) -> None:
    policy = adapted(zoo_model(family))
    with torch.no_grad():
        found, expected = policy.evaluate(batch_of()).logprobs_BT, plain(dense(policy), batch_of()).logprobs_BT
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_adapters_of_others_on_four_bits(tmp_path: Path) -> None:
    """peft saves the adapter of a model of bitsandbytes, with rows of whole blocks; covey loads it."""
    module = tiny_model(hidden_size=64)
    for path in [path for path, part in module.named_modules() if type(part) is nn.Linear and path != "lm_head"]:
        layer = module.get_submodule(path)
        four_bit = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        four_bit.load_state_dict({"weight": layer.weight.data})
        module.set_submodule(path, four_bit.to("cpu"))
    module.is_loaded_in_4bit = True  # type: ignore[assignment]
    other = get_peft_model(module, LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"]))  # type: ignore[arg-type]
    torch.manual_seed(2)
    for name, factor in other.named_parameters():
        if "lora_" in name:
            factor.data.normal_(std=0.2)
    other.save_pretrained(str(tmp_path))
    mine = tiny_model(hidden_size=64)
    quantize(mine, CPU)  # type: ignore[arg-type]
    policy = LanguagePolicy(mine)  # type: ignore[arg-type]
    adapter = add_adapter(policy.module, read_adapter_config(tmp_path, LORA))
    load_adapter(adapter, tmp_path)
    with torch.no_grad():
        found, expected = policy.evaluate(batch_of()).logprobs_BT, plain(other, batch_of()).logprobs_BT
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no layers of torch.nn.Linear"):
        quantized_share(tiny_model("gpt2"))  # type: ignore[arg-type]
