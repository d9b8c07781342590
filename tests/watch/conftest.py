"""A browser and trained runs, once for all tests of the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import Browser, browser
from helpers.watched import train_runs


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="session")
def trained(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs`, which no test changes. Without a browser nothing is trained."""
    folder = tmp_path_factory.mktemp("trained")
    train_runs(folder)
    return folder
