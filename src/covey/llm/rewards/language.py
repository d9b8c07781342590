"""The reward `language`: the fraction of letters in the scripts of the wanted language."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from covey.llm.rewards.answer_text import completion_text

# Beginnings of the Unicode names of a script's letters; for the other scripts it is the script's name.
_NAMES = {"han": ("CJK", "IDEOGRAPHIC")}
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+")


def script_share(completions: Sequence[Any], *, scripts: Sequence[str]) -> list[float]:
    """Fraction of the letters of a completion that belong to one of the scripts; 1 if it has no letter.

    As the language consistency reward of DeepSeek-R1 (arXiv 2501.12948), section 2.3.2, by letters instead of words.
    Digits, punctuation and LaTeX commands do not count. It distinguishes scripts, not languages: French instead of
    English has the value 1 for Latin.

    Args:
        scripts: names in lower case, such as ("latin",), or ("han", "hiragana", "katakana") for Japanese.
    """
    beginnings = tuple(name for script in scripts for name in _NAMES.get(script, (script.upper(),)))
    return [_share(completion_text(completion), beginnings) for completion in completions]


def _share(text: str, beginnings: tuple[str, ...]) -> float:
    # Compatibility forms, such as full-width letters, are replaced by the letters that they stand for.
    letters = [letter for letter in unicodedata.normalize("NFKC", _LATEX_COMMAND.sub(" ", text)) if letter.isalpha()]
    if not letters:
        return 1.0
    return sum(_name(letter).startswith(beginnings) for letter in letters) / len(letters)


@lru_cache(maxsize=1 << 16)
def _name(letter: str) -> str:
    return unicodedata.name(letter, "")
