"""The pages of docs/reference are those that the code's tables make."""

import re

import pytest

from helpers import reference


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_is_current(name: str) -> None:
    page = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference.PAGES[name](), "run: PYTHONPATH=tests .venv/bin/python -m helpers.reference"


def test_every_row_has_as_many_cells_as_its_head() -> None:
    for name, page in reference.PAGES.items():
        for lines in re.findall(r"(?:^\|.*\n)+", page(), re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}) == 1, name
