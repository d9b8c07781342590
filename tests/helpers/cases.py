"""Cases of parametrized tests: `make test` runs some of them, `make test-slow` all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_unless(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, those that are not in `quick` with the mark `slow`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def every_nth(n: int, cases: Iterable[Any], *marks: pytest.MarkDecorator) -> list[Any]:
    """The cases; the first of every n as they are, the others with the mark `slow` and these marks."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow, *marks] if i % n else ())
        for i, case in enumerate(cases)
    ]
