"""Encodes text of others beside text of a chat template, so that only the template makes control tokens.

A control token, such as the end of a turn, is a single token that a tokenizer makes of a certain text, like
`<|im_end|>`. In the reply of an environment this text must be encoded as ordinary characters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

Part = tuple[str, bool]  # a text, and whether the template wrote it


class ControlTokenInText(Exception):
    """A text cannot be encoded without a control token of the model."""


class PlainTextEncoder:
    """Encodes parts of text; a part that the template did not write never becomes a control token.

    Without the text of a control token in such a part, the tokens are those of the joined text. Otherwise a copy of the
    tokenizer is used in which every control token has another, unguessable text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.texts = {id: str(token) for id, token in added.items() if str(token).strip(" \t\r\n▁")}
        for id in {*tokenizer.all_special_ids, *end_ids} - self.texts.keys():
            text = tokenizer.convert_ids_to_tokens(id)
            if text:
                self.texts[id] = str(text)
        self.control_ids = frozenset(self.texts) | end_ids
        unknown = tokenizer.unk_token_id  # a character that the tokenizer does not know controls nothing
        if unknown not in end_ids | {tokenizer.bos_token_id, tokenizer.pad_token_id}:
            self.control_ids -= {unknown}
        longest_first = sorted(self.texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of the joined parts, without tokens that a tokenizer adds at the ends.

        Raises:
            ControlTokenInText: if a part of others would become a control token all the same.
        """
        wanted = [id for text, written in parts if written for id in self._controls(self._ids(text))]
        if not any(self._pattern.search(text) for text, written in parts if not written):
            ids = self._ids("".join(text for text, _ in parts))
            if self._controls(ids) == wanted:
                return ids
        renamed = self._renamed
        ids = list(self._ids_of_pieces(parts)) if renamed is None else self._renamed_ids(parts, *renamed)
        if self._controls(ids) != wanted:
            raise ControlTokenInText("its text would be encoded with a control token of the model")
        return ids

    def _ids(self, text: str, **options: Any) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]) if text else []

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [id for id in ids if id in self.control_ids]

    def _renamed_ids(self, parts: Sequence[Part], tokenizer: Tokenizer, names: Mapping[int, str]) -> list[int]:
        names_of = {self.texts[id]: name for id, name in names.items()}
        texts = []
        for text, written in parts:
            if not written and any(name in text.casefold() for name in names.values()):
                raise ControlTokenInText("its text has the hidden name of a control token")
            texts.append(self._pattern.sub(lambda found: names_of[found.group()], text) if written else text)
        return list(tokenizer.encode("".join(texts), add_special_tokens=False).ids)

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, str]] | None:
        """A copy of the tokenizer with other texts of the control tokens, and these texts; None if it is slow."""
        if not self.tokenizer.is_fast:
            return None
        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        secret = hashlib.sha256(json.dumps(content["added_tokens"]).encode()).hexdigest()[:24]
        names = {id: f"covey{secret}x{id}x" for id in self.texts}
        renamed = {text: names[id] for id, text in self.texts.items()}
        for token in content["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        model = content["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {renamed.get(text, text): id for text, id in vocabulary.items()}
        elif vocabulary:  # of a unigram model: pairs of a text and its score
            model["vocab"] = [[renamed.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        content["post_processor"] = None  # it adds tokens at the ends, which are not wanted
        content["truncation"] = content["padding"] = None
        return Tokenizer.from_str(json.dumps(content)), names

    def _ids_of_pieces(self, parts: Sequence[Part]) -> Iterator[int]:
        """For a slow tokenizer: the pieces between the template's control tokens, each encoded without them."""
        ids_of = {text: id for id, text in self.texts.items()}
        piece = ""
        for text, written in parts:
            begin = 0
            for found in self._pattern.finditer(text) if written else ():
                yield from self._ids(piece + text[begin : found.start()], split_special_tokens=True)
                yield ids_of[found.group()]
                piece, begin = "", found.end()
            piece += text[begin:]
        yield from self._ids(piece, split_special_tokens=True)
