"""Tokens of a conversation: prompt, what the model writes, and the text of the chat template between turns.

What the model wrote is never decoded and encoded again. After one of its turns, the template's own text and the reply
are appended as tokens:

    <|im_start|>user\\nWhat is 2+3?<|im_end|>\\n<|im_start|>assistant\\n     the prompt
    I add.<|im_end|>                                                      a turn of the model
    \\n<|im_start|>user\\nGo on.<|im_end|>\\n<|im_start|>assistant\\n         `after_turn`: the template and the reply
    5<|im_end|>                                                           the next turn

The text that follows a turn is found by rendering a conversation whose turn is a marker.

Only the template may make control tokens. A control token, such as the end of a turn, is a single token that a
tokenizer makes of a certain text, like `<|im_end|>`. In the reply of an environment this text must be encoded as
ordinary characters, which `PlainTextEncoder` does.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from covey.config import ConfigError
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.model.chat import Chat, Message

TURN = "coveyturn7"  # stands for a turn of the model, so a template must leave it unchanged
REPLY = "coveyreply{}z"  # stands for the content of a reply
QUESTION = {"role": "user", "content": "u"}
PLAIN_TURN = {"role": "assistant", "content": TURN}
# Contents that a template may change, as by JSON, or strip.
SAMPLES = ("5", 'He said "no"\\n', "two\nlines\n\n", "  spaces  ", "{{ x }}", "<tag>ü</tag>", "'", "null", "")


Part = tuple[str, bool]  # a text, and whether the template wrote it


class ReplyNotEncodable(Exception):
    """A reply that cannot follow a turn; one line with the reason."""


class ConversationEncoder:
    """Encodes turns and replies with the chat template of a model."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._plain = PlainTextEncoder(chat.tokenizer, chat.end_ids)
        self._pieces: dict[tuple[str, ...], list[str]] = {}
        self._last_turns: dict[str, str] = {}

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that no text of an environment becomes."""
        return self._plain.control_ids

    def check(self, roles: Sequence[str] = ("user",)) -> None:
        """Encode sample replies of each role.

        Raises:
            ConfigError: if the model has no chat template, or one that does not continue a conversation by appending.
        """
        for role in roles:
            for sample in SAMPLES:
                try:
                    tool = ToolCall("tool", {}).reply(sample)  # some templates need its identifier
                    self.after_turn([tool if role == "tool" else {"role": role, "content": sample}], ended=True)
                except ReplyNotEncodable as error:
                    if sample:  # the reply is refused when it occurs
                        raise ConfigError(
                            f"the model's chat template cannot continue a conversation with the reply {sample!r} of "
                            f"the role {role!r}: it {error}; change the template, or use another model"
                        ) from None

    def after_turn(self, replies: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        """Token ids between a turn of the model and its next one: the rest of the turn, replies, beginning of the next.

        Args:
            replies: messages of the roles user and tool, at least one.
            ended: the turn has its end token; otherwise the template's end token comes first.

        Raises:
            ReplyNotEncodable: if the template changes its own text with the content of a reply, or a reply would become
                a control token. ConfigError: if the template refuses the messages.
        """
        parts = self._parts(replies)
        ids = self._plain.encode(parts)
        return self.chat.check_ids(ids[self._closing(ids, parts[-1][0]) if ended else 0 :]) if ids else ()

    def own_text(self, message: Message) -> str:
        """The text of a given turn as the template writes it, without its end token, wherever it begins.

        Raises:
            ConfigError: if the template refuses it.
        """
        beginning = self.chat.render([QUESTION], answer_begins=True)
        whole = self.chat.render([QUESTION, message], answer_begins=False)
        common = _common(beginning, whole)
        if common != beginning:
            common = re.sub(r"[<\[][^<>\[\]\s]*\Z", "", common)  # two marks may begin alike
        text = whole[len(common) :].removesuffix(self._end_of_last(PLAIN_TURN))
        ids = self._with_end(self.chat.encode_text(text), beginning)
        return str(self.chat.tokenizer.decode(list(ids[:-1])))

    def turn(self, message: Message) -> tuple[int, ...]:
        """Token ids of a given turn of the model as it would write it, with the end token.

        Raises:
            ConfigError: if the template writes the turn in another place than after its beginning of an answer.
        """
        beginning = self.chat.render([QUESTION], answer_begins=True)
        whole = self.chat.render([QUESTION, message], answer_begins=False)
        if whole.startswith(beginning):
            text = whole[len(beginning) :]
        elif message.get("tool_calls"):
            raise ConfigError(
                "the model's chat template writes tool calls elsewhere than after its beginning of an answer"
            )
        else:
            marked = self.chat.render([QUESTION, PLAIN_TURN], answer_begins=False)
            text = str(message["content"]) + self._after_marker(marked)
        together, before = self.chat.encode_text(beginning + text), self.chat.encode_text(beginning)
        joined = together[: len(before)] == before
        return self._with_end(together[len(before) :] if joined else self.chat.encode_text(text), beginning)

    def _with_end(self, ids: Sequence[int], beginning: str) -> tuple[int, ...]:
        """The turn up to its last end token, if only white space follows it, or the beginning of another answer, which
        some templates always write; otherwise an end token is appended.
        """
        last = max((place for place, id in enumerate(ids) if id in self.chat.end_ids), default=None)
        if last is not None and beginning.rstrip().endswith(
            str(self.chat.tokenizer.decode(list(ids[last + 1 :]))).strip()
        ):
            return tuple(ids[: last + 1])
        return (*ids, self.chat.end_id)

    def _closing(self, ids: Sequence[int], after_reply: str) -> int:
        """The number of tokens that end the turn: white space, and the template's end token or what it writes in its
        place within a conversation, which then ends a reply, too.

        A token of the next message stays, also if it is an end token of the model, as GLM's `<|user|>` is.
        """
        for place, id in enumerate(ids):
            if id in self._own_ends:
                return place + 1
            if id in self._plain.control_ids:
                ends = next((id for id in self.chat.encode_text(after_reply) if id in self._plain.control_ids), None)
                return place + 1 if id == ends and self._own_ends and id not in self.chat.end_ids else 0
            if str(self.chat.tokenizer.decode([id])).strip():
                break
        return 0

    @cached_property
    def _own_ends(self) -> frozenset[int]:
        """The end tokens that the template writes after a turn that is the last message, one with a call or without."""
        call = {"role": "assistant", "content": "", "tool_calls": [ToolCall("t", {"a": TURN}).message()]}
        found: set[int] = set()
        for turn in (PLAIN_TURN, call):
            try:
                after = self._end_of_last(turn)
            except ConfigError:
                continue
            found.update([id for id in self.chat.encode_text(after) if id in self.chat.end_ids][:1])
        return frozenset(found)

    def _parts(self, replies: Sequence[Message]) -> list[Part]:
        """The text after a turn: pieces of the template, and between them the contents as it renders them."""
        pieces = self._template_pieces(replies)
        parts: list[Part] = [(pieces[0], True)]
        for number, reply in enumerate(replies):
            others = [
                reply if place == number else dict(other, content=REPLY.format(place))
                for place, other in enumerate(replies)
            ]
            # The same text as of the markers, with the content in the place of this one.
            before = "".join(pieces[k] + REPLY.format(k) for k in range(number)) + pieces[number]
            after = pieces[number + 1] + "".join(
                REPLY.format(k) + pieces[k + 1] for k in range(number + 1, len(replies))
            )
            text = self.text_after_turn(others)
            fits = len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after)
            if not fits:
                raise ReplyNotEncodable("writes other text of its own for this content")
            parts += [(text[len(before) : len(text) - len(after)], False), (pieces[number + 1], True)]
        return parts

    def _template_pieces(self, replies: Sequence[Message]) -> list[str]:
        """The template's own text before, between and after the contents of replies of these roles and names."""
        shape = tuple(json.dumps({**reply, "content": ""}, sort_keys=True, default=str) for reply in replies)
        if shape not in self._pieces:
            markers = [REPLY.format(place) for place in range(len(replies))]
            rest = self.text_after_turn(
                [dict(reply, content=marker) for reply, marker in zip(replies, markers, strict=True)]
            )
            pieces = []
            for marker in markers:
                if rest.count(marker) != 1:
                    raise ReplyNotEncodable("does not write the content of a reply exactly once")
                before, _, rest = rest.partition(marker)
                pieces.append(before)
            if len(self._pieces) > 1000:  # identifiers of tool calls differ
                self._pieces.clear()
            self._pieces[shape] = [*pieces, rest]
        return self._pieces[shape]

    def text_after_turn(self, replies: Sequence[Message]) -> str:
        """The text after the model's turn in a conversation of a question, the turn and these replies.

        Results of tools follow a turn with their calls, if the template takes it: some refuse results without calls, or
        write them into the turn.

        Raises:
            ConfigError: if the template refuses the messages.
        """
        results = [reply for reply in replies if reply["role"] == "tool"]
        calls = [ToolCall(str(each.get("name", "t")), {"a": TURN}, each.get("tool_call_id")) for each in results]
        if calls:
            try:
                turn = {"role": "assistant", "content": "", "tool_calls": [call.message() for call in calls]}
                return self._text_after_calls(turn, replies)
            except ConfigError:  # such as of a template that knows one call in a turn only
                pass
        return self._after_marker(self.chat.render([QUESTION, PLAIN_TURN, *replies]))

    def _text_after_calls(self, turn: Message, replies: Sequence[Message]) -> str:
        """The text from the end of the turn on, whose calls have the marker."""
        last, text = self._end_of_last(turn), self._after_marker(self.chat.render([QUESTION, turn, *replies]))
        of_calls = last.removesuffix(self._end_of_last(PLAIN_TURN))
        if text.startswith(of_calls) and last.endswith(self._end_of_last(PLAIN_TURN)):
            return text[len(of_calls) :]
        common = _common(last, text)
        ends = [
            common.find(self._plain.texts[id]) for id in self._own_ends if self._plain.texts.get(id, TURN) in common
        ]
        if ends:
            return text[min(ends) :]
        for control in (*self._plain.pattern.finditer(last), *self._plain.pattern.finditer(text)):
            if control.start() < len(common) < control.end():  # two control tokens begin alike
                common = common[: control.start()]
        return text[len(common) :]

    def _end_of_last(self, turn: Message) -> str:
        """The text after the marker of a turn that is the last message."""
        key = json.dumps(turn)
        if key not in self._last_turns:
            if len(self._last_turns) > 1000:  # identifiers of tool calls differ
                self._last_turns.clear()
            self._last_turns[key] = self._after_marker(self.chat.render([QUESTION, turn], answer_begins=False))
        return self._last_turns[key]

    def _after_marker(self, text: str) -> str:
        _, marker, after = text.partition(TURN)
        if not marker:
            raise ConfigError(
                "the model's chat template leaves out an earlier answer of the model, so a conversation cannot be "
                "continued: change the template, or use another model"
            )
        return after


def _common(first: str, second: str) -> str:
    """With what both begin."""
    differ = (place for place, both in enumerate(zip(first, second, strict=False)) if both[0] != both[1])
    return first[: next(differ, min(len(first), len(second)))]


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
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of the joined parts, without tokens that a tokenizer adds at the ends.

        Raises:
            ReplyNotEncodable: if a part of others would become a control token all the same.
        """
        wanted = [id for text, written in parts if written for id in self._controls(self._ids(text))]
        if not any(self.pattern.search(text) for text, written in parts if not written):
            ids = self._ids("".join(text for text, _ in parts))
            if self._controls(ids) == wanted:
                return ids
        renamed = self._renamed
        ids = list(self._ids_of_pieces(parts)) if renamed is None else self._renamed_ids(parts, *renamed)
        if self._controls(ids) != wanted:
            raise ReplyNotEncodable("cannot be used: its text would be encoded with a control token of the model")
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
                raise ReplyNotEncodable("cannot be used: its text has the hidden name of a control token")
            texts.append(self.pattern.sub(lambda found: names_of[found.group()], text) if written else text)
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
            for found in self.pattern.finditer(text) if written else ():
                yield from self._ids(piece + text[begin : found.start()], split_special_tokens=True)
                yield ids_of[found.group()]
                piece, begin = "", found.end()
            piece += text[begin:]
        yield from self._ids(piece, split_special_tokens=True)
