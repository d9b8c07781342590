"""A run that starts from another: from its model, from its newest checkpoint, or from the one that is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.config import (
    CheckpointConfig,
    ConfigError,
    CriticConfig,
    EvaluationConfig,
    LoRAConfig,
    LossConfig,
    ReferenceConfig,
    RunConfig,
    SamplingConfig,
    UpdateConfig,
)
from covey.config.model_sources import locate_model
from covey.config.recipe import config_from_dict, read_tables
from covey.config.rules import validate
from covey.experiment import job
from covey.experiment.llm import LLMBuilder
from covey.experiment.run import run
from covey.llm import memory as estimate
from covey.llm.memory import find_model_config, read_dimensions
from covey.llm.model.loading import load_model, resolve_checkpoint
from covey.llm.tasks import Arithmetic
from covey.runtime.checkpoint import CheckpointFolder
from covey.runtime.optimizer import EMAWeights
from covey.train.loop import train_step
from covey.train.prepare import NO_REFERENCE
from helpers.tiny_models import tiny_folder

CPU = torch.device("cpu")


def share_of_digits(completions, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def config_for(folder: Path, name: str, model: str, **changes) -> RunConfig:
    made = RunConfig(
        model=model, steps=5, run_dir=str(folder / name), threads=1, show_rollouts_every=0, precision="bf16",
        sampling=SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=5),
        update=UpdateConfig(learning_rate=3e-3), evaluation=EvaluationConfig(problems=2),
        checkpoint=CheckpointConfig(every=2, keep=3),
    )  # fmt: skip
    return replace(made, **changes)


def start(config: RunConfig, monkeypatch=None, *, stop_after: int | None = None):
    """A run; with `stop_after` one that is stopped as by Ctrl-C."""
    if stop_after is None:
        return run(config, task=Arithmetic(digits=(1,)), rewards=[share_of_digits])
    taken: list[int] = []

    def counting(*arguments):
        taken.append(1)
        return train_step(*arguments)

    monkeypatch.setattr("covey.train.loop.train_step", counting)
    monkeypatch.setattr(job, "stop_requests", lambda say: _Stops(lambda: len(taken) >= stop_after))
    result = run(config, task=Arithmetic(digits=(1,)), rewards=[share_of_digits])
    monkeypatch.undo()
    return result


class _Stops:
    def __init__(self, should_stop) -> None:
        self.should_stop = should_stop

    def __enter__(self):
        return self.should_stop

    def __exit__(self, *_) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("origins")
    tiny_folder(made / "base")
    patch = pytest.MonkeyPatch()
    assert start(config_for(made, "stopped", str(made / "base")), patch, stop_after=3) is None
    assert start(config_for(made, "finished", str(made / "base"))) is not None
    return made


def weights(model: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return dict(load_model(model, dtype=dtype, device=CPU).module.named_parameters())


def masters(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return CheckpointFolder(run_dir / "checkpoints").load(step)["optimizer"]["masters"]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


@pytest.mark.slow
def test_a_stopped_run_stands_for_its_newest_checkpoint(folder):
    stopped = folder / "stopped"
    assert resolve_checkpoint(str(stopped)) == str(stopped / "checkpoints" / "step-00000003")
    assert_equal(weights(str(stopped)), masters(stopped, 3))
    assert any(not torch.equal(w, weights(str(folder / "base"))[n]) for n, w in weights(str(stopped)).items())


@pytest.mark.slow
def test_a_checkpoint_that_is_named_is_the_policy_of_that_step_bit_for_bit(folder):
    named = folder / "stopped" / "checkpoints" / "step-00000002"
    for dtype in (torch.bfloat16, torch.float32):
        assert_equal(weights(str(named), dtype), masters(folder / "stopped", 2))


def test_a_finished_run_stands_for_its_model_which_is_its_last_checkpoint(folder):
    finished = folder / "finished"
    assert resolve_checkpoint(str(finished)) == str(finished / "model")
    assert_equal(weights(str(finished)), masters(finished, 5))
    assert_equal(weights(str(finished / "model")), weights(str(finished / "checkpoints" / "step-00000005")))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder / "stopped", copy)
    with open(copy / "checkpoints" / "step-00000003" / "tensors.safetensors", "ab") as file:
        file.write(b"x")
    assert resolve_checkpoint(str(copy)) == str(copy / "checkpoints" / "step-00000002")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(copy / "checkpoints" / "step-00000003"), dtype=torch.float32, device=CPU)
    shutil.rmtree(copy / "checkpoints" / "step-00000002")
    with pytest.raises(ConfigError, match="has no checkpoint that is whole"):
        resolve_checkpoint(str(copy))


def test_architecture_and_tokenizer_are_those_that_the_run_began_with(folder):
    for name in ("stopped", "stopped/checkpoints/step-00000002"):
        assert locate_model(str(folder / name)).description == folder / "stopped" / "architecture"
        ours, theirs = (find_model_config(str(folder / model)) for model in (name, "base"))
        assert {**ours, "dtype": None} == {**theirs, "dtype": None}
    loaded = load_model(str(folder / "stopped"), dtype=torch.float32, device=CPU)
    assert (
        loaded.chat.tokenizer("12").input_ids
        == load_model(str(folder / "base"), dtype=torch.float32, device=CPU).chat.tokenizer("12").input_ids
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("stopped/checkpoints/step-00000009", r"has no checkpoint step-00000009: it has step-00000002, step-00000003"),
        ("nothing", r"has saved neither its model nor a checkpoint yet: go on with it by covey train --resume"),
        ("agent", r"trained an agent, no language model"),
        ("agent/checkpoints/step-00000001", r"trained an agent, no language model"),
        ("orphan", r"architecture has no config.json, .*: copy config.json and the tokenizer's files"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_loaded(folder, model, message):
    for name in ("nothing", "agent", "orphan"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "nothing" / "config.toml").write_text((folder / "stopped" / "config.toml").read_text())
    (folder / "agent" / "config.toml").write_text('algorithm = "grpo"\n[environment]\nid = "CartPole-v1"\n')
    (folder / "orphan" / "config.toml").write_text(f'algorithm = "grpo"\nmodel = "{folder}/gone"\n')
    if not (folder / "orphan" / "checkpoints").exists():
        shutil.copytree(folder / "stopped" / "checkpoints", folder / "orphan" / "checkpoints")
    with pytest.raises(ConfigError, match=message):
        locate_model(str(folder / model))


@pytest.mark.slow
def test_ppo_goes_on_from_a_run_of_grpo_that_was_stopped(folder):
    config = config_for(folder, "ppo", str(folder / "stopped"), algorithm="ppo", steps=2)
    validate(config, own_task=True)
    summary = start(config)
    assert summary is not None
    written = config_from_dict(read_tables(folder / "ppo" / "config.toml"))
    assert written.model == str(folder / "stopped" / "checkpoints" / "step-00000003"), "pinned, to be resumed from"
    assert (folder / "ppo" / "critic").is_dir()
    assert any(not torch.equal(w, weights(str(folder / "stopped"))[n]) for n, w in weights(str(folder / "ppo")).items())


def built(config: RunConfig, tmp_path: Path):
    from rich.console import Console

    from covey.tracking.console import Display
    from covey.tracking.run_store import RunStore

    builder = LLMBuilder(config, Arithmetic(digits=(1,)), [share_of_digits])
    try:
        display = Display(config.steps, domain=builder.name, score_kind=builder.score_kind, console=Console(quiet=True))
        return builder.build(RunStore(tmp_path / "run"), display).parts
    finally:
        builder.close()


def test_the_reference_and_the_old_policy_are_the_checkpoint_too(folder, tmp_path):
    parts = built(config_for(tmp_path, "next", str(folder / "stopped")), tmp_path)
    expected = masters(folder / "stopped", 3)
    assert_equal(dict(parts.policy.module.named_parameters()), expected)
    assert_equal(dict(parts.reference.module.named_parameters()), expected)
    assert parts.critics == ()


FIXED, LEFT, ADAPTER = LossConfig(kl_coefficient=0.1), LossConfig(kl_coefficient=0.0), LoRAConfig(rank=2)


@pytest.mark.parametrize(
    ("has", "fields"),
    [
        (True, {}),
        (True, {"algorithm": "rloo"}),
        (True, {"loss": replace(FIXED, kl_warmup_steps=2)}),
        (True, {"loss": replace(FIXED, kl_warmup_steps=2), "lora": ADAPTER}),
        (False, {"algorithm": "dapo"}),
        (False, {"loss": LEFT}),
        (False, {"loss": replace(LEFT, kl_estimator="exact")}),
        (False, {"loss": LEFT, "lora": ADAPTER}),
        (False, {"loss": LEFT, "algorithm": "ppo"}),
    ],
)
def test_a_run_has_a_reference_if_its_kl_coefficient_is_ever_above_0(folder, tmp_path, has, fields):
    """The prediction of its memory counts the numbers that it has beside the policy's."""
    config = config_for(tmp_path, "next", str(folder / "base"), reference=ReferenceConfig(refresh_every=2), **fields)
    parts = built(config, tmp_path)
    assert (parts.reference is not NO_REFERENCE, isinstance(parts.reference_updater, EMAWeights)) == (has, has)
    size = read_dimensions(json.loads((folder / "base" / "config.json").read_text()))
    beside = sum(one.numel() for one in parts.reference.trained.parameters()) if has else 0
    assert estimate.reference_parameters(size, config) == beside


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_ppo_takes_over_the_critic_of_ppo(folder, tmp_path, trunk, monkeypatch):
    first = config_for(
        tmp_path, "first", str(folder / "base"), algorithm="ppo", steps=4, critic=CriticConfig(trunk=trunk)
    )
    assert start(first, monkeypatch, stop_after=2) is None
    parts = built(replace(first, model=str(tmp_path / "first"), run_dir=str(tmp_path / "next")), tmp_path)
    saved = CheckpointFolder(tmp_path / "first" / "checkpoints").load(2)["critic_optimizer"]["masters"]
    assert_equal(dict(parts.critics[0].module.named_parameters()), saved)
    assert float(parts.critics[0].head.linear.weight.detach().abs().sum()) > 0
    other = "policy" if trunk == "own" else "own"
    with pytest.raises(ConfigError, match=r"set critic\.trunk as that run has it"):
        built(replace(first, model=str(tmp_path / "first"), critic=CriticConfig(trunk=other)), tmp_path / other)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_several_epochs_leave_the_old_policy_and_the_kl_to_it_is_felt(folder, tmp_path, estimator):
    config = config_for(
        tmp_path, "epochs", str(folder / "base"), steps=3, precision="fp32",
        update=UpdateConfig(learning_rate=2e-2, epochs=3),
        loss=LossConfig(kl_to="behavior", kl_estimator=estimator, kl_coefficient=0.1),
    )  # fmt: skip
    validate(config, own_task=True)
    assert start(config) is not None
    free = replace(config, run_dir=str(tmp_path / "free"), loss=replace(config.loss, kl_coefficient=0.0))
    assert start(free) is not None
    held, loose = (_metrics(tmp_path / name) for name in ("epochs", "free"))
    moved = [line for line in held if line["update/optimizer_steps"] > 0]
    assert len(moved) >= 2
    assert max(line["ratio/max"] for line in moved) > 1.2
    assert sum(line["clip/low"] + line["clip/high"] for line in moved) > 0
    assert all(line["update/optimizer_steps"] == 3 for line in moved)
    assert all(value == value and abs(value) != float("inf") for line in held for value in line.values())
    assert moved[0]["kl/behavior"] > 0
    assert held[0]["kl/behavior"] != loose[0]["kl/behavior"]
    assert all("kl" in line for line in held), "the KL to the reference is watched all the same"
    assert not any("kl" in line for line in loose)


def _metrics(run_dir: Path) -> list[dict]:
    from covey.tracking.run_store import read_metrics

    return read_metrics(run_dir)


def test_parameters_begin_at_a_cache_line(tmp_path: Path) -> None:
    """In the memory of a mapped file they do not, and matrix products have other bits."""
    module = load_model(str(tiny_folder(tmp_path / "tiny")), dtype=torch.float32, device=torch.device("cpu")).module
    assert all(parameter.data_ptr() % 64 == 0 for parameter in module.parameters())
