"""Adapters against peft's own forward, and against a dense model with merged weights."""

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.config import ConfigError, LoRAConfig
from covey.config.model_sources import adapter_folder, read_adapter_config
from covey.core import kl
from covey.data import Start, collate
from covey.llm.critic import AdapterCritic
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.model.chat import Chat
from covey.llm.model.lora import (
    CRITIC,
    REFERENCE,
    Adapter,
    AdapterWeights,
    adapted_layers,
    add_adapter,
    base_of,
    copy_adapter,
    joined_weights,
    load_adapter,
    merge_adapter,
    merged_weight,
    save_adapter,
)
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import KLToReference, LanguagePolicy
from covey.llm.sampler import LanguageSampler
from helpers.plain_passes import plain, plain_values
from helpers.recomputing import batch_of
from helpers.tiny_models import PLAIN, SHARED, tiny_model, tiny_tokenizer
from helpers.zoo import zoo_model

LORA = LoRAConfig(rank=4, alpha=6.0)
KINDS = SHARED + PLAIN


def adapted(kind: str, dtype: torch.dtype = torch.float32, lora: LoRAConfig = LORA) -> tuple[LanguagePolicy, Adapter]:
    """A policy with an adapter that was trained for a while."""
    policy = LanguagePolicy(tiny_model(kind, dtype=dtype))  # type: ignore[arg-type]
    adapter = add_adapter(policy.module, lora)
    fill(adapter)
    return policy.with_outputs(trained=adapter.parameters), adapter


@torch.no_grad()
def fill(adapter: Adapter, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for factor in adapter.parameters.parameters():
        factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)


def peft_model(adapter: Adapter, kind: str, folder: Path) -> PeftModel:
    """peft's own model with the adapter that covey saved, trainable, in fp32."""
    save_adapter(adapter, "base", folder)
    return PeftModel.from_pretrained(tiny_model(kind), str(folder), is_trainable=True)


def objective(logp_BT: Tensor) -> Tensor:
    return (logp_BT * torch.linspace(-1, 1, logp_BT.numel()).view_as(logp_BT)).sum()


def gradients(adapter: Adapter) -> dict[str, Tensor]:
    return {name: factor.grad for name, factor in adapter.parameters.named_parameters()}  # type: ignore[misc]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_gradients_are_those_of_peft(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    if targets and kind in ("gpt2", "bloom"):
        targets = {"gpt2": ("c_attn", "mlp.c_proj"), "bloom": ("query_key_value",)}[kind]
    policy, adapter = adapted(kind, lora=LoRAConfig(rank=4, alpha=6.0, targets=targets))
    oracle, batch = peft_model(adapter, kind, tmp_path), batch_of()
    found, expected = policy.evaluate(batch).logprobs_BT, plain(oracle, batch).logprobs_BT
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    objective(found).backward()
    objective(expected).backward()
    wanted = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in oracle.named_parameters()
        if parameter.requires_grad
    }
    made = gradients(adapter)
    assert made.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        assert float(gradient.norm()) > 1e-3, name
        assert (made[name] - gradient).norm() <= 2e-5 * gradient.norm().clamp(min=1), name
    frozen = [name for name, one in policy.module.named_parameters() if one.grad is not None and "lora_" not in name]
    assert not frozen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mistral"])
def test_in_bf16_they_are_those_of_peft_in_fp32_but_for_rounding(kind: str, tmp_path: Path) -> None:
    policy, adapter = adapted(kind, torch.bfloat16)
    oracle, batch = peft_model(adapter, kind, tmp_path).to(torch.float32), batch_of()
    found, expected = policy.evaluate(batch).logprobs_BT, plain(oracle, batch).logprobs_BT
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.03)
    objective(found).backward()
    objective(expected).backward()
    wanted = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in oracle.named_parameters()
        if parameter.requires_grad
    }
    for name, gradient in gradients(adapter).items():
        exact = wanted[name]
        assert exact is not None
        assert nn.functional.cosine_similarity(gradient.float().flatten(), exact.flatten(), dim=0) > 0.98, name
        assert float(gradient.norm()) == pytest.approx(float(exact.norm()), rel=0.1), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_a_dense_model_with_the_same_gradient(kind: str) -> None:
    """With a dense layer of weights W + s B A, the chain rule gives dA = s B' dW and dB = s dW A'."""
    policy, adapter = adapted(kind)
    dense, batch = copy.deepcopy(policy.module), batch_of()
    for part in dense.modules():
        vars(part).pop("forward", None)
    merge_adapter(dense)
    dense.requires_grad_(True)
    assert not adapted_layers(dense)
    expected = plain(dense, batch).logprobs_BT
    found = policy.evaluate(batch).logprobs_BT
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    objective(found).backward()
    objective(expected).backward()
    made, scale = gradients(adapter), 6.0 / 4
    for path, layer in adapted_layers(policy.module).items():
        d_MN = dense.get_submodule(path).weight.grad
        assert isinstance(d_MN, Tensor)
        d_MN = d_MN.T if layer.fan_in_fan_out else d_MN
        a_RN, b_MR = (factors["policy"].weight for factors in (layer.lora_A, layer.lora_B))
        for name, wanted in (("lora_A", scale * b_MR.T @ d_MN), ("lora_B", scale * d_MN @ a_RN.T)):
            assert (made[f"{path}.{name}.weight"] - wanted).norm() <= 1e-4 * wanted.norm().clamp(min=1), (path, name)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    policy = LanguagePolicy(tiny_model(kind, dtype=dtype))  # type: ignore[arg-type]
    policy.module.requires_grad_(False)  # of which torch.matmul's last bits depend
    batch, results = batch_of(), []
    for lora in (None, LORA):
        if lora:
            adapter = add_adapter(policy.module, lora, seed=3)
            assert all(factor.any() == ("lora_A" in name) for name, factor in adapter.parameters.named_parameters())
        groups = sampler(policy).sample([Start(0, "12+34"), Start(1, "7")], 4, step=1)
        sampled = [(one.actions, one.behavior_logprobs) for group in groups for one in group.rollouts]
        with torch.no_grad():
            results.append((sampled, policy.evaluate(batch).logprobs_BT))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def sampler(policy: LanguagePolicy) -> LanguageSampler:
    return LanguageSampler(
        LocalGenerator(policy), Chat(tiny_tokenizer(), frozenset({1})), seed=5, max_new_tokens=10, temperature=1.0
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_has_the_log_probabilities_of_the_update_after_every_change(kind: str) -> None:
    policy, adapter = adapted(kind)
    made = sampler(policy)
    seen = []
    for seed in (1, 2):
        fill(adapter, seed)
        groups = made.sample([Start(0, "12+34"), Start(1, "7")], 4, step=1)
        for one in (one for group in groups for one in group.rollouts):
            one.reward = 0.0
            seen.append((one.actions, one.behavior_logprobs))
        batch = collate(groups)
        with torch.no_grad():
            found = policy.evaluate(batch).logprobs_BT
        torch.testing.assert_close(found, batch.behavior_logprobs_BT, atol=1e-4, rtol=0)
    assert seen[:8] != seen[8:]


def test_in_bf16_merged_weights_are_rounded_once() -> None:
    _, adapter = adapted("llama", torch.bfloat16)
    for layer in adapted_layers(adapter.model).values():
        weight, a_RN, b_MR = (
            one.detach().double()
            for one in (layer.base_layer.weight, layer.lora_A["policy"].weight, layer.lora_B["policy"].weight)
        )
        exact_MN = weight + 1.5 * (b_MR @ a_RN)
        error = (merged_weight(layer).double() - exact_MN).abs() / exact_MN.abs().clamp(min=1e-3)
        assert merged_weight(layer).dtype == torch.bfloat16
        assert float(error.max()) <= 2**-8


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_are_merged_a_few_rows_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, adapter = adapted(kind)
    layers = list(adapted_layers(adapter.model).values())
    whole = [merged_weight(layer) for layer in layers]
    monkeypatch.setattr("covey.llm.model.lora.MERGED_ROWS", 5)
    for layer, expected in zip(layers, whole, strict=True):
        torch.testing.assert_close(merged_weight(layer), expected, rtol=0, atol=1e-6)


def test_joined_weights_are_those_of_each_layer_and_a_single_frozen_one_is_not_copied() -> None:
    policy, _ = adapted("llama")
    attention = policy.module.base_model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = torch.cat([merged_weight(layer) for layer in layers])
    assert not torch.equal(expected, torch.cat([base_of(layer).weight for layer in layers]))
    assert torch.equal(joined_weights(*layers), expected)
    mixed = [base_of(layers[0]), layers[1]]
    assert torch.equal(joined_weights(*mixed), torch.cat([base_of(layers[0]).weight, merged_weight(layers[1])]))
    head = policy.module.get_output_embeddings()
    assert joined_weights(head).data_ptr() == head.weight.data_ptr()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_reference_is_the_model_without_its_adapter(kind: str) -> None:
    policy, _ = adapted(kind)
    base, batch = LanguagePolicy(tiny_model(kind)), batch_of()  # type: ignore[arg-type]
    reference = policy.with_outputs(weights=AdapterWeights(policy.module, None))
    with torch.no_grad():
        before = policy.evaluate(batch).logprobs_BT
        assert torch.equal(reference.evaluate(batch).logprobs_BT, base.evaluate(batch).logprobs_BT)
        assert torch.equal(policy.evaluate(batch).logprobs_BT, before), "the adapter is in use again"
    assert (before - base.evaluate(batch).logprobs_BT).abs().max() > 0.1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_exact_kl_to_the_model_without_its_adapter(kind: str, *, recomputed: bool) -> None:
    """Value and gradient against two dense models."""
    policy, adapter = adapted(kind)
    if recomputed:
        recompute_layers(policy.module)
    reference = policy.with_outputs(weights=AdapterWeights(policy.module, None))
    batch = batch_of()
    policy_kl = policy.with_outputs(KLToReference(reference)).evaluate(batch).kl_BT
    assert policy_kl is not None
    policy_kl.sum().backward()
    found = {name: gradient.clone() for name, gradient in gradients(adapter).items()}
    adapter.parameters.zero_grad()
    own, base = (plain(model, batch).all_logprobs for model in (policy.module, tiny_model(kind)))
    total = sum(kl.exact(new, old.detach()).sum() for new, old in zip(own, base, strict=True))
    torch.testing.assert_close(policy_kl.sum(), total, rtol=1e-4, atol=1e-4)
    total.backward()
    for name, gradient in gradients(adapter).items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1e-2), name


@pytest.mark.sampled(10)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_the_critic_has_an_adapter_of_its_own(kind: str, *, recomputed: bool) -> None:
    """Values and gradients are those of a policy with the critic's adapter; the policy's has no gradient."""
    policy, adapter = adapted(kind)
    if recomputed:
        recompute_layers(policy.module)
    batch = batch_of()
    with torch.no_grad():
        before = policy.evaluate(batch).logprobs_BT
    own = add_adapter(policy.module, LORA, CRITIC, seed=1)
    fill(own, seed=7)
    critic = AdapterCritic(policy, own)
    nn.init.normal_(critic.head.linear.weight)
    with torch.no_grad():
        assert torch.equal(policy.evaluate(batch).logprobs_BT, before)
    weight_BT = torch.linspace(-1, 1, batch.mask_BT.numel()).view_as(before)
    values = critic.values(batch)
    (values * weight_BT).sum().backward()
    assert all(factor.grad is None for factor in adapter.parameters.parameters())
    alone, its = adapted(kind)
    fill(its, seed=7)
    expected = plain_values(alone.module.base_model, critic.head.linear, batch)
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)
    (expected * weight_BT).sum().backward()
    for name, gradient in gradients(its).items():
        found = gradients(own)[name]
        assert (found - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1e-2), name


def test_a_copied_adapter_is_a_reference_that_stays() -> None:
    policy, adapter = adapted("llama")
    batch = batch_of()
    copied = add_adapter(policy.module, LORA, REFERENCE)
    copy_adapter(adapter, copied)
    copied.parameters.requires_grad_(False)
    reference = policy.with_outputs(weights=copied.weights(), trained=copied.parameters)
    with torch.no_grad():
        before = policy.evaluate(batch).logprobs_BT
        assert torch.equal(reference.evaluate(batch).logprobs_BT, before)
        fill(adapter, seed=9)
        assert torch.equal(reference.evaluate(batch).logprobs_BT, before)
        assert not torch.equal(policy.evaluate(batch).logprobs_BT, before)
    objective(policy.evaluate(batch).logprobs_BT).backward()
    assert all(factor.grad is None for factor in copied.parameters.parameters())
    assert all(factor.grad is not None for factor in adapter.parameters.parameters())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_saved_adapter_is_loaded_bit_for_bit(kind: str, tmp_path: Path) -> None:
    policy, adapter = adapted(kind, lora=LoRAConfig(rank=3, alpha=5.0))
    save_adapter(adapter, "base", tmp_path / "adapter")
    lora = read_adapter_config(adapter_folder(str(tmp_path / "adapter")), LoRAConfig())
    assert (lora.rank, lora.alpha) == (3, 5.0)
    other = LanguagePolicy(tiny_model(kind))  # type: ignore[arg-type]
    load_adapter(add_adapter(other.module, lora), tmp_path / "adapter")
    with torch.no_grad():
        found, expected = (one.evaluate(batch_of()).logprobs_BT for one in (other, policy))
    assert torch.equal(found, expected)


def test_the_first_matrices_follow_from_the_seed() -> None:
    def first(seed: int, name: str = "policy") -> list[Tensor]:
        module = tiny_model()
        assert isinstance(module, PreTrainedModel)
        torch.manual_seed(seed + 100)  # which must not matter
        return [factor.detach() for factor in add_adapter(module, LORA, name, seed=seed).parameters.parameters()]

    one, again, two, critic = first(0), first(0), first(1), first(0, CRITIC)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], two[0])
    assert not torch.equal(one[0], critic[0])
    assert not torch.equal(one[0], one[2]), "each layer has its own"
    a_RN = one[0].detach()
    assert float(a_RN.abs().max()) <= 32**-0.5
    assert float(a_RN.std()) == pytest.approx((32 * 3) ** -0.5, rel=0.15)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ("q_prj",),
            "'q_prj' is not a linear layer of LlamaForCausalLM that an adapter can be added to: choose among d",
        ),
        (("lm_head",), "'lm_head' is not a linear layer"),
        (("q_proj", "embed_tokens"), "'embed_tokens' is not a linear layer"),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(targets: tuple[str, ...], message: str) -> None:
    module = tiny_model()
    assert isinstance(module, PreTrainedModel)
    with pytest.raises(ConfigError, match=message):
        add_adapter(module, LoRAConfig(rank=2, targets=targets))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _, adapter = adapted("llama")
    save_adapter(adapter, "base", tmp_path)
    _, other = adapted("qwen3")
    with pytest.raises(ConfigError, match=r"belongs to another model: .* set model to the adapter's base"):
        load_adapter(other, tmp_path)
    with torch.no_grad():
        next(adapter.parameters.parameters()).fill_(float("nan"))
    save_adapter(adapter, "base", tmp_path)
    with pytest.raises(ConfigError, match="numbers that are not finite"):
        load_adapter(adapter, tmp_path)


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize(
    ("kind", "refused", "named"),
    [
        ("deepseek_v3", "gate_proj", "q_b_proj"),
        ("qwen3_next", "down_proj", "in_proj_qkvz"),
        ("mamba2", "out_proj", "in_proj"),
        ("jamba", "dt_proj", "x_proj"),
        ("llama4_text", "router", "q_proj"),  # a class derived from nn.Linear whose result is a pair
        ("falcon", "gate", "query_key_value"),  # one whose result is that of nn.Linear
    ],
)
def test_experts_in_one_parameter_and_mixers_of_mamba_have_adapters_where_peft_has_them(kind, refused, named, tmp_path):
    """Every adapted layer is trained, and peft reads the file to the same model."""
    model = zoo_model(kind)
    with pytest.raises(
        ConfigError, match=f"lora.targets: {refused!r} is not a linear layer of .* choose among .*{named}"
    ):
        add_adapter(model, LoRAConfig(rank=4, targets=(refused,)))
    adapter = add_adapter(model, LORA)
    fill(adapter)
    tokens = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 79, 3]])
    logits = model(input_ids=tokens).logits
    logits.log_softmax(-1)[0, :, 7].sum().backward()
    assert all(factor.grad is not None and bool(factor.grad.any()) for factor in adapter.parameters.parameters())
    save_adapter(adapter, "base", tmp_path)
    peft = PeftModel.from_pretrained(zoo_model(kind), str(tmp_path))
    torch.testing.assert_close(peft(input_ids=tokens).logits, logits)
