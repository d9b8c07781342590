"""The pages of docs/reference are those that the code's tables make."""

import re

import pytest

from covey.config import ControlConfig, RunConfig
from covey.config.recipe import describe_fields, foreign_names
from helpers import reference

MIGRATE = (reference.FOLDER.parent / "migrate.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_is_current(name: str) -> None:
    page = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference.PAGES[name](), "run: PYTHONPATH=tests .venv/bin/python -m helpers.reference"


def test_every_row_has_as_many_cells_as_its_head() -> None:
    for name, page in reference.PAGES.items():
        for lines in re.findall(r"(?:^\|.*\n)+", page(), re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}) == 1, name


def test_the_names_of_the_page_for_migrants_are_those_of_the_table() -> None:
    """Every field of covey on it exists, and belongs to the other library's name beside it."""
    rows = [row for root in (RunConfig, ControlConfig) for row in describe_fields(root)]
    known = {f"{row.section.split()[0]}.{row.name}" if row.section else row.name for row in rows}
    compared = 0
    for theirs, ours in re.findall(r"^\| ([^|]*`[^|]*) \| ([^|]*`[^|]*) \|", MIGRATE, re.M):
        fields = {name for name in re.findall(r"`([a-z_.]+)[^`]*`", ours) if name in known or "." in name}
        assert fields <= known, theirs
        for name in re.findall(r"`(?:\w+\.)*([a-z_]+)[^`]*`", theirs):
            found = foreign_names().get(name)
            if found and found.fields and fields:
                assert fields & set(found.fields), name
                compared += 1
    assert compared > 20
