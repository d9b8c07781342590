"""On a terminal lines are broken between words and commands stay whole; elsewhere every line stays as it is."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.config.terminal import fitted, say

WORDS = st.lists(st.text("abcxyz-/.=", min_size=1, max_size=30), min_size=1, max_size=40)
ADVICE = "The policy got better. Next: train for longer: covey train my_recipe.toml --steps 200 --group-size 8 --seed 1"
COVEY = "from covey.__main__ import main; main()"


@given(WORDS, st.integers(20, 120), st.sampled_from(["", "  ", "        "]))
@example(["abc"] * 30, 20, "  ")
def test_no_word_is_broken_and_every_line_fits_that_can(words: list[str], width: int, indent: str) -> None:
    lines = fitted(indent + " ".join(words), width).split("\n")
    assert " ".join(lines).split() == words
    for line in lines:
        assert len(line) <= width or len(line.split()) == 1


@pytest.mark.parametrize("width", [30, 60, 80])
def test_a_command_stays_whole(width: int) -> None:
    *prose, command = fitted(ADVICE, width).split("\n")
    assert command.strip() == "covey train my_recipe.toml --steps 200 --group-size 8 --seed 1"
    assert " ".join(prose) == "The policy got better. Next: train for longer:"
    assert fitted(ADVICE, 200) == ADVICE
    assert fitted(ADVICE, None) == ADVICE


def test_lines_are_broken_one_by_one() -> None:
    assert fitted("short\n  a longer line of words\n\nend", 16, "..") == "short\n  a longer line\n  ..of words\n\nend"


def test_elsewhere_nothing_is_broken() -> None:
    file = io.StringIO()
    say(ADVICE * 3, file)
    assert file.getvalue() == ADVICE * 3 + "\n"


def on_a_terminal(words: list[str], columns: int) -> list[str]:
    """The lines that a command writes to a terminal of so many columns."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", COVEY, *words]
    with subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=environment):
        os.close(there)
        written = b""
        while True:
            try:
                part = os.read(here, 1 << 16)
            except OSError:  # Linux ends a terminal so
                break
            if not part:
                break
            written += part
    os.close(here)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r", "").split("\n")


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "words",
    ["", "--help", "train --help", "eval --help", "trian x", "plan --help", "check cartpole_grpo --seed 3", "recipes"],
)
def test_commands_fit_80_columns(words: str) -> None:
    lines = on_a_terminal(words.split(), 80)
    assert len("".join(lines)) > 50
    for line in lines:
        assert len(line) <= 80 or len(line.split()) == 1 or re.match(r" +(covey|import covey)", line), line
