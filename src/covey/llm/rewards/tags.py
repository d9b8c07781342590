"""The reward `tags`: the completion consists of tagged parts, such as <think>...</think><answer>...</answer>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.llm.rewards.answer_text import completion_text


def tagged_parts(completions: Sequence[Any], *, tags: Sequence[str], first_tag_in_prompt: bool) -> list[float]:
    """1 if a completion is the tagged parts in their order, none of them empty, with white space alone between, else 0.

    Every opening and closing tag occurs once. The format reward of DeepSeek-R1 (arXiv 2501.12948), section 2.2.2.

    Args:
        tags: names without brackets, such as ("think", "answer").
        first_tag_in_prompt: the prompt ends with the first opening tag, so the completion begins after it.
    """
    return [
        float(_has_parts(completion_text(completion), tags, first_tag_in_prompt=first_tag_in_prompt))
        for completion in completions
    ]


def _has_parts(text: str, tags: Sequence[str], *, first_tag_in_prompt: bool) -> bool:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rest = f"<{tags[0]}>{text}" if first_tag_in_prompt else text
    for tag in tags:
        before, opening, rest = rest.partition(f"<{tag}>")
        content, closing, rest = rest.partition(f"</{tag}>")
        if before.strip() or not opening or not closing or not content.strip():
            return False
        if any(mark in content for mark in marks):
            return False
    return not rest.strip()
