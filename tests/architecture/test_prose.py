"""Wordings that avoid the standard English: their number in the texts of the package only falls."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "covey"
# Pattern -> most occurrences in strings and docstrings. Lower a number when it has fallen.
CEILINGS = {
    r"(?<!here )\b(?:is|are) no (?!longer|more|other|reason|such)": 6,
    r"\b(?:that|those) of\b": 185,
    r"\bof (?:its|their|one's) own\b": 61,
    r"\b[Tt]ake (?:it|them|[\w.]+) out\b": 1,
    r"\bbeside\b": 34,
    r"\banew\b": 0,
    r"\bfooting\b": 0,
}
TEXTS = [
    node.value
    for path in SOURCE.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]


@pytest.mark.parametrize("pattern", CEILINGS)
def test_a_wording_becomes_rarer(pattern):
    found = [text for text in TEXTS for _ in re.finditer(pattern, text)]
    assert len(found) <= CEILINGS[pattern], f"write it as PyTorch's documentation would: {found[-3:]}"
