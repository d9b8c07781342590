"""What a run can be told: frozen dataclasses, read from TOML and the command line.

Importing this module loads neither torch nor transformers, so that a mistake is reported at once.
The second argument of `option` is the field's `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A mistake of the user's, told in one line that names the fix."""


def option(default: Any, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A config field with its help text and, where there are few, the values it may take."""
    metadata = {"help": text, "choices": choices}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SamplingConfig:
    prompts_per_step: int = option(16, "prompts drawn for every training step")
    group_size: int = option(16, "rollouts from each prompt; they are compared with each other")
    max_new_tokens: int = option(64, "longest completion, in tokens, the end token included")
    temperature: float = option(1.0, "divides the logits while sampling and in the log-probabilities")
    top_p: float = option(1.0, "must stay 1.0 while training: cutting the tail biases the ratio")
    top_k: int = option(0, "must stay 0 while training: cutting the tail biases the ratio")
    rows_at_once: int = option(0, "rollouts decoded together; 0 chooses by memory")


@dataclass(frozen=True)
class LossConfig:
    """Fields left at None take the algorithm's own default."""

    clip_low: float | None = option(None, "the ratio is clipped below at 1 - clip_low")
    clip_high: float | None = option(None, "the ratio is clipped above at 1 + clip_high")
    dual_clip: float | None = option(None, "bound on the loss of negative advantages (above 1); unset is off")
    kl_coefficient: float | None = option(None, "weight of the KL to the reference model; 0 only watches it")
    kl_estimator: str | None = option(None, "estimator of that KL", choices=("k1", "k2", "k3"))
    kl_warmup_steps: int = option(0, "steps over which the KL coefficient rises from 0")
    mask_truncated: bool = option(False, "leave completions cut by the token limit out of the loss")


@dataclass(frozen=True)
class UpdateConfig:
    learning_rate: float = option(1e-5, "peak learning rate of AdamW")
    schedule: str = option("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "steps over which the learning rate rises from 0")
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay")
    beta1: float = option(0.9, "AdamW's decay of the mean gradient")
    beta2: float = option(0.999, "AdamW's decay of the mean squared gradient")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm")
    epochs: int = option(1, "passes over the rollouts of a step")
    minibatches: int = option(1, "optimizer steps per pass; the prompts of a step are split evenly")
    microbatch_tokens: int = option(4096, "tokens in one backward pass; less memory when smaller, same gradient")


@dataclass(frozen=True)
class EvaluationConfig:
    problems: int = option(256, "held-out problems, answered greedily before and after training")
    every: int = option(0, "also evaluate every so many steps; 0 is only before and after")
    max_new_tokens: tuple[int, ...] = option((), "token limits to report; empty is the training's own limit")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(20, "steps between checkpoints")
    keep: int = option(2, "checkpoints kept, at least 2")


@dataclass(frozen=True)
class ArithmeticConfig:
    digits: tuple[int, ...] = option((2,), "digits of an operand, drawn evenly from this list")
    operators: tuple[str, ...] = option(("+", "-"), "drawn evenly from this list of + - *")
    terms: tuple[int, ...] = option((2,), "numbers in an expression, drawn evenly from this list")
    instruction: str = option("Reply with the number only.", "sentence added to the question")


@dataclass(frozen=True)
class CountdownConfig:
    numbers: int = option(3, "how many numbers are given")
    largest: int = option(20, "largest given number")
    operators: tuple[str, ...] = option(("+", "-", "*"), "operators that a solution may use")


@dataclass(frozen=True)
class WordProblemsConfig:
    steps: tuple[int, ...] = option((2,), "reasoning steps of a problem, drawn evenly from this list (1 to 4)")
    largest: int = option(20, "largest number in a problem")


@dataclass(frozen=True)
class JsonlConfig:
    path: str = option("", "JSONL file; each line has a 'prompt' (string or chat messages) and any other columns")
    held_out_path: str = option("", "JSONL file of held-out prompts; empty takes held_out_share of `path`")
    held_out_share: float = option(0.1, "share of lines kept from training for evaluation")


TASK_CONFIGS: dict[str, type] = {
    "arithmetic": ArithmeticConfig,
    "countdown": CountdownConfig,
    "word_problems": WordProblemsConfig,
    "jsonl": JsonlConfig,
}


@dataclass(frozen=True)
class RewardConfig:
    name: str = option("", "a built-in reward", choices=("numeric", "exact", "format", "countdown"))
    function: str = option("", "or your own: file.py:function or module:function, with TRL's signature")
    weight: float = option(1.0, "weight in the sum of rewards")
    pattern: str = option("", "regular expression of the format reward, matched against the whole completion")
    answer_column: str = option("answer", "column that holds the right answer")
    timeout_seconds: float = option(10.0, "a call of your own function that takes longer has failed")
    score: bool = option(False, "this reward (1 = right) is what evaluation counts; default: the first")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    task: Any = option(None, "[task] table: name = arithmetic, countdown, word_problems or jsonl, and its fields")
    model: str = option("smollm2-135m", "smollm2-135m (embedded), a Hugging Face folder, a hub name, or a .gguf file")
    algorithm: str = option("grpo", "grpo, dr_grpo, rloo or reinforce")
    steps: int = option(100, "training steps")
    seed: int = option(0, "names the run's random choices")
    run_dir: str = option("", "folder of the run; empty is runs/<recipe>-<number>")
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    precision: str = option("auto", "of products: bf16 keeps fp32 master weights", choices=("auto", "bf16", "fp32"))
    threads: int = option(0, "CPU threads; 0 is every core")
    show_rollouts_every: int = option(10, "steps between printed sample rollouts; 0 is never")
    rewards: tuple[RewardConfig, ...] = option((), "[[rewards]] tables; empty is the task's own reward")
    sampling: SamplingConfig = option(SamplingConfig(), "[sampling] table")
    loss: LossConfig = option(LossConfig(), "[loss] table")
    update: UpdateConfig = option(UpdateConfig(), "[update] table")
    evaluation: EvaluationConfig = option(EvaluationConfig(), "[evaluation] table")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "[checkpoint] table")
