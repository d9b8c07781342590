"""The report: complete for runs of every kind and state, escaped, without scripts, bounded in size."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from covey.config import RewardConfig, RunConfig
from covey.config.tasks import ArithmeticConfig
from covey.tracking.report import charts, write_report
from covey.tracking.report.charts import MOST_POINTS, Axes, Interval, Line, chart, thinned
from covey.tracking.report.html import Html, element, pre, text_of
from covey.tracking.report.result import MOST_KINDS, verdict_text
from covey.tracking.report.run_data import RunData, flat, unique_names
from covey.tracking.run_folder import FolderLock
from helpers.conversation_records import conversation
from helpers.run_folders import answer, control_run, language_run, rollout

HOSTILE = (
    "</pre></title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>"
    "&lt;b&amp;<!-- --><![CDATA[ ]]> {{7*7}} ${x} javascript:alert(4) \x1b[2J\u202e\x00\ud800 $\\frac{a}{b}$ #010101"
)
ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "section", "footer", "h1", "h2", "h3", "h4",
    "p",
    "span", "b", "i", "ul", "li", "a", "div", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "details",
    "summary", "figure", "figcaption", "svg", "g", "defs", "path", "use", "text", "clippath", "rect",
}  # fmt: skip
VOID = {"meta"}


class Reader(HTMLParser):
    """Reads a page strictly: every element is known, closed in order, and has no attribute that could run or load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.text: list[str] = []
        self.headings: list[int] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, tag
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names))
        for name, value in attributes:
            assert not name.startswith("on"), name
            assert name not in ("src", "srcset", "srcdoc", "action", "formaction", "background", "ping", "data"), name
            if name in ("href", "xlink:href"):
                assert value is not None
                assert value.startswith("#"), value
                self.links.append(value[1:])
            if name == "id":
                self.ids[value or ""] += 1
            if name == "style":
                self.links += re.findall(r"url\(#([^)]*)\)", value or "")
                assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", value or "")
            if name == "clip-path":
                self.links += re.findall(r"url\(#([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError("a comment")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError("a declaration")


def report(folder: Path, *runs: Path, title: str = "") -> tuple[str, Reader]:
    """The page of a report of these runs, which has been read strictly."""
    file = write_report([(run, f"covey train {run.name}") for run in runs], folder / "report.html", title)
    page = file.read_text(encoding="utf-8")
    reader = Reader(page)
    assert max(reader.ids.values(), default=1) == 1
    assert set(reader.links) <= set(reader.ids), set(reader.links) - set(reader.ids)
    assert reader.headings[0] == 1
    assert all(b <= a + 1 for a, b in zip(reader.headings, reader.headings[1:], strict=False)), reader.headings
    return page, reader


def words(reader: Reader) -> str:
    return " ".join(" ".join(reader.text).split())


def test_a_finished_run_of_a_language_model(tmp_path: Path) -> None:
    answers = [answer(step, problem, float(problem < step)) for step in (0, 2, 4) for problem in range(6)]
    answers += [answer(4, 6, 0.0, text="forgotten"), answer(0, 6, 1.0, text="was right")]
    page, reader = report(tmp_path, language_run(tmp_path / "run", steps=12, answers=answers))
    shown = words(reader)
    assert "Better: from 25.0% to 75.0%." in shown
    assert "25.0% (10.0 to 40.0)" in shown
    assert "+50.0 points" in shown
    assert "4 got better, 1 worse and 2 kept their score between steps 0 and 4. Token limit: 8." in shown
    assert shown.index("Worse after training") < shown.index("was right") < shown.index("Better after training")
    assert "Step 12, group 1 of 3" in shown
    assert "It is 1.0. 1.00 1.00 0.00 +0.50 5 stop" in shown
    assert "Baseline of the group: 0.50" in shown
    assert "covey train run" in shown
    assert re.search(r"steps 12 100 ", shown)  # field, value, default
    assert re.search("checks over 12 steps found nothing|Warning|Problem", shown)
    assert 'content="default-src &#x27;none&#x27;; style-src &#x27;unsafe-inline&#x27;; base-uri' in page
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page


KINDS = {"2 + 1 digits": (0.25, 0.75), "borrow <b>": (0.5, 0.25)}


def with_kinds(run: Path, kinds: dict[str, tuple[float, float]]) -> Path:
    """A run whose summary has the scores before and after of these kinds of problems, ten of each."""
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    for place, when in enumerate(("before", "after")):
        summary["evaluations"][0][when]["by_kind"] = {
            name: {"score": scores[place], "low": scores[place] - 0.1, "high": scores[place] + 0.1, "count": 10}
            for name, scores in kinds.items()
        }
    file.write_text(json.dumps(summary))
    return run


def test_results_by_kind_of_problem(tmp_path: Path) -> None:
    _, reader = report(tmp_path, with_kinds(language_run(tmp_path / "run"), KINDS))
    shown = words(reader)
    assert (
        "kind of problem problems before after change 2 + 1 digits 10 25.0% (15.0 to 35.0) 75.0% (65.0 to 85.0)"
        in shown
    )
    assert "borrow <b> 10 50.0% (40.0 to 60.0) 25.0% (15.0 to 35.0) -25.0 points" in shown
    many = {f"kind {place:03d}": (0.0, 1.0) for place in range(MOST_KINDS + 2)}
    _, reader = report(tmp_path, with_kinds(language_run(tmp_path / "many"), many))
    assert f"kind {MOST_KINDS - 1:03d}" in words(reader)
    assert f"kind {MOST_KINDS:03d}" not in words(reader)
    assert "... 2 more kinds" in words(reader)


@pytest.mark.slow
def test_a_run_without_kinds_has_no_results_by_kind(tmp_path: Path) -> None:
    one = with_kinds(language_run(tmp_path / "one"), {"borrow": (0.0, 1.0)})
    for run in (language_run(tmp_path / "run"), one, control_run(tmp_path / "agent")):
        assert "kind of problem" not in words(report(tmp_path, run)[1])


def test_results_by_kind_of_a_run_that_trains_are_those_of_its_answers(tmp_path: Path) -> None:
    answers = [answer(step, problem, float(problem < step), kind=f"{problem % 2 + 1} steps")
               for step in (0, 2, 4) for problem in range(6)]  # fmt: skip
    data = RunData(language_run(tmp_path / "run", state="crashed", answers=answers), "run", "", 0)
    first, second = data.evaluations[0]["kinds"]
    assert [each["kind"] for each in (first, second)] == ["1 steps", "2 steps"]
    assert [(each["before"]["score"], each["after"]["score"]) for each in (first, second)] == [
        (0.0, pytest.approx(2 / 3)), (0.0, pytest.approx(2 / 3))
    ]  # fmt: skip
    assert first["after"]["count"] == 3


def test_the_outcome_follows_the_intervals(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    before = {"score": 0.5, "low": 0.4, "high": 0.6, "count": 40}
    for score, low, high, sentence in (
        (0.3, 0.2, 0.39, "Worse: from 50.0% to 30.0%."),
        (0.7, 0.59, 0.8, "No certain change: from 50.0% to 70.0%; the intervals overlap."),
        (0.3, 0.2, 0.41, "No certain change: from 50.0% to 30.0%; the intervals overlap."),
        (0.7, 0.61, 0.8, "Better: from 50.0% to 70.0%."),
    ):
        after = {"score": score, "low": low, "high": high, "count": 40}
        summary["evaluations"] = [{"max_new_tokens": 8, "before": before, "after": after}]
        (run / "summary.json").write_text(json.dumps(summary))
        made = verdict_text(RunData(run, "run", "", 0))
        assert re.sub("<[^>]*>", "", made) == sentence


def test_a_run_of_an_agent(tmp_path: Path) -> None:
    page, reader = report(tmp_path, control_run(tmp_path / "run"))
    shown = words(reader)
    assert "Better: from 9.00 to 500.0. The expected return of 475.0 is reached." in shown
    assert "CartPole-v1 9.00 (8.00 to 10.0) 500.0 (490.0 to 500.0) +491.0" in shown
    assert "Held-out answers" not in shown
    assert "seed: 12345" in shown
    assert "40 steps, terminated" in shown
    assert page.count("<svg") >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("state", ["stopped", "crashed", "running"])
def test_a_run_without_an_end(state: str, tmp_path: Path) -> None:
    answers = [answer(step, problem, float(step > 0)) for step in (0, 2) for problem in range(6)]
    run = language_run(tmp_path / "run", state="crashed" if state == "running" else state, answers=answers)
    if state == "running":
        with FolderLock(run):
            _, reader = report(tmp_path, run)
    else:
        _, reader = report(tmp_path, run)
    shown = words(reader)
    assert f"run {state} recipe my" in shown
    assert "so far" in shown
    assert "after training" not in shown.replace("Better after training", "").replace("Worse after training", "") or (
        "There is no evaluation after training yet." in shown
    )


def test_a_run_that_has_just_begun_and_one_that_is_damaged(tmp_path: Path) -> None:
    begun = language_run(tmp_path / "begun", state="crashed", rollouts=())
    (begun / "metrics.jsonl").write_text("")
    damaged = language_run(tmp_path / "damaged")
    for path in damaged.rglob("*.*"):
        if path.is_file():
            path.write_bytes(b'{"step": 1, "x": [\xff\n[]\n{"step": "x"}\n')
    for runs in ([begun], [damaged], [begun, damaged, control_run(tmp_path / "agent")]):
        shown = words(report(tmp_path, *runs)[1])
        assert "No step is recorded yet." in shown
        assert "No rollouts are recorded." in shown or "cannot be read" in shown


@pytest.mark.slow
def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [language_run(tmp_path / "first"), language_run(tmp_path / "second", steps=9)]
    runs.append(language_run(tmp_path / "other" / "first", state="stopped"))
    page, reader = report(tmp_path, *runs)
    shown = words(reader)
    assert shown.count(str(runs[2])) > 1  # two runs have the same name, so their paths are shown
    assert (
        "second finished grpo 7 9 25.0% (10.0 to 40.0) 75.0% (60.0 to 90.0) +50.0 points 0:01:05".replace(
            "0:01:05", "1:05"
        )
        in shown
    )
    differing = shown[shown.index("Settings that differ") :]
    assert "steps 4 9 4" in differing[:300]
    assert {f"run-{place}" for place in (1, 2, 3)} <= set(reader.ids)
    assert all(f"var(--s{place})" in page for place in (1, 2, 3))


def test_the_trainings_of_a_reward_model(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    lines = [
        {"step": 2, "before": {"rank_agreement": 0.5}, "after": {"rank_agreement": 0.75}},
        {"step": "x", "after": 3},
    ]
    (run / "iterations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "1 2 0.500 0.750 2 x - -" in words(report(tmp_path, run)[1])


@pytest.mark.slow
def test_hostile_content_is_text(tmp_path: Path) -> None:
    """In completions, prompts, roles, data, rewards, names of runs, config, versions, the recipe and the title."""
    name = re.sub(r"[/\x00\ud800]", "", HOSTILE)[:120]
    lines = [
        rollout(step, 0, reward, text=text, prompt=prompt, columns={HOSTILE: HOSTILE, "a": [HOSTILE]}, end=HOSTILE,
                reward_parts={HOSTILE: reward, "b": 1.0})
        for step in (1, 2) for reward, text in ((0.0, HOSTILE), (1.0, HOSTILE * 20))
        for prompt in (HOSTILE, [{"role": HOSTILE, "content": HOSTILE}])
    ]  # fmt: skip
    turns = conversation(HOSTILE, HOSTILE, HOSTILE, HOSTILE) | {"failure": HOSTILE, "observation": HOSTILE}
    lines += [rollout(step, 0, 0.5, **turns) for step in (1, 2)]
    answers = [answer(step, problem, step / 2, text=HOSTILE * length, prompt=HOSTILE, columns={HOSTILE: HOSTILE})
               for step in (0, 2) for problem, length in ((0, 1), (1, 9))]  # fmt: skip
    answers += [answer(step, 2, step / 2, **turns) for step in (0, 2)]
    config = RunConfig(model=name, task=ArithmeticConfig(), rewards=(RewardConfig(function=f"x.py:{name}"),))
    metrics = {f"reward/{HOSTILE.replace('/', '')}": 0.5}
    run = language_run(tmp_path / name, steps=2, rollouts=lines, answers=answers, config=config, recipe=HOSTILE)
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines(), start=1):
        with open(run / "metrics.jsonl", "a" if number > 1 else "w") as file:
            file.write(json.dumps(json.loads(line) | {key: value * number for key, value in metrics.items()}) + "\n")
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"machine": {HOSTILE: HOSTILE}, "domain": "language"}
    (run / "summary.json").write_text(json.dumps(summary))
    for runs in ([run], [run, control_run(tmp_path / "agent")]):
        page, reader = report(tmp_path, *runs, title=HOSTILE)
        shown = "".join(reader.text)
        assert shown.count("<script>alert(1)</script>") > 10
        assert "<script" not in page
        assert "$\\frac{a}{b}$" in shown  # no formula was made of it
        assert not [c for c in page if not c.isprintable() and c not in "\n\t"]


def test_conversations_have_their_turns(tmp_path: Path) -> None:
    turns = conversation() | {"failure": "its environment failed: x"}
    answers = [answer(step, 0, step / 2, **turns) for step in (0, 2)]
    run = language_run(tmp_path / "run", steps=2, rollouts=[rollout(2, 0, 0.5, **turns)], answers=answers)
    shown = words(report(tmp_path, run)[1])
    expected = (
        "Failed: its environment failed: x environment Begin. assistant, reward 0.25 I compute. calls calculate "
        "expression: 12 + 3 call that could not be read: 12 + 3} tool calculate 15 assistant, reward 0.50 "
        "I compute. again"
    )
    assert shown.count(expected) == 3


@pytest.mark.slow
def test_a_large_run_has_a_report_of_bounded_size(tmp_path: Path) -> None:
    """Its records have about 40 MB, and 3,000 metrics."""
    huge = "word <&> " * 20_000
    lines = [rollout(step, 0, float(place), text=huge, prompt=huge, columns={f"c{i}": huge for i in range(3)})
             for step in (1, 3) for place in range(12)]  # fmt: skip
    call = {"function": {"name": huge, "arguments": {str(i): huge for i in range(9)}}}
    turns = {"messages": [{"role": huge, "content": huge, "tool_calls": [call] * 9}] * 9, "failure": huge}
    lines += [rollout(2, 0, float(place), text=huge, **turns) for place in range(2)]
    answers = [answer(step, problem, float(step), text=huge, prompt=huge) for step in (0, 3) for problem in range(8)]
    run = language_run(tmp_path / "run", steps=3, rollouts=lines, answers=answers)
    records = [{"step": step} | {f"reward/{i}": float(i * step) for i in range(900)} for step in range(1, 3001, 40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page, reader = report(tmp_path, run)
    assert len(page) < 1_500_000
    assert "more characters" in words(reader)
    assert "4 rollouts between the best and the worst 4 left out." in words(reader)


def test_the_same_runs_give_the_same_report_but_for_its_date(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    first, second = (report(tmp_path, run)[0] for _ in range(2))
    assert re.sub("on 20[0-9: UTC-]+", "", first) == re.sub("on 20[0-9: UTC-]+", "", second)


# ---- parts ----


def test_elements_escape_texts_and_values() -> None:
    made = element("a", "<b>", [Html("<i></i>"), None, "&"], href="#\"'<", class_=None, aria_label="x")
    assert made == '<a href="#&quot;&#x27;&lt;" aria-label="x">&lt;b&gt;<i></i>&amp;</a>'
    assert text_of("a\x1b\u202e\n") == "a\ufffd\ufffd\n"
    assert pre("abcdef", 2) == '<pre class="text">ab<span class="muted"> ... 4 more characters</span></pre>'
    assert "(nothing)" in pre(" \n")


def test_long_lines_are_means_of_equal_parts() -> None:
    x, y = thinned([0.0, 1.0, 2.0], [5.0, 7.0, 9.0])
    assert (x, y) == ([0.0, 1.0, 2.0], [5.0, 7.0, 9.0])
    count = 2 * MOST_POINTS
    x, y = thinned([float(i) for i in range(count)], [float(i % 2) for i in range(count)])
    assert (len(x), x[0], x[-1]) == (MOST_POINTS, 0.5, count - 1.5)
    assert set(y) == {0.5}
    assert thinned([], []) == ([], [])


def test_a_chart_is_text_in_colours_of_the_style_sheet() -> None:
    drawn = chart([Line([1, 2, 3], [1.0, 3.0, 2.0], color=2), Line([1], [1.0], points=True)], Axes("steps"), (300, 200),
                  "a <chart>", [Interval(3, 2.0, 1.0, 3.0), Interval(1, 1.0, None, None)])  # fmt: skip
    root = ElementTree.fromstring(drawn.replace("xlink:", ""))
    assert root.get("viewBox") == "0 0 300 200"
    assert root.get("aria-label") == "a <chart>"
    assert "steps" in ["".join(node.itertext()).strip() for node in root.iter("text")]
    assert not re.search(r"#01[0-9a-f]{4}", drawn)  # placeholders
    assert {"var(--s1)", "var(--s3)", "var(--s2)", "var(--grid)", "var(--muted)"} <= set(
        re.findall(r"var\(--\w+\)", drawn)
    )
    assert "<style" not in drawn
    other = chart([Line([1, 2], [1.0, 2.0])], Axes(), (300, 200), "another")
    ids = [re.findall(r' id="([^"]*)"', one) for one in (drawn, other)]
    assert not set(ids[0]) & set(ids[1])
    assert len(charts._SERIES) == charts.COLORS


def test_settings_are_flat_and_names_unique(tmp_path: Path) -> None:
    tables = {"a": 1, "b": {"c": [1, 2], "d": {}}, "rewards": [{"name": "x"}, {"name": "y"}]}
    assert flat(tables) == {"a": 1, "b.c": [1, 2], "rewards[1].name": "x", "rewards[2].name": "y"}
    assert unique_names([Path("a/x"), Path("b/x"), Path("y")]) == ["a/x", "b/x", "y"]


def test_curves_are_drawn_over_the_axis_of_the_kind_of_run(tmp_path: Path) -> None:
    agent = RunData(control_run(tmp_path / "agent"), "agent", "", 0)
    assert agent.points("score/mean") == ([100.0, 200.0, 300.0, 400.0], [20.0, 40.0, 60.0, 80.0])
    assert agent.points("score/mean", "step")[0] == [1.0, 2.0, 3.0, 4.0]
    model = RunData(language_run(tmp_path / "model"), "model", "", 0)
    assert model.points("eval/score") == ([2.0], [0.5])
    assert model.points("missing") == ([], [])
