"""Process supervision: splits completions into reasoning steps, by characters and by tokens.

A step reward gets the texts of the steps and returns one number for each (`RewardConfig.per_step`). It may be a rule or
a process reward model with the same signature.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from covey.data import Rollout
from covey.llm.model.chat import Chat
from covey.llm.rewards.runner import RewardPool
from covey.runtime.worker.child import InvalidResult

Boundary = Callable[[str], Sequence[int]]  # text -> positions (in characters) after its steps

BOUNDARY_SECONDS = 10.0  # deadline of a user's boundary function, for one text

# White space belongs to the step before it, so that no step is empty.
_LINE = re.compile(r"(?<=\S)[^\S\n]*\n\s*")
_PARAGRAPH = re.compile(r"(?<=\S)[^\S\n]*\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?][\"')\]*]*\s+|(?<=\S)[^\S\n]*\n\s*")
_LIST_NUMBER = re.compile(r"\s*[0-9]+[.]\s+")


def lines(text: str) -> list[int]:
    """A step is a line; empty lines are not steps."""
    return [match.end() for match in _LINE.finditer(text)]


def paragraphs(text: str) -> list[int]:
    """A step ends before an empty line."""
    return [match.end() for match in _PARAGRAPH.finditer(text)]


def sentences(text: str) -> list[int]:
    """A step ends after a full stop, an exclamation mark or a question mark before white space, and at a line's end.
    The number of a list item, as in "2. Add 5", is not a sentence.
    """
    ends: list[int] = []
    for match in _SENTENCE.finditer(text):
        begin = ends[-1] if ends else 0
        if not _LIST_NUMBER.fullmatch(text, begin, match.end()):
            ends.append(match.end())
    return ends


RULES: dict[str, Boundary] = {"line": lines, "paragraph": paragraphs, "sentence": sentences}


class StepSplitter:
    """Splits completions into reasoning steps: at the positions of a rule or a function, and at their end.

    Every completion has at least one step. A step ends at the token that completes its text. Steps that end within the
    same token are one step, and the end token belongs to the last step. If the policy did not decide that token (a
    tool's output), the step ends at the last decision before it, and a step without any decision is part of its
    neighbour.
    """

    def __init__(self, boundary: str) -> None:
        """`boundary` is a key of `RULES`, or `file.py:function`, which a process of its own calls for each text."""
        self.boundary = boundary
        self.chat: Chat | None = None  # set when the model is loaded; before that steps have no tokens
        self._process = None if boundary in RULES else RewardPool(boundary)

    def split(self, rollout: Rollout) -> list[str]:
        """The texts of a rollout's steps, whose concatenation is its text. Sets `step_ends` if the tokens are known.

        The steps of a conversation are the turns of the model, whose ends the sampler has set.

        Raises:
            CallError: if the boundary function fails. InvalidResult: if it returns invalid positions.
        """
        if rollout.messages is not None:
            return [str(message["content"]) for message in rollout.messages if message["role"] == "assistant"]
        positions = self._positions(rollout.text)
        if self.chat is not None:
            ended = rollout.actions[-1] in self.chat.end_ids
            tokens = rollout.actions[:-1] if ended else rollout.actions
            positions, ends = token_ends(self.chat.decode, tokens, positions)
            last = len(rollout.actions) - 1
            if rollout.decided is not None:
                positions, ends, last = _at_decisions(positions, ends, rollout.decided)
            rollout.step_ends = [*ends, last]
        return [rollout.text[i:j] for i, j in zip([0, *positions], [*positions, len(rollout.text)], strict=True)]

    def close(self) -> None:
        """End the process of the boundary function."""
        if self._process is not None:
            self._process.close()

    def _positions(self, text: str) -> list[int]:
        """Positions within the text at which a step ends, ascending, without the end of the text."""
        if self._process is None:
            found: Sequence[int] = RULES[self.boundary](text)
        else:
            found = self._process.positions(text, BOUNDARY_SECONDS)
            if any(not 0 <= position <= len(text) for position in found) or sorted(found) != list(found):
                raise InvalidResult(
                    f"returned {found!r:.60} for a text of {len(text)} characters: give ascending positions in it"
                )
        return sorted({position for position in found if text[:position].strip() and text[position:].strip()})


def token_ends(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The tokens that complete the text up to each position; a token may be a part of a character, or several steps.

    Args:
        decode: token ids -> text.
        tokens: of a completion, without its end token.
        positions: in characters of the decoded text, ascending.

    Returns:
        (positions, token indices) of the steps that end before the last token, at most one per token.
    """
    text = decode(tokens)
    ends: dict[int, int] = {}
    for position in positions:
        # Binary search: further tokens do not change a prefix of the text that is complete.
        ends[
            bisect_left(range(len(tokens)), True, key=lambda k: decode(tokens[: k + 1]).startswith(text[:position]))
        ] = position
    ends.pop(len(tokens) - 1, None)
    return list(ends.values()), list(ends)


def _at_decisions(
    positions: Sequence[int], ends: Sequence[int], decided: Sequence[bool]
) -> tuple[list[int], list[int], int]:
    """(positions, ends) of `token_ends` with every end moved to the last decision up to it, and the last decision."""
    decisions = [place for place, chosen in enumerate(decided) if chosen]
    moved: dict[int, int] = {}
    for position, end in zip(positions, ends, strict=True):
        before = bisect_right(decisions, end)
        if before:
            moved[decisions[before - 1]] = position
    moved.pop(decisions[-1], None)
    return list(moved.values()), list(moved), decisions[-1]
