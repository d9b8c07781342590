"""The report in a real Chromium: nothing runs, nothing is loaded, nothing overflows a phone, no barrier for readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.tracking.report import write_report
from helpers.browser import browser
from helpers.run_folders import answer, control_run, language_run, rollout

HOSTILE = "</pre></title><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(2)><base href=//x>" * 3


@pytest.mark.slow
def test_a_report_of_hostile_runs(tmp_path: Path) -> None:
    lines = [rollout(step, 0, reward, text=HOSTILE, prompt=HOSTILE, columns={HOSTILE: HOSTILE})
             for step in (1, 2) for reward in (0.0, 1.0)]  # fmt: skip
    answers = [answer(step, 0, step / 2, text=HOSTILE, prompt=HOSTILE) for step in (0, 2)]
    runs = [language_run(tmp_path / "run", steps=2, rollouts=lines, answers=answers, recipe=HOSTILE)]
    runs += [control_run(tmp_path / "agent"), language_run(tmp_path / "other", steps=6)]
    with browser(tmp_path / "profile") as chromium:
        for number, chosen in enumerate((runs[:1], runs)):
            file = write_report([(run, HOSTILE) for run in chosen], tmp_path / f"{number}.html", HOSTILE)
            for scheme in ("light", "dark"):
                page = chromium.open(file.as_uri(), scheme=scheme)
                page.wait("document.readyState === 'complete' && document.querySelector('footer')")
                assert page.evaluate("document.scripts.length") == 0
                assert page.evaluate("document.querySelectorAll('img, base, link, iframe').length") == 0
                assert page.evaluate("document.querySelectorAll('svg').length") > 3
                assert page.barriers() == []
                page.resize(360, 800)
                assert page.evaluate("document.documentElement.scrollWidth") <= 360
                assert page.evaluate("document.querySelector('.narrow').getClientRects().length") == 1
                assert (page.dialogs, page.problems, page.requests) == ([], [], [file.as_uri()])
                page.close()
