"""Runs of one rank of several: `python rank_cases.py FOLDER MODEL NAMES WEIGHTS`, in torchrun's environment.

Every rank trains the cases one after the other; the run of a case is in FOLDER/name. WEIGHTS is `cluster.weights`. If
the environment variable KILLED_AT is "RANK:NUMBER", that rank kills itself at its NUMBER-th message or flushed file; if
it is "RANK:stepNUMBER", in that step of a training on examples.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey import ArithmeticConfig, EvaluationConfig, RecordConfig, RunConfig, SamplingConfig, UpdateConfig
from covey.config import (
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    LoRAConfig,
    ProcessConfig,
    ReferenceConfig,
    RewardConfig,
    RunningTotalConfig,
)
from covey.data import StepRecord

BASE = RunConfig(
    steps=3,
    seed=5,
    threads=1,
    precision="fp32",
    task=ArithmeticConfig(digits=(1,)),
    rewards=(RewardConfig(name="digits"), RewardConfig(name="length", length_limit=8, weight=0.5)),
    sampling=SamplingConfig(prompts_per_step=6, group_size=4, max_new_tokens=6),
    update=UpdateConfig(learning_rate=1e-3, epochs=2, minibatches=2, max_grad_norm=0.1, microbatch_tokens=200),
    evaluation=EvaluationConfig(problems=15, every=1),  # one digit has no more, and to look for more takes seconds
    record=RecordConfig(tokens=True),
    cluster=ClusterConfig(shards=4),
    checkpoint=CheckpointConfig(every=2, best=True),
    show_rollouts_every=0,
)
STEPS = {
    "task": RunningTotalConfig(steps=(2,)),
    "rewards": (
        RewardConfig(name="step_numbers", answer_column="totals"),
        RewardConfig(name="length", length_limit=30),
    ),
    "process": ProcessConfig(),
}
ONCE = replace(BASE.update, epochs=1, minibatches=1)


def case(**changes: Any) -> RunConfig:
    """The base with some fields of its tables changed."""
    tables = {
        name: replace(getattr(BASE, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(BASE, **tables)


CASES = {
    "grpo": case(),
    # More problems than a piece, so that ranks divide them.
    "grpo_once": case(update=ONCE, task=ArithmeticConfig(digits=(2,)), evaluation={"problems": 300, "every": 3}),
    "grpo_bf16": case(precision="bf16", loss={"kl_coefficient": 0.1}),
    "grpo_kl_controller": case(loss={"kl_coefficient": 0.1, "adaptive_kl_target": 0.01, "entropy_coefficient": 0.01}),
    "grpo_entropy": case(
        loss={
            "entropy_coefficient": 0.01,
            "entropy_target": 1.0,
            "clip_cov_fraction": 0.1,
            "clip_cov_bounds": (0.0, 5.0),
            "kl_cov_fraction": 0.1,
        }
    ),
    "grpo_minimum_length": case(sampling={"min_new_tokens": 3}),
    "grpo_selection": case(selection={"candidates": 3, "back_to_data": True}),
    "grpo_replay": case(replay={"groups": 2}),
    "grpo_exact_kl": case(loss={"kl_coefficient": 0.1, "kl_estimator": "exact"}),
    "grpo_teacher": case(
        teacher={"model": "policy", "prompt": "{answer}{best_sibling}", "divergence": "jensen_shannon"}
    ),
    "grpo_target_kl": case(update={"target_kl": 1e-4, "epochs": 4}),
    "grpo_gdpo": case(loss={"normalize_rewards": "each"}),
    "grpo_importance": case(loss={"importance_cap": 1.0, "importance_mask": (0.5, 4.0)}),
    "grpo_stop": case(sampling={"stop": ("7", "+", "e")}, chat={"system_prompt": "Add.", "examples": ("1+1", "2")}),
    "grpo_adaptive": case(sampling={"adaptive": True, "initial_group_size": 2}),
    "grpo_growing": case(sampling={"final_group_size": 6}),
    "grpo_refreshed": case(reference=ReferenceConfig(1, 0.5), loss={"kl_coefficient": 0.1}),
    "process": case(loss={"credit": "process"}, **STEPS),
    "process_return_to_go": case(loss={"credit": "process_return_to_go"}, **STEPS),
    "dr_grpo": case(algorithm="dr_grpo"),
    "dapo": case(algorithm="dapo", sampling={"max_resamples": 2, "group_size": 2}),
    "gspo": case(algorithm="gspo"),
    "cispo": case(algorithm="cispo"),
    "rloo": case(algorithm="rloo", update=ONCE, loss={"kl_coefficient": 0.1}),
    "reinforce": case(algorithm="reinforce", update=ONCE),
    "reinforce_pp": case(algorithm="reinforce_pp", update=ONCE, loss={"kl_coefficient": 0.1}),
    "ppo": case(algorithm="ppo", update={"critic_learning_rate": 1e-3, "critic_epochs": 1}),
    "ppo_warmup": case(algorithm="ppo", update={"critic_warmup_steps": 1}, sampling={"group_size": 1}),
    "recomputed": case(update={"recompute": True}, loss={"kl_coefficient": 0.1}),
    "eight_bit_moments": case(update={"eight_bit_moments": True}),
    "ppo_trunk": case(algorithm="ppo", critic=CriticConfig(trunk="policy"), update={"critic_epochs": 1}),
    "lora_grpo": case(lora=LoRAConfig(rank=2), loss={"kl_coefficient": 0.1}),
    "lora_refreshed": case(lora=LoRAConfig(rank=2), reference=ReferenceConfig(1, 0.5), loss={"kl_coefficient": 0.1}),
    "lora_ppo_adapter": case(
        algorithm="ppo", lora=LoRAConfig(rank=2), critic=CriticConfig(trunk="adapter"), update={"critic_epochs": 1}
    ),
    "ppo_process": case(algorithm="ppo", **STEPS),
    "grpo_inexact": case(cluster={"exact": False}, update=ONCE),
}
IN_FP32 = [name for name, config in CASES.items() if config.precision == "fp32"]
CASES |= {f"{name}_bf16": replace(CASES[name], precision="bf16") for name in IN_FP32 if name != "grpo"}
IN_BF16 = [name for name in CASES if name not in IN_FP32]
LORA = LoRAConfig(rank=2)
CONVERSATION = {"turns": 3, "total_tokens": 60}
GUESS, ADDER = (
    CONVERSATION | {"environment": f"{Path(__file__).with_name('guessing.py')}:{name}"} for name in ("Guess", "Adder")
)
FEW_PROBLEMS = {"every": 3}  # each problem with a process
CONVERSATIONS = {  # for a model that calls the tool of `Adder`
    "conversation": case(conversation=GUESS, rewards=(), evaluation=FEW_PROBLEMS),
    "conversation_tools_ppo": case(
        conversation=ADDER,
        evaluation=FEW_PROBLEMS,
        rewards=(RewardConfig(name="environment"), RewardConfig(name="digits")),
        algorithm="ppo",
        update={"critic_epochs": 1, "critic_learning_rate": 1e-3},
    ),
    "conversation_tools_lora": case(
        conversation=ADDER,
        evaluation=FEW_PROBLEMS,
        rewards=(RewardConfig(name="environment"),),
        lora=LORA,
        loss={"kl_coefficient": 0.1},
        precision="bf16",
    ),
}
ADAPTERS = {  # beside those above
    "adapter_adaptive": case(lora=LORA, sampling={"adaptive": True, "initial_group_size": 2}),
    "adapter_dapo": case(lora=LORA, algorithm="dapo", sampling={"max_resamples": 2, "group_size": 2}),
    "adapter_exact_kl": case(lora=LORA, loss={"kl_coefficient": 0.1, "kl_estimator": "exact"}),
    "adapter_ppo_trunk": case(
        lora=LORA, algorithm="ppo", critic=CriticConfig(trunk="policy"), update={"critic_epochs": 1}
    ),
    "adapter_recomputed": case(lora=LORA, update={"recompute": True}, loss={"kl_coefficient": 0.1}),
    "adapter_eight_bit_moments": case(lora=LORA, update={"eight_bit_moments": True}),
    "adapter_process": case(lora=LORA, loss={"credit": "process"}, **STEPS),
}
CASES |= CONVERSATIONS | ADAPTERS
QUICK = ("grpo_bf16",)

# Trainings on the examples that `write_examples` writes: words of a command, without the model, the weights and the run
# folder. An epoch has 3 minibatches, of which the last is one example, so that some shards are empty.
TRAINING = ["--epochs", "2", "--batch-size", "8", "--threads", "1", "--microbatch-tokens", "30"]
SFT = ["sft", "sft.toml", *(word.replace("--epochs", "--sft.epochs") for word in TRAINING), "--cluster.shards", "4"]
REWARD_MODEL = ["reward-model", "train", "--held-out", "held_out.jsonl", *TRAINING, "--checkpoint-every", "2"]
REWARD_MODEL += ["--shards", "4", "--checkpoint-best", "true"]
EXAMPLES = {
    "sft": [*SFT, "--precision", "fp32"],
    "sft_bf16": [*SFT, "--precision", "bf16"],
    "sft_samples": [*SFT, "--precision", "bf16", "--sft.data", "samples", "--sft.count", "9", "--sft.keep", "all",
                    "--sft.min-reward", "0", "--checkpoint.best", "false"],
    "pairs": [*REWARD_MODEL, "pairs.jsonl", "--precision", "fp32"],
    "steps_bf16": [*REWARD_MODEL, "steps.jsonl", "--held-out", "", "--precision", "bf16"],
}  # fmt: skip
SFT_RECIPE = """
[task]
name = "arithmetic"
[[rewards]]
name = "digits"
[sampling]
max_new_tokens = 4
[sft]
data = "sft.jsonl"
learning_rate = 1e-2
[checkpoint]
every = 2
best = true
"""


def write_examples(folder: Path) -> None:
    """Write the recipe and the data of `EXAMPLES`; some examples share their prompt."""
    (folder / "sft.toml").write_text(SFT_RECIPE)
    sums = [(a, b, a + b) for a in range(1, 9) for b in (1, 2)]
    rows = {
        "sft": [{"prompt": f"{a}+{b}=", "completion": str(c) * (1 + c % 4)} for a, b, c in [*sums, *sums[:3]]],
        "pairs": [
            {"prompt": f"{a}+{b}=", "chosen": str(c), "rejected": f"{c + 1}, {c}"} for a, b, c in [*sums, sums[0]]
        ],
        "held_out": [{"prompt": f"{c}-{b}=", "chosen": str(a), "rejected": "no" * a} for a, b, c in sums[:7]],
        "steps": [
            {"prompt": f"{a}+{b}=", "completions": [f"add {b}"] * (1 + a % 3), "labels": [a % 2 > 0] * (1 + a % 3)}
            for a, b, _ in sums
        ],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_ranks(words: Sequence[str], size: int, folder: Path, **changes: str) -> list[subprocess.Popen[str]]:
    """Start a program on several ranks, as torchrun does, without its agent."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=os.environ | environment(rank, size, port) | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def kill_at(moment: str) -> None:
    """Make this process kill itself at a counted message to other ranks or flush of a file, if it is this rank's."""
    from covey.runtime.distributed import TorchTeam

    rank, _, number = moment.partition(":")
    if rank != os.environ["RANK"]:
        return
    if number.startswith("step"):
        kill_in_step(int(number.removeprefix("step")))
        return
    moments = iter(range(1, int(number)))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(moments, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    TorchTeam.exchange = counted(TorchTeam.exchange)  # type: ignore[method-assign]
    os.fsync = counted(os.fsync)


def kill_in_step(number: int) -> None:
    """Make this process kill itself at the beginning of a step of a training on examples."""
    from covey.train.supervised import SupervisedTrainer

    step = SupervisedTrainer.train_step

    def train_step(self: SupervisedTrainer, examples: Any) -> dict[str, float]:
        if self.step + 1 == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, examples)

    SupervisedTrainer.train_step = train_step  # type: ignore[method-assign]


class Witness:
    """An observer that leaves a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.seen-by-{os.environ['RANK']}"

    def record(self, step: StepRecord) -> None:
        with open(self.path, "a") as file:
            file.write(f"{step.step}\n")


def train_examples(name: str, model: str, weights: str) -> None:
    """Train on examples by the command, in the working folder."""
    from covey.cli.main import main as covey

    option = "--cluster.weights" if name.startswith("sft") else "--weights"
    code = covey([*EXAMPLES[name], "--model", model, option, weights, "--run-dir", name])
    if code:
        sys.exit(code)


def main(folder: Path, model: str, names: Sequence[str], weights: str) -> None:
    from covey import run
    from covey.runtime import optimizer
    from covey.runtime.distributed import joined_ranks

    # So that the small matrices of the model have moments in 8 bits too.
    optimizer.FEWEST_NUMBERS, optimizer.SHORTEST_BLOCK = 100, 8

    if moment := os.environ.get("KILLED_AT"):
        kill_at(moment)
    with joined_ranks():
        for name in names:
            if name in EXAMPLES:
                train_examples(name, model, weights)
                continue
            config = CASES[name]
            cluster = replace(config.cluster, weights=weights)
            settings = replace(config, model=model, cluster=cluster, run_dir=str(folder / name))
            run(settings, observers=Witness(folder, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
