"""Longest prompt that a model takes, checked before training if the prompts are known by then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.config import ConfigError, RunError
from covey.data import Start, Task
from covey.llm.model.architecture import exact_length, position_limit
from covey.llm.model.chat import Chat

Note = Callable[[str], None]

TRIED_BEFOREHAND = 256  # number of training starts of a generating task that are checked before training
OTHER_DRAWS = 20  # replacements that are drawn for one start before it is left out
FAR = 1_000_003  # distance in starts at which a replacement is drawn
NOTED = 3  # number of left-out prompts that are logged; further ones are only counted


def length_fault(
    config: Any, prompt_tokens: int, max_new_tokens: int, *, field: str = "max_new_tokens", additions: str = ""
) -> str:
    """The reason why a model with this config cannot complete a prompt of this many tokens; "" if it can.

    Beyond the limit of its positions a model crashes or writes nonsense. Beyond a second limit of some architectures,
    the numbers of a row depend on the other rows of its batch.

    Args:
        config: transformers' config of the model.
        prompt_tokens: tokens of the prompt.
        max_new_tokens: the most tokens after it.
        field: name of this limit in a recipe.
        additions: what the prompt has beside that of the data, such as " with its tools".
    """
    wanted = f"a prompt of {prompt_tokens} tokens{additions} and {field} = {max_new_tokens}"
    limit, exact = position_limit(config), exact_length(config)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        return f"{wanted} exceed the model's {limit} positions: shorten the prompt or lower {field}"
    if exact is not None and prompt_tokens + max_new_tokens > exact[0]:
        return (
            f"{wanted} exceed {exact[0]} tokens, beyond which a model of the type {config.model_type} cannot be "
            f"trained because {exact[1]}: shorten the prompt or lower {field}"
        )
    return ""


@dataclass(frozen=True)
class PromptLimit:
    """Checks whether a model can complete a prompt.

    The prompts of conversations also have the descriptions of tools and the first observation (`encode`).
    """

    chat: Chat
    config: Any  # the model's config of transformers
    max_new_tokens: int
    drop: bool = False  # True: prompts that are too long are dropped; False: refused
    encode: Callable[[Any], Sequence[int]] | None = None  # tokens of a prompt; None: those of `chat`
    field: str = "max_new_tokens"  # name of `max_new_tokens` in a recipe
    additions: str = ""  # to the prompts of the data, for messages
    teacher: Any = None  # the config of a teacher that reads the same prompts and completions

    def __post_init__(self) -> None:
        """Raises ConfigError if no prompt can fit."""
        positions = position_limit(self.config)
        if positions is not None and self.max_new_tokens >= positions:
            raise ConfigError(
                f"a limit of {self.max_new_tokens} new tokens leaves no room for prompts in the model's {positions} "
                f"positions: lower {self.field}{', or token_limits' if self.encode is None else ''}"
            )

    def fault(self, prompt: Any) -> str:
        """The reason why a prompt is too long; "" if it fits.

        Raises:
            ConfigError: if it is not a prompt, empty, or refused by the chat template.
        """
        if not isinstance(prompt, str) and not (
            isinstance(prompt, (list, tuple)) and prompt and all(isinstance(message, dict) for message in prompt)
        ):
            raise ConfigError(f"a prompt must be a string or a list of chat messages, this is {str(prompt)[:60]!r}")
        tokens = len((self.encode or self.chat.encode)(prompt))
        additions = " with its images" if getattr(prompt, "pictures", ()) else self.additions
        for config, who in ((self.config, ""), (self.teacher, "for the teacher, ")):
            fault = config and length_fault(config, tokens, self.max_new_tokens, field=self.field, additions=additions)
            if fault:
                return who + fault
        return ""

    def taken(self, starts: Sequence[Start], note: Note) -> list[Start]:
        """The held-out starts that fit; the others are refused or, if `drop` is set, left out.

        Raises:
            ConfigError: for the first refused prompt; if none is left.
        """
        kept = []
        for start in starts:
            fault = _fault_of(self, start)
            if fault and not self.drop:
                raise ConfigError(f'{fault}; or set sampling.long_prompts = "drop" to leave such prompts out')
            if not fault:
                kept.append(start)
        if not kept:
            raise ConfigError(f"no held-out prompt of the task fits the model: {fault}")
        if len(kept) < len(starts):
            note(f"{len(starts) - len(kept)} of {len(starts)} held-out prompts are too long for the model: left out")
        return kept


class FittingTask:
    """A generating task in which starts that are too long for the model are replaced; implements `covey.data.Task`.

    If the task has no replacement, the step has one group less. Replacements are a function of the arguments of `draw`,
    so that a resumed run draws the same.
    """

    def __init__(self, task: Task, limit: PromptLimit, note: Note) -> None:
        self.task, self.limit, self.note = task, limit, note
        self._left_out, self._told = 0, 0

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """As the task's own `draw`, without prompts that are too long for the model.

        Raises:
            RunError: if neither they nor their replacements fit.
        """
        starts = self.task.draw(seed, step, count, first=first, before=before)
        found = [
            self._fitting(start, seed, step, None if before is None else before + place)
            for place, start in enumerate(starts)
        ]
        fitting = [start for start in found if start is not None]
        if starts and not fitting:
            raise RunError(f"step {step}: the model can take no prompt of the task: {_fault_of(self.limit, starts[0])}")
        return fitting

    def held_out(self, count: int) -> list[Start]:
        """As the task's own."""
        return self.task.held_out(count)

    def metrics(self) -> dict[str, float]:
        """`prompts/left_out` since the last call; empty if there were none."""
        count, self._left_out = self._left_out, 0
        return {"prompts/left_out": float(count)} if count else {}

    def _fitting(self, start: Start, seed: int, step: int, before: int | None) -> Start | None:
        drawn = start
        for attempt in range(1, OTHER_DRAWS + 1):
            fault = _fault_of(self.limit, drawn)
            if not fault:
                return drawn if drawn is start else replace(drawn, index=start.index)
            self._left_out += 1
            self._tell(step, fault)
            ahead = attempt * FAR
            drawn_before = None if before is None else before + ahead
            try:
                drawn = self.task.draw(seed, step, 1, first=start.index + ahead, before=drawn_before)[0]
            except Exception:  # a user's task may have no start at this index
                return None
        return None

    def _tell(self, step: int, fault: str) -> None:
        self._told += 1
        if self._told <= NOTED:
            last = "; further ones are counted in prompts/left_out" if self._told == NOTED else ""
            self.note(f"step {step}: left out a prompt that the model cannot take: {fault}{last}")


def _fault_of(limit: PromptLimit, start: Start) -> str:
    """The reason why a start cannot be used, with the beginning of its prompt; "" if it can."""
    try:
        fault = limit.fault(start.prompt)
    except ConfigError as error:
        fault = str(error)
    return f"{fault} (prompt {start.index}: {_beginning(start.prompt)})" if fault else ""


def _beginning(prompt: Any) -> str:
    chat = isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[-1], dict)
    return f"{str(prompt[-1].get('content') if chat else prompt)[:60]!r}"


def refuse_first_starts(task: Task, limit: PromptLimit, seed: int, steps: int, count: int) -> None:
    """Check the training starts of the first steps, so that most prompts that do not fit are found before training.

    Args:
        steps: number of steps of the run.
        count: starts per step.

    Raises:
        ConfigError: for the first prompt that does not fit.
    """
    for step in range(1, min(steps, -(-TRIED_BEFOREHAND // count)) + 1):
        for start in task.draw(seed, step, count, first=0, before=(step - 1) * count):
            if fault := _fault_of(limit, start):
                raise ConfigError(f'{fault}; or set sampling.long_prompts = "drop" to leave such prompts out')
