"""Config of a run on a language model."""
# ruff: noqa: RUF009 -- `config_field` returns a dataclasses.field, made once per field on purpose

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covey.config.builtin_rewards import BUILT_IN_REWARDS, BuiltInReward
from covey.config.common import CheckpointConfig, LossBase, RunBase, UpdateBase, config_field
from covey.config.judge import JudgeFields

EMBEDDED_MODELS = ("smollm2-135m",)
SCRIPTS = (
    *("latin", "greek", "cyrillic", "armenian", "georgian", "hebrew", "arabic", "ethiopic", "devanagari", "bengali"),
    *("gurmukhi", "gujarati", "tamil", "telugu", "kannada", "malayalam", "sinhala", "thai", "lao", "myanmar", "khmer"),
    *("tibetan", "mongolian", "hangul", "han", "hiragana", "katakana"),
)
DAPO_RESAMPLES = 3
PPO_KL_COEFFICIENT = 0.05  # TRL's; InstructGPT (arXiv 2203.02155) has 0.02
DAPO_OVERLONG_FRACTION = 0.2  # of the token limit; arXiv 2503.14476, section 4.1: 4,096 of 20,480


@dataclass(frozen=True)
class SamplingConfig:
    prompts_per_step: int = config_field(16, "prompts per training step", min=1)
    group_size: int = config_field(
        16, "rollouts from each prompt, which are compared with each other; at least 2, except for ppo", min=1
    )
    max_new_tokens: int = config_field(64, "longest completion in tokens, with the end token", min=1, max=1_000_000)
    temperature: float = config_field(1.0, "temperature of sampling and of the log-probabilities", min=1e-4, max=1e4)
    long_prompts: str = config_field(
        "refuse",
        "a prompt that leaves no room for max_new_tokens in the model's positions: refuse the run before it trains, or "
        "drop the prompt",
        choices=("refuse", "drop"),
        advanced=True,
    )
    rows_at_once: int = config_field(0, "rollouts that are decoded together; 0: chosen by memory", min=0, advanced=True)
    final_group_size: int | None = config_field(
        None,
        "group size of the last step; it changes evenly from group_size; unset: fixed",
        min=2,
        advanced=True,
    )
    adaptive: bool = config_field(
        False,
        "adaptive groups: initial_group_size rollouts for every prompt, the rest of prompts_per_step x group_size for "
        "prompts whose rewards vary",
        advanced=True,
    )
    initial_group_size: int = config_field(
        4, "adaptive: rollouts of every prompt in the first round", min=2, advanced=True
    )
    max_group_size: int | None = config_field(
        None, "adaptive: largest group; unset: 4 x group_size", min=2, advanced=True
    )
    max_resamples: int | None = config_field(
        None,
        "rounds in which a step may replace groups whose rewards are all the same by further prompts (DAPO's dynamic "
        f"sampling); unset is {DAPO_RESAMPLES} for dapo, else 0",
        min=0,
        advanced=True,
    )
    overlong_tokens: int | None = config_field(
        None,
        "tokens before the limit over which the reward falls by up to 1 (DAPO's overlong shaping); unset is a fifth "
        "of max_new_tokens for dapo, else 0",
        min=0,
        advanced=True,
    )


@dataclass(frozen=True)
class LossConfig(LossBase):
    mask_truncated: bool = config_field(
        False, "leave completions that the token limit cut out of the loss", advanced=True
    )
    credit: str = config_field(
        "outcome",
        "what is compared within a group: whole completions (outcome), or reasoning steps: each with all steps of the "
        "group (process), with the same step of the siblings (process_by_step), or its rewards to go with theirs "
        "(process_return_to_go); steps need a reward with per_step = true",
        choices=("outcome", "process", "process_by_step", "process_return_to_go"),
    )
    normalize_rewards: str = config_field(
        "sum",
        "what is normalised within a group: the weighted sum of the rewards, or each reward before the sum, which is "
        "then whitened over the step (GDPO)",
        choices=("sum", "each"),
    )
    gamma: float = config_field(1.0, "ppo and reinforce_pp: discount per token", min=0, max=1)
    importance_cap: float | None = config_field(
        None,
        "cap of the importance weight (trainer's over sampler's probability) on a token's loss, 2 is usual; unset: off",
        above=0,
        advanced=True,
    )


@dataclass(frozen=True)
class UpdateConfig(UpdateBase):
    microbatch_tokens: int = config_field(
        4096, "tokens in one backward pass; a smaller number takes less memory, with the same gradient", min=1
    )


@dataclass(frozen=True)
class EvaluationConfig:
    problems: int = config_field(
        256,
        "held-out problems, answered greedily before and after training; all if there are fewer",
        min=1,
        max=1_000_000,
    )
    every: int = config_field(0, "steps between evaluations; 0: only before and after training", min=0)
    token_limits: tuple[int, ...] = config_field(
        (), "token limits of evaluations; empty: max_new_tokens", min=1, advanced=True
    )


@dataclass(frozen=True)
class ArithmeticConfig:
    digits: tuple[int, ...] = config_field((2,), "digits of an operand, drawn evenly from this list", min=1, max=12)
    operators: tuple[str, ...] = config_field(
        ("+", "-"), "drawn evenly from this list of + - *", choices=("+", "-", "*")
    )
    terms: tuple[int, ...] = config_field(
        (2,), "numbers in an expression, drawn evenly from this list", min=2, max=100, advanced=True
    )
    negative: bool = config_field(False, "allow answers below 0, such as that of 17 - 45", advanced=True)
    instruction: str = config_field("Reply with the number only.", "sentence added to the question", advanced=True)
    held_out_digits: tuple[int, ...] = config_field(
        (),
        "digits of an operand in held-out problems; empty: as in training",
        min=1,
        max=12,
        advanced=True,
    )


@dataclass(frozen=True)
class CountdownConfig:
    numbers: int = config_field(3, "given numbers", min=2, max=6)
    largest: int = config_field(20, "largest given number", min=2, advanced=True)
    operators: tuple[str, ...] = config_field(
        ("+", "-", "*"), "operators that a solution may use, of + - * /", choices=("+", "-", "*", "/")
    )


@dataclass(frozen=True)
class WordProblemsConfig:
    steps: tuple[int, ...] = config_field(
        (2,), "reasoning steps of a problem, drawn evenly from this list (1 to 4)", min=1, max=4
    )
    largest: int = config_field(20, "largest number in a problem", min=2, advanced=True)


@dataclass(frozen=True)
class RunningTotalConfig:
    steps: tuple[int, ...] = config_field(
        (3,), "additions and subtractions, drawn evenly from this list", min=1, max=12
    )
    largest: int = config_field(5, "largest number in a problem", min=2, advanced=True)
    examples: int = config_field(3, "solved examples before the problem", min=0, max=3, advanced=True)


@dataclass(frozen=True)
class CodeFunctionsConfig:
    cases: int = config_field(6, "hidden cases of a function", min=2, max=100, advanced=True)
    steps: tuple[int, ...] = config_field(
        (1,), "operations that a function combines, drawn evenly from this list (1 or 2)", min=1, max=2
    )
    examples: int = config_field(2, "solved examples before the problem", min=0, max=2, advanced=True)


@dataclass(frozen=True)
class HumanEvalConfig:
    held_out_fraction: float = config_field(
        0.5,
        "fraction of the 164 problems that is held out for evaluation; the others are for training",
        above=0,
        below=1,
    )


@dataclass(frozen=True)
class JsonlConfig:
    path: str = config_field(
        "",
        "JSONL or Parquet file, or a folder of the package datasets (save_to_disk); each row has a 'prompt' (string or "
        "chat messages) and any other columns",
    )
    held_out_path: str = config_field("", "such a file of held-out prompts; empty takes held_out_fraction of `path`")
    held_out_fraction: float = config_field(
        0.1,
        "fraction of the different prompts of `path` that is held out for evaluation, at least one",
        above=0,
        below=1,
    )
    overlap: str = config_field(
        "refuse",
        "a line of `path` whose prompt is also in `held_out_path`: refuse the run, or drop the line from training",
        choices=("refuse", "drop"),
        advanced=True,
    )


@dataclass(frozen=True)
class ReasoningGymConfig:
    source_dataset: str = config_field(
        "chain_sum", "name of a data set of the package reasoning_gym, such as chain_sum or leg_counting"
    )
    options: tuple[str, ...] = config_field(
        (), 'options of the data set, each as in a TOML file: ["max_animals = 4", "min_animals = 2"]'
    )
    instruction: str = config_field(
        "Give the final answer between <answer> and </answer>.", "sentence added to the question", advanced=True
    )
    held_out_problems: int = config_field(
        256, "problems that are held out from training; evaluation.problems of them are used", min=1, max=100_000,
        advanced=True,
    )  # fmt: skip


TASK_CONFIGS: dict[str, type] = {
    "arithmetic": ArithmeticConfig,
    "countdown": CountdownConfig,
    "word_problems": WordProblemsConfig,
    "running_total": RunningTotalConfig,
    "code_functions": CodeFunctionsConfig,
    "human_eval": HumanEvalConfig,
    "jsonl": JsonlConfig,
    "reasoning_gym": ReasoningGymConfig,
}


@dataclass(frozen=True)
class RewardFields:
    name: str = config_field("", "a built-in reward", choices=tuple(BUILT_IN_REWARDS))
    function: str = config_field("", "or your own: file.py:function or module:function, with TRL's signature")
    model: str = config_field(
        "",
        "or a reward model: the run folder of `covey reward-model train`, a folder or a hub name; with per_step = true "
        "a process reward model scores each step",
    )
    standardise: bool | None = config_field(
        None,
        "model: subtract the mean of the scores on its training data and divide by their deviation; unset: if they are "
        "stored with the model",
        advanced=True,
    )
    clip: float | None = config_field(
        None, "model: bound of the (standardised) score's absolute value; unset: none", above=0, advanced=True
    )
    step_differences: bool = config_field(
        False, "model, per_step: each step's score minus that of the step before", advanced=True
    )
    aggregate: str = config_field(
        "",
        "process reward model without per_step: how the scores of the steps make one; unset: min",
        choices=("min", "product", "mean", "last"),
        advanced=True,
    )
    weight: float = config_field(1.0, "weight in the sum of rewards")
    pattern: str = config_field(
        "", "regular expression of the format reward, matched against the whole completion", advanced=True
    )
    answer_column: str = config_field(
        "answer", "column that holds the right answer; of step_numbers a list of them", advanced=True
    )
    tags: tuple[str, ...] = config_field(
        ("think", "answer"), "tags: the tagged parts of which a completion consists, in their order", advanced=True
    )
    first_tag_in_prompt: bool = config_field(
        False, "tags: the prompt ends with the first opening tag, so completions begin after it", advanced=True
    )
    unit: str = config_field(
        "tokens", "length, repetition: what is counted", choices=("tokens", "words", "characters"), advanced=True
    )
    length_target: int = config_field(
        0, "length: units up to which there is no penalty", min=0, max=10_000_000, advanced=True
    )
    length_limit: int | None = config_field(
        None, "length: units from which the penalty is 1; above length_target", min=1, max=10_000_000, advanced=True
    )
    length_shape: str = config_field(
        "linear", "length: how the penalty rises from target to limit", choices=("linear", "cosine"), advanced=True
    )
    length_both_sides: bool = config_field(
        False, "length: completions shorter than length_target have a penalty too", advanced=True
    )
    ngram_size: int = config_field(3, "repetition: units of an n-gram", min=1, max=100, advanced=True)
    scripts: tuple[str, ...] = config_field(
        (), "language: Unicode scripts of the wanted language", choices=SCRIPTS, advanced=True
    )
    timeout_seconds: float = config_field(
        10.0,
        "deadline of a call of your own function, of math for one answer, or of a question to a judge with all "
        "attempts; importing a file has the same, at least 10 s",
        above=0,
        max=86_400,
        advanced=True,
    )
    workers: int | None = config_field(
        None,
        "processes side by side, for your own function, math, format and code; unset: 2 for math, as many as the "
        "processor has cores for code, else 1",
        min=1,
        max=256,
        advanced=True,
    )
    score: bool = config_field(False, "evaluations average this reward; default: the first")
    binary: bool = config_field(
        False,
        "your own function or judge returns 1 (right) or 0 (wrong), so its mean is an accuracy; else it is a score",
    )
    per_step: bool = config_field(
        False,
        "your own function returns a list for each completion, with a number for each reasoning step",
        advanced=True,
    )

    tests_column: str = config_field("tests", "code: column that holds the hidden tests of a program", advanced=True)
    partial: bool = config_field(False, "code: the share of passed cases, instead of 1 for all and else 0")
    time_limit_seconds: float = config_field(
        5.0, "code: wall time of a program in one case, or in a whole test program", above=0, max=3600, advanced=True
    )
    memory_mb: int = config_field(
        256, "code: address space of each process of a program, in MiB", min=64, max=1 << 20, advanced=True
    )
    process_limit: int = config_field(
        4, "code: processes and threads of a program, the first included", min=1, max=64, advanced=True
    )
    unsafe_without_sandbox: bool = config_field(
        False, "code: run programs without a sandbox, with all rights of the user who trains", advanced=True
    )

    @property
    def built_in(self) -> BuiltInReward | None:
        """The entry of a built-in reward in the table, None for a function of the user's."""
        return BUILT_IN_REWARDS.get(self.name)

    @property
    def is_per_step(self) -> bool:
        """True for a reward of reasoning steps, False for one of whole completions."""
        return self.per_step or (self.built_in is not None and self.built_in.per_step)

    @property
    def is_binary(self) -> bool:
        """True if the reward is always 1 (right) or 0 (wrong), so that its mean is an accuracy."""
        return self.binary or (self.built_in is not None and self.built_in.binary and not self.partial)


@dataclass(frozen=True)
class RewardConfig(JudgeFields, RewardFields):
    """A [[rewards]] table: a built-in reward, a function or a judge."""

    @property
    def label(self) -> str:
        """The name of the reward in messages and metrics; empty if the table names no reward."""
        models = {"judge": self.judge, "reward_model": self.model}
        return (
            self.name or self.function.rpartition(":")[2] or next((word for word, set_ in models.items() if set_), "")
        )


@dataclass(frozen=True)
class CriticConfig:
    trunk: str = config_field(
        "own",
        "ppo: the critic's decoder: a copy of the policy's (own), or the policy's itself with a value head (policy)",
        choices=("own", "policy"),
        advanced=True,
    )


@dataclass(frozen=True)
class ReferenceConfig:
    refresh_every: int = config_field(
        0, "steps after which the reference is refreshed from the policy; 0: never", min=0, advanced=True
    )
    refresh_fraction: float = config_field(
        1.0,
        "weight of the policy in the refreshed reference: 1 copies it, less is a moving average (EMA)",
        above=0,
        max=1,
        advanced=True,
    )


@dataclass(frozen=True)
class ProcessConfig:
    boundary: str = config_field(
        "line",
        "end of a reasoning step: line, paragraph or sentence, or your own file.py:function from a text to the "
        "positions (in characters) after its steps",
        advanced=True,
    )


@dataclass(frozen=True)
class RunConfig(RunBase):
    """One training run on a language model."""

    task: Any = config_field(
        None,
        "[task] table: name = arithmetic, countdown, word_problems, running_total, code_functions, human_eval, jsonl "
        "or reasoning_gym",
    )
    model: str = config_field(
        "smollm2-135m",
        "smollm2-135m (embedded), a Hugging Face folder, a hub name, a .gguf file, or the folder of a run or of one of "
        "its checkpoints",
    )
    device: str = config_field("auto", "device", choices=("auto", "cpu", "cuda"))
    precision: str = config_field(
        "auto", "precision of matrix products; bf16 keeps fp32 master weights", choices=("auto", "bf16", "fp32")
    )
    rewards: tuple[RewardConfig, ...] = config_field((), "[[rewards]] tables; empty is the task's own reward")
    token_budget: int = config_field(
        0, "sampled tokens after which the run ends; 0: no limit", min=0, max=2**53, advanced=True
    )
    sampling: SamplingConfig = config_field(SamplingConfig(), "[sampling] table")
    loss: LossConfig = config_field(LossConfig(), "[loss] table")
    update: UpdateConfig = config_field(UpdateConfig(), "[update] table")
    critic: CriticConfig = config_field(CriticConfig(), "[critic] table")
    reference: ReferenceConfig = config_field(ReferenceConfig(), "[reference] table")
    process: ProcessConfig = config_field(ProcessConfig(), "[process] table")
    evaluation: EvaluationConfig = config_field(EvaluationConfig(), "[evaluation] table")
    checkpoint: CheckpointConfig = config_field(CheckpointConfig(), "[checkpoint] table")

    @property
    def max_resamples(self) -> int:
        """sampling.max_resamples, or the algorithm's default if it is unset."""
        default = DAPO_RESAMPLES if self.algorithm == "dapo" else 0
        return default if self.sampling.max_resamples is None else self.sampling.max_resamples

    @property
    def kl_coefficient(self) -> float | None:
        """loss.kl_coefficient, or ppo's default if it is unset; None means the default of another algorithm."""
        default = PPO_KL_COEFFICIENT if self.algorithm == "ppo" else None
        return default if self.loss.kl_coefficient is None else self.loss.kl_coefficient

    @property
    def overlong_tokens(self) -> int:
        """sampling.overlong_tokens, or the algorithm's default if it is unset."""
        fraction = DAPO_OVERLONG_FRACTION if self.algorithm == "dapo" else 0.0
        default = round(fraction * self.sampling.max_new_tokens)
        return default if self.sampling.overlong_tokens is None else self.sampling.overlong_tokens
