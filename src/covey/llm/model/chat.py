"""Conversion between text and token ids: chat templates, end tokens, decoding, the texts of single tokens."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from covey.config import ChatConfig, ConfigError
from covey.llm.conversation.tool_calls import ToolCall, given_calls, marks_of, with_common_marks
from covey.llm.data.images import ImagePrompt
from covey.llm.model.chat_templates import TemplateFailed, render
from covey.llm.model.images import ImageReader

Message = Mapping[str, Any]
ToolSchema = Mapping[str, Any]  # JSON schema of a function, as transformers' templates read it
NO_ADDITIONS = ChatConfig()
MARKER = "coveymarker"  # stands for a text, to see whether a template writes it


class TokenPrompt(str):
    """A prompt given as token ids, which are fed unchanged; rewards get its text."""

    __slots__ = ("ids",)
    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> TokenPrompt:
        prompt = super().__new__(cls, text)
        prompt.ids = tuple(ids)
        return prompt


class Chat:
    """Encodes prompts for one model and decodes its completions."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        embedded: int | None = None,
        config: ChatConfig = NO_ADDITIONS,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            tokenizer: of the model.
            end_ids: token ids that end a completion.
            embedded: number of token ids with an embedding; None: prompts are not checked.
            config: system prompt, examples and switches of the template.
            folder: of the model's files, with which a processor of images may be; None: it has none.
        """
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.embedded = embedded
        self.config = config
        self.images = None if folder is None else ImageReader(folder, tokenizer)
        self._template_options = config.assigned_options
        self._call_forms: dict[str, str] = {}

    @property
    def end_id(self) -> int:
        """The token that ends a turn which has none: the tokenizer's end token, if it ends the model's completions."""
        end = self.tokenizer.eos_token_id
        return end if end in self.end_ids else min(self.end_ids)

    def with_config(self, config: ChatConfig) -> Chat:
        """The same model's chat with a system prompt, examples and switches of the template."""
        return Chat(self.tokenizer, self.end_ids, self.embedded, config, self.images.folder if self.images else None)

    @cached_property
    def for_tools(self) -> Chat:
        """The chat of conversations with tools, of which all is written by the template `tool_use`, if there is one."""
        templates = self.tokenizer.chat_template
        if not isinstance(templates, dict) or "tool_use" not in templates:
            return self
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = templates["tool_use"]
        return Chat(tokenizer, self.end_ids, self.embedded, self.config)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and the processor of images if there is one."""
        self.tokenizer.save_pretrained(folder)
        if self.images is not None:
            self.images.save(folder)

    def encode(self, prompt: str | Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Token ids of a prompt: a string is encoded unchanged, messages by the model's chat template. The config's
        system prompt and examples come before messages.

        `tools` are JSON schemas of functions, which the template shows to the model.

        Tokens that a tokenizer appends to a text, such as an end token, are left out, because a completion follows.

        Raises:
            ConfigError: for messages if the model has no chat template, or it cannot render them; for an empty prompt;
                for a string if the config adds to messages.
        """
        ids: Any
        if isinstance(prompt, TokenPrompt):
            ids = prompt.ids
        elif isinstance(prompt, ImagePrompt):
            ids = self._with_images(prompt)
        elif isinstance(prompt, str):
            if self.config != NO_ADDITIONS:
                raise ConfigError(
                    "a prompt is a plain string, which is fed unchanged, and the table [chat] is for chat messages: "
                    'write such prompts as [{"role": "user", "content": "..."}], or remove [chat]'
                )
            ids = self.tokenizer(prompt)["input_ids"]
            if self._appended and tuple(ids[-len(self._appended) :]) == self._appended:
                ids = ids[: -len(self._appended)]
        else:
            ids = self._rendered(self.config.added_to(prompt), answer_begins=True, tools=tools)
        if not ids:
            raise ConfigError("a prompt is empty: a model needs at least one token to continue from")
        return self.check_ids(ids)

    def _with_images(self, prompt: ImagePrompt) -> Sequence[int]:
        if self.images is None:
            raise ConfigError(
                "the prompt has images, and the model was given without the files of its processor: give its name"
            )
        return self.images.encode(prompt, self.config.added_to, self.render)

    def begins_twice(self, prompt: Any) -> bool:
        """True if a prompt that is a text begins with the model's first token, because a chat template has rendered it,
        and the tokenizer adds the token once more.
        """
        begin, id = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        begins = _is_text(prompt) and begin is not None and prompt.startswith(begin)
        return begins and self.encode(prompt)[:2] == (id, id)

    def is_unmarked(self, prompt: Any) -> bool:
        """True if a prompt is a text without special tokens, and the model has a chat template, which adds some."""
        return (
            bool(self.tokenizer.chat_template)
            and _is_text(prompt)
            and not any(token in prompt for token in self.tokenizer.all_special_tokens)
        )

    def encode_whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat that ends with the model's answer, by the model's chat template.

        Raises:
            ConfigError: if the model has no chat template, or it cannot render the messages.
        """
        return self.check_ids(self._rendered(messages, answer_begins=False))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text within a sequence, without the tokens that a tokenizer adds at its ends."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.check_ids(ids) if ids else ()

    def _rendered(self, messages: Sequence[Message], *, answer_begins: bool, tools: Sequence[ToolSchema] = ()) -> Any:
        text = self.render(messages, answer_begins=answer_begins, tools=tools)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError(
                f"the model's chat template makes no text of the messages {_roles(messages)}: use messages that it "
                "knows, or prompts that are plain strings"
            )
        return ids

    def check_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids, if the model has an embedding for each.

        Raises:
            ConfigError: if it has not.
        """
        if self.embedded is not None and max(ids) >= self.embedded:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise ConfigError(
                f"a prompt holds the token {token!r} (number {max(ids)}), but the model has embeddings for "
                f"{self.embedded} tokens only: leave it out of the prompts and the chat template"
            )
        return ids if isinstance(ids, tuple) else tuple(ids)

    @cached_property
    def _appended(self) -> tuple[int, ...]:
        """The ids that the tokenizer appends to every text."""
        plain, whole = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        for begin in range(len(whole) - len(plain) + 1):
            if plain and whole[begin : begin + len(plain)] == plain:
                return tuple(whole[begin + len(plain) :])
        return ()

    def render(
        self, messages: Sequence[Message], *, answer_begins: bool = True, tools: Sequence[ToolSchema] = ()
    ) -> str:
        """Render the text of a chat, up to the beginning of the model's answer, or with it among the messages.

        Raises:
            ConfigError: if the model has no chat template, or it cannot render the chat.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "the prompts are chat messages but the model has no chat template: "
                "use an instruction-tuned model, or prompts that are plain strings"
            )
        try:
            template = self.tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None)
        except ValueError as error:
            raise ConfigError(
                f"the model has several chat templates and none is called 'default' ({error}): name one of them so"
            ) from error
        known = [_for_template(message) for message in messages]
        if any("tool_calls" in message for message in known):
            form = self._call_form(template)
            if not form:
                raise ConfigError(
                    "the model's chat template leaves out the tool calls of a message, so the model would not read "
                    "them: write them into the 'content' of the message, or use another model"
                )
            known = _with_text_arguments(known) if form == "text" else known
        try:
            return render(template, known, self._variables, answer_begins=answer_begins, tools=tools)
        except TemplateFailed as error:
            raise ConfigError(
                f"the model's chat template {error} (the roles are {_roles(messages)}): change the prompts or the "
                "template, or use prompts that are plain strings"
            ) from error

    def writes_calls(self, template: str) -> bool:
        """True if a chat template writes the `tool_calls` of messages."""
        return bool(self._call_form(template))

    def _call_form(self, template: str) -> str:
        """How a chat template takes the arguments of `tool_calls`: as an "object", or as its JSON "text", which some
        templates join with their own text; "" if it leaves calls out.
        """
        if template not in self._call_forms:
            call = {"role": "assistant", "content": "", "tool_calls": [ToolCall(MARKER, {MARKER: MARKER}).message()]}
            messages: list[Message] = [{"role": "user", "content": "u"}, call]
            forms: dict[str, Sequence[Message]] = {"object": messages, "text": _with_text_arguments(messages)}
            found = {}
            for form, given in forms.items():
                try:
                    text = render(template, given, self._variables, answer_begins=False)
                except TemplateFailed:
                    continue
                if MARKER in text:
                    found[form] = text.count(f"'{MARKER}'")  # as Python writes an object
            self._call_forms[template] = min(found, key=found.__getitem__, default="")
        return self._call_forms[template]

    @property
    def _variables(self) -> dict[str, Any]:
        """Variables of the template beside the messages."""
        return {**self.tokenizer.special_tokens_map, **self._template_options}

    def decode(self, actions: Sequence[int]) -> str:
        """Decode a completion, without the end token and other special tokens. Thinking whose marks are special tokens
        is between <think> and </think>.
        """
        marks, specials = self._marks
        text = str(self.tokenizer.decode(list(actions), skip_special_tokens=specials is None))
        return text if specials is None else specials.sub("", with_common_marks(text, *marks))

    @cached_property
    def _marks(self) -> tuple[tuple[tuple[str, str], str], re.Pattern[str] | None]:
        """The marks of `marks_of`, and the special tokens; None: the marks have none."""
        marks = marks_of(self.tokenizer.chat_template)
        specials = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        has_some = any(token in marks[0][0] for token in specials)
        return marks, re.compile("|".join(map(re.escape, specials))) if has_some else None


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) and not isinstance(prompt, TokenPrompt)


def _for_template(message: Message) -> dict[str, Any]:
    """A message without empty entries; the arguments of its calls are objects, which templates write as JSON.

    Raises:
        ConfigError: for an entry of `tool_calls` that is not a call.
    """
    known = {key: value for key, value in message.items() if value is not None}
    try:
        calls = given_calls(known)
    except ValueError as error:
        raise ConfigError(f"an entry of 'tool_calls' is not a call of a tool: {error}") from None
    known.pop("tool_calls", None)
    written = [call.message() | ({} if call.id is None else {"id": call.id}) for call in calls]
    return known | ({"tool_calls": written} if written else {})


def _with_text_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    found = [dict(message) for message in messages]
    for message in found:
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
            message["tool_calls"] = [
                {**call, "function": {**function, "arguments": text}}
                for call, function, text in zip(calls, functions, texts, strict=True)
            ]
    return found


def _roles(messages: Sequence[Message]) -> str:
    roles = [message["role"] for message in messages]
    return ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")


def end_ids_of(config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    """All ids that end a completion: the end tokens of the model, its generation config and its tokenizer.

    Raises:
        ConfigError: for an end token that is not an id.
    """
    found: set[int] = set()
    for declared in (
        getattr(config, "eos_token_id", None),
        getattr(generation, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        listed = declared if isinstance(declared, (list, tuple)) else [declared]
        for end in listed:
            if end is not None and (not isinstance(end, int) or isinstance(end, bool)):
                raise ConfigError(
                    f"eos_token_id {declared!r} is not a token id: correct generation_config.json or config.json"
                )
        found.update(end for end in listed if end is not None and end >= 0)
    return frozenset(found)


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for bytes that are not a whole character


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
