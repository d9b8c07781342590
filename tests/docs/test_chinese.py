"""The Chinese pages print the code, the commands and the figures of the English ones."""

import re
from pathlib import Path

import pytest

from helpers.pages import ROOT, blocks_of

PAGES = {
    page: ROOT / ("README.md" if page.stem == "README" else f"docs/{page.name}") for page in ROOT.glob("docs/zh/*.md")
}
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def code_of(page: Path) -> list[object]:
    """The text of each block, and of commands the words, whose explanations are translated."""
    return [block.commands() if block.kind == "commands" else block.text for block in blocks_of(page)]


def figures_of(page: Path) -> list[list[str]]:
    """The numbers of each row of the tables, without those of links and code."""
    text = re.sub(r"^```.*?^```|\]\([^)]*\)|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [NUMBER.findall(row) for row in re.findall(r"^\|.*", text, re.M)]


def percentages_of(page: Path) -> list[str]:
    """The percentages and decimal numbers of the sentences."""
    text = re.sub(r"^```.*?^```|^\|.*|^ {4}.*|\]\([^)]*\)", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return sorted(re.findall(r"\d[\d.]*(?= ?%)|\d+\.\d+", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_translated_page_has_the_code_and_the_figures_of_its_original(page: Path) -> None:
    original = PAGES[page]
    assert code_of(page) == code_of(original)
    assert figures_of(page) == figures_of(original)
    assert percentages_of(page) == percentages_of(original)


def test_the_pages_are_there() -> None:
    assert {page.stem for page in PAGES} == {"README", "tutorial", "articles", "ppo"}
