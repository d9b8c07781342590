"""Sources of examples, and their token ids. Only what the assistant wrote is trained, with the end token of each turn.

prompt, completion        the prompt as `covey train` feeds it, the tokens of the completion, an end token
messages                  the prompt, then turns of the assistant; the chat template's text and replies are masked
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.fields import plural
from covey.config.files import LARGEST_RECORDS, read_below
from covey.config.sft import SFTConfig, is_function
from covey.data import Batch, EndReason, Group, Rollout, Start, collate
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.environments.calculator import Calculator
from covey.llm.conversation.styles import GivenTurns
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import Tool, call_tool, describe_tools
from covey.llm.data.rows import Options, Split
from covey.llm.data.sft_examples import Example, Messages, check_rows, read_rows, split_examples
from covey.llm.model.architecture import longest_row, shortest
from covey.llm.model.chat import Chat
from covey.llm.sampler import GivenPrompt
from covey.llm.sft.function_rows import read_function
from covey.llm.tasks.arithmetic import Arithmetic
from covey.tracking.run_store import encode

# ---- sources of examples ----

DRAW_STEP = 0  # of `Arithmetic.draw`; training begins at step 1, so that it asks other problems


def calculator_examples(count: int = 200, seed: int = 0, task: Arithmetic | None = None) -> list[dict[str, Any]]:
    """Example conversations with the calculator, for a warm start.

    A small model must know the format of calls before GRPO can help:

    user        What is 123 + 456?
    assistant   the call calculate(expression="123 + 456"), in the format of the model
    tool        579
    assistant   579

    Problems are from the training side of the task, so no held-out problem is among them. The same arguments give the
    same rows.

    Args:
        count: number of rows.
        seed: of the problems.
        task: None: sums of three-digit numbers, without an instruction.

    Raises:
        ConfigError: if count is not positive.
    """
    if count < 1:
        raise ConfigError(f"count is {count}, but a warm start needs at least one example")
    task = task or Arithmetic(digits=(3,), operators=("+",), instruction="")
    calculator = Calculator()
    tools = describe_tools(calculator)
    rows = []
    for start in task.draw(seed, DRAW_STEP, count):
        question = start.prompt[-1]["content"]  # type: ignore[index]
        call = ToolCall("calculate", {"expression": question.removeprefix("What is ").partition("?")[0]})
        turn = {"role": "assistant", "content": "", "tool_calls": [call.message()]}
        reply = call.reply(call_tool(calculator, call, tools))
        answer = {"role": "assistant", "content": str(start.columns["answer"])}
        rows.append({"messages": [*start.prompt, turn, reply, answer], "tools": [tool.schema for tool in tools]})
    return rows


# Name -> function of the number of examples and the seed, which returns rows.
GENERATED: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {"calculator": calculator_examples}


def read_source(config: RunConfig) -> Split[Example]:
    """The training and the held-out examples of a config.

    Raises:
        ConfigError: for the first unusable row.
    """
    sft = config.sft
    if sft.data in GENERATED:
        rows = GENERATED[sft.data](sft.count, config.seed)
        examples = check_rows(sft, [(f"{sft.data} example {number}", row) for number, row in enumerate(rows, start=1)])
    elif is_function(sft.data):
        examples = check_rows(sft, read_function(sft.data))
    else:
        examples = read_rows(sft, sft.data)
    return split_examples(sft, examples)


@dataclass(frozen=True)
class EncodedExample:
    """An example as tokens; `decided` marks the actions that are trained."""

    prompt: tuple[int, ...]
    actions: tuple[int, ...]
    decided: tuple[bool, ...]

    @property
    def content(self) -> tuple[int, ...]:
        """Key that is equal for equal prompts."""
        return self.prompt

    @property
    def tokens(self) -> int:
        """The number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.actions)

    @property
    def trained(self) -> int:
        """The number of tokens that are trained."""
        return sum(self.decided)


class ExampleEncoder:
    """Encodes examples for one model, as rollouts of the same recipe would be."""

    def __init__(self, chat: Chat, tools: Sequence[Tool] | None = None) -> None:
        """
        Args:
            tools: of the recipe's conversations, for rows without tools; None: the recipe has no conversations.

        Raises:
            ConfigError: if the model declares no end token.
        """
        if not chat.end_ids:
            raise ConfigError("the model declares no end token (eos_token_id), so no completion can end: set it")
        self.chat = chat
        self.tools = tools
        self._encoder = ConversationEncoder(chat)

    def encode(self, example: Example) -> EncodedExample:
        """The tokens of an example.

        Raises:
            ConfigError: if the chat template cannot encode it, or a rollout would not read it so.
        """
        prompt, completion = example.prompt, example.completion
        if isinstance(prompt, str) and self.tools is None:
            actions = self._with_end(self.chat.encode_text(str(completion)))
            return EncodedExample(self.chat.encode(prompt), actions, (True,) * len(actions))
        own = [Tool(schema["function"]["name"], dict(schema)) for schema in example.tools]
        turns = GivenTurns(self._encoder, own or self.tools or ())
        # The tokens after a prompt do not depend on it, and messages of the assistant in it are not trained.
        return EncodedExample(turns.prompt(_messages(prompt, "user")), *turns.rest(_messages(completion, "assistant")))

    def _with_end(self, actions: Sequence[int]) -> tuple[int, ...]:
        if actions and actions[-1] in self.chat.end_ids:
            return tuple(actions)
        return (*actions, self.chat.end_id)


def _messages(given: str | Messages, role: str) -> Messages:
    """Messages; a text is one of this role, as in a conversation."""
    return ({"role": role, "content": given},) if isinstance(given, str) else given


SFT_OPTIONS = Options("sft.max_tokens", 'set sft.long_examples = "drop"')


def longest_example(model_config: Any, max_tokens: int) -> int | None:
    """The longest prompt with its completion, in tokens; `max_tokens` 0: the model's limit. None: there is no limit."""
    return shortest(max_tokens or None, longest_row(model_config))


def batch_of(examples: Sequence[EncodedExample]) -> Batch:
    """The examples as a batch; those with the same prompt are a group, so that it is computed once."""
    groups: dict[tuple[int, ...], Group] = {}
    for example in examples:
        group = groups.setdefault(example.prompt, Group(Start(len(groups), example.prompt), []))
        zeros = [0.0] * len(example.actions)
        group.rollouts.append(
            Rollout(example.prompt, list(example.actions), zeros, EndReason.STOP, decided=list(example.decided))
        )
    return collate(list(groups.values()))


@dataclass(frozen=True)
class Sample:
    """A completion or a conversation of the model, with its tokens."""

    place: str  # for messages
    example: EncodedExample
    record: Mapping[str, Any]  # its line in examples.jsonl, without `held_out`

    @property
    def tokens(self) -> int:
        """The number of tokens of prompt and completion."""
        return self.example.tokens

    @property
    def content(self) -> str:
        """Key that is equal for equal prompts."""
        prompt, tools = self.record["prompt"], self.record.get("tools", ())
        if not isinstance(prompt, str):
            prompt = tuple(prompt)
        return Example(self.place, prompt, "", tuple(tools)).content


def select(
    groups: Iterable[Group], sft: SFTConfig, prompt_of: Callable[[Any, str], GivenPrompt], *, remedy: str = ""
) -> list[Sample]:
    """The samples that are trained, in the order of their prompts; those of equal prompts are compared together.

    Args:
        groups: graded. A rollout without a reward is left out, as is one with the tokens of another.
        prompt_of: what the model was given, for a start's prompt and a first observation (`LanguageSampler.prompt_of`).
        remedy: end of the message of the error.

    Raises:
        ConfigError: if none has the reward; the message has the highest one.
    """
    samples = 0
    highest: float | None = None
    passed: dict[str, dict[tuple[int, ...], Sample]] = {}  # by prompt, then by tokens
    for group in groups:
        for place, rollout in enumerate(group.rollouts):
            samples += 1
            if rollout.reward is None:
                continue
            highest = rollout.reward if highest is None else max(highest, rollout.reward)
            if rollout.reward >= sft.min_reward:
                where = f"sample {place + 1} of prompt {group.start.index + 1}"
                sample = _sample(where, rollout, prompt_of(group.start.prompt, rollout.observation))
                passed.setdefault(sample.content, {}).setdefault(sample.example.actions, sample)
    if not passed:
        known = "none could be graded" if highest is None else f"the highest is {highest:g}"
        raise ConfigError(
            f"no example: of {plural(samples, 'sample')} none has a reward of at least {sft.min_reward:g} ({known}); "
            f"lower sft.min_reward{remedy}"
        )
    kept: list[Sample] = []
    for different in passed.values():
        best = max(different.values(), key=lambda sample: sample.record["reward"])
        kept += different.values() if sft.keep == "all" else [best]
    return kept


def _sample(place: str, rollout: Rollout, prompt: GivenPrompt) -> Sample:
    messages, tools = prompt
    actions = tuple(int(action) for action in rollout.actions)
    decided = (True,) * len(actions) if rollout.decided is None else tuple(map(bool, rollout.decided))
    record = {
        "prompt": messages if isinstance(messages, str) else list(messages),
        **({"tools": list(tools)} if tools else {}),
        "completion": rollout.text if rollout.messages is None else list(rollout.messages),
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "end": str(rollout.end),
        "token_ids": {
            "prompt": list(rollout.context),
            "completion": list(actions),
            "undecided": [place for place, decides in enumerate(decided) if not decides],
        },
    }
    return Sample(place, EncodedExample(tuple(rollout.context), actions, decided), record)


def tokens_of(samples: Iterable[Sample]) -> list[EncodedExample]:
    """The tokens of samples."""
    return [sample.example for sample in samples]


def written(samples: Sequence[Sample], held_out: Sequence[Sample]) -> bytes:
    """The content of examples.jsonl."""
    lines = [{**sample.record, "held_out": False} for sample in samples]
    lines += [{**sample.record, "held_out": True} for sample in held_out]
    return b"".join(encode(line) + b"\n" for line in lines)


def read_back(path: Path) -> tuple[list[Sample], list[Sample]]:
    """The training and the held-out examples of an examples.jsonl.

    Raises:
        ConfigError: if it is missing or damaged.
    """
    found: dict[bool, list[Sample]] = {False: [], True: []}
    try:
        for number, line in enumerate(read_below(path.parent, path.name, most=LARGEST_RECORDS).splitlines(), start=1):
            row = json.loads(line)
            ids = row["token_ids"]
            undecided = set(ids["undecided"])
            decided = tuple(place not in undecided for place in range(len(ids["completion"])))
            example = EncodedExample(tuple(ids["prompt"]), tuple(ids["completion"]), decided)
            found[row.pop("held_out")].append(Sample(f"{path} line {number}", example, row))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is missing or damaged: sample the examples again") from error
    return found[False], found[True]
