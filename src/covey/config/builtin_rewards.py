"""The table of built-in rewards. A reward is a function in `llm/rewards/`, and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Measured memory of a process that calls a reward, with its supervisor and without what the function imports, and of a
# sandboxed program with its test program.
PROCESS_MIB = 15


@dataclass(frozen=True)
class BuiltInReward:
    """How a built-in reward is called, and what a recipe may set for it."""

    function: str  # module:function, with TRL's signature
    binary: bool = False  # always 1 (right) or 0 (wrong), so that its mean is an accuracy
    per_step: bool = False  # a number for each reasoning step, else one for the whole completion
    per_turn: bool = False  # of a conversation: the sum of the environment's rewards for the turns
    required: Mapping[str, str] = field(default_factory=dict)  # fields that need a value -> an example, in TOML
    own_process: bool = False  # it may hang, so it is called in a process that can be ended
    # Called for one completion at a time, in RewardConfig.workers processes side by side, each call with its deadline.
    one_by_one: bool = False
    shortcut: str = ""  # one_by_one: a function of this process that grades what is easy, and returns None for the rest
    # own_process, one_by_one, runner: processes side by side unless the recipe sets another number; None: one for each
    # processor of the machine.
    workers: int | None = 1
    memory_mib: int = 0  # one_by_one: limit of the address space of each process; 0: none
    resident_mib: int = PROCESS_MIB  # own_process, one_by_one, runner: measured memory of each process
    package: str = ""  # module that it imports, of the extra covey[NAME] with the name of the reward
    # module:function that is called before a run for every row of a data set, with the values of the columns of `gold`
    # (names of columns, or of the options that name them), and raises ValueError if they cannot grade a completion.
    check: str = ""
    gold: tuple[str, ...] = ("answer_column",)
    tasks: tuple[str, ...] = ()  # the only tasks whose answers it grades, besides dataset; empty: any
    runner: str = ""  # module:function that builds its `RewardRunner` from the RewardConfig; empty: by the fields above

    @property
    def has_processes(self) -> bool:
        """True if it is computed in processes of its own."""
        return self.own_process or self.one_by_one or bool(self.runner)


BUILT_IN_REWARDS: dict[str, BuiltInReward] = {
    "numeric": BuiltInReward(
        "covey.llm.rewards.numbers:numeric",
        binary=True,
        check="covey.llm.rewards.numbers:check_number",
    ),
    "digits": BuiltInReward(
        "covey.llm.rewards.numbers:digits",
        check="covey.llm.rewards.numbers:check_number",
    ),
    "exact": BuiltInReward(
        "covey.llm.rewards.rules:exact",
        binary=True,
        check="covey.llm.rewards.numbers:check_text",
    ),
    "math": BuiltInReward(
        "covey.llm.rewards.math:math_equal",
        binary=True,
        one_by_one=True,
        check="covey.llm.rewards.numbers:check_expression",
        shortcut="covey.llm.rewards.numbers:plain_verdicts",
        workers=2,
        memory_mib=2048,
        resident_mib=80,  # SymPy
        package="math_verify",
    ),
    "format": BuiltInReward(
        "covey.llm.rewards.rules:format_match",
        binary=True,
        required={"pattern": "'-?[0-9]+'"},
        own_process=True,  # a regular expression may take exponential time
    ),
    "tags": BuiltInReward("covey.llm.rewards.rules:tagged_parts", binary=True),
    "length": BuiltInReward(
        "covey.llm.rewards.rules:length_penalty",
        required={"length_limit": "200"},
    ),
    "repetition": BuiltInReward("covey.llm.rewards.rules:repetition_penalty"),
    "language": BuiltInReward("covey.llm.rewards.rules:script_share", required={"scripts": '["latin"]'}),
    "reasoning_gym": BuiltInReward(
        "covey.llm.rewards.reasoning_gym_process:score",
        own_process=True,  # its scorers evaluate text
        resident_mib=115,
        tasks=("reasoning_gym",),
    ),
    "code": BuiltInReward(
        "covey.llm.rewards.code:code",
        binary=True,  # unless partial = true
        check="covey.llm.rewards.code_tests:read_tests",
        gold=("tests_column", "entry_point"),
        tasks=("code_functions", "human_eval"),
        workers=None,
        runner="covey.llm.rewards.code:code_runner",
    ),
    "environment": BuiltInReward("covey.llm.rewards.rules:environment", per_turn=True),
    "countdown": BuiltInReward(
        "covey.llm.rewards.rules:countdown",
        binary=True,
        check="covey.llm.rewards.rules:check_numbers",
        gold=("target", "numbers"),
        tasks=("countdown",),
    ),
    "step_numbers": BuiltInReward(
        "covey.llm.rewards.numbers:step_numbers",
        per_step=True,
        check="covey.llm.rewards.numbers:right_steps",
        tasks=("running_total",),
    ),
}
