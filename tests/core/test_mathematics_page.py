"""docs/mathematics.md names functions and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from covey.core import baselines, covariance, kl, loss_weights, policy_losses, prompt_signal, ratios, returns, schedules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mathematics.md").read_text()


def test_every_test_and_file_named_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(names) > 20
    assert [name for name in sorted(names) if f"def {name}(" not in tests] == []
    files = re.findall(r"`((?:tests|src)/[\w/.]+)`", PAGE)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_function_of_core_is_on_the_page():
    for module in (baselines, covariance, loss_weights, kl, prompt_signal, ratios, schedules, policy_losses, returns):
        functions = [
            name for name, member in vars(module).items() if getattr(member, "__module__", "") == module.__name__
        ]
        for name in functions:
            if name.islower() and not name.startswith("_") and name != "count":
                assert f"`{name}" in PAGE, f"{module.__name__}.{name}"
