"""A [[rewards]] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.builtin_rewards import BUILT_IN_REWARDS, PROCESS_MIB, BuiltInReward
from covey.config.common import Table, config_field
from covey.config.judge import JudgeFields
from covey.config.machine import processors

SCRIPTS = (
    *("latin", "greek", "cyrillic", "armenian", "georgian", "hebrew", "arabic", "ethiopic", "devanagari", "bengali"),
    *("gurmukhi", "gujarati", "tamil", "telugu", "kannada", "malayalam", "sinhala", "thai", "lao", "myanmar", "khmer"),
    *("tibetan", "mongolian", "hangul", "han", "hiragana", "katakana"),
)


@dataclass(frozen=True)
class RewardFields(Table):
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
        "machine has processors for code, else 1",
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
        "your own function returns a list for each completion, with a number for each reasoning step, or for "
        "each turn of the model in a conversation",
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
    def is_per_turn(self) -> bool:
        """True for the rewards that the environment of a conversation pays for each turn."""
        return self.built_in is not None and self.built_in.per_turn

    @property
    def is_binary(self) -> bool:
        """True if the reward is always 1 (right) or 0 (wrong), so that its mean is an accuracy."""
        return self.binary or (self.built_in is not None and self.built_in.binary and not self.partial)


@dataclass(frozen=True)
class RewardConfig(JudgeFields, RewardFields):
    """A [[rewards]] table: a built-in reward, a function or a judge."""

    @property
    def process_count(self) -> int:
        """Processes that compute it side by side; 0 if the run's own process computes it."""
        if self.judge:
            return int(bool(self.judge_pattern))  # which may need exponential time
        if self.built_in is None:
            return (self.workers or 1) if self.function else 0
        return (self.workers or self.built_in.workers or processors()) if self.built_in.has_processes else 0

    @property
    def process_bytes(self) -> int:
        """Measured memory of its processes, without what a user's function imports and what a program allocates."""
        each = PROCESS_MIB if self.built_in is None else self.built_in.resident_mib
        return self.process_count * each << 20

    @property
    def label(self) -> str:
        """The name of the reward in messages and metrics; empty if the table names no reward."""
        models = {"judge": self.judge, "reward_model": self.model}
        return (
            self.name or self.function.rpartition(":")[2] or next((word for word, set_ in models.items() if set_), "")
        )
