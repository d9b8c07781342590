"""The report, the page of `covey watch` in one file: what it has, how large it is, and that it is safe."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from covey.cli.report import advice_on
from covey.config import RewardConfig, RunConfig
from covey.config.tasks import ArithmeticConfig
from covey.tracking.run_folder import FolderLock
from covey.watch import report
from covey.watch.files import STATIC
from covey.watch.report import bundle, is_report, render, write_report
from helpers.browser import Browser
from helpers.conversation_records import conversation
from helpers.run_folders import answer, control_run, language_run, rollout

HOSTILE = (
    "</pre></title></style></script><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(2)>\"'>"
    "<svg onload=alert(3)><base href=//x>&lt;b&amp;<!-- --><![CDATA[ ]]> {{7*7}} ${x} \\u003c \x1b[2J\u202e\x00\ud800"
)


class Page(HTMLParser):
    """The elements of a report: its texts by element, and its attributes."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def content(self, tag: str, place: int = 0) -> str:
        return [text for name, text in self.texts if name == tag][place]


def data(*runs: Path, title: str = "") -> dict[str, Any]:
    """What the report of these runs has inlined."""
    page = Page(render(runs, title))
    found: dict[str, Any] = json.loads(page.content("script"))
    return found


def of_run(*runs: Path, part: str = "") -> Any:
    """An answer about the first of these runs."""
    answers = data(*runs)["answers"]
    return answers[f"runs/{answers['runs']['runs'][0]['id']}{part}"]


def with_result(run: Path, score: float, low: float, high: float) -> Path:
    """A run with this result after training, from 50 % (40 to 60) before."""
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    before = {"score": 0.5, "low": 0.4, "high": 0.6, "count": 40}
    after = {"score": score, "low": low, "high": high, "count": 40}
    file.write_text(json.dumps(summary | {"evaluations": [{"max_new_tokens": 8, "before": before, "after": after}]}))
    return run


@pytest.mark.parametrize(
    ("result", "outcome", "sentence"),
    [
        ((0.3, 0.2, 0.39), "worse", "Worse: from 50.0% to 30.0%."),
        ((0.7, 0.59, 0.8), "unclear", "No certain change: from 50.0% to 70.0%; the intervals overlap."),
        ((0.3, 0.2, 0.41), "unclear", "No certain change: from 50.0% to 30.0%; the intervals overlap."),
        ((0.7, 0.61, 0.8), "better", "Better: from 50.0% to 70.0%."),
        ((0.5, 0.5, 0.5), "unclear", "No certain change: from 50.0% to 50.0%."),
    ],
)
def test_the_verdict_follows_the_intervals(
    tmp_path: Path, result: tuple[float, float, float], outcome: str, sentence: str
) -> None:
    run = with_result(language_run(tmp_path / "run"), *result)
    assert of_run(run)["verdict"] == {"outcome": outcome, "text": sentence}


def test_an_agent_reaches_its_expected_return(tmp_path: Path) -> None:
    sentence = "Better: from 9.00 to 500.0. The expected return of 475.0 is reached."
    assert of_run(control_run(tmp_path / "run"))["verdict"]["text"] == sentence


@pytest.mark.parametrize("state", ["stopped", "crashed", "running"])
def test_a_run_without_an_end(state: str, tmp_path: Path) -> None:
    answers = [answer(step, problem, float(step > 0)) for step in (0, 2) for problem in range(6)]
    run = language_run(tmp_path / "run", state="crashed" if state == "running" else state, answers=answers)
    without = language_run(tmp_path / "without", state=state if state != "running" else "crashed")
    if state == "running":
        with FolderLock(run):
            found = of_run(run)
    else:
        found = of_run(run)
    assert found["state"] == state
    if state != "stopped":  # which has a summary, of the evaluation before training
        assert "Better so far: from 0.0% to 100.0%." in found["verdict"]["text"]
    assert found["next"] is None
    other = of_run(without)
    assert (other["verdict"], other["evaluations"][0]["before"]["score"]) == (None, 0.25)


def test_it_has_what_a_reader_asks_for(tmp_path: Path) -> None:
    answers = [answer(step, problem, float(problem < step)) for step in (0, 2, 4) for problem in range(60)]
    run = language_run(tmp_path / "run", steps=12, answers=answers)
    (run / "iterations.jsonl").write_text(json.dumps({"step": 2, "before": {"rank_agreement": 0.5}}) + "\n")
    file = write_report([run], tmp_path / "report.html", advise=advice_on)
    found = json.loads(Page(file.read_text()).content("script"))
    (detail,) = (one for path, one in found["answers"].items() if re.fullmatch("runs/[^/]+", path))
    path = f"runs/{detail['id']}"
    assert (detail["defaults"]["steps"], detail["config"]["steps"]) == (100, 12)
    assert detail["repeat"].startswith("covey train my.toml")
    assert detail["machine"] == {"covey": "0.1.0"}
    assert detail["iterations"] == [{"step": 2, "before": {"rank_agreement": 0.5}}]
    assert detail["steps_with_rollouts"] == [[1, 1], [7, 7], [12, 12]]
    assert found["answers"][f"{path}/metrics"]["series"]["entropy"]["mean"][-1] == 1.0
    assert found["answers"][f"{path}/diagnosis"]["available"] is True
    assert [group["group"] for group in found["answers"][f"{path}/steps/12/groups"]["groups"]] == [0, 1, 2]
    rollouts = found["answers"][f"{path}/steps/12/groups/1"]["rollouts"]
    assert [one["reward"] for one in rollouts] == [0.0, 0.0, 1.0, 1.0]
    held_out = found["answers"][f"{path}/held_out"]
    assert held_out["changes"] == {"better": 4, "worse": 0, "same": 56, "unknown": 0}
    assert [one["change"] for one in held_out["answers"]] == [1.0] * 4 + [0.0] * report.MOST_UNCHANGED
    assert is_report(file)
    assert not is_report(run / "config.toml")


def test_what_to_do_next_is_said_of_a_finished_run(tmp_path: Path) -> None:
    run = language_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text()) | {"findings": []}
    (run / "summary.json").write_text(json.dumps(summary))
    assert "covey" in advice_on(run)["next"]
    summary["findings"] = [{"check": "x", "severity": "problem", "last_step": 4, "remedy": "Lower it."}]
    (run / "summary.json").write_text(json.dumps(summary))
    assert advice_on(run)["next"] == "lower it."


def test_a_run_that_has_just_begun_and_one_that_is_damaged(tmp_path: Path) -> None:
    begun = language_run(tmp_path / "begun", state="crashed", rollouts=())
    (begun / "metrics.jsonl").write_text("")
    damaged = language_run(tmp_path / "damaged")
    for path in damaged.rglob("*.*"):
        if path.is_file():
            path.write_bytes(b'{"step": 1, "x": [\xff\n[]\n{"step": "x"}\n')
    for runs in ([begun], [damaged], [begun, damaged, control_run(tmp_path / "agent")]):
        assert of_run(*runs, part="/diagnosis")["findings"] == []
        assert advice_on(runs[0]).keys() <= {"repeat"}


def test_several_runs_keep_their_order_and_have_names_of_their_own(tmp_path: Path) -> None:
    runs = [language_run(tmp_path / "b"), control_run(tmp_path / "a"), language_run(tmp_path / "other" / "b")]
    found = data(*runs)
    assert found["title"] == f"3 runs: {tmp_path.name}/b, a, other/b"
    assert [run["name"] for run in found["answers"]["runs"]["runs"]] == [f"{tmp_path.name}/b", "a", "other/b"]


def hostile_run(folder: Path) -> Path:
    """A run with hostile texts in completions, prompts, roles, data, rewards, names, settings, versions, its recipe."""
    name = re.sub(r"[/\x00\ud800]", "", HOSTILE)[:120]
    lines = [
        rollout(step, 0, reward, text=HOSTILE, prompt=prompt, columns={HOSTILE: HOSTILE, "a": [HOSTILE]}, end=HOSTILE,
                reward_parts={HOSTILE: reward, "b": 1.0})
        for step in (1, 2) for reward in (0.0, 1.0)
        for prompt in (HOSTILE, [{"role": HOSTILE, "content": HOSTILE}])
    ]  # fmt: skip
    turns = conversation(HOSTILE, HOSTILE, HOSTILE, HOSTILE) | {"failure": HOSTILE, "observation": HOSTILE}
    lines += [rollout(step, 0, 0.5, **turns) for step in (1, 2)]
    answers = [answer(step, 0, step / 2, text=HOSTILE, prompt=HOSTILE, columns={HOSTILE: HOSTILE}) for step in (0, 2)]
    answers += [answer(step, 2, step / 2, **turns) for step in (0, 2)]
    config = RunConfig(model=name, task=ArithmeticConfig(), rewards=(RewardConfig(function=f"x.py:{name}"),))
    run = language_run(folder / name, steps=2, rollouts=lines, answers=answers, config=config, recipe=HOSTILE,
                       metrics={f"reward/{HOSTILE}": 0.5})  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"machine": {HOSTILE: HOSTILE}}))
    return run


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    """The file has exactly the elements of the page, one script and one style sheet, which its policy names by hash."""
    file = write_report([hostile_run(tmp_path)], tmp_path / "r.html", HOSTILE, lambda run: {"repeat": HOSTILE})
    content = file.read_text(encoding="utf-8")
    page = Page(content)
    own = Page((STATIC / "index.html").read_text())
    added = ["meta"] * 3 + ["style", "script"]  # which the two links to style sheets became
    assert sorted([*(tag for tag, _ in page.elements), "link", "link"]) == sorted(
        [tag for tag, _ in own.elements] + added
    )
    assert len(re.findall("<script", content)) == 2
    policy = next(each["content"] for _, each in page.elements if each.get("http-equiv") == "Content-Security-Policy")
    for tag, place in (("script", 1), ("style", 0)):
        text = content.split(f"<{tag}")[1 + place].partition(">")[2].partition(f"</{tag}>")[0]
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "<" not in page.content("script")
    assert not [each for _, each in page.elements if any(name.startswith("on") for name in each)]
    assert json.loads(page.content("script"))["title"] == HOSTILE


def test_the_modules_are_one_script() -> None:
    script = bundle("main.js")
    assert not re.findall(r"^(?:import|export) .*", re.sub(r"/\*.*?\*/", "", script, flags=re.DOTALL), re.MULTILINE)
    assert not re.search("</script|<!--", script, re.IGNORECASE)
    modules = [path.name for path in STATIC.glob("*.js")]
    assert sorted(modules) == sorted(name.replace("_js", ".js") for name in re.findall(r"const module_(\w+) = ", script)
                                     if not name.startswith("vendor"))  # fmt: skip


@pytest.mark.slow
def test_a_large_run_has_a_report_of_bounded_size(tmp_path: Path) -> None:
    """Its records have about 40 MB, and 900 metrics."""
    huge = "word <&> " * 20_000
    lines = [rollout(step, 0, float(place), text=huge, prompt=huge, columns={f"c{i}": huge for i in range(3)})
             for step in (1, 3) for place in range(12)]  # fmt: skip
    call = {"function": {"name": huge, "arguments": {str(i): huge[:9000] for i in range(9)}}}
    turns = {"messages": [{"role": huge, "content": huge, "tool_calls": [call] * 9}] * 9, "failure": huge}
    lines += [rollout(2, 0, float(place), text=huge, **turns) for place in range(2)]
    answers = [answer(step, problem, float(step), text=huge, prompt=huge) for step in (0, 3) for problem in range(50)]
    run = language_run(tmp_path / "run", steps=3, rollouts=lines, answers=answers)
    records = [{"step": step} | {f"reward/{i}": float(i * step) for i in range(900)} for step in range(1, 3001, 40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = render([run])
    assert len(page) - len(render([language_run(tmp_path / "small")])) < 2_500_000
    assert "more characters left out of the report" in page
    assert "more turns left out of the report" in page
    answers_of = json.loads(Page(page).content("script"))["answers"]
    assert [one["left_out"] for path, one in answers_of.items() if path.endswith("/steps/3/groups/0")] == [4]
    assert [one["metrics_left_out"] for path, one in answers_of.items() if re.fullmatch("runs/[^/]+", path)] == [750]


@pytest.mark.slow
def test_a_report_of_hostile_runs_in_a_browser(chromium: Browser, tmp_path: Path) -> None:
    """From a file, without a request: nothing of a run is run or loaded, and every view can be read."""
    runs = [hostile_run(tmp_path), control_run(tmp_path / "agent"), language_run(tmp_path / "other", steps=6)]
    for number, chosen in enumerate((runs[:1], runs)):
        file = write_report(chosen, tmp_path / f"{number}.html", HOSTILE)
        for scheme in ("light", "dark"):
            page = chromium.open(file.as_uri(), scheme=scheme)
            page.wait("document.querySelector('.verdict').textContent && document.querySelector('.chart canvas')")
            for view, shown in (("rollouts", ".rollout .output"), ("held-out", ".answers .output"), ("config", "td")):
                page.evaluate(f"document.querySelector('[data-view={view}]').click()")
                page.wait(f"document.querySelector('{shown}')")
                assert page.barriers() == []
            page.resize(360, 800)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            assert page.evaluate("document.querySelectorAll('img, base, iframe').length") == 0
            assert (page.dialogs, page.problems) == ([], [])
            assert [each for each in page.requests if not each.startswith("data:image/svg")] == [file.as_uri()]
            page.close()


@pytest.mark.slow
def test_the_views_of_a_report(chromium: Browser, tmp_path: Path) -> None:
    answers = [answer(step, problem, float(problem < step)) for step in (0, 4) for problem in range(6)]
    answers += [answer(4, 6, 0.0, text="forgotten"), answer(0, 6, 1.0, text="was right")]
    turns = conversation() | {"failure": "its environment failed: x"}
    lines = [rollout(4, 0, float(place), **turns) for place in range(12)]
    run = language_run(tmp_path / "run", rollouts=lines, answers=answers)
    file = write_report([run, control_run(tmp_path / "agent")], tmp_path / "r.html", "Two runs", advice_on)
    page = chromium.open(file.as_uri())
    page.wait("document.querySelectorAll('.results tbody tr').length === 2")
    assert page.texts("footer")[0].startswith("Written by covey")
    # Returns and accuracies share no axis, rewards of either kind neither.
    page.wait("document.querySelectorAll('.chart').length > 7")
    drawn = dict(zip(page.texts(".chart h4"), page.texts(".chart .readout"), strict=True))
    expected = {
        "Accuracy in training": "run100.0\u202f%",
        "Return in training (CartPole-v1)": "agent80",
        "Reward, mean (accuracy)": "run1",
        "Reward, mean (CartPole-v1)": "agent80",
    }
    assert expected.items() <= drawn.items()
    assert page.texts(".scale") == ["0\u202f%100\u202f%", "0500"]
    page.click(".segmented button", "time of training")
    page.wait("document.querySelector('.chart .plot').getAttribute('aria-valuemax') === '8'")  # 4 steps of 2 s
    page.click(".runs-head a")
    page.wait("document.querySelectorAll('.runs-table tbody tr').length === 2")
    heads = ".runs-table thead button"
    for head, names in (("seed", ["agent", "run"]), ("seed", ["run", "agent"]), ("run", ["agent", "run"])):
        page.click(heads, head)
        assert page.texts(".runs-table tbody th") == names
    assert page.texts(".runs-table .change") == ["+491", "+50\u202fpoints".replace("\u202f", " ")]
    assert page.barriers() == []
    page.click(".run-list a", "run")
    page.wait("document.querySelector('.verdict').textContent === 'Better: from 25.0% to 75.0%.'")
    page.click(".tabs a", "Held-out")
    page.wait("document.querySelectorAll('.answers > li').length === 7")
    assert "was right" in page.texts(".answers > li")[0]
    page.click(".kinds button", "right \u2192 wrong")
    page.wait("document.querySelectorAll('.answers > li').length === 1")
    page.press("/")
    page.type("nowhere")
    page.wait("document.querySelector('.held-out [role=status]').textContent === 'No answer matches.'")
    page.click(".tabs a", "Rollouts")
    page.wait("document.querySelectorAll('.rollout').length === 8")
    assert "4 rollouts between the best and the worst left out" in page.texts(".group-facts")[0]
    assert len(page.texts(".rollout:first-child .turn")) == 4
    page.click(".tabs a", "Settings")
    page.wait("document.querySelector('.config pre').textContent.startsWith('covey train my.toml')")
    page.close()
