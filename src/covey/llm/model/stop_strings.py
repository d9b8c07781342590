"""Stop strings: a completion ends with the token after which its text contains one of them.

The text of a completion has no special tokens. A string with the text of a special token, such as `<|eot_id|>`, is
looked for in the text that has them.

Shapes: V vocabulary.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from covey.llm.model.chat import Chat


class StopStrings:
    """Finds the end of a completion by its text, `Chat.decode` of the tokens so far.

    Few tokens can be the one that completes a stop string, and the text is decoded after these alone. They are known
    for byte-level tokenizers, whose text is that of the joined bytes of the tokens; for others, every token is one.
    """

    def __init__(self, chat: Chat, strings: tuple[str, ...]) -> None:
        """`stop_strings` returns equal objects for equal arguments, which requests of one batch need."""
        self.chat = chat
        self.strings = strings
        special = [text for text in chat.tokenizer.all_special_tokens if text.strip()]
        self._with_special = tuple(string for string in strings if any(text in string for text in special))

    @cached_property
    def completing_V(self) -> NDArray[np.bool_]:
        """True for the token ids after which a completion may contain a stop string that it did not contain before."""
        tokenizer = self.chat.tokenizer
        completing_V = np.ones(len(tokenizer), dtype=bool)
        if not _joins_bytes(tokenizer):
            return completing_V
        stops = [string.encode() for string in self.strings]
        added = set(tokenizer.get_added_vocab().values())  # their texts are not in the alphabet of bytes
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        for number, token in enumerate(tokens):
            if token is not None and number not in added:
                completing_V[number] = any(_may_complete(_bytes_of(token), stop) for stop in stops)
        return completing_V

    def may_end(self, token: int) -> bool:
        """False if no completion ends with this token because of a stop string."""
        return token >= len(self.completing_V) or bool(self.completing_V[token])

    def contained_in(self, tokens: Sequence[int]) -> bool:
        """True if the text of the tokens contains a stop string."""
        text = self.chat.decode(tokens)
        if any(string in text for string in self.strings):
            return True
        whole = str(self.chat.tokenizer.decode(list(tokens))) if self._with_special else ""
        return any(string in whole for string in self._with_special)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to and including the one that completes the first stop string; None if there is none."""
        candidates = (count for count, token in enumerate(tokens, start=1) if self.may_end(token))
        return next((count for count in candidates if self.contained_in(tokens[:count])), None)

    def end(self, tokens: Sequence[int]) -> bool:
        """True if a completion that did not contain a stop string before its last token does now."""
        return self.may_end(tokens[-1]) and self.contained_in(tokens)


@lru_cache(maxsize=8)
def stop_strings(chat: Chat, strings: tuple[str, ...]) -> StopStrings | None:
    """The stop strings of a run or a request; None if there are none."""
    return StopStrings(chat, strings) if strings else None


def _may_complete(token: bytes, stop: bytes) -> bool:
    """True if an occurrence of `stop` can end within a token with these bytes."""
    return stop in token or any(token.startswith(stop[-count:]) for count in range(1, len(stop) + 1))


def _joins_bytes(tokenizer: object) -> bool:
    """True if the text of tokens is that of their joined bytes, unchanged."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    decoder = json.loads(backend.to_str())["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable characters stand for themselves, the others for those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _bytes_of(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary."""
    alphabet = _byte_of_character()
    known = [alphabet.get(character) for character in token]
    return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
