"""The predicted memory against models that are really made, against what autograd really keeps, and against itself."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.cli.main import main
from covey.config import (
    ArithmeticConfig,
    ConfigError,
    CriticConfig,
    IterationConfig,
    LoRAConfig,
    LossConfig,
    ProcessConfig,
    ReasoningGymConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TeacherConfig,
    UpdateConfig,
)
from covey.config.machine import processors
from covey.config.rewards import BUILT_IN_REWARDS
from covey.experiment.plan import check_memory, plan_memory
from covey.llm import memory as estimate
from covey.llm.generation import backend
from covey.llm.memory import (
    SMOLLM2_135M,
    MemoryPlan,
    activation_bytes,
    activation_change,
    adapter_parameters,
    find_model_config,
    frozen_parameters,
    largest_microbatch,
    predict,
    read_dimensions,
)
from covey.llm.model import prefix_attention
from covey.llm.model.lora import add_adapter
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from covey.llm.rewards.runner import InProcess
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.runtime.optimizer import MasterAdamW
from helpers.memory_models import FIELDS, SMOLLM2, batch_of, bytes_kept, model_config, sized_model

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig(precision="bf16", device="cpu")
PPO = replace(CONFIG, algorithm="ppo")


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_parameters_are_counted_exactly(kind: str) -> None:
    model, size = sized_model(kind)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    head = 0 if size.is_tied else model.get_output_embeddings().weight.numel()
    assert size.trunk_parameters == size.parameters - head
    assert size.is_tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_dimensions_are_those_of_the_architecture() -> None:
    gpt2, qwen3 = read_dimensions(model_config("gpt2")), read_dimensions(model_config("qwen3"))
    assert (gpt2.hidden, gpt2.layers, gpt2.query, gpt2.key_value, gpt2.intermediate) == (96, 3, 96, 96, 384)
    assert (qwen3.query, qwen3.key_value, qwen3.has_head_norms, qwen3.feed_forward_kept) == (192, 64, True, 4)
    assert (gpt2.has_rms_norm, gpt2.has_head_norms, gpt2.feed_forward_kept) == (False, False, 5)


@pytest.mark.sampled(42)
@pytest.mark.parametrize("limit", [prefix_attention.SCORES_LIMIT, 0], ids=["products", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_activations_are_what_autograd_keeps(
    kind: str, kernels: bool, dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
    monkeypatch.setattr(prefix_attention, "SCORES_LIMIT", limit)
    model, size = sized_model(kind, dtype)
    policy = LanguagePolicy(model)
    assert policy.shares_prompts
    for prompts, group_size, prompt_tokens, new_tokens in ((2, 4, 10, 7), (2, 3, 30, 5), (2, 8, 10, 30)):
        counted = activation_bytes(
            size, dtype.itemsize, prompts, prompts * group_size, prompt_tokens, new_tokens - 1,
            fused=kernels and size.has_kernels,
        )  # fmt: skip
        kept = bytes_kept(policy, batch_of(prompts, group_size, prompt_tokens, new_tokens))
        assert counted == pytest.approx(kept, rel=0.015)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_recomputed_layers_keep_their_inputs(
    kind: str, kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd keeps the inputs between the passes, and the backward pass has one layer's activations besides."""
    if not kernels:
        monkeypatch.setattr(backend, "kernels_for", lambda *_: None)
    model, size = sized_model(kind, dtype)
    policy = LanguagePolicy(model)
    recompute_layers(policy.module)
    shape = 2, 4, 30, 12
    kept = bytes_kept(policy, batch_of(*shape))

    def stated(layers: int, *, recomputed: bool) -> int:
        return activation_bytes(
            replace(size, layers=layers), dtype.itemsize, 2, 8, 30, 11,
            fused=kernels and size.has_kernels, recomputed=recomputed,
        )  # fmt: skip

    a_layer = stated(size.layers, recomputed=False) - stated(size.layers - 1, recomputed=False)
    angles = (2 * 30 + 8 * 11) * 2 * size.head_dim * dtype.itemsize  # arguments of all layers, which no hook is shown
    # What is not counted: the indices of the decisions.
    assert stated(size.layers, recomputed=True) - a_layer - angles == pytest.approx(kept, rel=0.06)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("microbatch_tokens", [1, 20, 30, 64, 100, 117, 118, 119, 400])
def test_the_largest_microbatch_is_that_of_the_policy(microbatch_tokens: int) -> None:
    prompts, group_size, prompt_tokens, new_tokens = 3, 4, 19, 10
    policy = LanguagePolicy(sized_model("llama")[0], microbatch_tokens=microbatch_tokens)
    batch = batch_of(prompts, group_size, prompt_tokens, new_tokens)
    largest = max(policy.microbatches(batch), key=len)
    config = replace(
        CONFIG,
        sampling=SamplingConfig(prompts_per_step=prompts, group_size=group_size, max_new_tokens=new_tokens),
        update=UpdateConfig(microbatch_tokens=microbatch_tokens),
    )
    assert largest_microbatch(config, prompt_tokens) == (len(batch.group_B[largest].unique()), len(largest))
    halves = replace(config, update=UpdateConfig(microbatch_tokens=10_000, minibatches=3))
    assert largest_microbatch(halves, prompt_tokens) == (1, group_size)


def test_what_stays_is_counted_by_the_weights() -> None:
    assert SMOLLM2.parameters == SMOLLM2.trunk_parameters == 134_515_008
    parts = predict(SMOLLM2, CONFIG, device="cpu", width=2).parts
    assert parts["weights"] == parts["reference"] == 2 * SMOLLM2.parameters
    assert parts["fp32 master weights"] == parts["gradients"] == 4 * SMOLLM2.parameters
    assert parts["optimizer moments"] == 8 * SMOLLM2.parameters
    exact = predict(SMOLLM2, CONFIG, device="cpu", width=4).parts
    assert exact["weights"] == exact["reference"] == 4 * SMOLLM2.parameters
    assert exact["fp32 master weights"] == exact["critic's master weights"] == 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ppo_is_grpo_and_a_critic(kind: str) -> None:
    size, everything = read_dimensions(model_config(kind)), UpdateConfig(microbatch_tokens=100_000)
    grpo = predict(size, replace(CONFIG, update=everything), device="cuda", width=2)
    ppo = replace(PPO, update=everything)
    own = predict(size, ppo, device="cuda", width=2)
    shared = predict(size, replace(ppo, critic=CriticConfig(trunk="policy")), device="cuda", width=2)
    without_head = size.parameters - (0 if size.is_tied else size.hidden * size.vocabulary)
    for plan, critic in ((own, without_head + size.hidden + 1), (shared, size.hidden + 1)):
        names = ("critic's weights", "critic's master weights", "critic's moments", "critic's gradients")
        assert [plan.parts[name] for name in names] == [2 * critic, 4 * critic, 8 * critic, 4 * critic]
        assert not plan.parts["fragmentation"]
        read = 256 * 64 * size.hidden * 4 if plan is shared else 0  # by the value head on the policy's trunk, in fp32
        rest = {name: count for name, count in plan.parts.items() if name not in names}
        rest["activations"] -= read
        assert rest == {name: count for name, count in grpo.parts.items() if name not in names}
    assert not any(size for name, size in grpo.parts.items() if name.startswith("critic"))
    assert grpo.peak < min(shared.peak, own.peak)


def test_a_teacher_is_counted_by_its_kind() -> None:
    bare = replace(CONFIG, loss=LossConfig(kl_coefficient=0.0))
    plain = predict(SMOLLM2, bare, device="cpu", width=2).parts
    for model, extra in {
        "smollm2-135m": {"teacher": 2 * SMOLLM2.parameters},
        "reference": {"reference": 2 * SMOLLM2.parameters},
        "policy": {},
    }.items():
        config = replace(bare, teacher=TeacherConfig(model, prompt="{answer}"))
        parts = predict(SMOLLM2, config, device="cpu", width=2).parts
        assert {name: size for name, size in parts.items() if size != plain[name] and name != "logits"} == extra
        assert parts["logits"] > plain["logits"]
        mixed = replace(config, teacher=replace(config.teacher, divergence="jensen_shannon"))
        assert predict(SMOLLM2, mixed, device="cpu", width=2).parts["logits"] > parts["logits"]
    assert frozen_parameters(SMOLLM2, replace(bare, teacher=TeacherConfig("smollm2-135m"))) == SMOLLM2.parameters


def test_a_reward_model_has_an_optimizer_in_an_iterative_run() -> None:
    def parts(width: int, **fields: int) -> dict[str, int]:
        config = replace(CONFIG, iteration=IterationConfig(**fields))
        found = predict(SMOLLM2, config, device="cpu", width=width, reward_model_parameters=1000).parts
        return {name: found[name] for name in ("reward models", "reward model's optimizer")}

    assert parts(2) == {"reward models": 2000, "reward model's optimizer": 0}
    assert parts(2, steps=10) == {"reward models": 2000, "reward model's optimizer": 12_000}
    assert parts(4, steps=10) == {"reward models": 4000, "reward model's optimizer": 8000}  # no fp32 masters
    assert parts(2, steps=10, reward_model_epochs=0) == parts(2)


def test_the_processes_of_rewards_are_counted() -> None:
    config = replace(
        CONFIG,
        model="smollm2-135m",
        task=ArithmeticConfig(),
        rewards=(
            RewardConfig(name="math"),  # two processes
            RewardConfig(name="math", workers=3),
            RewardConfig(name="format", pattern="a"),
            RewardConfig(function="rewards.py:mine", workers=4),
            RewardConfig(name="numeric"),
            RewardConfig(name="code", workers=3),
            RewardConfig(judge="http://127.0.0.1/v1", judge_model="m", judge_prompt="{completion}"),
            RewardConfig(
                judge="http://127.0.0.1/v1", judge_model="m", judge_prompt="{completion}", judge_pattern="(.)"
            ),
        ),
    )
    without = replace(config, rewards=())
    assert [reward.process_bytes >> 20 for reward in config.rewards] == [160, 240, 15, 60, 0, 45, 0, 15]
    assert RewardConfig(name="code").process_bytes >> 20 == 15 * processors()
    assert _planned(config) - _planned(without) == pytest.approx(535 / 1024, abs=0.02)
    assert "other processes" in check_memory(config)
    assert "other processes" not in check_memory(without)
    task_s_own = replace(without, task=ReasoningGymConfig())
    assert _planned(task_s_own) - _planned(without) == pytest.approx(2 * 115 / 1024, abs=0.02)  # with its problems
    splits = replace(without, process=ProcessConfig(boundary="ends.py:mine"))
    assert splits.process.process_bytes >> 20 == 15
    assert _planned(splits) - _planned(without) == pytest.approx(15 / 1024, abs=0.02)
    assert predict(SMOLLM2, config, device="cuda", width=2, processes=1 << 30).parts["other processes"] == 0


@pytest.mark.parametrize("name", BUILT_IN_REWARDS)
def test_a_built_in_reward_with_processes_is_counted(name: str) -> None:
    """Those of the rewards that are not computed in this process."""
    needed = {"length": {"length_limit": 9}, "format": {"pattern": "a"}, "language": {"scripts": ("latin",)}}
    config = RewardConfig(name=name, unsafe_without_sandbox=name == "code", **needed.get(name, {}))
    assert (config.process_bytes > 0) is not isinstance(WeightedReward.from_config(config).caller, InProcess)


def _planned(config: RunConfig) -> float:
    """The sum of the parts that `covey check` prints, in GiB."""
    return sum(float(line.split()[-2]) for line in check_memory(config).splitlines()[1:])


def test_keys_and_values_grow_with_the_rows_up_to_the_sampler_s_bound() -> None:
    def cache(**fields: int) -> float:
        config = replace(CONFIG, sampling=SamplingConfig(**fields))
        return predict(SMOLLM2, config, device="cpu", width=2, prompt_tokens=50).parts["keys and values"]

    per_token = 2 * 30 * 3 * 64 * 2
    row, prompt = 32, 50  # room is made for 32 tokens at a time
    assert cache(prompts_per_step=1, group_size=4, max_new_tokens=16) == per_token * (4 * row + prompt)
    assert cache(prompts_per_step=4, group_size=4, max_new_tokens=16) == per_token * 4 * (4 * row + prompt)
    assert cache(rows_at_once=16, max_new_tokens=16) == per_token * (16 * row + prompt)
    assert 0.8 * 2**31 < cache(max_new_tokens=4000, group_size=4) < 1.05 * 2**31


def test_without_kernels_the_keys_of_the_rows_that_stay_are_copied() -> None:
    sampling = SamplingConfig(rows_at_once=16, max_new_tokens=32)
    fast, slow = (
        predict(size, replace(CONFIG, sampling=sampling), device="cpu", width=2, prompt_tokens=0).parts
        for size in (SMOLLM2, replace(SMOLLM2, has_kernels=False))
    )
    assert slow["keys and values"] == fast["keys and values"] * 23 / 16


def test_a_cpu_decodes_with_a_packed_copy_of_the_weights() -> None:
    from covey.llm.generation.decoder import PackedLinear, PackedLinears
    from covey.llm.generation.native_decoder import PackedStack, TiledStack
    from covey.llm.model.architecture import is_llama_like
    from covey.llm.native.bindings import kernels_for

    config = CONFIG
    assert predict(SMOLLM2, config, device="cuda", width=2, has_kernels=False).parts["prepacked weights"] == 0
    # All weights but the norms', 576 in each of 61.
    matrices = SMOLLM2.parameters - 61 * 576
    assert predict(SMOLLM2, config, device="cpu", width=2).parts["prepacked weights"] == 2 * matrices
    for kind in ("llama", "qwen2", "gpt2"):
        model = sized_model(kind)[0]
        counted = read_dimensions(model_config(kind)).prepacked_parameters
        alone = PackedLinears(model).packed.values()
        assert counted == sum(part.weight.numel() for part in alone)
        assert is_llama_like(model) is (kind != "gpt2")
        if kind == "gpt2":
            continue
        stack = PackedStack(model, kernels_for(torch.float32, torch.device("cpu")))
        packed = [part for layer in stack.layers for part in vars(layer).values()]
        packed.append(stack.linear_head)
        assert counted == sum(part.weight.numel() for part in packed if isinstance(part, PackedLinear))
        low = kernels_for(torch.bfloat16, torch.device("cpu"))
        if low.has_avx512_bf16:
            tiled = TiledStack(sized_model(kind, torch.bfloat16)[0], low, 4).referenced
            assert counted == pytest.approx(sum(part.numel() for part in tiled), rel=0.05), "norms, padding"


def test_logits_are_made_in_parts() -> None:
    def logits(width: int, device: str = "cuda", **fields: object) -> int:
        config, has_kernels = replace(CONFIG, **fields), device == "cpu"
        return predict(SMOLLM2, config, device=device, width=width, has_kernels=has_kernels).parts["logits"]

    product, exact = 512 * 49152 * 2, 512 * 49152 * 4
    head = 576 * 49152
    decisions = largest_microbatch(CONFIG, estimate.PROMPT_TOKENS)[1] * CONFIG.sampling.max_new_tokens
    back = decisions * 576 * 4
    assert logits(2, "cpu") == product + 2 * head + back
    assert logits(4, "cpu") == exact + 4 * head + back
    assert logits(2) == product + exact + max(exact, 2 * head + back)
    assert logits(4) == exact + max(exact, 4 * head + back)
    assert logits(2, loss=LossConfig(entropy_coefficient=0.1)) == product + 3 * exact + 2 * head + back
    both = 2 * (product + exact) + 2 * head + back
    for device in ("cpu", "cuda"):
        assert logits(2, device, loss=LossConfig(kl_estimator="exact")) == both + decisions * 576 * 2
    few = {"update": UpdateConfig(microbatch_tokens=64 + 2 * 64), "sampling": SamplingConfig(max_new_tokens=64)}
    assert logits(2, **few) == 128 * 49152 * (2 + 4) + 2 * head + 128 * 576 * 4


def test_the_peak_is_the_larger_of_sampling_and_update() -> None:
    parts = dict.fromkeys(predict(SMOLLM2, CONFIG, device="cpu", width=2).parts, 0)
    parts |= {"weights": 1000, "keys and values": 100, "gradients": 10, "logits": 20, "critic's gradients": 30}
    assert MemoryPlan(parts).peak == 1000 + 40 + 100, "gradients keep their memory"
    assert MemoryPlan(parts | {"activations": 140, "fragmentation": 5}).peak == 1000 + 40 + 165


def test_freed_memory_leaves_holes_on_a_cpu() -> None:
    def holes(device: str, microbatch_tokens: int) -> float:
        config = replace(CONFIG, update=UpdateConfig(microbatch_tokens=microbatch_tokens))
        parts = predict(SMOLLM2, config, device=device, width=2).parts
        return parts["fragmentation"] / (parts["activations"] + parts["gradients"])

    step = 16 * (64 + 16 * 64)
    assert holes("cpu", step) == pytest.approx(estimate.HOLES_OF_ONE_MICROBATCH)
    assert holes("cpu", step // 2) == pytest.approx(estimate.HOLES_OF_SEVERAL)
    assert holes("cpu", step - 1) == pytest.approx(estimate.HOLES_OF_SEVERAL)
    assert holes("cuda", 4096) == 0


def test_where_a_config_is_found(tmp_path: Path) -> None:
    assert find_model_config("smollm2-135m") == SMOLLM2_135M
    assert find_model_config("nobody/no-such-model") is None
    with pytest.raises(ConfigError, match="there is no folder no/such/folder at all"):
        find_model_config("no/such/folder at all")
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "config.json"
    file.write_text('{"hidden_size": 8}')
    assert find_model_config(str(tmp_path / "model")) == {"hidden_size": 8}
    with pytest.raises(ConfigError, match=r"not a Hugging Face model; the folder .*model has one"):
        find_model_config(str(tmp_path))
    assert find_model_config(str(file)) == {"hidden_size": 8}
    for text, message in (("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            find_model_config(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama", "hidden_size": "wide"}, "no .*language model known here"),
        ({"model_type": "llama", "hidden_size": 0}, "no .*language model known here"),
        ({"model_type": "t5"}, "is not a causal language model"),
    ],
)
def test_what_is_no_language_model_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_dimensions(fields)


def test_the_plan_shows_both_algorithms_and_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model_config("llama")))
    report = plan_memory(str(file), ["--device", "cpu", "--precision", "bf16"])
    header = next(line for line in report.splitlines() if line.split() == ["grpo", "ppo", "ppo,", "shared"])
    assert header
    assert "critic's moments" in report
    assert report.splitlines()[-1].endswith(
        f"covey train arithmetic_grpo --model {tmp_path} --device cpu --precision bf16"
    )
    only = plan_memory(str(file), ["--group-size", "4"], algorithms=["grpo"])
    assert "critic" not in only
    assert "16 prompts x 4 completions" in only
    assert "ppo, shared" not in plan_memory(str(file), critic_trunk="own")


WIDE = ("--max-new-tokens", "8192", "--prompts-per-step", "2", "--group-size", "2")


@pytest.mark.parametrize(
    ("gib", "algorithm", "trunk", "given", "proposed"),
    [
        (6, "grpo", None, (), "--microbatch-tokens "),
        (10, "grpo", None, WIDE, "--recompute true"),
        (1.9, "grpo", None, (), "--rank 16 --"),
        (1.9, "ppo", "own", (), "--rank 16 --trunk adapter --"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_fix(
    gib: float,
    algorithm: str,
    trunk: str | None,
    given: tuple[str, ...],
    proposed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("covey.experiment.plan.total_memory_bytes", lambda device: int(gib * 2**30))
    words = ["--precision", "bf16", "--device", "cpu", *given]
    last = plan_memory("smollm2-135m", words, algorithms=[algorithm], critic_trunk=trunk).splitlines()[-1]
    assert last.startswith(f"This machine has {gib:.1f} GiB, too little for: {algorithm}"), last
    fix = last.partition("With ")[2].partition(f" {algorithm} fits")[0]
    assert fix.startswith(proposed), last
    trunk = "adapter" if algorithm == "ppo" else None
    assert "it fits" in plan_memory("smollm2-135m", [*words, *fix.split()], algorithms=[algorithm], critic_trunk=trunk)


def test_a_machine_that_is_too_small_needs_a_smaller_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.experiment.plan.total_memory_bytes", lambda device: 1 << 29)
    assert "choose a smaller model" in plan_memory("smollm2-135m", ["--device", "cpu"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nobody/no-such-model"}, "no config.json of nobody/no-such-model"),
        ({"algorithms": ["grpo", "gropo"]}, "algorithm must be"),
        ({"fields": ["--group-size", "1"]}, "group_size is 1"),
        ({"fields": ["--grup-size", "4"]}, "grup"),
        ({"prompt_tokens": 0}, "--prompt-tokens must be at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(**{"model": "smollm2-135m", **changes})  # type: ignore[arg-type]


def test_the_command_reads_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--group-size", "4", "--prompt-tokens=10", "--max-new-tokens", "7", "--device", "cuda"]
    assert main(["plan", "smollm2-135m", "--algorithm", "dapo,ppo", "--critic-trunk", "policy", *words]) == 0
    out = capsys.readouterr().out
    assert "on cuda" in out
    assert "16 prompts x 4 completions a step, 10 + 7 tokens" in out
    assert next(line.split() for line in out.splitlines() if "dapo" in line) == ["dapo", "ppo,", "shared"]
    assert main(["plan", "smollm2-135m", "--temprature", "2"]) == 2
    assert "did you mean --temperature" in capsys.readouterr().err


def test_check_reports_the_same_prediction() -> None:
    report = check_memory(PPO)
    peak = predict(read_dimensions(SMOLLM2_135M), PPO, device="cpu", width=2).peak
    assert f"{peak / 2**30:.1f} GiB at the most" in report
    assert "critic's moments" in report
    assert "unknown until" in check_memory(replace(CONFIG, model="nobody/no-such-model"))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "ppo:policy"])
def test_the_peak_of_a_real_run_is_predicted_within_15_percent(algorithm: str, tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--cases", "one small microbatch"]
    subprocess.run([*script, "--algorithms", algorithm, "--output", str(output)], check=True)
    (row,) = json.loads(output.read_text())["cases"]
    assert row["algorithm"] == algorithm
    assert row["ratio"] == pytest.approx(1, abs=0.15), row


ADAPTER_CONFIG = RunConfig(precision="bf16", device="cpu", model="smollm2-135m")
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
    assert adapter_parameters(size, replace(ADAPTER_CONFIG, lora=lora)) == sum(factor.numel() for factor in made)
    with pytest.raises(ConfigError, match=r"'qproj' is not a linear layer of .* an adapter can be added to: choose"):
        adapter_parameters(size, replace(ADAPTER_CONFIG, lora=LoRAConfig(rank=5, targets=("qproj",))))


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
    config = replace(ADAPTER_CONFIG, lora=LoRAConfig(rank=5, targets=SOME[kind] if targets == "some" else ()))
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
    parts = predict(size, replace(ADAPTER_CONFIG, lora=LORA), device="cpu", width=2).parts
    whole = predict(size, ADAPTER_CONFIG, device="cpu", width=2).parts
    names = ("adapter", "fp32 master weights", "optimizer moments", "gradients")
    assert [parts[name] for name in names] == [2 * numbers, 4 * numbers, 8 * numbers, 4 * numbers]
    assert parts["weights"] == whole["weights"]
    assert parts["reference"] == 0, "it is the model without its adapter"
    assert parts["prepacked weights"] == whole["prepacked weights"], "merged weights are packed for sampling"
    assert whole["adapter"] == 0
    head = 512 * 96 * 2
    assert parts["logits"] == whole["logits"] - head
    exact = replace(ADAPTER_CONFIG, loss=LossConfig(kl_estimator="exact", kl_coefficient=0.1))
    kl_parts = [predict(size, one, device="cpu", width=2).parts["logits"] for one in (exact, replace(exact, lora=LORA))]
    assert kl_parts[0] > kl_parts[1]
    for config in (
        replace(ADAPTER_CONFIG, lora=LORA, reference=ReferenceConfig(refresh_every=2)),
        replace(ADAPTER_CONFIG, lora=LORA, iteration=replace(ADAPTER_CONFIG.iteration, steps=3)),
    ):
        assert predict(size, config, device="cpu", width=2).parts["reference"] == 2 * numbers


def test_weights_in_4_bits_are_those_of_linear_layers() -> None:
    """SmolLM2: 106,168,320 weights in linear layers, the largest of 576 x 1536; the others stay in bf16."""
    config = replace(ADAPTER_CONFIG, lora=replace(LORA, load_in_4bit=True))
    whole, parts = (
        predict(SMOLLM2, one, device="cpu", width=2).parts for one in (replace(ADAPTER_CONFIG, lora=LORA), config)
    )
    kept = 49152 * 576 + 61 * 576 + 576 * 1536
    assert parts["weights"] == 2 * kept + 106_168_320 // 2 + 106_168_320 // 64 + 106_168_320 // (64 * 256) * 4
    assert parts | {"weights": 0} == whole | {"weights": 0}


def test_a_critic_s_adapter_is_counted() -> None:
    config = replace(ADAPTER_CONFIG, algorithm="ppo", lora=LORA, critic=CriticConfig(trunk="adapter"))
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
    assert "adapter" in check_memory(replace(ADAPTER_CONFIG, lora=LORA))
    more = ["--cluster", "--mean-tokens", "30", "--sampler-devices", "1"]
    assert main(["plan", "smollm2-135m", *words, *more]) == 0


def test_the_gradients_in_a_tree_are_those_of_the_adapter() -> None:
    config = replace(ADAPTER_CONFIG, lora=LORA, update=UpdateConfig(eight_bit_moments=True))
    sharded = replace(config, cluster=replace(ADAPTER_CONFIG.cluster, shards=2))
    parts = predict(SMOLLM2, sharded, device="cpu", width=2).parts
    assert parts["gradients of shards"] == parts["gradients"] == 4 * adapter_parameters(SMOLLM2, config)
    assert parts["optimizer moments"] < 3 * adapter_parameters(SMOLLM2, config)


def test_an_adapter_that_training_begins_with_is_read(tmp_path: Path) -> None:
    fields = {"peft_type": "LORA", "r": 3, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    parts = predict(
        SMOLLM2, replace(ADAPTER_CONFIG, lora=LoRAConfig(adapter=str(tmp_path))), device="cpu", width=2
    ).parts
    assert parts["adapter"] == parts["reference"] == 2 * 30 * 3 * (576 + 192)
