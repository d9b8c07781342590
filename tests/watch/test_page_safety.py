"""Model output is text on the page and nothing else. The page can be used by keyboard, on a phone, with a reader."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import Browser, Page
from helpers.conversation_records import conversation
from helpers.watched import serving, tampered

pytestmark = pytest.mark.slow

IDS = "fetch('/api/runs').then((r) => r.json()).then(({runs}) => Object.fromEntries(runs.map((r) => [r.name, r.id])))"
HOSTILE_NAME = "<img src=x onerror=alert(8)>"
HOSTILE = [
    "<script>window.hacked = 1; alert(1)</script>",
    "<img src=x onerror='window.hacked = 1; alert(2)'>",
    "</div></article><svg onload=alert(3)><style>*{display:none}</style>",
    "<a href='javascript:alert(4)'>click</a><iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "{{constructor.constructor('alert(5)')()}} ${alert(6)} `${alert(7)}`",
    "right to left: \u202egnp.exe\u202c, isolates \u2067x\u2069, marks \u200f\u200e\ufeff\u200b",
    "nulls \x00 and \x1b[31mescapes\x07 \x7f",
    "long " + "y" * 100_000,
    "<link rel=stylesheet href=https://example.com/x.css><img src=https://example.com/x.png>",
]
VIEWS = ["overview", "rollouts", "search", "held-out", "files", "config"]


def make_hostile(record: dict[str, Any], index: int) -> None:
    """Every text of a record becomes a hostile one."""
    text = HOSTILE[index % len(HOSTILE)]
    record |= {"text": text, "prompt": [{"role": text[:80], "content": text}], "columns": {text[:60]: text}}
    record |= {"reward_parts": {text[:60]: 1.0}, "extra": {text[:60]: text}, "advantage": 0.5, "baseline": 0.25}
    if index % 2:
        record["steps"] = [[text, 0.5], [text, -0.5]]


def make_hostile_turns(record: dict[str, Any], index: int) -> None:
    """Every text of a conversation becomes a hostile one; each rollout has another one."""
    text = HOSTILE[index % len(HOSTILE)]
    record |= conversation(text, text, text, text[:80]) | {"failure": text, "observation": text}
    record["messages"].append({"role": text[:80], "content": text})
    record.pop("tokens", None)


@pytest.fixture(scope="module")
def address(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runs = shutil.copytree(trained / "runs", tmp_path_factory.mktemp("watch") / "runs")
    tampered(runs / "turns", runs / "hostile-turns", make_hostile_turns)
    metrics = tampered(runs / "language-a", runs / HOSTILE_NAME, make_hostile) / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [step | {"reward/<b onclick=alert(9)>": 1.0 * index} for index, step in enumerate(steps)]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    with serving(runs.parent) as url:
        yield url


def visit(page: Page, view: str, run: str, query: str = "") -> None:
    page.evaluate(f"location.hash = '#/{view}/{page.evaluate(IDS)[run]}?{query}'")
    page.wait(f"document.querySelector('h1').textContent === {json.dumps(run)}")
    page.wait(f"document.querySelector('.tabs [aria-current]')?.dataset.view === '{view}'")
    page.wait("document.querySelector('.view').textContent.length > 60 && !document.querySelector('[aria-busy]')")


def open_view(chromium: Browser, address: str, view: str, run: str, query: str = "", **options: Any) -> Page:
    page = chromium.open(address, **options)
    page.wait("document.querySelector('.run-head h1')")
    visit(page, view, run, query)
    return page


def assert_only_text(page: Page, address: str) -> None:
    """Nothing of the hostile run has become an element, a script or a request."""
    assert page.evaluate("window.hacked") is None
    assert page.dialogs == []
    assert page.problems == []
    assert [request for request in page.requests if not request.startswith((address, "data:"))] == []
    active = "main :is(script, iframe, style, link, object, embed, base, form, [onerror], [onload], [onclick])"
    assert page.texts(active) == []
    assert page.evaluate("[...document.querySelectorAll('a')].every((a) => a.protocol === 'http:')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_hostile_completions_are_shown_as_text(chromium: Browser, address: str) -> None:
    page = open_view(chromium, address, "rollouts", HOSTILE_NAME, "step=2&group=0")
    shown = []
    for group in range(4):
        visit(page, "rollouts", HOSTILE_NAME, f"step=2&group={group}")
        page.wait(f"document.querySelector('.group-list [aria-current] .group-number')?.textContent === '{group}'")
        page.wait("document.querySelectorAll('.rollout').length === 4 && !document.querySelector('[aria-busy]')")
        shown += page.texts(".rollout .output")
        shown += page.texts(".more")
    text = "\n".join(shown)
    for hostile in (*HOSTILE[:5], HOSTILE[8]):
        assert hostile in text
    for character, name in {"\u202e": "RLO", "\x00": "NUL", "\x1b": "ESC", "\ufeff": "BOM"}.items():
        assert name in text
        assert character not in text
    assert "Show all 100,005 characters" in text
    assert_only_text(page, address)


def test_hostile_turns_calls_and_replies_are_shown_as_text(chromium: Browser, address: str) -> None:
    page = open_view(chromium, address, "rollouts", "hostile-turns", "step=1&group=0")
    shown = []
    for group in range(4):
        visit(page, "rollouts", "hostile-turns", f"step=1&group={group}")
        page.wait(f"document.querySelector('.group-list [aria-current] .group-number')?.textContent === '{group}'")
        page.wait("document.querySelectorAll('.turn').length === 20 && !document.querySelector('[aria-busy]')")
        shown += page.texts(".rollout")
    text = "\n".join(shown)
    for hostile in (*HOSTILE[:5], HOSTILE[8]):
        assert text.count(hostile) >= 6  # failure, observation, turns, argument and replies
    assert not {"\u202e", "\x00", "\x1b", "\ufeff"} & set(text)
    assert "Show all 100,005 characters of this argument" in text
    visit(page, "held-out", "hostile-turns")
    page.wait("document.querySelectorAll('.side .turn').length === 40")
    assert HOSTILE[0] in page.texts(".side .call dd")
    assert_only_text(page, address)


@pytest.mark.parametrize(
    ("view", "selector"),
    [("overview", ".chart"), ("search", ".hits li"), ("held-out", ".side .output"), ("config", "tbody tr")],
)
def test_other_views_of_a_hostile_run_show_text(chromium: Browser, address: str, view: str, selector: str) -> None:
    page = open_view(chromium, address, view, HOSTILE_NAME)
    page.wait(f"document.querySelectorAll('{selector}').length > 9")
    if view in ("search", "held-out"):
        assert HOSTILE[0] in page.texts("main")[0]
    assert_only_text(page, address)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (1280, "dark"),
        (360, "light"),
        (360, "dark"),
    ],
)
def test_no_view_has_a_barrier(chromium: Browser, address: str, width: int, scheme: str) -> None:
    page = open_view(chromium, address, "overview", "language-a", width=width, scheme=scheme)
    found = {}
    other = page.evaluate(IDS)["language-b"]
    for view in VIEWS:
        visit(page, view, "tokens", f"vs={other}" if view == "overview" else "")
        found[view] = page.barriers()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    for view, run in (("rollouts", "turns"), ("rollouts", "hostile-turns"), ("held-out", "hostile-turns")):
        visit(page, view, run)
        page.wait("document.querySelectorAll('.turn').length > 4")
        found[f"{view} of {run}"] = page.barriers()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, run
    visit(page, "rollouts", "cartpole")
    found["episodes"] = page.barriers()
    page.press("?", 8)
    page.wait("document.querySelector('dialog').open")
    found["keys"] = page.barriers()
    assert found == {view: [] for view in found}
    assert page.problems == []
    page.close()


def shown_number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace(",", ""))


def test_tokens_of_a_run_that_records_them_are_tinted_and_tell_their_numbers(
    chromium: Browser, address: str, trained: Path
) -> None:
    page = open_view(chromium, address, "rollouts", "tokens", "step=3&group=1&tint=advantage")
    page.wait("document.querySelector('.token[data-sign=plus]') && document.querySelector('.token[data-sign=minus]')")
    lines = (trained / "runs/tokens/rollouts/step_000003.jsonl").read_text().splitlines()
    group = [record for record in map(json.loads, lines) if record["group"] == 1]
    for number, record in enumerate(group):
        table = record["tokens"]
        spans = f"[...document.querySelectorAll('.tokens')[{number}].querySelectorAll('.token')]"
        signs = [{1: "plus", -1: "minus", 0: None}[(value > 0) - (value < 0)] for value in table["advantages"]]
        assert page.evaluate(f"{spans}.map((e) => e.dataset.sign ?? null)") == signs
    table = group[0]["tokens"]
    page.evaluate("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.texts(".token-numbers p")[0].startswith("token 3:")
    assert page.texts(".token-numbers p")[0].endswith(f"id {table['ids'][2]}")
    told = dict(zip(page.texts(".token-numbers dt"), page.texts(".token-numbers dd"), strict=True))
    names = ("logprobs", "reference_logprobs", "updated_logprobs", "advantages")
    policy, reference, updated, advantage = (table[name][2] for name in names)
    assert 0 < abs(reference - policy) < 1 > abs(updated - policy) > 0
    expected = {
        "log-probability": policy,
        "of the reference": reference,
        "KL": math.exp(reference - policy) - (reference - policy) - 1,
        "after the update": updated,
        "change": updated - policy,
        "advantage": advantage,
    }
    assert told.keys() == expected.keys()
    for name, value in expected.items():  # three digits; a small KL has two
        assert shown_number(told[name]) == pytest.approx(value, rel=6e-2 if name == "KL" else 6e-3), name
    page.press("c")
    page.wait("location.hash.includes('tint=kl')")
    page.wait("document.querySelector('.legend').textContent.startsWith('KL to the reference, nats')")
    page.wait("document.querySelector('.token[data-sign=plus]')")
    assert page.texts(".token[data-sign=minus]") == []
    assert page.problems == []
    page.close()


def test_turns_of_conversations_are_tinted_where_the_model_wrote(
    chromium: Browser, address: str, trained: Path
) -> None:
    lines = [json.loads(line) for line in (trained / "runs/turns/rollouts/step_000002.jsonl").read_text().splitlines()]
    record = next(line for line in lines if any(line["turn_rewards"]) and len(line["turn_rewards"]) > 1)
    group = [line for line in lines if line["group"] == record["group"]]
    page = open_view(chromium, address, "rollouts", "turns", f"step=2&group={record['group']}&tint=advantage")
    page.wait("document.querySelector('.token[data-sign]')")
    for place, line in enumerate(group):
        card = f"document.querySelectorAll('.rollout')[{place}]"
        roles = page.evaluate(f"[...{card}.querySelectorAll('.turn-head .role')].map((e) => e.textContent)")
        assert roles == ["environment", *(message["role"] for message in line["messages"])]
        replies = [message["content"] for message in line["messages"] if message["role"] == "user"]
        others = f"[...{card}.querySelectorAll('.turn[data-by=other]')]"
        assert page.evaluate(f"{others}.map((e) => e.querySelector('.output').textContent)") == ["Guess", *replies]
        assert page.evaluate(f"{others}.some((e) => e.querySelector('.token'))") is False
        # The tokens of the model are those with a log-probability, each turn by itself.
        table = line["tokens"]
        decided = [i for i, value in enumerate(table["logprobs"]) if value is not None]
        words = page.evaluate(f"[...{card}.querySelectorAll('.turn[data-by=model] .token')].map((e) => e.textContent)")
        assert "".join(words) == "".join(table["texts"][i] for i in decided)
        assert len(words) == len(decided) == line["decisions"]
        spans = f"[...{card}.querySelectorAll('.token')].map((e) => e.dataset.sign ?? null)"
        signs = [
            {1: "plus", -1: "minus", 0: None}[(v > 0) - (v < 0)] for v in (table["advantages"][i] for i in decided)
        ]
        assert page.evaluate(spans) == signs
    second = f"document.querySelectorAll('.rollout')[{group.index(record)}].querySelectorAll('.tokens')[1]"
    page.evaluate(f"{second}.focus()")
    page.press("ArrowRight")
    (_, first), *_ = record["undecided"]  # the tokens of the reply to the first turn
    assert page.texts(".token-numbers p")[0].startswith(f"token {first + 1}:")
    rewards = page.evaluate(
        f"[...document.querySelectorAll('.rollout')[{group.index(record)}].querySelectorAll('.step-reward')]"
        ".map((e) => e.textContent)"
    )
    assert [shown_number(text.removeprefix("reward ")) for text in rewards] == record["turn_rewards"]
    visit(page, "search", "turns")
    page.press("/")
    page.type("higher")
    found = [line for file in (trained / "runs/turns/rollouts").glob("*.jsonl") for line in
             map(json.loads, file.read_text().splitlines()) if "higher" in line["text"].lower()]  # fmt: skip
    page.wait(f"document.querySelector('.search [role=status]').textContent.includes('of {len(found)}')")
    page.press("Escape")
    page.click(".hits a")
    page.wait("document.querySelector('.rollout.chosen .turn mark')")
    assert "higher" in page.texts(".turn mark")
    assert page.problems == []
    page.close()


def test_everything_is_reachable_by_keyboard(chromium: Browser, address: str) -> None:
    page = open_view(chromium, address, "overview", "language-a")
    page.evaluate("document.querySelector('#skip').focus()")
    reached = []
    for _ in range(90):
        page.press("Tab")
        reached.append(
            page.evaluate(
                "((e) => [e.id || e.className || e.tagName, e.matches(':focus-visible')"
                " && (getComputedStyle(e).outlineStyle !== 'none' || e.tagName === 'INPUT')])(document.activeElement)"
            )
        )
    names = {name for name, _ in reached}
    assert {"theme", "help", "plot"} <= names
    assert [name for name, visible in reached if not visible and name != "BODY"] == []  # BODY: past the last element
    for key, view in [("2", "rollouts"), ("3", "search"), ("4", "held-out"), ("1", "overview"), ("3", "search")]:
        page.press(key)
        page.wait(f"document.querySelector('.tabs [aria-current]').dataset.view === '{view}'")
        page.wait("document.activeElement.tagName === 'H1'")
    page.press("/")
    page.wait("document.activeElement.type === 'search'")
    page.press("Escape")
    page.press("r")
    page.wait("document.activeElement.closest('.run-list')")
    page.press("?", 8)
    page.wait("document.querySelector('dialog').open")
    page.press("Escape")
    page.wait("!document.querySelector('dialog').open")
    for theme in ("light", "dark"):
        page.press("t")
        page.wait(f"document.documentElement.dataset.theme === '{theme}'")
    assert page.problems == []
    page.close()


def test_nothing_moves_if_less_motion_is_wanted(chromium: Browser, address: str) -> None:
    page = open_view(chromium, address, "overview", "language-a")
    page.evaluate("document.querySelector('.run-head .state').dataset.state = 'running'")
    assert page.evaluate("document.getAnimations().length") > 0
    page.emulate("light", motion="reduce")
    page.wait("document.getAnimations().length === 0")
    page.close()
