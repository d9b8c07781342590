"""The texts of single tokens, which joined give the text of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for bytes that are no whole character


class TokenTexts:
    """Splits the text of a sequence into the texts of its tokens.

    A character that is spread over several tokens is the text of the last of them; the others have an empty text. The
    text of a token may depend on the one before, as in tokenizers that remove the first space of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._single: dict[int, str] = {}  # token id -> its text if it is decoded alone

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """The texts of the tokens; joined they are the decoded sequence with its special tokens."""
        whole = self._decode(ids)
        texts = [self._alone(token) for token in ids]
        return texts if "".join(texts) == whole else self._divided(ids, whole)

    def _divided(self, ids: Sequence[int], whole: str) -> list[str]:
        """The texts by decoding each token after the ones before, from the last but one whole character on."""
        texts: list[str] = []
        begin = read = 0  # the tokens before `read` have their text; those from `begin` on are decoded again
        for end in range(1, len(ids) + 1):
            before, after = self._decode(ids[begin:read]), self._decode(ids[begin:end])
            if after.endswith(INCOMPLETE) and end < len(ids):
                texts.append("")
                continue
            texts.append(after[len(before) :])
            begin, read = read, end
        return texts if "".join(texts) == whole else [*[""] * (len(ids) - 1), whole]

    def _alone(self, token: int) -> str:
        if token not in self._single:
            self._single[token] = self._decode([token])
        return self._single[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
