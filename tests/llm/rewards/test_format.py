"""The reward `format`."""

from covey.llm.rewards.format import format_match


def test_format_matches_the_whole_completion():
    pattern = "<think>.*</think>-?[0-9]+"
    texts = ["<think>a\nb</think>5", "x<think>a</think>5", "<think>a</think>5 ", "<think>a</think>5\n"]
    assert format_match(texts, pattern=pattern) == [1, 0, 0, 0]
