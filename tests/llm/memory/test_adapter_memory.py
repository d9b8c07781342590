"""The predicted memory of adapters against adapters that are really made and tensors that autograd really keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.cli.main import main
from covey.config import ConfigError, CriticConfig, LoRAConfig, LossConfig, ReferenceConfig, RunConfig, UpdateConfig
from covey.experiment.plan import check_memory
from covey.llm.generation import backend
from covey.llm.memory import activation_bytes, activation_change, adapter_parameters, predict
from covey.llm.model.lora import add_adapter
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from covey.runtime.optimizer import MasterAdamW
from helpers.memory_models import SMOLLM2, batch_of, bytes_kept, sized_model

CONFIG = RunConfig(precision="bf16", device="cpu", model="smollm2-135m")
SOME = {
    "llama": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "k_proj", "v_proj", "up_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
}
LORA = LoRAConfig(rank=16)


@pytest.mark.parametrize("targets", ["all", "some"])
@pytest.mark.parametrize("kind", sorted(SOME))
def test_the_numbers_of_an_adapter(kind: str, targets: str) -> None:
    module, size = sized_model(kind)
    lora = LoRAConfig(rank=5, targets=SOME[kind] if targets == "some" else ())
    made = list(add_adapter(module, lora).parameters.parameters())
    assert adapter_parameters(size, replace(CONFIG, lora=lora)) == sum(factor.numel() for factor in made)
    with pytest.raises(ConfigError, match=r"'qproj' is not a linear layer of .* an adapter can be added to: choose"):
        adapter_parameters(size, replace(CONFIG, lora=LoRAConfig(rank=5, targets=("qproj",))))


@pytest.mark.sampled(28)
@pytest.mark.parametrize("targets", ["all", "some"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", sorted(SOME))
def test_activations_are_those_that_autograd_keeps(
    kind: str, kernels: bool, dtype: torch.dtype, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
    module, size = sized_model(kind, dtype)
    policy = LanguagePolicy(module)
    config = replace(CONFIG, lora=LoRAConfig(rank=5, targets=SOME[kind] if targets == "some" else ()))
    add_adapter(module, config.lora)
    shape = 2, 8, 10, 30
    tokens, fused = 2 * 10 + 16 * 29, kernels and size.has_kernels
    stated = activation_bytes(size, dtype.itemsize, 2, 16, 10, 29, fused=fused)
    change = activation_change(size, config, tokens, dtype.itemsize, fused=fused, recomputed=False)
    # Counted, and not kept: what the first layer computes before its first adapter.
    assert stated + change == pytest.approx(bytes_kept(policy, batch_of(*shape)), rel=0.02)
    recompute_layers(module)
    kept = bytes_kept(policy, batch_of(*shape))
    stated = activation_bytes(size, dtype.itemsize, 2, 16, 10, 29, fused=fused, recomputed=True)
    a_layer = stated - activation_bytes(replace(size, layers=0), dtype.itemsize, 2, 16, 10, 29, fused=fused)
    assert kept < stated < kept + a_layer


def test_what_stays_is_counted_by_the_adapter() -> None:
    policy = LanguagePolicy(sized_model("llama", torch.bfloat16)[0])
    adapter = add_adapter(policy.module, LORA)
    made = MasterAdamW(adapter.parameters, 1e-3)
    numbers = sum(master.numel() for master in made.masters.values())
    size = sized_model("llama")[1]
    parts = predict(size, replace(CONFIG, lora=LORA), device="cpu", width=2).parts
    whole = predict(size, CONFIG, device="cpu", width=2).parts
    names = ("adapter", "fp32 master weights", "optimizer moments", "gradients")
    assert [parts[name] for name in names] == [2 * numbers, 4 * numbers, 8 * numbers, 4 * numbers]
    assert parts["weights"] == whole["weights"]
    assert parts["reference"] == 0, "it is the model without its adapter"
    assert parts["prepacked weights"] == whole["prepacked weights"], "merged weights are packed for sampling"
    assert whole["adapter"] == 0
    head = 512 * 96 * 2
    assert parts["logits"] == whole["logits"] - head
    exact = replace(CONFIG, loss=LossConfig(kl_estimator="exact", kl_coefficient=0.1))
    kl_parts = [predict(size, one, device="cpu", width=2).parts["logits"] for one in (exact, replace(exact, lora=LORA))]
    assert kl_parts[0] > kl_parts[1]
    for config in (
        replace(CONFIG, lora=LORA, reference=ReferenceConfig(refresh_every=2)),
        replace(CONFIG, lora=LORA, iteration=replace(CONFIG.iteration, steps=3)),
    ):
        assert predict(size, config, device="cpu", width=2).parts["reference"] == 2 * numbers


def test_weights_in_4_bits_are_those_of_linear_layers() -> None:
    """SmolLM2: 106,168,320 weights in linear layers, the largest of 576 x 1536; the others stay in bf16."""
    config = replace(CONFIG, lora=replace(LORA, load_in_4bit=True))
    whole, parts = (predict(SMOLLM2, one, device="cpu", width=2).parts for one in (replace(CONFIG, lora=LORA), config))
    kept = 49152 * 576 + 61 * 576 + 576 * 1536
    assert parts["weights"] == 2 * kept + 106_168_320 // 2 + 106_168_320 // 64 + 106_168_320 // (64 * 256) * 4
    assert parts | {"weights": 0} == whole | {"weights": 0}


def test_a_critic_s_adapter_is_counted() -> None:
    config = replace(CONFIG, algorithm="ppo", lora=LORA, critic=CriticConfig(trunk="adapter"))
    parts = predict(SMOLLM2, config, device="cpu", width=2).parts
    critic = adapter_parameters(SMOLLM2, config) + 576 + 1
    names = ("critic's weights", "critic's master weights", "critic's moments", "critic's gradients")
    assert [parts[name] for name in names] == [2 * critic, 4 * critic, 8 * critic, 4 * critic]
    shared = replace(config, critic=CriticConfig(trunk="policy"))
    assert predict(SMOLLM2, shared, device="cpu", width=2).parts["critic's weights"] == 2 * 577


@pytest.mark.slow
def test_the_plan_shows_an_adapter_and_its_critic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2-135m", "--device", "cpu", "--precision", "bf16", "--rank", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split() for line in lines if "shared" in line) == ["grpo", "ppo", "ppo,", "shared"]
    assert not any("reference" in line for line in lines)
    assert next(line.split()[1:] for line in lines if "adapter" in line) == ["0.01", "0.01", "0.01"]
    words = ["--ranks", "2", "--device-memory", "8GiB", "--rank", "16", "--algorithm", "ppo"]
    assert main(["plan", "smollm2-135m", *words]) == 0
    said = capsys.readouterr().out
    assert "with LoRA the ranks divide the frozen weights, and every rank has the whole adapter" in said
    assert "FSDP2, exact" not in said
    of_layouts = {line.split()[0]: line.split()[-2:] for line in said.splitlines() if line.split()}
    assert of_layouts["weights"] == ["0.25", "0.13"]
    assert of_layouts["adapter"] == ["0.01", "0.01"]
    assert 'cluster.weights = "auto" chooses replicated' in said
    assert "take 0.4 GiB, at most 70% of a device" in said
    assert "adapter" in check_memory(replace(CONFIG, lora=LORA))
    more = ["--cluster", "--mean-tokens", "30", "--sampler-devices", "1"]
    assert main(["plan", "smollm2-135m", *words, *more]) == 0


def test_the_gradients_in_a_tree_are_those_of_the_adapter() -> None:
    config = replace(CONFIG, lora=LORA, update=UpdateConfig(eight_bit_moments=True))
    sharded = replace(config, cluster=replace(CONFIG.cluster, shards=2))
    parts = predict(SMOLLM2, sharded, device="cpu", width=2).parts
    assert parts["gradients of shards"] == parts["gradients"] == 4 * adapter_parameters(SMOLLM2, config)
    assert parts["optimizer moments"] < 3 * adapter_parameters(SMOLLM2, config)


def test_an_adapter_that_training_begins_with_is_read(tmp_path: Path) -> None:
    fields = {"peft_type": "LORA", "r": 3, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    parts = predict(SMOLLM2, replace(CONFIG, lora=LoRAConfig(adapter=str(tmp_path))), device="cpu", width=2).parts
    assert parts["adapter"] == parts["reference"] == 2 * 30 * 3 * (576 + 192)
