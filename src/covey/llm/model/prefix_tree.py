"""Common prefixes of prompts, and the prefix tree of a prompt's completions: a forward pass is fed each node once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

# Prompts that begin with fewer tokens alike are fed whole: fused attention is faster without the mask of the rests.
LEAST_COMMON = 8


@dataclass(frozen=True)
class PrefixNode:
    """Tokens `begin` to `end` of some completions of a prompt, which have them, and all before, in common."""

    rows: list[int]
    begin: int
    end: int
    prompt: int
    parent: int  # the segment before, or -1: the prompt

    @property
    def length(self) -> int:
        return self.end - self.begin


def build_prefix_tree(completions: Sequence[Tensor], prompt_of_row: Sequence[int]) -> list[PrefixNode]:
    """Build the prefix tree of each prompt's completions: every shared run of tokens is one node, parents first."""
    tokens = [completion.tolist() for completion in completions]
    found: list[PrefixNode] = []
    to_go: list[tuple[list[int], int, int]] = []  # rows that have their next token in common too, its place, the parent

    def part(rows: list[int], begin: int, parent: int) -> None:
        ways: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if len(tokens[row]) > begin:
                ways.setdefault((prompt_of_row[row], tokens[row][begin]), []).append(row)
        to_go.extend((way, begin, parent) for way in reversed(ways.values()))

    part(list(range(len(tokens))), 0, -1)
    while to_go:
        rows, begin, parent = to_go.pop()
        end = begin + common_prefix_length(*(tokens[row][begin:] for row in rows))
        found.append(PrefixNode(rows, begin, end, prompt_of_row[rows[0]], parent))
        if len(rows) > 1:
            part(rows, end, len(found) - 1)
    return found


def shared_prompt_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the prompts' common prefix without the last token of each; 0 if it is shorter than LEAST_COMMON."""
    common = common_prefix_length(*(prompt[:-1] for prompt in prompts))
    return common if common >= LEAST_COMMON and len(prompts) > 1 else 0


def common_prefix_length(*sequences: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
