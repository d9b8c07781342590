"""Runs with an adapter: checkpoints, folders, exports and further runs."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey import (
    ArithmeticConfig,
    ConfigError,
    EvaluationConfig,
    LossConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    UpdateConfig,
    run,
)
from covey.cli.main import main
from covey.config import CheckpointConfig, CriticConfig, LoRAConfig
from covey.experiment.llm import LLMBuilder
from covey.experiment.models import check_first_adapter
from covey.runtime.checkpoint import CheckpointFolder
from covey.tracking.run_store import read_metrics
from helpers.tiny_models import tiny_folder, tiny_model

FACTORS = 2 * 7 * 2  # matrices of an adapter of two layers


def settings(folder: Path, name: str, **changes: object) -> RunConfig:
    config = RunConfig(
        model=str(folder / "model"),
        steps=3,
        threads=1,
        precision="fp32",
        task=ArithmeticConfig(digits=(1,)),
        rewards=(RewardConfig(name="digits"), RewardConfig(name="length", length_limit=4, weight=0.5)),
        sampling=SamplingConfig(prompts_per_step=3, group_size=4, max_new_tokens=6),
        update=UpdateConfig(learning_rate=3e-3),
        loss=LossConfig(kl_coefficient=0.02),
        evaluation=EvaluationConfig(problems=2),
        checkpoint=CheckpointConfig(every=1),
        lora=LoRAConfig(rank=2, alpha=8),
        run_dir=str(folder / name),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    tiny_folder(made / "model")
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """A finished run of GRPO, with the checkpoints of steps 2 and 3."""
    run(settings(folder, "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def trained_bf16(folder: Path) -> Path:
    run(settings(folder, "run-bf16", precision="bf16"))
    return folder / "run-bf16"


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[5, 9, 30, 41, 7, 12]])).logits.float()
    return logits


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_alone(trained: Path) -> None:
    masters = CheckpointFolder(trained / "checkpoints").tensors(3, "optimizer/masters")
    assert len(masters) == FACTORS
    assert all(".lora_" in name for name in masters)
    numbers = sum(one.numel() for one in masters.values())
    size = (trained / "checkpoints" / "step-00000003" / "tensors.safetensors").stat().st_size
    assert 3 * 4 * numbers <= size < 3 * 4 * numbers + 16_000
    base = json.loads((trained / "architecture" / "base.json").read_text())
    assert base["model"] == str(trained.parent / "model")
    metrics = read_metrics(trained)
    assert metrics[0]["kl"] < 1e-10, "the reference is the model without its adapter"
    assert metrics[-1]["kl"] > 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["trained", "trained_bf16"])
def test_the_merged_export_is_adapter_plus_base(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Both are loaded by transformers and by peft unchanged, and peft merges them to the same weights."""
    run_dir: Path = request.getfixturevalue(name)
    assert main(["export", str(run_dir), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run_dir), str(tmp_path / "adapter"), "--adapter"]) == 0
    exact = name == "trained"
    dtype = torch.float32 if exact else torch.bfloat16
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == dtype
    base = AutoModelForCausalLM.from_pretrained(run_dir.parent / "model", dtype=dtype).double()
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).to(torch.float64)
    unmerged = logits_of(adapted)
    plain = adapted.merge_and_unload()
    first, changed = dict(tiny_model(dtype=dtype).double().named_parameters()), 0
    for path, weight in plain.named_parameters():
        found = dict(merged.named_parameters())[path].double()
        torch.testing.assert_close(found, weight, rtol=1e-6 if exact else 2**-8, atol=1e-7 if exact else 1e-5)
        changed += int(not torch.equal(weight, first[path]))
    assert changed == FACTORS / 2
    if exact:
        torch.testing.assert_close(logits_of(merged), unmerged, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template
    assert sorted(path.name for path in (tmp_path / "adapter").glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_weights_in_4_bits_are_exported_as_they_were_trained(folder: Path, tmp_path: Path) -> None:
    """The exports of the run and of its last checkpoint are equal, and not those of the original weights."""
    pytest.importorskip("bitsandbytes", reason="covey[4bit] is not installed")
    lora = LoRAConfig(rank=2, alpha=8, load_in_4bit=True)
    run(settings(folder, "run-4bit", steps=2, lora=lora, precision="bf16"))
    metrics = read_metrics(folder / "run-4bit")
    assert metrics[0]["kl"] < 1e-3, "the reference is the quantized model without its adapter"
    assert metrics[-1]["mismatch/kl"] < 1e-3
    for name, words in (("run-4bit", []), ("run-4bit@2", []), ("run-4bit@2", ["--adapter"])):
        assert main(["export", str(folder / name), str(tmp_path / f"{name}{len(words)}"), *words]) == 0
    weights = [
        load_file(path / "model.safetensors")
        for path in (tmp_path / "run-4bit0", tmp_path / "run-4bit@20", folder / "run-4bit" / "model")
    ]
    original = tiny_model(dtype=torch.bfloat16).state_dict()
    for name, weight in weights[0].items():
        assert all(torch.equal(weight, other[name]) for other in weights[1:])
        error = float((weight - original[name]).float().norm() / original[name].float().norm())
        assert 0.03 < error < 0.2 if "proj" in name else error == 0
    bases = [
        json.loads((at / "base.json").read_text()) for at in (tmp_path / "run-4bit@21", folder / "run-4bit" / "adapter")
    ]
    assert bases[0] == bases[1]
    assert bases[0]["quantization"] == "nf4, double quantization"


def test_weights_in_4_bits_need_bitsandbytes_and_linear_layers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = LoRAConfig(rank=2, load_in_4bit=True)
    found = find_spec("peft")
    present = {"bitsandbytes"}
    monkeypatch.setattr(
        "covey.config.model_sources.find_spec", lambda name: found if name in present | {"peft"} else None
    )
    assert check_first_adapter(settings(folder, "none", lora=lora)) == [
        "77% of the frozen weights, in 14 linear layers, are in 4 bits; no others are quantized"
    ]
    gpt2 = settings(folder, "none", lora=lora, model=str(tiny_folder(tmp_path, "gpt2")))
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no layers of torch\.nn\.Linear below its output layer"):
        check_first_adapter(gpt2)
    present.clear()
    with pytest.raises(ConfigError, match=r'needs the package bitsandbytes: pip install "covey\[4bit\]"$'):
        check_first_adapter(settings(folder, "none", lora=lora))


def test_a_finished_run_has_both(trained: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    adapted = PeftModel.from_pretrained(tiny_model(), str(trained / "adapter"))
    torch.testing.assert_close(logits_of(model), logits_of(adapted), atol=1e-4, rtol=0)
    assert main(["export", str(trained), str(tmp_path / "adapter"), "--adapter"]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors", "base.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (trained / "adapter" / name).read_bytes()


def test_a_checkpoint_is_exported_with_its_adapter(trained: Path, tmp_path: Path) -> None:
    assert main(["export", f"{trained}@2", str(tmp_path / "merged")]) == 0
    assert main(["export", f"{trained}@2", str(tmp_path / "adapter"), "--adapter"]) == 0
    masters = CheckpointFolder(trained / "checkpoints").tensors(2, "optimizer/masters")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in masters} == saved.keys()
    for name, master in masters.items():
        assert torch.equal(saved[f"base_model.model.{name}"], master)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(merged), logits_of(adapted), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "MODEL", "out", "--adapter"], "is not a run with LoRA, so there is no adapter to export"),
        (["export", "RUN", "out", "--adapter", "--gguf", "f32"], "leave out --adapter or --gguf"),
        (["sample", "RUN/adapter", "1+2"], "is an adapter (LoRA or another kind), no whole model: name its base"),
    ],
)
def test_what_has_no_adapter_or_no_model_is_refused(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [word.replace("MODEL", str(trained.parent / "model")).replace("RUN", str(trained)) for word in words]
    assert main(given) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of", ["", "@2"], ids=["finished", "checkpoint"])
def test_sample_and_eval_read_a_run_with_an_adapter(trained: Path, of: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", f"{trained}{of}", "1+2", "--n", "1", "--max-new-tokens", "2"]) == 0
    assert main(["eval", f"{trained}{of}", "--problems", "2", "--max-new-tokens", "4"]) == 0
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_starts_from_an_adapter_and_its_reference_does_too(trained: Path, folder: Path) -> None:
    run(settings(folder, "second", lora=LoRAConfig(adapter=str(trained)), steps=2))
    metrics = read_metrics(folder / "second")
    assert metrics[0]["kl"] < 1e-10
    assert metrics[1]["kl"] > 1e-6
    before, after = (load_file(one / "adapter" / "adapter_model.safetensors") for one in (trained, folder / "second"))
    distance = sum(float((before[name] - after[name]).norm()) for name in before)
    assert before.keys() == after.keys()
    assert 0 < distance < sum(float(one.norm()) for one in before.values())
    config = json.loads((folder / "second" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8.0)


@pytest.mark.slow
def test_peft_s_own_adapter_is_where_a_run_starts(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(tiny_model(), LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    made.save_pretrained(tmp_path / "peft")
    lora = LoRAConfig(adapter=str(tmp_path / "peft"))
    update = UpdateConfig(learning_rate=1e-12)
    run(settings(folder, "from-peft", lora=lora, steps=1, update=update))
    merged = AutoModelForCausalLM.from_pretrained(folder / "from-peft" / "model")
    torch.testing.assert_close(logits_of(merged), logits_of(made), atol=1e-4, rtol=0)


def test_check_compares_the_adapter_with_the_model_without_its_weights(trained: Path, tmp_path: Path) -> None:
    """An adapter of another model, of other layers, or that names another base: found before any weights are read."""
    adapter = tmp_path / "adapter"
    shutil.copytree(trained / "adapter", adapter)
    (adapter / "base.json").unlink()  # as in an adapter of peft
    config = settings(tmp_path, "unused", lora=LoRAConfig(adapter=str(adapter)))
    fields = json.loads((adapter / "adapter_config.json").read_text())
    for name in ("llama", "qwen3"):
        tiny_folder(tmp_path / name, name)
        (tmp_path / name / "model.safetensors").unlink()
    same = replace(config, model=str(tmp_path / "llama"))

    def write(**changes: Any) -> None:
        (adapter / "adapter_config.json").write_text(json.dumps(fields | changes))

    for base, notes in (("some/llama", 0), ("", 0), (None, 0), ("meta-llama/Llama-3.2-1B", 1)):
        write(base_model_name_or_path=base)
        found = check_first_adapter(same)
        assert len(found) == notes
        assert all("names the base model meta-llama/Llama-3.2-1B, and model is" in note for note in found)
    reason = "belongs to another model: .* matrices do not fit, such as .*: set model to the adapter's base"
    with pytest.raises(ConfigError, match=reason):
        LLMBuilder(replace(config, model=str(tmp_path / "qwen3")))
    write(r=fields["r"] + 1)
    with pytest.raises(ConfigError, match=reason):
        LLMBuilder(same)
    write(target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=reason):
        LLMBuilder(same)
    (adapter / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="cannot be read: copy it again"):
        LLMBuilder(same)


@pytest.mark.slow
def test_a_run_with_all_weights_goes_on_from_a_checkpoint_with_an_adapter(trained: Path, folder: Path) -> None:
    run(settings(folder, "whole", model=f"{trained}@3", lora=LoRAConfig(), steps=1))
    masters = CheckpointFolder(folder / "whole" / "checkpoints").tensors(1, "optimizer/masters")
    assert masters.keys() == dict(tiny_model().named_parameters()).keys()


@pytest.mark.slow
def test_another_adapter_is_trained_on_the_merged_model(trained: Path, folder: Path) -> None:
    """The base of a checkpoint of the second run is a checkpoint of the first."""
    run(settings(folder, "third", model=f"{trained}@3", steps=1))
    assert read_metrics(folder / "third")[0]["kl"] < 1e-10
    assert main(["sample", f"{folder / 'third'}@1", "1+2", "--n", "1", "--max-new-tokens", "2"]) == 0


@pytest.mark.slow
def test_a_changed_base_is_refused(trained: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    config = settings(folder, "run", model=str(tmp_path / "model"), run_dir=str(tmp_path / "run"), steps=1)
    run(config)
    tiny_folder(tmp_path / "model", seed=1)
    with pytest.raises(
        ConfigError, match=r"model to which the adapter of .*architecture/base.json belongs: put them back"
    ):
        main(["--debug", "sample", f"{tmp_path / 'run'}@1", "1+2", "--n", "1"])
    with pytest.raises(ConfigError, match="belongs: set model to the adapter's base, which that file names"):
        run(replace(config, lora=LoRAConfig(adapter=str(trained)), run_dir=str(tmp_path / "other")))
    assert main(["sample", str(tmp_path / "run"), "1+2", "--n", "1", "--max-new-tokens", "2"]) == 0, "it is merged"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("trunk", ["adapter", "policy"])
def test_ppo_has_a_critic_on_the_same_weights(folder: Path, trunk: str) -> None:
    name = f"ppo-{trunk}"
    update = UpdateConfig(learning_rate=1e-3, critic_learning_rate=3e-2, critic_epochs=1)
    run(settings(folder, name, algorithm="ppo", critic=CriticConfig(trunk=trunk), update=update))
    checkpoints = CheckpointFolder(folder / name / "checkpoints")
    masters = checkpoints.tensors(3, "critic_optimizer/masters")
    assert len(masters) == 2 + (FACTORS if trunk == "adapter" else 0)
    metrics = read_metrics(folder / name)
    assert metrics[0]["value/mean"] == 0
    assert metrics[-1]["value/mean"] != 0
    saved = {path.name for path in (folder / name / "critic").iterdir()}
    adapter = {"adapter_config.json", "adapter_model.safetensors", "base.json"} if trunk == "adapter" else set()
    assert saved == {"value_head.safetensors"} | adapter


def test_without_peft_the_install_command_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("covey.config.model_sources.find_spec", lambda name: None)
    words = ["train", "arithmetic_grpo", "--model", str(folder / "model"), "--run-dir", str(folder / "without")]
    assert main([*words, "--rank", "2"]) == 2
    assert 'LoRA needs the package peft: pip install "covey[lora]"' in capsys.readouterr().err
    assert not (folder / "without").exists()


PROGRAM = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "peft":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from covey.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_all_weights_are_trained_without_peft(folder: Path) -> None:
    words = ["train", "arithmetic_grpo", "--model", folder / "model", "--steps", "1", "--run-dir", folder / "all"]
    more = ["--problems", "2", "--max-new-tokens", "4"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words, *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
