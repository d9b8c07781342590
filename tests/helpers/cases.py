"""Cases of parametrized tests by name: `make test` runs some of them, `make test-slow` all."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_unless(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, those that are not in `quick` with the mark `slow`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
