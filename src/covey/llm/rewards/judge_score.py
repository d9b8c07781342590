"""Reads a score from the text of a judge's reply. Text without a valid score is an error, never a score of 0."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_OBJECTS = 200  # opening braces of a reply at which a JSON object is looked for; bounds the time

# A comma separates thousands; "0,8" is refused, because it may be a decimal comma or a list.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = rf"(?<![\w.])(?<![0-9],)[-+−]?(?:{_DIGITS})(?:[eE][-+]?[0-9]+)?(?!\w|[.,][0-9])"
_SCORE = re.compile(rf"(?P<number>{_NUMBER})(?:(?P<percent>\s?%)|\s*(?:/|out of\b|of\b)\s*(?P<scale>{_NUMBER}))?")
_EMPHASIS = re.compile(r"[*`]")
_AROUND = " \t\r\n\"'.!:"


class UnreadableReply(ValueError):
    """The reply has no valid score; the message says why, in one line."""


@dataclass(frozen=True)
class ScoreReader:
    """How a score is read: the text that states it, then its number.

    The text is the whole reply, the group of `pattern` at its last match, or the field of the last JSON object that
    has it. The number is the last one in the text, or that of the last of `words` in it.
    """

    low: float
    high: float
    pattern: str = ""
    field: str = ""
    words: Mapping[str, float] | None = None  # in lower case

    def read(self, reply: str, *, cut: bool = False) -> float:
        """The score in a reply, from `low` to `high`.

        A number may be written on its scale, as in "8/10", if the scale ends at `high`.

        Args:
            cut: the reply ended at its token limit, so its last number may lack digits.

        Raises:
            UnreadableReply: if there is no score, or it is not finite or out of range.
        """
        if cut and not self.field and not self.words:
            raise UnreadableReply("the reply was cut at its token limit: raise max_tokens in judge_request")
        found = self._stated(reply)
        score = float(found) if isinstance(found, (bool, int, float)) else self._number(found)
        if not math.isfinite(score):
            raise UnreadableReply(f"the score {score} is not finite")
        if not self.low <= score <= self.high:
            raise UnreadableReply(f"the score {score:g} is outside judge_range ({self.low:g} to {self.high:g})")
        return score

    def read_or_reason(self, reply: str, *, cut: bool) -> tuple[float, str]:
        """The score, and "" or the reason why there is none."""
        try:
            return self.read(reply, cut=cut), ""
        except UnreadableReply as fault:
            return math.nan, str(fault)

    def _stated(self, reply: str) -> Any:
        """The part of the reply that states the score: text, or a number of a JSON object."""
        if self.pattern:
            matches = list(re.finditer(self.pattern, reply, re.DOTALL))
            if not matches or matches[-1][1] is None:
                raise UnreadableReply("the reply does not match judge_pattern")
            return matches[-1][1]
        if not self.field:
            return reply
        values = [value for document in _objects(reply) for value in _at(document, self.field.split("."))]
        if not values or not isinstance(values[-1], (bool, int, float, str)):
            raise UnreadableReply(f"the reply has no JSON object with a number or text in {self.field!r}")
        try:
            return float(values[-1]) if isinstance(values[-1], int) else values[-1]
        except OverflowError:
            raise UnreadableReply("the score is too large") from None

    def _number(self, text: str) -> float:
        if self.words:
            return self._word(text)
        whole = bool(self.pattern or self.field)  # then the text must be the score and nothing else
        plain = _EMPHASIS.sub("", text)
        matches = list(_SCORE.finditer(plain))
        if not matches or (whole and matches[-1][0] != plain.strip(_AROUND)):
            raise UnreadableReply("there is no number where the score should be")
        match = matches[-1]
        scale = "100" if match["percent"] else match["scale"]
        if scale is not None and _float(scale) != self.high:
            raise UnreadableReply(f"the score is on a scale up to {scale}, but judge_range ends at {self.high:g}")
        return _float(match["number"])

    def _word(self, text: str) -> float:
        assert self.words is not None
        by_length = sorted(self.words, key=len, reverse=True)
        one_of = "|".join(map(re.escape, by_length))
        found = re.findall(rf"(?<!\w)(?:{one_of})(?!\w)", text.lower())
        if not found:
            raise UnreadableReply("the reply has none of judge_words")
        return self.words[found[-1]]


def read_one(
    completions: Sequence[str], cut: bool, reader: Mapping[str, Any], log_extra: Callable[[str, list[str]], None]
) -> list[float]:
    """The score in one reply, in a process; logs the column "error". `reader` has the fields of a `ScoreReader`."""
    score, error = ScoreReader(**reader).read_or_reason(completions[0], cut=cut)
    log_extra("error", [error])
    return [score]


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def _objects(reply: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text that are not inside another one, in their order."""
    decoder, position = json.JSONDecoder(), 0
    for _ in range(MOST_OBJECTS):
        position = reply.find("{", position)
        if position < 0:
            return
        try:
            document, position = decoder.raw_decode(reply, position)
        except (ValueError, RecursionError):  # also an integer with too many digits
            position += 1
        else:
            yield document


def _at(document: Any, path: list[str]) -> Iterator[Any]:
    """The value at a path of keys, if there is one."""
    for key in path:
        if not isinstance(document, dict) or key not in document:
            return
        document = document[key]
    yield document
