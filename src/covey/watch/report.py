"""The report of runs: the page of `covey watch` in one HTML file, with the answers that it would ask the server for.

The file loads nothing and asks nobody: its policy allows the one script and the one style sheet that it has, by their
hashes. The texts of a run are JSON in which no `<` occurs, so that they end no element.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from covey.config.fields import plural, printable
from covey.config.files import open_below
from covey.tracking.evaluations import information
from covey.tracking.run_folder import write_atomically
from covey.tracking.run_reader import Group, ranges
from covey.tracking.run_store import encode
from covey.watch.answers import Advise, Answers, no_advice
from covey.watch.files import STATIC
from covey.watch.library import Library, Run
from covey.watch.rollouts import group_page, group_row

MOST_RUNS = 24  # of a report
GENERATOR = "covey report"
POINTS, FEW_POINTS, MANY_RUNS = 300, 100, 6  # of a curve; in a report of more than so many runs
MOST_METRICS = 150
MOST_STEPS = 3  # with rollouts: the first, one in the middle, the last
MOST_GROUPS, MOST_SIBLINGS = 3, 8  # of a step; of a group, the best and the worst
MOST_CHANGES = 20  # held-out answers that got better, and that got worse
MOST_UNCHANGED = 5
MOST_TOKENS = 300  # of a rollout with its tokens
MOST_CHARACTERS, LONGEST_TEXT = 20_000, 4_000  # of a rollout, an answer or a setting; of one of its texts
MOST_ENTRIES = 100  # of a table in a record
SETTINGS_CHARACTERS = 200_000  # of what is known of a run

_IMPORT = re.compile(r'^import (?:(\w+)|\{ ([^}]*) \}) from "\./([\w./]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
_DEFAULT = re.compile(r"^export \{ (\w+) as default \};$", re.MULTILINE)


def write_report(runs: Sequence[Path], file: Path, title: str = "", advise: Advise = no_advice) -> Path:
    """Write the report of some runs; returns the file's path.

    Args:
        runs: their folders.
        file: the HTML file; an existing one is replaced.
        title: the title; by default the names of the runs.
        advise: see `Answers`.

    Raises:
        MachineError: if the file cannot be written.
    """
    write_atomically(file, render(runs, title, advise).encode())
    return file


def is_report(file: Path) -> bool:
    """True if the file is a report, which a newer one may replace.

    Raises:
        OSError: if it cannot be read.
    """
    with open_below(file.parent, file.name) as opened:
        return f'name="generator" content="{GENERATOR}"'.encode() in opened.read(2000)


def render(folders: Sequence[Path], title: str = "", advise: Advise = no_advice) -> str:
    """The file."""
    library = Library([], folders)
    answers = Answers(library, None, advise)
    known = {run.folder: run for run in library.runs()}
    runs = [known[folder.resolve()] for folder in folders]
    names = ", ".join(run.name for run in runs)
    title = title or (names if len(runs) == 1 else f"{plural(len(runs), 'run')}: {names}")
    data = {
        "title": title,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": version("covey"),
        "answers": _answers(answers, runs),
    }
    inlined = encode(data).decode().replace("<", "\\u003c")  # else a text could end the element
    icon = f"data:image/svg+xml;base64,{base64.b64encode((STATIC / 'icon.svg').read_bytes()).decode()}"
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("vendor/uPlot.min.css", "watch.css"))
    style = style.replace("/static/icon.svg", icon)
    script = bundle("main.js")
    policy = "; ".join([
        "default-src 'none'", f"script-src {_hash(script)}", f"style-src {_hash(style)}", "img-src data: blob:",
        "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
    ])  # fmt: skip
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    head = [line for line in page.partition("<head>")[2].partition("</head>")[0].splitlines() if "<meta" in line]
    head[1:1] = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<meta name="generator" content="{GENERATOR}">',
        '<meta name="referrer" content="no-referrer">',
    ]
    head += [f"<title>{escape(printable(title[:200]))}</title>",
             f'<link rel="icon" href="{icon}">', f"<style>{style}</style>"]  # fmt: skip
    body = page.partition("<body>")[2].partition("</body>")[0]
    scripts = (
        f'<script type="application/json" id="answers">{inlined}</script>\n<script type="module">{script}</script>'
    )
    lines = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", f"<body>{body}{scripts}", "</body>"]
    return "\n".join([*lines, "</html>", ""])


def bundle(entry: str) -> str:
    """The modules of the page as one script: each is a function that returns what it exports."""
    ordered: dict[str, str] = {}

    def add(name: str) -> None:
        if name in ordered:
            return
        source = (STATIC / name).read_text(encoding="utf-8")
        for _, _, other in _IMPORT.findall(source):
            add(other)
        exported = [f"default: {own}" for own in _DEFAULT.findall(source)] or _EXPORT.findall(source)
        source = _DEFAULT.sub("", _IMPORT.sub(_as_constant, source))
        source = re.sub(r"^export ", "", source, flags=re.MULTILINE)
        ordered[name] = f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    add(entry)
    return "".join(ordered.values())


def _as_constant(found: re.Match[str]) -> str:
    names = f"{{ default: {found[1]} }}" if found[1] else f"{{ {found[2].replace(' as ', ': ')} }}"
    return f"const {names} = {_variable(found[3])};"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _answers(answers: Answers, runs: Sequence[Run]) -> dict[str, Any]:
    """The answers of the API by their paths, without parameters."""
    few = len(runs) > MANY_RUNS
    found: dict[str, Any] = {"runs": {"runs": [run.describe() for run in runs], "root": None, "version": ""}}
    for run in runs:
        path = f"runs/{run.id}"
        detail = answers.run(run.id)
        names = [metric["name"] for metric in detail["metrics"][:MOST_METRICS]]
        steps = run.reader.rollout_steps()
        shown = sorted({steps[-1]} if few and steps else {steps[at] for at in (0, len(steps) // 2, -1) if steps})
        detail |= {
            "metrics": detail["metrics"][:MOST_METRICS],
            "metrics_left_out": max(0, len(detail["metrics"]) - MOST_METRICS),
            "steps_with_rollouts": ranges(shown[-MOST_STEPS:]),
            "held_out_steps": list(dict.fromkeys(detail["held_out_steps"][:1] + detail["held_out_steps"][-1:])),
            "files": [],
        }
        found[path] = _bounded(detail, [SETTINGS_CHARACTERS])
        curves = answers.metrics(run.id, names, FEW_POINTS if few else POINTS, 0, None)
        found[f"{path}/metrics"] = curves | {"series": {
            name: {key: _rounded(values) for key, values in columns.items()}
            for name, columns in curves["series"].items()
        }}  # fmt: skip
        found[f"{path}/diagnosis"] = _bounded(answers.diagnosis(run.id), [SETTINGS_CHARACTERS])
        for step in shown[-MOST_STEPS:]:
            with suppress(OSError):
                found |= _groups(path, step, run.reader.groups(step)[0])
        if detail["held_out_steps"]:
            found[f"{path}/held_out"] = _held_out(answers, run.id)
    return found


def _groups(path: str, step: int, groups: Sequence[Group]) -> dict[str, Any]:
    """The answers about the groups of a step that have the largest spread of rewards."""
    chosen = sorted(sorted(groups, key=information, reverse=True)[:MOST_GROUPS], key=lambda group: group.number)
    left_out = len(groups) - len(chosen)
    rows = [group_row(group) for group in chosen]
    found: dict[str, Any] = {f"{path}/steps/{step}/groups": {
        "step": step, "groups": rows, "damaged": 0, "left_out": left_out}}  # fmt: skip
    for group in chosen:
        page = group_page(step, group)
        order = sorted(page["rollouts"], key=lambda one: (one["reward"] is None, -(one["reward"] or 0.0)))
        if len(order) > MOST_SIBLINGS:
            order = order[: MOST_SIBLINGS // 2] + order[-MOST_SIBLINGS // 2 :]
        kept = [_bounded_record(one) for one in sorted(order, key=lambda one: one["index"])]
        page |= {"rollouts": kept, "left_out": len(group.rollouts) - len(kept)}
        for key in ("prompt", "model_prompt", "columns"):
            page[key] = _bounded(page[key], [MOST_CHARACTERS])
        found[f"{path}/steps/{step}/groups/{group.number}"] = page
    return found


def _held_out(answers: Answers, id: str) -> dict[str, Any]:
    """The answers of the first and the last evaluation that changed most."""
    rows: dict[int, Any] = {}
    for kind, limit in (("worse", MOST_CHANGES), ("better", MOST_CHANGES), ("same", MOST_UNCHANGED)):
        order = "problem" if kind == "same" else kind
        found = answers.held_out(id, None, None, None, order=order, kind=kind, wanted="", offset=0, limit=limit)
        rows |= {row["problem"]: row for row in found["answers"]}
    for row in rows.values():
        for when in ("first", "last"):
            row[when] = row[when] and _bounded_record(row[when])
        row["prompt"], row["columns"] = (_bounded(row[key], [MOST_CHARACTERS]) for key in ("prompt", "columns"))
    return found | {"answers": [rows[problem] for problem in sorted(rows)]}


def _bounded_record(record: dict[str, Any]) -> dict[str, Any]:
    """A rollout or an answer of bounded size."""
    if record.get("tokens") and isinstance(record["tokens"], dict):
        tokens = record["tokens"]
        record = record | {"tokens": tokens if len(tokens.get("texts", ())) <= MOST_TOKENS else None}
    bounded: dict[str, Any] = _bounded(record, [MOST_CHARACTERS])
    if missing := len(record.get("turns") or ()) - len(bounded.get("turns") or ()):
        text = f"{plural(missing, 'more turn')} left out of the report"
        note: dict[str, Any] = {"role": "covey", "name": "", "text": text, "calls": [], "unread": [], "reward": None}
        bounded["turns"] = [*(bounded["turns"] or ()), note]
    return bounded


def _bounded(value: Any, left: list[int]) -> Any:
    """A value of JSON with at most about `left[0]` characters: texts are cut, and lists end earlier."""
    if isinstance(value, str):
        most = max(0, min(LONGEST_TEXT, left[0]))
        left[0] -= min(len(value), most) + 8
        rest = len(value) - most
        return value if rest <= 0 else f"{value[:most]} ... {rest:,} more characters left out of the report"
    if isinstance(value, dict):
        return {_bounded(name, left): _bounded(one, left) for name, one in list(value.items())[:MOST_ENTRIES]}
    if isinstance(value, (list, tuple)):
        kept = []
        for one in value:
            if left[0] <= 0:
                break
            kept.append(_bounded(one, left))
        return kept
    left[0] -= 8
    return value


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Numbers as a curve needs them."""
    return [value if value is None or value == int(value) else float(f"{value:.6g}") for value in values]
