"""The page of `covey watch` in a real browser, on runs that were really trained and on one that is in progress."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from covey.watch.index import index_path
from helpers.browser import Browser, Page
from helpers.run_helpers import covey
from helpers.watched import STEPS, serving, steps_of, training

pytestmark = pytest.mark.slow

IDS = "fetch('/api/runs').then((r) => r.json()).then(({runs}) => Object.fromEntries(runs.map((r) => [r.name, r.id])))"
CURVES = "document.querySelector('.chart[data-metric=time] canvas')"  # of the last section that is open
STEP = "Number(document.querySelector('input[aria-label=\"Number of the step\"]').value)"
NEWEST_STEP = "Number(document.querySelector('input[aria-label=Step]').max)"
STATE = "document.querySelector('.run-head .state').dataset.state"
FOUND = "document.querySelector('.search [role=status]').textContent"
ENTROPY = ".chart[data-metric=entropy]"
REWARD = '.chart[data-metric="reward/mean"]'


@pytest.fixture(scope="module")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trained runs, for this file alone."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("watch"), dirs_exist_ok=True)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as url:
        yield url


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    """The page, with its first run. When the test ends, nothing went wrong in it and it asked only the server."""
    made = chromium.open(address)
    made.wait("document.querySelector('.run-head h1')")
    yield made
    assert made.problems == []
    assert [request for request in made.requests if not request.startswith((address, "data:"))] == []
    made.close()


def visit(page: Page, view: str, run: str, query: str = "") -> None:
    """The view of the run with this name."""
    page.evaluate(f"location.hash = '#/{view}/{page.evaluate(IDS)[run]}?{query}'")
    page.wait(f"document.querySelector('.tabs [aria-current]').dataset.view === '{view}'")
    page.wait(f"document.querySelector('h1').textContent === '{run}'")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_overview_shows_result_curves_and_their_definitions(page: Page) -> None:
    visit(page, "overview", "language-a")
    page.wait(CURVES)
    runs = page.evaluate("fetch('/api/runs').then((r) => r.json())")["runs"]
    after = next(run for run in runs if run["name"] == "language-a")["result"]["after"]["score"]
    assert f"{after:.3g}" in page.texts(".results tbody")[0]
    page.click(f"{REWARD} button[aria-expanded]")
    assert "rises, with noise" in page.texts(f"{REWARD} .definition:not([hidden])")[0]
    assert "healthy" in page.texts("[data-section=update] .note")[0]
    assert {"sample", "update", "other"} <= set(page.texts(".chart[data-metric=time] .readout dt"))


def test_results_by_kind_of_problem(chromium: Browser, folder: Path) -> None:
    """With intervals, before and after, beside those of another run; without a place if a task has no kinds."""
    names = ["1 step", "2 steps, <b>carry</b>"]
    for name in ("language-a", "language-b"):
        file = shutil.copytree(folder / "runs" / name, folder / "kinds/runs" / f"{name}-kinds") / "summary.json"
        summary = json.loads(file.read_text())
        for when, score in (("before", 0.25), ("after", 0.75)):
            summary["evaluations"][0][when]["by_kind"] = {
                kind: {"score": score, "low": score - 0.125, "high": score + 0.125, "count": 8} for kind in names
            }
        file.write_text(json.dumps(summary))
    shutil.copytree(folder / "runs" / "cartpole", folder / "kinds/runs/cartpole")
    with serving(folder / "kinds") as address:
        page = chromium.open(address)
        page.wait("document.querySelector('.run-head h1')")
        visit(page, "overview", "language-a-kinds")
        page.wait("!document.querySelector('.by-kind').hidden")
        assert page.texts(".by-kind tbody th") == [f"{name}8 problems" for name in names]
        assert page.texts(".by-kind tbody tr:first-child td:not(.drawn)") == [
            "0.250 0.125\u20130.375", "0.750 0.625\u20130.875", "+0.500"
        ]  # fmt: skip
        assert page.evaluate("document.querySelectorAll('.by-kind .whiskers .interval').length") == 4
        page.evaluate("document.querySelector('.by-kind').focus()")
        assert page.evaluate("document.activeElement.className") == "scroll by-kind"
        for scheme in ("light", "dark"):
            page.emulate(scheme)
            assert page.barriers() == []
        page.resize(360, 800)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        region = "document.querySelector('.by-kind')"
        assert page.evaluate(f"{region}.scrollWidth <= {region}.clientWidth")
        page.resize(1280, 900)
        page.click("input[aria-label^='Lay language-b']")
        page.wait("document.querySelectorAll('.by-kind tbody tr').length === 4")
        visit(page, "overview", "cartpole")
        page.wait("document.querySelector('.results tbody')")
        assert page.evaluate("document.querySelector('.by-kind').hidden")
        assert page.problems == []
        page.close()


def test_the_cursor_is_shared_and_every_number_is_in_a_table(page: Page, folder: Path) -> None:
    visit(page, "overview", "language-a")
    page.wait(CURVES)
    page.evaluate(f"document.querySelector('{ENTROPY} .plot').focus()")
    page.press("ArrowLeft")
    page.wait(f"document.querySelector('{REWARD} .at').textContent === 'step {STEPS - 1}'")
    values = [line["entropy"] for line in lines(folder / "runs/language-a/metrics.jsonl")]
    assert [float(text) for text in page.texts(f"{ENTROPY} dd")] == pytest.approx([values[-2]], rel=5e-3)
    page.click(".segmented button", "Tables")
    page.wait(f"!document.querySelector('{ENTROPY} .numbers').hidden")
    assert [float(text) for text in page.texts(f"{ENTROPY} td")] == pytest.approx(values[::-1], rel=5e-3)
    assert "as=tables" in page.evaluate("location.hash")


def test_a_drag_zooms_every_chart_and_back_undoes_it(page: Page) -> None:
    visit(page, "overview", "language-a")
    page.wait(CURVES)
    x, y, width, height = page.evaluate(
        "((e) => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
        f" return [r.x, r.y, r.width, r.height]; }})(document.querySelector('{REWARD} .u-over'))"
    )
    page.mouse("mouseMoved", x + 0.3 * width, y + height / 2)
    page.mouse("mousePressed", x + 0.3 * width, y + height / 2)
    page.mouse("mouseMoved", x + 0.5 * width, y + height / 2)
    page.mouse("mouseMoved", x + 0.7 * width, y + height / 2)
    page.mouse("mouseReleased", x + 0.7 * width, y + height / 2)
    page.wait("location.hash.includes('zoom=')")
    reset = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Reset zoom')"
    page.wait(f"!{reset}.hidden")
    scale = f"(({{min, max}}) => [min, max])(document.querySelector('{ENTROPY} .plot').chart.u.scales.x)"
    low, high = page.evaluate(scale)
    assert 1 < low < 4 < high < STEPS
    page.evaluate("history.back()")
    page.wait(f"{reset}.hidden")
    assert page.evaluate(scale) == [1, STEPS]


def test_two_runs_are_laid_over_each_other_and_their_settings_compared(page: Page) -> None:
    visit(page, "overview", "language-a")
    page.wait(CURVES)
    page.click("input[aria-label^='Lay language-b']")
    page.wait(f"document.querySelectorAll('{ENTROPY} .readout dt').length === 2")
    assert page.texts(f"{ENTROPY} .readout dt") == ["language-a", "language-b"]
    assert page.texts(".results th[scope=row]:not(.kind)") == ["language-a", "language-b"]
    assert sorted(page.texts(".differences tbody th")) == ["seed", "update.learning_rate"]
    page.evaluate("history.back()")
    page.wait(f"document.querySelectorAll('{ENTROPY} .readout dt').length === 1")


def test_groups_of_a_step_are_browsed(page: Page, folder: Path) -> None:
    visit(page, "rollouts", "language-a", "step=3")
    page.wait("document.querySelectorAll('.rollout').length === 4")
    records = lines(folder / "runs/language-a/rollouts/step_000003.jsonl")
    second = [record for record in records if record["group"] == 1]
    assert len(page.texts(".group-list li")) == 4
    page.press("ArrowRight")
    page.wait("document.querySelector('.group-list [aria-current] .group-number').textContent === '1'")
    page.wait(f"document.querySelector('.prompt .columns dd').textContent === '{second[0]['columns']['answer']}'")
    assert "group=1" in page.evaluate("location.hash")
    shown = [float(text.replace("\u2212", "-")) for text in page.texts(".rollout .reward")]
    assert shown == pytest.approx([record["reward"] for record in second], abs=6e-3)
    assert page.texts(".rollout .output") == [record["text"] for record in second]
    page.press("j")
    page.wait(f"{STEP} === 4")
    page.press("k")
    page.wait(f"{STEP} === 3")


def test_rollouts_of_the_run_are_filtered_and_searched(page: Page, folder: Path) -> None:
    files = sorted((folder / "runs/language-a/rollouts").glob("*.jsonl"))
    records = [record for file in files for record in lines(file)]
    visit(page, "search", "language-a")
    page.wait(f"{FOUND}.includes('of {len(records)}')")
    page.click(".segmented button", "best")
    page.wait("location.hash.includes('filter=best')")
    most = max(record["reward"] for record in records)
    page.wait(f"Math.abs(parseFloat(document.querySelector('.hit-reward').textContent) - {most}) < 0.01")
    page.press("/")
    page.type("7")
    found = [r for r in records if "7" in r["text"] or any("7" in part["content"] for part in r["prompt"])]
    page.wait(f"{FOUND}.includes('of {len(found)}')")
    assert set(page.texts(".hits mark")) == {"7"}
    page.press("Escape")
    page.click(".hits a")
    page.wait("location.hash.startsWith('#/rollouts/') && document.querySelector('.rollout.chosen')")
    assert "7" in page.texts(".group mark")
    page.evaluate("history.back()")
    page.wait(f"{FOUND}.includes('of {len(found)}')")


def test_a_search_shows_what_is_read_later(
    chromium: Browser, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run sends no news, so the view itself looks again while the index is not complete."""
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path))
    run = folder / "runs/language-a"
    records = sum(len(lines(file)) for file in (run / "rollouts").glob("*.jsonl"))
    lock = index_path(run.resolve()).with_suffix(".lock")
    lock.parent.mkdir()
    with serving(folder) as address:
        with open(lock, "ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # as if another process wrote the index
            page = chromium.open(address)
            page.wait("document.querySelector('.run-head h1')")
            visit(page, "search", "language-a")
            page.wait(f"{FOUND}.includes('{STEPS} steps not read yet')")
        page.wait(f"{FOUND}.includes('of {records}') && !{FOUND}.includes('not read')")
        page.close()


def test_held_out_answers_are_compared(page: Page, folder: Path) -> None:
    before, after = (lines(folder / f"runs/language-a/held_out/step_{step:06d}.jsonl") for step in (0, STEPS))
    changes = [b["score"] - a["score"] for a, b in zip(before, after, strict=True)]
    visit(page, "held-out", "language-a", "order=better")
    page.wait(f"document.querySelectorAll('.answers > li').length === {len(changes)}")
    kinds = [len(changes), sum(c > 0 for c in changes), sum(c < 0 for c in changes), changes.count(0)]
    assert page.texts(".kinds b")[:4] == [str(kind) for kind in kinds]
    order = [int(text.removeprefix("Problem ")) for text in page.texts(".answers h2")]
    assert [changes[problem] for problem in order] == sorted(changes, reverse=True)
    page.evaluate(
        "((box) => { box.value = '2'; box.dispatchEvent(new Event('change')); })"
        "(document.querySelectorAll('.held-out select')[1])"
    )
    page.wait("document.querySelectorAll('.side-head')[1].textContent.includes('after step 2')")
    assert "last=2" in page.evaluate("location.hash")


def test_a_control_run_has_returns_episodes_and_pictures(page: Page) -> None:
    visit(page, "overview", "cartpole")
    page.wait(CURVES)
    assert "Return in training" in page.texts(".chart h4")
    page.click(".segmented button", "environment steps")
    text = f"document.querySelector('{ENTROPY} .plot').getAttribute('aria-valuetext')"
    page.wait(f"{text}.startsWith('environment steps')")
    page.click(".tabs a", "Pictures")
    page.wait("document.querySelector('.file img')?.naturalWidth > 100")


def test_the_recording_of_an_agent_is_shown(page: Page, folder: Path) -> None:
    visit(page, "files", "cartpole")
    page.wait("document.querySelectorAll('.file').length === 1")
    code, output = covey("eval", "runs/cartpole", "--render", "--episodes", "3", cwd=folder)
    assert code == 0, output
    image = "document.querySelector('.file img[src$=\"agent.gif\"]')"
    page.wait(f"{image}?.complete && {image}.naturalWidth > 0")  # without a reload
    with Image.open(folder / "runs/cartpole/agent.gif") as recording:
        assert recording.n_frames > 5
        assert page.evaluate(f"[{image}.naturalWidth, {image}.naturalHeight]") == list(recording.size)
    assert "agent.gif" in page.texts(".file figcaption")[0]


def test_a_running_training_updates_the_page_without_losing_the_place(page: Page, folder: Path) -> None:
    with training(folder, "live") as run_dir:
        page.wait("document.querySelector('.run-list').textContent.includes('live')")
        visit(page, "overview", "live")
        page.wait(CURVES)
        page.wait(f"{STATE} === 'running'")
        page.evaluate(
            f"window.kept = document.querySelector('{ENTROPY} .plot');"
            " kept.focus(); kept.scrollIntoView(); window.place = kept.getBoundingClientRect().top"
        )
        seen = int(page.evaluate("kept.getAttribute('aria-valuemax')"))
        page.wait(f"Number(kept.getAttribute('aria-valuemax')) > {seen + 2}")
        assert page.evaluate("document.activeElement === kept && kept.isConnected")
        moved = page.evaluate("kept.getBoundingClientRect().top - place")  # a new finding above it may scroll the page
        assert abs(moved) <= 1
        visit(page, "rollouts", "live", "step=1&group=1")
        page.wait("document.querySelectorAll('.rollout').length === 4")
        page.evaluate(
            "getSelection().selectAllChildren(document.querySelector('.rollout .rollout-facts'));"
            " window.chosen = String(getSelection())"
        )
        seen = page.evaluate(NEWEST_STEP)
        page.wait(f"{NEWEST_STEP} > {seen + 2}")
        assert page.evaluate(f"{STEP} === 1 && chosen !== '' && String(getSelection()) === chosen")
        page.press("f")
        page.wait(f"{STEP} > 2")
        assert "step=latest" in page.evaluate("location.hash")
    page.wait(f"{STATE} !== 'running'")
    assert steps_of(run_dir) > 3


def test_the_page_says_when_the_server_is_gone_and_comes_back(chromium: Browser, folder: Path) -> None:
    with serving(folder) as url:
        page = chromium.open(url)
        page.wait("document.querySelector('#connection').dataset.state === 'connected'")
        visit(page, "rollouts", "language-a", "step=2")
        page.wait("document.querySelectorAll('.rollout').length === 4")
    page.wait("document.querySelector('#connection').textContent.includes('The server is gone')")
    assert len(page.texts(".rollout")) == 4
    with serving(folder, port=int(url.rstrip("/").rpartition(":")[2])):
        page.wait("document.querySelector('#connection').textContent === 'live'")
        page.press("j")
        page.wait(f"{STEP} === 3")
        page.close()
