"""Docstrings as covey writes them, in plain text with `code` and formulas, as reStructuredText."""

from __future__ import annotations

import re

SECTION = re.compile(r"^\w[\w ]*:$")
GAP = re.compile(r"(\S)\s{3,}(?=\S)")  # between a formula and its source
EQUATION = re.compile(r"^\S+(\(.*?\))? = ")


def to_rst(lines: list[str]) -> list[str]:
    """Formulas and indented examples as literal blocks; the rest escaped, with ``code``; sections as they are."""
    result: list[str] = []
    section = False
    for paragraph in paragraphs(lines):
        indent = re.match(" *", paragraph[0])[0]  # type: ignore[index]
        section = bool(SECTION.match(paragraph[0])) or (section and bool(indent))
        if section:
            result += [escaped(line) for line in paragraph]
        elif paragraph[0].lstrip().startswith(">>>"):
            result += paragraph
        elif indent or (len(paragraph) > 1 and all(GAP.search(line) for line in paragraph)):
            result += literal(paragraph)
        elif GAP.search(paragraph[0]) or EQUATION.match(paragraph[0]):
            formula, _, source = GAP.sub(r"\1\0", paragraph[0], count=1).partition("\0")
            result += [*literal([formula]), *(escaped(line) for line in ([source] if source else []) + paragraph[1:])]
        else:
            result += [escaped(line) for line in paragraph]
        result.append("")
    return result


def paragraphs(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.rstrip())
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def literal(lines: list[str]) -> list[str]:
    return ["::", "", *(f"    {line}" for line in lines), ""]


def escaped(line: str) -> str:
    """Markup of reStructuredText is text, except that `code` is code."""
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return line.replace("`", "\\`")
    for at, part in enumerate(parts):
        parts[at] = f"``{part}``" if at % 2 else re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", r"\\\g<0>", part)
    return "".join(parts)
