"""Reads the data of reward models from JSONL, checked line by line: preference pairs, grades, step labels.

| columns                        | example                                                              |
|--------------------------------|----------------------------------------------------------------------|
| prompt, chosen, rejected       | `Pair`, optionally with a column margin; TRL's preference format     |
| chosen, rejected               | `Pair`: the prompt is the messages that both begin with, or empty    |
| prompt, completion, grade      | `Graded`                                                             |
| prompt, completions, labels    | `Steps`: texts and labels of the steps; TRL's stepwise format        |

A prompt is a string or chat messages, or the column `question`; a completion is a string, or the messages after the
prompt, or a whole chat.
"""

import json
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from msgspec import Struct

from covey.llm.data.rows import Messages, check_prompt, check_text, faults_at, kind_name, read_records, with_prompt


class Example(Struct, frozen=True, tag_field="kind", tag=True):
    """One line of a data set, checked."""

    place: str  # "pairs.jsonl line 7", for messages
    prompt: str | Messages

    @property
    def content(self) -> str:
        """Key that is equal for equal prompts; an example without a prompt has the beginning of its texts instead."""
        return json.dumps(self.prompt or self._beginning, sort_keys=True)

    @property
    def _beginning(self) -> Any:
        raise NotImplementedError


class Pair(Example, frozen=True, tag=True):
    """Two completions of a prompt, of which the first is preferred."""

    chosen: str | Messages
    rejected: str | Messages
    margin: float = 0.0  # the difference that their scores should have at least

    @property
    def _beginning(self) -> str:
        """Up to the first difference of the two texts, as in TRL's implicit prompt."""
        assert isinstance(self.chosen, str)  # without a prompt, a completion is a string
        assert isinstance(self.rejected, str)
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self.chosen, self.rejected, strict=False))
        return "".join(one for one, _ in alike) or self.chosen


class Graded(Example, frozen=True, tag=True):
    """A completion with its grade."""

    completion: str | Messages
    grade: float

    @property
    def labels(self) -> tuple[float]:
        return (self.grade,)

    @property
    def _beginning(self) -> str | Messages:
        return self.completion


class Steps(Example, frozen=True, tag=True):
    """The steps of a completion; each label is the probability that the step is right, usually 0 or 1."""

    steps: tuple[str, ...]
    labels: tuple[float, ...]

    @property
    def _beginning(self) -> str:
        return self.steps[0]


def read_examples(path: str, grade_column: str = "grade") -> list[Example]:
    """All examples of a JSONL file, of one kind.

    Raises:
        ConfigError: "pairs.jsonl line 7: ..." for the first line that is unusable, or of another kind than the first.
    """
    records = read_records(path, "preference pairs, grades or step labels")
    kinds = _kinds(grade_column)
    found: list[Example] = []
    for place, row in records:
        with faults_at(place):
            record = with_prompt(row)
            matching = [kind for kind, (columns, _) in kinds.items() if columns <= record.keys()]
            if len(matching) != 1:
                what = "several kinds of data" if matching else "not a known kind of data"
                raise ValueError(
                    f"its columns ({', '.join(list(record)[:8]) or 'none'}) are {what}: give prompt, chosen and "
                    f"rejected, or prompt, completion and {grade_column} (--grade-column), or prompt, completions and "
                    "labels"
                )
            if found and not isinstance(found[0], matching[0]):
                raise ValueError(f"it has other columns than {found[0].place}: write each kind of data to its own file")
            found.append(kinds[matching[0]][1](place, record))
    return found


def _kinds(grade_column: str) -> dict[type[Example], tuple[set[str], Callable[[str, dict[str, Any]], Example]]]:
    return {
        Pair: ({"chosen", "rejected"}, _pair),
        Graded: ({"prompt", "completion", grade_column}, lambda place, record: _graded(place, record, grade_column)),
        Steps: ({"prompt", "completions", "labels"}, _steps),
    }


def _pair(place: str, record: dict[str, Any]) -> Pair:
    if "prompt" in record and not all(_is_whole(record[name], record["prompt"]) for name in ("chosen", "rejected")):
        prompt = _prompt(record["prompt"])
        chosen, rejected = (_completion(record[name], name, prompt) for name in ("chosen", "rejected"))
    else:
        prompt, chosen, rejected = _without_prompt(record["chosen"], record["rejected"])
    if chosen == rejected:
        raise ValueError("'chosen' and 'rejected' are the same, so there is nothing to prefer: remove the line")
    margin = _number(record.get("margin", 0.0), "margin")
    return Pair(place, prompt, chosen, rejected, margin)


def _is_whole(chat: Any, prompt: Any) -> bool:
    """True for a whole chat, which has the text of the prompt before its last message, as in UltraFeedback."""
    before = chat[:-1] if isinstance(chat, list) and isinstance(prompt, str) else ()
    return any(isinstance(message, Mapping) and message.get("content") == prompt for message in before)


def _without_prompt(chosen: Any, rejected: Any) -> tuple[str | Messages, str | Messages, str | Messages]:
    """The common beginning of two whole chats, and the rest of each; of two strings none is the prompt."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        return "", _text(chosen, "chosen"), _text(rejected, "rejected")
    whole = _messages(chosen, "chosen"), _messages(rejected, "rejected")
    common = 0
    while common < min(map(len, whole)) - 1 and whole[0][common] == whole[1][common]:
        common += 1
    if not common:
        raise ValueError(
            "'chosen' and 'rejected' have no common first message, which would be the prompt: add 'prompt'"
        )
    return whole[0][:common], whole[0][common:], whole[1][common:]


def _graded(place: str, record: dict[str, Any], grade_column: str) -> Graded:
    prompt = _prompt(record["prompt"])
    grade = record[grade_column]
    number = float(grade) if isinstance(grade, bool) else _number(grade, grade_column)
    return Graded(place, prompt, _completion(record["completion"], "completion", prompt), number)


def _steps(place: str, record: dict[str, Any]) -> Steps:
    prompt, texts, labels = _prompt(record["prompt"]), record["completions"], record["labels"]
    for name, value in (("completions", texts), ("labels", labels)):
        if not isinstance(value, list) or not value:
            empty = " of 0" if value == [] else ""
            raise ValueError(f"{name!r} must be a list with one value for each step, this is {kind_name(value)}{empty}")
    if len(texts) != len(labels):
        raise ValueError(f"there are {len(texts)} 'completions' (steps) and {len(labels)} 'labels': give one for each")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):  # it may be empty, if a policy ended its completion at once
            raise ValueError(f"step {number} of 'completions' must be a text, this is {kind_name(text)}")
    numbers = [float(label) if isinstance(label, bool) else _number(label, "labels") for label in labels]
    if not all(0 <= number <= 1 for number in numbers):
        raise ValueError("'labels' are true or false, or probabilities from 0 to 1")
    return Steps(place, prompt, tuple(texts), tuple(numbers))


def _prompt(prompt: Any) -> str | Messages:
    return "" if prompt == "" else _messages(prompt, "prompt")


def _completion(value: Any, name: str, prompt: str | Messages) -> str | Messages:
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(prompt, str):
        raise ValueError(
            f"{name!r} must be a string, because 'prompt' is one; this is {kind_name(value)}: write 'prompt' as a list "
            "of messages too, or leave it out if the completions hold the whole chat"
        )
    return _messages(value, name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be a string, this is {kind_name(value)}")
    check_text(value, name)
    return value


def _messages(value: Any, name: str) -> Any:
    """Checked messages, or a text."""
    check_prompt(value, name)
    return tuple(value) if isinstance(value, list) else value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name!r} must be a number, this is {kind_name(value)}")
    if not abs(value) <= 1e6:  # True for NaN
        raise ValueError(f"{name!r} is beyond 1e6: scale the numbers to at most 1e6")
    return float(value)
