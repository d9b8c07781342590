"""Common prefix of prompts, and prefix tree of completions. A forward pass is fed the tokens of each node once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

# A shorter common prefix of prompts is not shared, because fused attention is faster without the mask of the suffixes.
MIN_COMMON_PREFIX = 8


@dataclass(frozen=True)
class PrefixNode:
    """A node: tokens `begin` to `end` of the completions `rows`, whose tokens before `end` are equal."""

    rows: list[int]  # indices of the completions
    begin: int
    end: int
    prompt: int  # index of their prompt
    parent: int  # index of the parent node; -1: the prompt

    @property
    def length(self) -> int:
        return self.end - self.begin


def build_prefix_tree(completions: Sequence[Tensor], prompt_of_row: Sequence[int]) -> list[PrefixNode]:
    """Build the prefix tree of each prompt's completions: every shared run of tokens is one node.

    Args:
        completions: token ids of each row.
        prompt_of_row: index of each row's prompt.

    Returns:
        the nodes, parents before children.
    """
    tokens = [completion.tolist() for completion in completions]
    nodes: list[PrefixNode] = []
    pending: list[tuple[list[int], int, int]] = []  # (rows with the same next token, its position, parent)

    def branch(rows: list[int], begin: int, parent: int) -> None:
        children: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if len(tokens[row]) > begin:
                children.setdefault((prompt_of_row[row], tokens[row][begin]), []).append(row)
        pending.extend((child, begin, parent) for child in reversed(children.values()))

    branch(list(range(len(tokens))), 0, -1)
    while pending:
        rows, begin, parent = pending.pop()
        end = begin + common_prefix_length(*(tokens[row][begin:] for row in rows))
        nodes.append(PrefixNode(rows, begin, end, prompt_of_row[rows[0]], parent))
        if len(rows) > 1:
            branch(rows, end, len(nodes) - 1)
    return nodes


def shared_prompt_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of the prompts without their last tokens; 0 if it is below MIN_COMMON_PREFIX."""
    common = common_prefix_length(*(prompt[:-1] for prompt in prompts))
    return common if common >= MIN_COMMON_PREFIX and len(prompts) > 1 else 0


def common_prefix_length(*sequences: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
