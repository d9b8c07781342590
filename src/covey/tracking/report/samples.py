"""The sections with texts of the model: held-out answers that changed most, and groups of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from covey.config.fields import plural
from covey.tracking.console import last_turn
from covey.tracking.evaluations import compare_answers, read_answers, token_limits
from covey.tracking.plain_files import Refused, TooLarge
from covey.tracking.report.completions import completion, one_line
from covey.tracking.report.html import Html, element, heading, pre, section
from covey.tracking.report.html import table as grid
from covey.tracking.report.run_data import RunData
from covey.tracking.rollout_choice import choose_group
from covey.tracking.run_reader import Group, number, table, text
from covey.tracking.score_kinds import number as short
from covey.tracking.turns import conversation_turns

LONGEST_PROMPT, LONGEST_VALUE = 2000, 300  # characters that are shown
MOST_CHANGES = 5  # answers that got better, and that got worse
MOST_SIBLINGS = 8  # of a group: the best and the worst
MOST_COLUMNS, MOST_PARTS = 8, 8
SHORT_TEXT, FEW_LINES = 140, 4  # of a completion that is shown in a table


def answers_section(run: RunData, level: int) -> Html | None:
    """The held-out answers whose score changed most; None for a run without such answers."""
    steps = run.reader.held_out_steps()
    if not steps:
        return None
    first, last = read_answers(run.reader, steps[0]), read_answers(run.reader, steps[-1])
    limit = next(iter(token_limits([last, first])), None)
    if limit is None or len(steps) < 2:
        return section("Held-out answers", element("p", "There is one evaluation so far.", class_="note"), level=level)
    shown: list[Html] = []
    counts: dict[str, int] = {}
    for order, title in (("worse", "Worse after training"), ("better", "Better after training")):
        result = compare_answers(
            first.get(limit, {}), last.get(limit, {}), order=order, kind=order, wanted="", offset=0, limit=MOST_CHANGES
        )
        counts = result["changes"]
        of = f" ({len(result['answers'])} of {counts[order]})"
        shown.append(heading(level + 1, title + of))
        shown += _answers(result["answers"], steps[-1])
        if not result["answers"]:
            shown.append(element("p", "None.", class_="note"))
    problems = plural(sum(counts.values()), "held-out problem")
    note = (
        f"Of {problems}, {counts['better']} got better, {counts['worse']} worse "
        f"and {counts['same']} kept their score between steps {steps[0]:,} and {steps[-1]:,}. Token limit: {limit:,}."
    )
    return section("Held-out answers that changed most", element("p", note), *shown, level=level)


def groups_section(run: RunData, level: int, most: int = 3) -> Html:
    """The most informative group of a few steps: the first, one in the middle, the last."""
    steps = run.reader.rollout_steps()
    if not steps:
        return section("Rollouts", element("p", "No rollouts are recorded.", class_="note"), level=level)
    places = sorted({0, len(steps) - 1} if most < 3 else {0, len(steps) // 2, len(steps) - 1})
    groups = [_step_group(run, steps[place], level + 1) for place in places[-most:]]
    note = (
        "Of each step the group with the largest spread of rewards; the rollouts with the highest rewards first. An "
        "advantage above 0 makes a rollout more probable."
    )
    return section("Rollouts", element("p", note, class_="note"), *groups, level=level)


def _step_group(run: RunData, step: int, level: int) -> Html:
    groups: list[Group] = []
    with suppress(OSError, Refused, TooLarge):
        groups, _ = run.reader.groups(step)
    if not groups:
        return element("p", f"The rollouts of step {step:,} cannot be read.", class_="note")
    group, _ = choose_group(groups, None)
    order = sorted(range(len(group.rollouts)), key=lambda place: _descending(group.rollouts[place]))
    left_out = len(order) - MOST_SIBLINGS
    if left_out > 0:
        order = order[: MOST_SIBLINGS // 2] + order[-MOST_SIBLINGS // 2 :]
    title = f"Step {step:,}, group {group.number} of {len(groups)}"
    note = f"{plural(left_out, 'rollout')} between the best and the worst {MOST_SIBLINGS // 2} left out."
    return element(
        "div",
        heading(level, title),
        _prompt(run, group.rollouts[0]),
        _common_baseline(group),
        _siblings(order, group, unit_of(run)),
        element("p", note, class_="note") if left_out > 0 else None,
    )


def _prompt(run: RunData | None, line: Mapping[str, Any]) -> Html:
    prompt, parts = line.get("prompt"), list[Html]()
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        for turn in prompt:
            parts += [element("div", one_line(turn.get("role", "message")), class_="label"),
                      pre(_value(turn.get("content")), LONGEST_PROMPT)]  # fmt: skip
    else:
        label, content = run.wording.prompt if run is not None else "prompt", _value(prompt)
        if _is_short(content):
            parts = [element("p", f"{label}: ", element("code", content))]
        else:
            parts = [element("div", label, class_="label"), pre(content, LONGEST_PROMPT)]
    columns = list(table(line.get("columns")).items())
    shown = [f"{one_line(name)}: {_cut(_value(value))}" for name, value in columns[:MOST_COLUMNS]]
    shown += [plural(len(columns) - MOST_COLUMNS, "other column")] if len(columns) > MOST_COLUMNS else []
    parts += [element("p", "; ".join(shown), class_="label")] if shown else []
    return element("div", *parts, class_="prompt")


def _common_baseline(group: Group) -> Html | None:
    baselines = {number(line.get("baseline")) for line in group.rollouts} - {None}
    if len(baselines) != 1:
        return None
    return element("p", f"Baseline of the group: {short(baselines.pop() or 0.0)}", class_="label")


def unit_of(run: RunData) -> str:
    """The decision of a kind of run."""
    return "action" if run.wording.domain == "control" else "token"


def _siblings(order: Sequence[int], group: Group, unit: str) -> Html:
    """The rollouts of a group: a table if the completions are short, otherwise one block for each."""
    lines = [(place, group.rollouts[place]) for place in order]
    if all(_is_short(text(line.get("text"))) and not conversation_turns(line) for _, line in lines):
        parts = _part_names(line for _, line in lines)
        head = ("", "completion", "reward", *map(one_line, parts), "advantage", f"{unit}s", "end")
        rows = [
            [
                str(place),
                element("code", text(line.get("text")) or "(nothing)"),
                _number(line.get("reward"), "not graded"),
                *(_number(table(line.get("reward_parts")).get(name)) for name in parts),
                _advantage(line),
                _number(line.get("decisions"), whole=True),
                one_line(line.get("end") or "-"),
            ]
            for place, line in lines
        ]
        return grid(head, rows, numbers=(0, *range(2, 5 + len(parts))))
    return element("div", *(_rollout(place, line, unit) for place, line in lines), class_="rollouts")


def _is_short(completion: str) -> bool:
    return len(completion) <= SHORT_TEXT and completion.count("\n") < FEW_LINES


def _part_names(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the parts of the rewards; none if there is one part, which is the reward."""
    names = list(dict.fromkeys(name for line in lines for name in table(line.get("reward_parts"))))
    return names[:MOST_PARTS] if len(names) > 1 else []


def _rollout(place: int, line: Mapping[str, Any], unit: str) -> Html:
    parts = _part_names([line])
    named = ", ".join(f"{one_line(name)} {_number(table(line.get('reward_parts')).get(name))}" for name in parts)
    count = number(line.get("decisions"))
    facts: list[Html | str | None] = [
        f"{place}: ",
        element("b", f"reward {_number(line.get('reward'), 'none, not graded')}"),
        f" ({named})" if named else None,
    ]
    facts += [", advantage ", _advantage(line)] if number(line.get("advantage")) is not None else []
    facts += [f", {plural(int(count), unit)}"] if count is not None else []
    facts += [f", {one_line(line['end'])}"] if line.get("end") else []
    shown = completion(text(line.get("text")), conversation_turns(line), text(line.get("failure")))
    return element("div", element("div", *facts, class_="label"), shown, class_="rollout")


def _advantage(line: Mapping[str, Any]) -> Html | str:
    advantage = number(line.get("advantage"))
    if advantage is None:
        return "-"
    style = "good" if advantage > 0 else "bad" if advantage < 0 else None
    return element("span", f"{advantage:+.2f}", class_=style)


def _answers(rows: Sequence[Mapping[str, Any]], step: int) -> list[Html]:
    """Answers before and after: a table if they are short, otherwise beside each other."""
    texts = [last_turn(row["prompt"]) for row in rows]
    answers = [table(row[which]) for row in rows for which in ("first", "last")]
    texts += [text(answer.get("text")) for answer in answers]
    if not rows or not all(map(_is_short, texts)) or any(answer.get("turns") for answer in answers):
        return [_pair(row, step) for row in rows]
    cells = []
    for row in rows:
        first, last = table(row["first"]), table(row["last"])
        columns = list(table(row["columns"]).items())[:MOST_COLUMNS]
        data = "; ".join(f"{one_line(name)}: {one_line(_value(value))}" for name, value in columns)
        cells.append([
            element("code", last_turn(row["prompt"])), data or "-",
            element("code", text(first.get("text")) or "(nothing)"), _number(first.get("score")),
            element("code", text(last.get("text")) or "(nothing)"), _number(last.get("score")),
        ])  # fmt: skip
    return [grid(("prompt", "data", "before", "score", f"after step {step:,}", "score"), cells, numbers=(3, 5))]


def _pair(row: Mapping[str, Any], step: int) -> Html:
    cells = []
    for label, answer in (("before", row["first"]), (f"after step {step:,}", row["last"])):
        score = number(table(answer).get("score"))
        facts = f"{label}: " + ("not graded" if score is None else f"score {short(score)}")
        facts += ", truncated" if table(answer).get("truncated") else ""
        known = table(answer)
        shown = completion(text(known.get("text")), known.get("turns") or [], text(known.get("failure")))
        cells.append(element("div", element("div", facts, class_="label"), shown))
    return element("div", _prompt(None, row), *cells, class_="pair")


def _descending(line: Mapping[str, Any]) -> tuple[bool, float]:
    reward = number(line.get("reward"))
    return reward is None, -(reward or 0.0)


def _number(value: Any, missing: str = "-", *, whole: bool = False) -> str:
    known = number(value)
    if known is None:
        return missing
    return f"{known:,.0f}" if whole else short(known)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]} ..."
