"""One term of a rollout's reward: a function, how it is called, and its weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.config import ConfigError, RewardConfig
from covey.config.fields import check_fields
from covey.config.rewards import check_reward
from covey.data import Group, Rollout, Start
from covey.llm.reward_models.reward import ModelReward
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.rules import length_penalty
from covey.llm.rewards.runner import InProcess, OneByOne, RewardPool, RewardRunner
from covey.runtime.worker.child import load_function

JUDGE = "covey.llm.rewards.judge:Judge"
LARGEST_REWARD = 1e18  # absolute value; its square is finite in float32


@dataclass(frozen=True)
class RewardResult:
    """Result of one reward for one rollout: a value, None on purpose, or an error."""

    value: float | None
    error: str = ""
    steps: Sequence[float] = ()  # of a step reward: the reward of each step; `value` is their sum

    @property
    def score(self) -> float | None:
        """The number that evaluations average: the value, or the mean over the steps of a step reward."""
        return self.value / len(self.steps) if self.value is not None and self.steps else self.value


Wait = Callable[[], list[RewardResult]]  # waits for the results of a call, one for each rollout


@dataclass(frozen=True)
class WeightedReward:
    """One term of a rollout's reward."""

    name: str
    caller: RewardRunner
    options: Mapping[str, Any]  # arguments from the config, not from the data
    weight: float = 1.0
    score: bool = False  # evaluations average this reward
    timeout_seconds: float = 10.0
    shaping: bool = False  # added by the run: counts only if one of the user's rewards has a value
    per_step: bool = False  # a number for each reasoning step of a completion
    per_turn: bool = False  # the sum of `Rollout.turn_rewards`, each of which is paid at the end of its turn
    binary: bool = False  # always 1 (right) or 0 (wrong), so its mean is an accuracy
    range: tuple[float, float] | None = None  # lowest and highest value (of each step); None: not known
    check: Callable[..., Any] | None = None  # of the values of the columns `gold` of a row (`BuiltInReward.check`)
    gold: tuple[str, ...] = ()

    @staticmethod
    def from_function(
        function: Callable[..., Any],
        *,
        weight: float = 1.0,
        score: bool = False,
        timeout_seconds: float = 60.0,
        per_step: bool = False,
        binary: bool = False,
    ) -> WeightedReward:
        """A reward from a Python callable with TRL's signature, called in a thread of this process.

        Args:
            score: evaluations average this reward; without one, the first of the run.
            per_step: it returns a list for each completion, with one number for each reasoning step.
            binary: it returns 1 (right) or 0 (wrong), so that its mean is an accuracy; else it is a score.

        Raises:
            ConfigError: if both binary and per_step are set.
        """
        if per_step and binary:
            raise ConfigError("a reward per step is not binary: leave out per_step or binary")
        name = getattr(function, "__name__", type(function).__name__)
        return WeightedReward(
            name, InProcess(function), {}, weight, score, timeout_seconds, per_step=per_step, binary=binary
        )

    @staticmethod
    def from_config(config: RewardConfig, device: str = "auto", precision: str = "auto") -> WeightedReward:
        """A reward from its config: built in, a judge, a reward model, or a function by its name in its own processes.

        Args:
            device, precision: of a reward model, as in a recipe.

        Raises:
            ConfigError: if a field is invalid or a file is missing. The function itself is not loaded yet.
        """
        check_fields(config, "reward: ")
        name = config.label
        check_reward(config, f"reward {name or '(no name)'}")
        built_in = config.built_in
        return WeightedReward(
            name,
            _runner(config, device, precision),
            config.arguments,
            config.weight,
            config.score,
            config.timeout_seconds,
            per_step=config.is_per_step,
            per_turn=config.is_per_turn,
            binary=config.is_binary,
            range=config.range,
            check=load_function(built_in.check) if built_in is not None and built_in.check else None,
            gold=() if built_in is None else tuple(getattr(config, name, name) for name in built_in.gold),
        )

    @staticmethod
    def overlong(max_new_tokens: int, overlong_tokens: int) -> WeightedReward:
        """The length penalty that a run adds to its rewards: 0 up to `overlong_tokens` before the token limit, then
        linear to -1 at the limit. DAPO (arXiv 2503.14476), eq. 13
        """
        target = max_new_tokens - overlong_tokens
        config = RewardConfig(name="length", length_target=target, length_limit=max_new_tokens)
        return WeightedReward("overlong", InProcess(length_penalty), config.arguments, shaping=True)

    def evaluate(self, groups: Sequence[Group]) -> list[RewardResult]:
        """Call the function once for all rollouts of `groups`; errors as of `RewardRunner.start`."""
        return self.start(groups)()

    def start(self, groups: Sequence[Group]) -> Wait:
        """Start a call for all rollouts of `groups`; returns a function that waits for the results, and stores logs in
        the groups. A reward that may not run while others are sampled (`RewardRunner.early`) is called by it.
        """
        if self.caller.by_group and len(groups) > 1:
            waits = [self.start([group]) for group in groups]
            return lambda: [result for wait in waits for result in wait()]
        if not any(_gradable(groups)):
            return lambda: self._received(Results([], {}, {}), groups)
        if not self.caller.early:
            return lambda: self._received(self.caller.call(*self._arguments(groups)), groups)
        call = self.caller.start(*self._arguments(groups))
        return lambda: self._received(call.result(), groups)

    def _arguments(self, groups: Sequence[Group]) -> tuple[dict[str, Any], int, float, list[int] | None]:
        """The arguments of `RewardRunner.start`."""
        rows = _gradable(groups)
        columns = dict.fromkeys(name for start, _ in rows for name in start.columns)
        arguments = {
            "prompts": [start.prompt for start, _ in rows],
            "completions": [completion_of(start, rollout) for start, rollout in rows],
            "completion_ids": [list(rollout.actions) for _, rollout in rows],
            **{name: [start.columns.get(name) for start, _ in rows] for name in columns},
            **_of_conversations([rollout for _, rollout in rows]),
            **self.options,
        }
        counts = None
        if self.per_step:
            steps = [list(rollout.step_texts or [rollout.text]) for _, rollout in rows]
            arguments["steps"], counts = steps, [len(texts) for texts in steps]
        return arguments, rows[0][1].version, self.timeout_seconds, counts

    def _received(self, results: Results, groups: Sequence[Group]) -> list[RewardResult]:
        """The results of a call, by rollout; stores its logs in the groups."""
        rollouts = [rollout for _, rollout in _gradable(groups)]
        for metric, numbers in results.metrics.items():
            groups[0].logged.setdefault(f"{self.name}/{metric}", []).extend(numbers)
        for column, values in results.extras.items():
            for rollout, value in zip(rollouts, values, strict=True):
                rollout.extras.setdefault(self.name, {})[column] = value
        found = (
            RewardResult(None, results.errors[row]) if row in results.errors else _result_of(result, binary=self.binary)
            for row, result in enumerate(results.values)
        )
        return [
            RewardResult(None, rollout.failure) if rollout.failure else next(found)
            for group in groups
            for rollout in group.rollouts
        ]


def _runner(config: RewardConfig, device: str, precision: str) -> RewardRunner:
    """The way to call a reward. The module of a judge or of the reward `code` is imported only if it is used."""
    if config.model:
        return ModelReward(config, device, precision)
    reward, workers = config.built_in, config.process_count
    if named := JUDGE if config.judge else reward and reward.runner:
        runner: RewardRunner = load_function(named)(config)
        return runner
    if reward is None or reward.own_process:
        return RewardPool(reward.function if reward else config.function, workers, config.timeout_seconds)
    if reward.one_by_one:
        shortcut = load_function(reward.shortcut) if reward.shortcut else None
        pool = RewardPool(reward.function, workers, repeat=False, memory_mib=reward.memory_mib)
        return OneByOne(pool, tuple(config.arguments), shortcut)
    return InProcess(load_function(reward.function))


def _gradable(groups: Sequence[Group]) -> list[tuple[Start, Rollout]]:
    """The rollouts of the groups, without conversations whose environment failed."""
    return [(group.start, rollout) for group in groups for rollout in group.rollouts if not rollout.failure]


def _of_conversations(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Arguments of rewards over conversations; empty for other rollouts."""
    if any(rollout.messages is None for rollout in rollouts):
        return {}
    return {
        "turn_rewards": [list(rollout.turn_rewards or ()) for rollout in rollouts],
        "environments": [dict(rollout.environment or {}) for rollout in rollouts],
    }


def completion_of(start: Start, rollout: Rollout) -> Any:
    """A completion in TRL's form: messages if the prompt is messages, else a string; of a conversation all messages."""
    if rollout.messages is not None:
        return list(rollout.messages)
    return rollout.text if isinstance(start.prompt, str) else [{"role": "assistant", "content": rollout.text}]


def _result_of(result: float | list[float] | None, *, binary: bool) -> RewardResult:
    if result is None:
        return RewardResult(None)
    if binary and math.isfinite(result) and result not in (0, 1):  # type: ignore[arg-type]  # steps are not binary
        return RewardResult(
            None, f"returned {result:g}, but it is binary: let it return 0 or 1, or take out binary = true"
        )
    numbers = result if isinstance(result, list) else [result]
    for number in numbers:
        if not abs(number) <= LARGEST_REWARD:  # True for NaN
            return RewardResult(None, f"returned {number}")
    return RewardResult(math.fsum(numbers), steps=numbers) if isinstance(result, list) else RewardResult(result)
