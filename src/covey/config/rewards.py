"""The table of built-in rewards, and a [[rewards]] table of a recipe with its checks."""

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.config.common import ConfigError, Fault, Table, config_field, refuse, table
from covey.config.fields import missing_file, or_list
from covey.config.files import parse_json, read_file, shortened, user_path
from covey.config.machine import processors
from covey.config.named_modules import check_function_name
from covey.config.servers import is_this_machine, judge_token, parse_address, public_address
from covey.config.sft import reward_model_fault

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
    range: tuple[float, float] | None = None  # lowest and highest value, of a step reward of each step; None: any
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
        range=(0, 1),
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
        range=(-1, 0),
        required={"length_limit": "200"},
    ),
    "repetition": BuiltInReward("covey.llm.rewards.rules:repetition_penalty", range=(-1, 0)),
    "language": BuiltInReward("covey.llm.rewards.rules:script_share", range=(0, 1), required={"scripts": '["latin"]'}),
    "reasoning_gym": BuiltInReward(
        "covey.llm.rewards.reasoning_gym_process:score",
        range=(0, 1),
        own_process=True,  # its scorers evaluate text
        resident_mib=115,
        tasks=("reasoning_gym",),
    ),
    "code": BuiltInReward(
        "covey.llm.rewards.code:code",
        range=(0, 1),
        binary=True,  # unless partial = true
        check="covey.llm.rewards.code:read_tests",
        gold=("tests_column", "entry_point"),
        tasks=("code_functions", "human_eval"),
        workers=None,
        runner="covey.llm.rewards.code:CodeRunner",
    ),
    "environment": BuiltInReward("covey.llm.rewards.rules:environment", per_turn=True),
    "zero": BuiltInReward("covey.llm.rewards.rules:zero", range=(0, 0)),
    "countdown": BuiltInReward(
        "covey.llm.rewards.rules:countdown",
        binary=True,
        check="covey.llm.rewards.rules:check_numbers",
        gold=("target", "numbers"),
        tasks=("countdown",),
    ),
    "step_numbers": BuiltInReward(
        "covey.llm.rewards.numbers:step_numbers",
        range=(0, 1),
        per_step=True,
        check="covey.llm.rewards.numbers:right_steps",
        tasks=("running_total",),
    ),
}

JUDGE_TOKENS = 256  # longest reply of a judge; judge_request may set another max_tokens
LARGEST_PROMPT = 1 << 20  # bytes of judge_prompt_file
SCRIPTS = (
    *("latin", "greek", "cyrillic", "armenian", "georgian", "hebrew", "arabic", "ethiopic", "devanagari", "bengali"),
    *("gurmukhi", "gujarati", "tamil", "telugu", "kannada", "malayalam", "sinhala", "thai", "lao", "myanmar", "khmer"),
    *("tibetan", "mongolian", "hangul", "han", "hiragana", "katakana"),
)
# Fields of one kind of reward.
_of_model = partial(config_field, advanced=True, used_by=("model",))
_of_length = partial(config_field, advanced=True, used_by=("length",))
_of_code = partial(config_field, advanced=True, used_by=("code",))
_of_judge = partial(config_field, advanced=True, used_by=("judge",))
_of_tags = partial(config_field, advanced=True, used_by=("tags",))


@table(frozen=True)
class RewardConfig(Table):
    """A [[rewards]] table: a built-in reward, a function, a judge or a reward model.

    `used_by` of a field names the rewards that use it: built-in ones, or "function", "judge" and "model". The fields of
    a judge, but `judge` and `allow_remote`, begin with `judge_`.
    """

    name: str = config_field("", "a built-in reward", choices=tuple(BUILT_IN_REWARDS))
    function: str = config_field("", "or your own: file.py:function or module:function, with TRL's signature")
    model: str = config_field(
        "",
        "or a reward model: the run folder of `covey reward-model train`, a folder or a hub name; with per_step = true "
        "a process reward model scores each step",
    )
    standardise: bool | None = _of_model(
        None,
        "model: subtract the mean of the scores on its training data and divide by their deviation; unset: if they are "
        "stored with the model",
    )
    clip: float | None = _of_model(
        None, "model: bound of the (standardised) score's absolute value; unset: none", above=0
    )
    step_differences: bool = _of_model(False, "model, per_step: each step's score minus that of the step before")
    aggregate: str = _of_model(
        "",
        "process reward model without per_step: how the scores of the steps make one; unset: min",
        choices=("min", "product", "mean", "last"),
    )
    weight: float = config_field(1.0, "weight in the sum of rewards")
    pattern: str = config_field(
        "",
        "regular expression of the format reward, matched against the whole completion",
        advanced=True,
        used_by=("format",),
    )
    answer_column: str = config_field(
        "answer",
        "column that holds the right answer; of step_numbers a list of them",
        advanced=True,
        used_by=("numeric", "digits", "exact", "math", "step_numbers"),
    )
    tags: tuple[str, ...] = _of_tags(
        ("think", "answer"), "tags: the tagged parts of which a completion consists, in their order"
    )
    first_tag_in_prompt: bool = _of_tags(
        False, "tags: the prompt ends with the first opening tag, so completions begin after it"
    )
    unit: str = config_field(
        "tokens",
        "length, repetition: what is counted",
        choices=("tokens", "words", "characters"),
        advanced=True,
        used_by=("length", "repetition"),
    )
    length_target: int = _of_length(0, "length: units up to which there is no penalty", min=0, max=10_000_000)
    length_limit: int | None = _of_length(
        None, "length: units from which the penalty is 1; above length_target", min=1, max=10_000_000
    )
    length_shape: str = _of_length(
        "linear", "length: how the penalty rises from target to limit", choices=("linear", "cosine")
    )
    length_both_sides: bool = _of_length(False, "length: completions shorter than length_target have a penalty too")
    ngram_size: int = config_field(
        3, "repetition: units of an n-gram", min=1, max=100, advanced=True, used_by=("repetition",)
    )
    scripts: tuple[str, ...] = config_field(
        (), "language: Unicode scripts of the wanted language", choices=SCRIPTS, advanced=True, used_by=("language",)
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
        used_by=("function", "math", "format", "reasoning_gym", "code"),
    )
    score: bool = config_field(False, "evaluations average this reward; default: the first")
    binary: bool = config_field(
        False,
        "your own function or judge returns 1 (right) or 0 (wrong), so its mean is an accuracy; else it is a score",
        used_by=("function", "judge"),
    )
    per_step: bool = config_field(
        False,
        "your own function returns a list for each completion, with a number for each reasoning step, or for "
        "each turn of the model in a conversation",
        advanced=True,
        used_by=("function", "model", "step_numbers"),
    )

    tests_column: str = _of_code("tests", "code: column that holds the hidden tests of a program")
    partial: bool = _of_code(False, "code: the share of passed cases, instead of 1 for all and else 0", advanced=False)
    time_limit_seconds: float = _of_code(
        5.0, "code: wall time of a program in one case, or in a whole test program", above=0, max=3600
    )
    memory_mb: int = _of_code(256, "code: address space of each process of a program, in MiB", min=64, max=1 << 20)
    process_limit: int = _of_code(4, "code: processes and threads of a program, the first included", min=1, max=64)
    unsafe_without_sandbox: bool = _of_code(
        False, "code: run programs without a sandbox, with all rights of the user who trains"
    )
    judge: str = config_field(
        "", "or a judge: the address of an OpenAI-compatible server with a model, such as http://127.0.0.1:8000/v1"
    )
    judge_model: str = _of_judge("", "judge: name of the model at that address")
    judge_prompt: str = _of_judge(
        "", "judge: the question, with {prompt}, {completion} and {answer} or any other column in it"
    )
    judge_prompt_file: str = _of_judge("", "judge: or a text file with the question")
    judge_pattern: str = _of_judge(
        "",
        "judge: regular expression whose only group is the score in the reply, at its last match; the score is "
        "otherwise the last number of the reply",
    )
    judge_field: str = _of_judge("", "judge: or the field of a JSON object in the reply, with dots for inner objects")
    judge_words: tuple[str, ...] = _of_judge(
        (), 'judge: words that stand for numbers, such as ["good = 1", "bad = 0"]; the last one counts'
    )
    judge_order: bool = _of_judge(
        False,
        "judge of a question with {completions}: the list in its reply has the numbers of the completions from the "
        "best to the worst, in place of their scores",
    )
    judge_range: tuple[float, ...] = _of_judge(
        (0.0, 1.0), "judge: lowest and highest score; grading fails for a score outside of it"
    )
    judge_temperature: float = _of_judge(0.0, "judge: temperature of its replies", min=0, max=10)
    judge_request: str = _of_judge(
        "", "judge: further fields of each request, such as max_tokens, as a JSON object; null takes a field out"
    )
    judge_concurrency: int = _of_judge(8, "judge: questions asked at a time", min=1, max=1024)
    judge_retries: int = _of_judge(
        3, "judge: further attempts after a fault of the server or the network", min=0, max=100
    )
    judge_token_variable: str = _of_judge(
        "", "judge: environment variable with the access token; the token itself is never written"
    )
    judge_token_file: str = _of_judge("", "judge: or a file with the access token")
    judge_cache: str = _of_judge(
        "", "judge: folder with the replies, each asked for once; empty: in covey's cache folder"
    )
    allow_remote: bool = _of_judge(
        False, "judge: allow an address on another machine, which receives prompts and completions"
    )

    @property
    def kind(self) -> str:
        """The name of a built-in reward, or "function", "judge" or "model"; empty if the table names no reward."""
        return self.name or next((kind for kind in ("function", "judge", "model") if getattr(self, kind)), "")

    def uses(self, field: str) -> bool:
        """True if the reward uses a field."""
        users = type(self).__dataclass_fields__[field].metadata["used_by"]
        return not users or self.kind in users

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a built-in reward's function."""
        if self.built_in is None or self.built_in.runner:
            return {}
        taken = (item for item in fields(self) if self.name in item.metadata["used_by"])
        return {item.name: getattr(self, item.name) for item in taken if item.name not in ("workers", "per_step")}

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

    @property
    def range(self) -> tuple[float, float] | None:
        """The lowest and the highest value of the reward, or of a step; None if it is not known."""
        if self.judge:
            return self.judge_range[0], self.judge_range[1]
        return self.built_in.range if self.built_in is not None else None

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
        return self.function.rpartition(":")[2] or ("reward_model" if self.kind == "model" else self.kind)

    def faults(self) -> Iterator[Fault]:
        sources = [kind for kind in ("name", "function", "judge", "model") if getattr(self, kind)]
        if len(sources) != 1:
            wrong = " and ".join(sources) or "neither name nor function nor judge nor model"
            yield Fault(f"the table has {wrong}: give exactly one of them")
            return
        if self.weight == 0 and not self.score:
            yield Fault("weight is 0, so the reward changes nothing: give it a weight or remove it")
        needed = self.built_in.required if self.built_in is not None else {}
        for item in fields(self):
            value, users = getattr(self, item.name), item.metadata["used_by"]
            is_set = value != item.default and value is not False
            if item.name in needed and not is_set:
                example = needed[item.name]
                yield Fault(f"a {self.name} reward needs a value for {item.name}, such as {item.name} = {example}")
            if is_set and not self.uses(item.name):
                yield Fault(f"{item.name} is set, but not used with {self.kind}: remove it, or choose {or_list(users)}")
        for tag in self.tags:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", tag):
                yield Fault(f"the tag {tag!r:.60} must be a word, such as think, without brackets")
        if len(set(self.tags)) < len(self.tags):
            yield Fault(f"tags names a tag twice ({', '.join(self.tags)}), and each may occur once")
        if self.length_limit is not None and self.length_limit <= self.length_target:
            yield Fault(
                f"length_limit ({self.length_limit}) must be above length_target ({self.length_target}), because the "
                "penalty rises from the target to the limit"
            )
        if self.binary and self.per_step:
            yield Fault(
                "binary = true with per_step = true: evaluations average a step reward over the steps, which is not an "
                "accuracy; remove binary"
            )
        if self.step_differences and not self.per_step:
            yield Fault("step_differences = true needs per_step = true: add it")
        if self.aggregate and self.per_step:
            yield Fault("aggregate is set, but per_step = true gives every step its own score: remove one of them")
        if self.judge:
            yield from self._judge_faults()

    def _judge_faults(self) -> Iterator[Fault]:
        if not self.judge_model:
            yield Fault("judge_model is empty: give the name of the judge's model")
        if bool(self.judge_prompt) == bool(self.judge_prompt_file):
            both = "both judge_prompt and judge_prompt_file" if self.judge_prompt else "no judge_prompt"
            yield Fault(f"the judge has {both}: give its question once, with {{prompt}} and {{completion}} in it")
        if self.judge_pattern and self.judge_field:
            yield Fault("both judge_pattern and judge_field are set: give the one that finds the score")
        if len(self.judge_range) != 2 or not self.judge_range[0] < self.judge_range[1]:
            yield Fault("judge_range must be the lowest and the highest score, such as [0, 10]")
        if self.judge_token_variable and self.judge_token_file:
            yield Fault("both judge_token_variable and judge_token_file are set: give one")

    def check(self) -> None:
        _compiled("pattern", self.pattern)
        if self.built_in is not None and self.built_in.package and find_spec(self.built_in.package) is None:
            raise ConfigError(
                f'the {self.name} reward needs a package that is not installed: pip install "covey[{self.name}]"'
            )
        if self.function:
            check_function_name(self.function, "function")
        if self.model and (fault := reward_model_fault(self.model, per_step=self.per_step)):
            raise ConfigError(fault)
        if self.judge:
            _check_judge(self)

    @property
    def ranks(self) -> bool:
        """True for a judge whose question has all completions of a group. Raises ConfigError as `judge_question`."""
        return bool(self.judge) and "{completions}" in self.judge_question

    @property
    def judge_question(self) -> str:
        """The template of the judge's question. Raises ConfigError if its file cannot be read."""
        if self.judge_prompt:
            return self.judge_prompt
        path = user_path(self.judge_prompt_file, "judge_prompt_file: ")
        if not path.is_file():
            raise ConfigError(f"judge_prompt_file: {missing_file(path, self.judge_prompt_file)}")
        try:
            return read_file(path, LARGEST_PROMPT).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError(f"judge_prompt_file: {self.judge_prompt_file} is not UTF-8 text") from None

    @property
    def judge_scores(self) -> dict[str, float]:
        """Word in lower case -> score. Raises ConfigError for an entry that is not 'word = number'."""
        found: dict[str, float] = {}
        for entry in self.judge_words:
            word, _, number = entry.rpartition("=")
            word = word.strip().lower()
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not word or not math.isfinite(value):
                raise ConfigError(f"judge_words has {shortened(entry)}: an entry is a word and its score, 'good = 1'")
            if word in found:
                raise ConfigError(f"judge_words has {shortened(word)} twice")
            found[word] = value
        return found

    @property
    def judge_body(self) -> dict[str, Any]:
        """The fields of each request except its messages. Raises ConfigError if judge_request is not a JSON object."""
        request: dict[str, Any] = {
            "model": self.judge_model,
            "temperature": self.judge_temperature,
            "max_tokens": JUDGE_TOKENS,
        }
        if self.judge_request:
            try:
                further = parse_json(self.judge_request)
            except ValueError as error:
                raise ConfigError(f"judge_request is {error}") from None
            if not isinstance(further, dict):
                raise ConfigError("judge_request must be a JSON object, such as '{\"seed\": 1}'")
            if taken := next((name for name in ("model", "messages", "stream", "n") if name in further), None):
                raise ConfigError(f"judge_request has {taken!r}, which covey sets itself: remove it")
            request |= further
        return {name: value for name, value in request.items() if value is not None}


def _check_judge(reward: RewardConfig) -> None:
    """Refuse a judge that cannot be asked. Its server is not contacted, and no message has its token."""
    check_judge_address(reward.judge, allow_remote=reward.allow_remote)
    if reward.ranks:
        _check_ranking(reward)
    elif "{completion}" not in reward.judge_question:
        raise ConfigError("the judge's question has no {completion}, so it does not see what it judges")
    elif reward.judge_order:
        raise ConfigError("judge_order is for a question with all completions of a group: write {completions} in it")
    _ = reward.judge_body
    low, high = reward.judge_range
    for word, value in reward.judge_scores.items():
        if not low <= value <= high:
            limits = f"{low:g} to {high:g}"
            raise ConfigError(f"judge_words has {word!r} = {value:g}, outside judge_range ({limits})")
    groups = _compiled("judge_pattern", reward.judge_pattern, re.DOTALL).groups
    if reward.judge_pattern and groups != 1:
        raise ConfigError(f"judge_pattern needs one group, the score, and has {groups}: 'Score: ([0-9]+)'")
    variable, file = reward.judge_token_variable, reward.judge_token_file
    if variable and not os.environ.get(variable, "").strip():
        named = f" {variable}" if re.fullmatch(r"[A-Z][A-Z0-9_]*", variable) else ""  # others may be a token
        raise ConfigError(
            "judge_token_variable is the name of an environment variable, not the token, and there is no "
            f"variable{named} with a value: set it"
        )
    path = user_path(file, "judge_token_file: ") if file else Path()
    if file and not path.is_file():
        raise ConfigError(f"judge_token_file: {missing_file(path, file)}")
    if variable or file:
        judge_token(variable, str(path))


def _check_ranking(reward: RewardConfig) -> None:
    """Refuse settings of a judge of single completions in one that ranks a group."""
    if "{completion}" in reward.judge_question:
        raise ConfigError(
            "the judge's question has {completion} and {completions}: leave out the first to compare all "
            "completions of a group, or the second to judge each alone"
        )
    if not reward.judge_field:
        raise ConfigError(
            "the judge's question has {completions}, so its reply is a JSON object with a list: name its field in "
            'judge_field, such as "scores"'
        )
    for name in ("judge_words", "binary", "score"):
        if getattr(reward, name):
            raise ConfigError(
                f"{name} is set, but the judge's question has {{completions}}, and its scores compare the "
                f"completions of a group only: remove {name}"
            )


def check_reward(reward: RewardConfig, where: str) -> None:
    """Refuse a [[rewards]] table that contradicts itself or cannot be used; `where` names it in the message.

    Raises:
        ConfigError: one line that names the table, the field and the remedy.
    """
    try:
        refuse(reward.faults())
        reward.check()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _compiled(name: str, pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A regular expression in the field `name`. Raises ConfigError for text that the module re cannot compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets such as [[a], which are read as they stand
            return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{name} {shortened(pattern)} is not a regular expression ({reason})") from error


def check_judge_address(address: str, *, allow_remote: bool) -> None:
    """Refuse what is not a plain address of a server, and another machine unless it is allowed.

    Raises:
        ConfigError: without a password or a query of the address, which may be secret.
    """
    if re.match(r"[^/]*/*[^/]*@", address):  # it may have a password, which no message may show
        raise _secret_in_address("a user name")
    parts, _ = parse_address(address, "judge ")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\\]", address):
        raise ConfigError(
            f"judge must be an address such as http://127.0.0.1:8000/v1 (is {shortened(public_address(address))})"
        )
    if parts.query or parts.fragment:
        raise _secret_in_address("a query")
    host = parts.hostname
    try:
        remote = not is_this_machine(host)
    except ValueError:
        return  # a name; the client resolves it
    if remote and not allow_remote:
        fix = "write 127.0.0.1" if host in ("0.0.0.0", "::") else "allow it with allow_remote = true"
        raise ConfigError(f"judge: {host} is another machine, which would receive prompts; {fix}")


def _secret_in_address(what: str) -> ConfigError:
    return ConfigError(
        f"judge must be a plain address, and this one has {what}; an access token belongs in a file "
        "(judge_token_file) or an environment variable (judge_token_variable)"
    )
