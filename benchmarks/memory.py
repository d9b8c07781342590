"""Runs short training steps in processes of their own and compares their peak memory with what `covey plan` predicts.

    .venv/bin/python benchmarks/memory.py                                   every case; minutes each on one core
    .venv/bin/python benchmarks/memory.py --algorithms grpo --cases few     only cases whose name contains "few"
    .venv/bin/python benchmarks/memory.py --large --algorithms grpo         models that need up to 16 or 24 GiB
    .venv/bin/python benchmarks/memory.py --device cuda --algorithms grpo   cases of a GPU with 80 GB

Every case makes two steps (the second is the first that finds the optimizer's moments in memory), each of two
minibatches where the case says so, on prompts of one exact length and completions that go on to their limit. The peak
is the resident memory of the process, as the operating system counts it; on a GPU that of live tensors, as torch counts
it, without the CUDA context. Results go to benchmarks/results/.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import zlib
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers import RESULTS
from rich.console import Console
from rich.table import Table
from shape import WORDS

from covey.config import (
    ClusterConfig,
    CriticConfig,
    EvaluationConfig,
    LoRAConfig,
    RunConfig,
    SamplingConfig,
    UpdateConfig,
)
from covey.data import Start

STEPS = 2
VOCABULARY = 49152  # of the embedded model's tokenizer, which the random models use too; a larger one is padded
RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "llama-small": {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 1408, "tie_word_embeddings": True,
    },
    "qwen2-untied": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 12, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 2432, "tie_word_embeddings": False,
    },
    "gpt2-small": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "shape of Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "shape of SmolLM2-1.7B": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "shape of Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "shape of Qwen2.5-3B": {
        "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "shape of Qwen3-4B": {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration to measure."""

    name: str
    model: str
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    microbatch_tokens: int
    precision: str = "bf16"
    minibatches: int = 1
    shards: int = 0
    recompute: bool = False
    eight_bit_moments: bool = False
    rank: int = 0  # of an adapter (LoRA); 0: all weights are trained
    device: str = "cpu"

    def config(self, algorithm: str, trunk: str = "own", **changes: Any) -> RunConfig:
        """The run, as `covey plan` and as the process that is measured sees it."""
        return RunConfig(
            algorithm=algorithm,
            model=self.model,
            precision=self.precision,
            device=self.device,
            steps=STEPS,
            sampling=SamplingConfig(
                prompts_per_step=self.prompts, group_size=self.group_size, max_new_tokens=self.new_tokens
            ),
            update=UpdateConfig(
                microbatch_tokens=self.microbatch_tokens,
                minibatches=self.minibatches,
                recompute=self.recompute,
                eight_bit_moments=self.eight_bit_moments,
            ),
            critic=CriticConfig(trunk=trunk),
            lora=LoRAConfig(rank=self.rank),
            cluster=ClusterConfig(shards=self.shards),
            evaluation=EvaluationConfig(problems=1),
            show_rollouts_every=0,
            **changes,
        )


CASES = (
    Case("135m, one small microbatch", "smollm2-135m", 2, 4, 32, 16, 4096),
    Case("135m, few tokens each", "smollm2-135m", 8, 8, 50, 12, 512),
    Case("135m, short answers", "smollm2-135m", 16, 16, 50, 12, 4096),
    Case("135m, small microbatches", "smollm2-135m", 8, 8, 50, 32, 256),
    Case("135m, long completions", "smollm2-135m", 4, 8, 64, 128, 2048),
    Case("135m, large groups", "smollm2-135m", 2, 32, 64, 48, 1024),
    Case("135m, large microbatch", "smollm2-135m", 4, 8, 100, 128, 4096),
    Case("135m, large microbatch, recomputed", "smollm2-135m", 4, 8, 100, 128, 4096, recompute=True),
    Case("135m, few tokens each, 8-bit moments", "smollm2-135m", 8, 8, 50, 12, 512, eight_bit_moments=True),
    Case("135m, few tokens each, LoRA of rank 16", "smollm2-135m", 8, 8, 50, 12, 512, rank=16),
    Case("135m, large microbatch, LoRA of rank 16", "smollm2-135m", 4, 8, 100, 128, 4096, rank=16),
    Case(
        "135m, large microbatch, LoRA of rank 16, recomputed",
        "smollm2-135m",
        4,
        8,
        100,
        128,
        4096,
        recompute=True,
        rank=16,
    ),
    Case("llama-small, LoRA of rank 16", "llama-small", 8, 8, 50, 32, 1024, rank=16),
    Case("gpt2-small, LoRA of rank 16", "gpt2-small", 8, 8, 50, 16, 1024, rank=16),
    Case("135m, two optimizer steps", "smollm2-135m", 8, 8, 50, 24, 1024, minibatches=2),
    Case("135m, two shards", "smollm2-135m", 8, 8, 50, 12, 512, shards=2),
    Case("135m, four shards", "smollm2-135m", 8, 8, 50, 12, 512, shards=4),
    Case("135m in fp32, four shards", "smollm2-135m", 8, 8, 50, 12, 512, precision="fp32", shards=4),
    Case("135m in fp32", "smollm2-135m", 8, 8, 50, 16, 512, precision="fp32"),
    Case("llama-small", "llama-small", 8, 8, 50, 32, 1024),
    Case("llama-small, long", "llama-small", 4, 8, 64, 128, 4096),
    Case("qwen2-untied", "qwen2-untied", 8, 8, 50, 16, 1024),
    Case("qwen2-untied, large microbatch", "qwen2-untied", 8, 16, 50, 24, 4096),
    Case("gpt2-small", "gpt2-small", 8, 8, 50, 16, 1024),
    Case("gpt2-small, large microbatch", "gpt2-small", 8, 8, 64, 64, 4096),
    Case("gpt2-small, large microbatch, recomputed", "gpt2-small", 8, 8, 64, 64, 4096, recompute=True),
)

# The largest models that fit in 16 GiB, and in 24 GiB with 8-bit moments or an adapter (docs/lora.md).
LARGE_CASES = (
    Case("Qwen3-0.6B, all weights", "shape of Qwen3-0.6B", 8, 8, 50, 16, 512),
    Case("Qwen2.5-3B, LoRA of rank 16", "shape of Qwen2.5-3B", 8, 8, 50, 16, 512, rank=16),
    Case("Llama-3.2-1B, 8-bit moments", "shape of Llama-3.2-1B", 8, 8, 50, 16, 512, eight_bit_moments=True),
    Case("Qwen3-4B, LoRA of rank 16", "shape of Qwen3-4B", 8, 8, 50, 16, 512, rank=16),
)


GPU_CASES = (
    Case("Qwen3-0.6B", "shape of Qwen3-0.6B", 16, 16, 256, 256, 8192),
    Case("SmolLM2-1.7B", "shape of SmolLM2-1.7B", 16, 16, 256, 512, 8192),
    Case("SmolLM2-1.7B, small microbatches", "shape of SmolLM2-1.7B", 16, 16, 256, 512, 2048),
    Case("SmolLM2-1.7B, recomputed", "shape of SmolLM2-1.7B", 16, 16, 256, 512, 8192, recompute=True),
    Case("SmolLM2-1.7B, 8-bit moments", "shape of SmolLM2-1.7B", 16, 16, 256, 512, 2048, eight_bit_moments=True),
    Case("Qwen3-4B, LoRA of rank 16", "shape of Qwen3-4B", 16, 16, 256, 256, 4096, rank=16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=["grpo", "ppo", "ppo:policy"],
        help="ppo:policy shares the trunk; ppo:adapter",
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--large", action="store_true", help="the models that need up to 16 or 24 GiB instead")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokenizer", default="", help="a folder; default: that of the embedded model")
    parser.add_argument("--output", type=Path, default=None, help="a JSON file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what this script tells the processes that it starts
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(json.loads(arguments.measure))))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="covey-memory-") as folder:
        cases = GPU_CASES if arguments.device == "cuda" else LARGE_CASES if arguments.large else CASES
        for case in (case for case in cases if arguments.cases in case.name):
            case = replace(
                case, model=model_for(case.model, Path(folder), arguments.tokenizer), device=arguments.device
            )
            for algorithm in arguments.algorithms:
                rows.append(compare(case, algorithm, Path(folder)))
                print(f"{case.name}, {algorithm}: {rows[-1]['ratio']:.2f}", flush=True)
    show(rows)
    output = arguments.output or RESULTS / f"memory-{arguments.device}-{datetime.now(UTC).strftime('%Y-%m-%d')}.json"
    output.write_text(json.dumps({"cases": rows, "environment": machine(arguments.device)}, indent=2) + "\n")
    print(f"written to {output}")


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on beside the cases."""
    import torch

    from covey.runtime.device import environment

    return {
        name: value for name, value in environment(torch.device(device), torch.bfloat16).items() if name != "precision"
    }


def model_for(name: str, folder: Path, tokenizer: str = "") -> str:
    """The embedded model by its name; a folder with random weights for the others, with its tokenizer or this one."""
    if name not in RANDOM_MODELS:
        return name
    target = folder / name
    if not target.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from covey.llm.model.gguf import EMBEDDED
        from covey.llm.model.loading import find_model

        fields = {"vocab_size": VOCABULARY, **RANDOM_MODELS[name], "eos_token_id": 2, "bos_token_id": 1}
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(tokenizer or find_model(EMBEDDED)).save_pretrained(target)
    return str(target)


def compare(case: Case, name: str, folder: Path) -> dict[str, Any]:
    """Predicted and measured bytes of one case under one algorithm."""
    from covey.llm.memory import find_model_config, predict, read_dimensions

    algorithm, _, trunk = name.partition(":")
    trunk = trunk or "own"
    model_config = find_model_config(case.model)
    assert model_config is not None
    plan = predict(
        read_dimensions(model_config),
        case.config(algorithm, trunk),
        device=case.device,
        width=4 if case.precision == "fp32" else 2,
        prompt_tokens=case.prompt_tokens,
    )
    predicted = plan.peak - (plan.parts["program"] if case.device == "cuda" else 0)  # torch does not count it
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        work = json.dumps({"case": asdict(case), "algorithm": algorithm, "trunk": trunk, "run_dir": f"{run_dir}/run"})
        done = subprocess.run([sys.executable, __file__, "--measure", work], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case.name}, {name} failed:\n{done.stderr[-3000:]}")
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "case": asdict(case) | {"model": Path(case.model).name},
        "algorithm": name,
        "predicted_bytes": predicted,
        "parts": plan.parts,
        **measured,
        "ratio": predicted / measured["measured_bytes"],
    }


class ExactPrompts:
    """Distinct prompts of common words, each of one exact number of tokens."""

    def __init__(self, model: str, tokens: int) -> None:
        from transformers import AutoTokenizer

        from covey.llm.model.loading import find_model

        self.tokenizer, self.tokens = AutoTokenizer.from_pretrained(find_model(model)), tokens

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        return [self._start(i, random.Random(f"{seed} {step} {i}")) for i in range(first, first + count)]

    def held_out(self, count: int) -> list[Start]:
        return [self._start(i, random.Random(f"held out {i}")) for i in range(count)]

    def _start(self, index: int, rng: random.Random) -> Start:
        text = "The"
        while len(self.tokenizer(text)["input_ids"]) < self.tokens:
            text += " " + rng.choice(WORDS)
        return Start(index, text)


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Train for some steps; the peak of this process, and how much of the token limit was used."""
    from covey import run

    case = Case(**work["case"])

    def luck(completions: list[str], **columns: Any) -> list[float]:
        """Differs from sibling to sibling, so that every group teaches and is fed to the update."""
        return [zlib.crc32(str(text).encode()) % 1000 / 1000 for text in completions]

    summary = run(
        case.config(work["algorithm"], work["trunk"], run_dir=work["run_dir"]),
        task=ExactPrompts(case.model, case.prompt_tokens),
        rewards=[luck],
    )
    assert summary is not None
    limit = STEPS * case.prompts * case.group_size * case.new_tokens
    return {
        "measured_bytes": summary["peak_memory_bytes"],
        "share_of_token_limit": summary["decisions_sampled"] / limit,
        "seconds": summary["seconds"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Predicted, measured and their ratio."""
    table = Table("case", "algorithm", title="peak memory in GiB")
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = [f"{row[key] / 2**30:.2f}" for key in ("predicted_bytes", "measured_bytes")]
        table.add_row(row["case"]["name"], row["algorithm"], *sizes, f"{row['ratio']:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
