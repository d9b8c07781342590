"""The reward `language`."""

import unicodedata

import pytest

from covey.config import ConfigError, RewardConfig
from covey.config.rewards import SCRIPTS
from covey.llm.grader import build_grader
from covey.llm.rewards.language import script_share

JAPANESE = ("han", "hiragana", "katakana")


@pytest.mark.parametrize(
    ("text", "scripts", "share"),
    [
        ("The answer is 57.", ("latin",), 1),
        ("Ça coûte 5 €, à peu près.", ("latin",), 1),
        ("答案是57。", ("latin",), 0),
        ("答案是57。", ("han",), 1),
        ("ab答案", ("latin",), 0.5),
        ("ab答案", ("latin", "han"), 1),
        ("答えはコーヒー。", JAPANESE, 1),
        ("答えはコーヒー。", ("han",), 1 / 7),
        ("인사", ("hangul",), 1),
        ("Привет", ("cyrillic",), 1),
        ("नमस्ते", ("devanagari",), 1),
        ("Ａｂ", ("latin",), 1),  # full-width
        ("人々", ("han",), 1),
        (r"\frac{1}{2} 是答案", ("han",), 1),  # a LaTeX command is no word
        ("12 + 5 = 17", ("latin",), 1),  # no letter at all
        ("", ("latin",), 1),
    ],
)
def test_language_by_hand(text, scripts, share):
    assert script_share([text], scripts=scripts) == pytest.approx([share])


@pytest.mark.sampled(24)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_letters(script):
    """The name of a script is how the names of its letters begin in Unicode, so a misspelt one would match nothing."""
    letters = [chr(code) for code in range(0x20000) if chr(code).isalpha() and not unicodedata.decomposition(chr(code))]
    shares = script_share(letters, scripts=(script,))
    assert 26 <= sum(shares) < len(letters) / 2 or script == "han"
    assert 0 < sum(shares) < len(letters)


def test_scripts_are_required_and_known():
    with pytest.raises(ConfigError, match=r'needs a value for scripts, such as scripts = \["latin"\]'):
        build_grader([RewardConfig(name="language")], ())
    with pytest.raises(ConfigError, match=r"did you mean 'latin'\?"):
        build_grader([RewardConfig(name="language", scripts=("latn",))], ())
