"""Rollouts and held-out answers as text for a terminal.

A model's text is indented line by line, and its control characters are replaced, so that it cannot be mistaken for a
line of covey's or change the terminal.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from covey.config.fields import plural, printable
from covey.tracking.evaluations import Found
from covey.tracking.run_reader import SHOWN_AT_FIRST, Group, Turn, conversation_turns, number, table, text
from covey.tracking.wording import number as short

INDENT = "      "
TURN_INDENT = "  "  # of the text of a turn, below its role
LONGEST_TEXT = 2000  # characters of a completion or of a turn, unless all of it is asked for
LONGEST_VALUE = 200  # of a data column
MOST_COLUMNS = 20  # data columns of a prompt


class RolloutPrinter:
    """Prints rollouts to a console.

    Args:
        whole: print texts of any length as a whole.
        in_control: the run trains an agent: prompts are seeds of episodes, decisions are actions.
    """

    def __init__(self, console: Console, *, whole: bool = False, in_control: bool = False) -> None:
        self.console, self.whole = console, whole
        self.prompt, self.unit = ("seed", "action") if in_control else ("prompt", "token")

    def group(self, step: int, group: Group, groups: int | None = None, why: str = "") -> None:
        """Print a group: the prompt, then the siblings, the best first.

        Args:
            groups: number of groups of the step.
            why: the reason for choosing this one.
        """
        of = f" of {groups}" if groups is not None else ""
        heading = f"step {step}, group {group.number}{of}, {plural(len(group.rollouts), 'rollout')}"
        self._line(Text(heading, "bold").append(f" ({why})" if why else "", "not bold"))
        self.start(group.rollouts[0])
        self._model_prompt(group.model_prompt())
        self._fact("rewards", _rewards_text(group))
        baselines = {number(line.get("baseline")) for line in group.rollouts} - {None}
        if len(baselines) == 1:
            self._fact("baseline", short(baselines.pop() or 0.0))
        if group.is_dropped:
            self._fact("dropped", "replaced by another group, so it was not trained on")
        order = sorted(range(len(group.rollouts)), key=lambda place: _descending(group.rollouts[place]))
        for place in order:
            self._line(Text())
            self.rollout(place, group.rollouts[place], own_baseline=len(baselines) > 1)

    def found(self, found: Found) -> None:
        """Print one rollout with its prompt."""
        size = len(found.group.rollouts)
        self._line(Text(f"step {found.step}, group {found.group.number}, rollout {found.index} of {size}", "bold"))
        self.start(found.line)
        self._model_prompt(found.group.model_prompt(found.index))
        self._fact("rewards", _rewards_text(found.group))
        self.rollout(found.index, found.line, own_baseline=True)
        self._line(Text())

    def start(self, line: Mapping[str, Any]) -> None:
        """Print the prompt of a rollout and its data columns."""
        prompt = line.get("prompt")
        for label, content in _turns(prompt, self.prompt):
            self._fact(label, content)
        columns = table(line.get("columns"))
        for name, value in list(columns.items())[:MOST_COLUMNS]:
            shown = _value(value)
            self._fact(name, shown if self.whole or len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]} ...")
        if len(columns) > MOST_COLUMNS:
            self._fact("...", plural(len(columns) - MOST_COLUMNS, "other column"))

    def rollout(self, place: int, line: Mapping[str, Any], *, own_baseline: bool) -> None:
        """Print the numbers of a rollout and its completion."""
        reward, advantage = number(line.get("reward")), number(line.get("advantage"))
        head = Text(f"{place:>4}  ", "dim")
        head.append("not graded" if reward is None else f"reward {short(reward)}", "bold " + _style(reward, advantage))
        parts = table(line.get("reward_parts"))
        if len(parts) > 1 or any(number(part) != reward for part in parts.values()):
            named = ", ".join(f"{name} {_number(part)}" for name, part in parts.items())
            head.append(printable(f" = {named}").replace("\n", " "), "dim")
        if advantage is not None:
            head.append(f"  advantage {advantage:+.2f}", _style(reward, advantage))
        baseline = number(line.get("baseline"))
        if own_baseline and baseline is not None:
            head.append(f"  baseline {short(baseline)}")
        score = number(line.get("score"))
        if score is not None and score != reward:
            head.append(f"  score {short(score)}")
        head.append(f"  {_length(line, self.unit)}", "dim")
        self._line(head)
        self._completion(text(line.get("text")), conversation_turns(line), text(line.get("failure")))

    def answers(self, row: Mapping[str, Any], labels: Sequence[str]) -> None:
        """Print a held-out problem with two answers to it: a row of `covey.tracking.evaluations.compare_answers`."""
        change = number(row["change"])
        direction = "" if change is None else f", {change:+g}" if change else ", same score"
        self._line(Text(f"problem {row['problem']}{direction}", "bold"))
        self.start(row)
        for label, answer in zip(labels, (row["first"], row["last"]), strict=True):
            if answer is None:
                self._line(Text(f"  {label}: no answer recorded", "dim"))
                continue
            score = answer["score"]
            head = Text(f"  {label}: ", "dim").append(
                "not graded" if score is None else f"score {short(score)}", "bold"
            )
            tokens = answer["tokens"]
            length = "" if tokens is None else f"  {plural(int(tokens), 'token')}"
            self._line(head.append(length + (", truncated" if answer["truncated"] else ""), "dim"))
            self._completion(answer["text"], answer["turns"] or [], answer["failure"] or "")
        self._line(Text())

    def _model_prompt(self, content: str) -> None:
        """Print what the model read: the prompt with template, system text and tools."""
        left = 0 if self.whole else max(0, len(content) - LONGEST_TEXT)
        more = f"\n... {left:,} more characters (--full shows them)" if left else ""
        if content:
            self._fact("model read", content[: len(content) - left] + more)

    def _fact(self, label: str, content: str) -> None:
        name = printable(label).replace("\n", " ").replace("\t", " ")[:40]
        lines = printable(content).split("\n") or [""]
        begin = Text(f"  {name:<10} ", "dim").append(lines[0], "not dim")
        self._line(begin)
        for line in lines[1:]:
            self._line(Text(" " * 13 + line))

    def _completion(self, content: str, turns: Sequence[Turn], failure: str) -> None:
        """Print a completion; that of a conversation by its turns."""
        if failure:
            self._line(Text(f"{INDENT}{_one_line(failure)}", "red"))
        if not turns:
            self._block(content)
        shown = turns if self.whole else turns[:SHOWN_AT_FIRST]
        for turn in shown:
            head = Text(f"{INDENT}{_one_line(turn['role'])} {_one_line(turn['name'])}".rstrip(), "dim")
            if turn["reward"] is not None:
                head.append(f"  reward {short(turn['reward'])}", "not dim")
            self._line(head)
            if turn["text"] or not (turn["calls"] or turn["unread"]):
                self._block(turn["text"], INDENT + TURN_INDENT)
            for call in turn["calls"]:
                self._line(Text(f"{INDENT}{TURN_INDENT}calls ", "dim").append(_one_line(call["name"]), "bold"))
                for name, value in call["arguments"]:
                    self._line(Text(f"{INDENT}{TURN_INDENT * 2}{_one_line(name)}:", "dim"))
                    self._block(value, INDENT + TURN_INDENT * 3)
            for content in turn["unread"]:
                self._line(Text(f"{INDENT}{TURN_INDENT}call that could not be read", "dim"))
                self._block(content, INDENT + TURN_INDENT * 2)
        if len(turns) > len(shown):
            self._line(Text(f"{INDENT}... {len(turns) - len(shown):,} more turns (--full shows them)", "dim"))

    def _block(self, content: str, indent: str = INDENT) -> None:
        shown = content if self.whole else content[:LONGEST_TEXT]
        width = max(20, self.console.width - len(indent)) if self.console.is_terminal else None
        for line in printable(shown).expandtabs(4).split("\n") if shown.strip() else ["(nothing)"]:
            style = "" if shown.strip() else "dim"
            for part in Text(line, style).wrap(self.console, width) if width else [Text(line, style)]:
                self._line(Text(indent).append_text(part))
        if len(content) > len(shown):
            self._line(Text(f"{indent}... {len(content) - len(shown):,} more characters (--full shows them)", "dim"))

    def _line(self, line: Text) -> None:
        line.rstrip()
        self.console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _one_line(words: str) -> str:
    return " ".join(printable(words).split())[:LONGEST_VALUE]


def _turns(prompt: Any, label: str) -> list[tuple[str, str]]:
    """The messages of a prompt with their roles."""
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        return [(str(turn.get("role", label)), _value(turn.get("content"))) for turn in prompt]
    return [(label, _value(prompt))]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rewards_text(group: Group) -> str:
    rewards, failed = group.rewards, len(group.rollouts) - len(group.rewards)
    if not rewards:
        return "none was graded"
    mean, low, high = sum(rewards) / len(rewards), min(rewards), max(rewards)
    equal = "all equal" if group.has_signal else "all equal, so every advantage is 0"
    spread = f"from {short(low)} to {short(high)}" if group.has_spread else equal
    return f"mean {short(mean)}, {spread}" + (f"; {failed} not graded" if failed else "")


def _descending(line: Mapping[str, Any]) -> tuple[bool, float]:
    reward = number(line.get("reward"))
    return reward is None, -(reward or 0.0)


def _style(reward: float | None, advantage: float | None) -> str:
    if reward is None:
        return "red"
    return "" if not advantage else "green" if advantage > 0 else "red"


def _number(value: Any) -> str:
    known = number(value)
    return "none" if known is None else short(known)


def _length(line: Mapping[str, Any], unit: str) -> str:
    count, end = number(line.get("decisions")), printable(text(line.get("end"))).replace("\n", " ")
    length = "" if count is None else plural(int(count), unit)
    return ", ".join(part for part in (length, end) if part)
