"""A completion ends with the token after which its decoded text contains a stop string."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey.data import EndReason, Start
from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import Engine, LocalGenerator
from covey.llm.model.chat import Chat
from covey.llm.model.stop_strings import StopStrings, stop_strings
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.sampler import LanguageSampler
from covey.runtime.foreign_json import BadJson
from helpers.chat_models import CHAT_MODELS
from helpers.chat_models import chat_of as chat_model
from helpers.tiny_models import tiny_model, tiny_tokenizer

ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are all bytes, some words of several characters, and a special token."""
    into = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [*sorted(ALPHABET), *(into.pre_tokenize_str(word)[0][0] for word in words)]
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer, tokenizer.decoder = into, decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.add_special_tokens({"eos_token": "</answer>"})
    fast.add_tokens(["<b>\n\n"])
    return fast


def sentence_piece() -> PreTrainedTokenizerFast:
    """A tokenizer that decodes as Llama 2's: bytes that are not text become U+FFFD, and the first space is removed."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "n", "</", "answer", ">"]
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)


BYTES = byte_level(["an", "swer", "</", "</an", "er>", ">\n", "\n\n", "\n\n\n", "a\n", "é", "🙂", " n't", "ans"])
TOKENIZERS: dict[str, Any] = {"bytes": BYTES, "pieces": sentence_piece(), "characters": tiny_tokenizer()}
TEXTS = ("</answer>", "\n\n", "a", "é", "🙂🙂", "swer>\n", "n't", "e", " a", "  ")


def chat_of(kind: str) -> Chat:
    return Chat(TOKENIZERS[kind], frozenset({1}))


def end_by_whole_texts(chat: Chat, stops: tuple[str, ...], tokens: list[int]) -> int | None:
    """The definition: decode every prefix whole."""
    special = [stop for stop in stops if any(text in stop for text in chat.tokenizer.all_special_tokens)]
    for count in range(1, len(tokens) + 1):
        whole = chat.tokenizer.decode(tokens[:count])
        if any(stop in chat.decode(tokens[:count]) for stop in stops) or any(stop in whole for stop in special):
            return count
    return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.data())
@settings(max_examples=60)
def test_the_end_is_that_of_the_whole_decoded_text(kind: str, data: st.DataObject) -> None:
    chat = chat_of(kind)
    stops = tuple(data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3, unique=True)))
    # Most tokens from the end of the vocabulary, where the words are.
    token = st.integers(0, len(chat.tokenizer) - 1) | st.integers(len(chat.tokenizer) - 16, len(chat.tokenizer) - 1)
    tokens = data.draw(st.lists(token, min_size=1, max_size=12))
    stop = StopStrings(chat, stops)
    expected = end_by_whole_texts(chat, stops, tokens)
    assert stop.end_of(tokens) == expected
    whole = tokens[:expected]
    assert stop.end(whole) == (expected is not None)
    assert not any(stop.end(tokens[:count]) for count in range(1, len(whole)))


@given(st.text(alphabet="</answer>\n é🙂", min_size=1, max_size=12), st.sampled_from(TEXTS))
@example("x</answer>y", "</answer>")
@example("ab🙂🙂", "🙂🙂")
@settings(max_examples=60)
def test_characters_of_several_bytes_are_completed_by_their_last_byte(text: str, stop: str) -> None:
    chat = chat_of("bytes")
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    tokens = chat.tokenizer.convert_tokens_to_ids(list(symbols))
    found = StopStrings(chat, (stop,)).end_of(tokens)
    place = text.find(stop)
    assert found == (None if place < 0 else len(text[: place + len(stop)].encode()))


def test_a_tokenizer_that_replaces_characters_is_asked_for_every_token():
    """The token is '▁a', its text ' a'."""
    chat = chat_of("pieces")
    tokens = chat.tokenizer.convert_tokens_to_ids(["n", "a", "▁a", "n"])
    assert StopStrings(chat, (" a",)).end_of(tokens) == 3


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_special_token_is_a_stop_string(name: str) -> None:
    """Alone and with text around it; the text of the completion does not have it."""
    chat = chat_model(name)
    encode = chat.encode_text
    for special in chat.tokenizer.all_special_tokens:
        tokens = [*encode("It is 4"), chat.tokenizer.convert_tokens_to_ids(special), *encode("2\nand"), *encode(" so")]
        place = len(encode("It is 4")) + 1
        assert StopStrings(chat, (special,)).end_of(tokens) == place
        assert StopStrings(chat, ("zz", special)).end(tokens[:place])
        begin, _, rest = chat.tokenizer.decode(tokens).partition(special)
        after = StopStrings(chat, (special + rest[:2],)).end_of(tokens)
        assert after is not None
        assert place < after <= place + len(encode("2\nand"))
        plain = StopStrings(chat, (begin[-1] + rest[:2],)).end_of(tokens)
        assert plain == after, "a text is looked for without special tokens"
        assert StopStrings(chat, (special + "3",)).end_of(tokens) is None


def test_few_tokens_of_a_byte_level_vocabulary_are_looked_at():
    stop = StopStrings(chat_of("bytes"), ("</answer>",))
    looked_at = {BYTES.convert_ids_to_tokens(place) for place in stop.completing_V.nonzero()[0].tolist()}
    assert looked_at == {">", "er>", ">Ċ", "</answer>", "<b>\n\n"}  # the last two are added tokens


def policy_and_chat() -> tuple[LanguagePolicy, Chat]:
    return LanguagePolicy(tiny_model()), Chat(tiny_tokenizer(), frozenset({1}), 84)


def sampler_with(stops: tuple[str, ...], *, rows: int = 0, limit: int = 24) -> LanguageSampler:
    policy, chat = policy_and_chat()
    return LanguageSampler(
        LocalGenerator(policy), chat, 3, limit, rows_at_once=rows, stop=stop_strings(chat, stops)
    )  # fmt: skip


STARTS = [Start(index, text) for index, text in enumerate(["12+3=", "ab", "x", "7"])]
STOPS = ("7", "Z", "B>p", "=E")  # the last two take several tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [0, 4, 8])
def test_completions_are_those_without_stop_strings_cut_after_the_first(rows: int) -> None:
    sampler = sampler_with(STOPS, rows=rows)
    assert sampler.stop is not None
    found = sampler.sample(STARTS, 4, 1)
    whole = sampler_with(()).sample(STARTS, 4, 1)
    ended_early = 0
    for group, other in zip(found, whole, strict=True):
        for rollout, longer in zip(group.rollouts, other.rollouts, strict=True):
            count = end_by_whole_texts(sampler.chat, STOPS, longer.actions)
            assert rollout.actions == longer.actions[:count]
            assert rollout.behavior_logprobs == pytest.approx(longer.behavior_logprobs[:count], abs=1e-5)
            assert (rollout.end is EndReason.STOP) == (count is not None or longer.end is EndReason.STOP)
            if count is not None:
                assert any(stop in rollout.text for stop in STOPS)  # the text keeps it
                ended_early += 1
    assert 4 < ended_early < 16


@pytest.mark.sampled(5)
@pytest.mark.parametrize("limit", [1, 2, 5, 11, 24])
def test_groups_that_are_truncated_are_those_of_a_lower_limit(limit: int) -> None:
    whole = sampler_with(STOPS)
    cut = whole.truncated(whole.sample(STARTS, 4, 1), limit)
    for group, expected in zip(cut, sampler_with(STOPS, limit=limit).sample(STARTS, 4, 1), strict=True):
        for rollout, other in zip(group.rollouts, expected.rollouts, strict=True):
            assert (rollout.actions, rollout.end, rollout.text) == (other.actions, other.end, other.text)


def requests(stops: tuple[str, ...], chat: Chat) -> list[GenerationRequest]:
    settings = GenerationSettings(24, 1.0, frozenset({1}), 0, stop=stop_strings(chat, stops))
    return [GenerationRequest((5 + group, 6), 3, RandomKey(3, 1, group), settings) for group in range(4)]


def test_a_server_and_a_run_without_one_have_the_same_completions():
    """Through the bodies of the routes; vLLM's server ignores the strings, and its answer is cut."""
    policy, chat = policy_and_chat()
    expected = LocalGenerator(policy).generate(requests(STOPS, chat))
    engine = Engine(policy)
    engine.start()
    for request, local in zip(requests(STOPS, chat), expected, strict=True):
        for covey in (True, False):
            body = wire.request_body(request, "run-0", covey=True)
            assert body["sampling_params"]["stop"] == list(STOPS)
            if not covey:
                del body["sampling_params"]["stop"]
            asked = wire.read_request(
                json.dumps(body).encode(), 84, ("run-0", 0), lambda strings: stop_strings(chat, strings)
            )
            assert asked.settings.stop is (stop_strings(chat, STOPS) if covey else None)
            answer = wire.answer_body(engine.generate(asked).result(60), "run-0")  # type: ignore[arg-type]
            found = wire.read_answer(answer, request, "run-0", 84)
            assert [(one.tokens, one.end) for one in found] == [(one.tokens, one.end) for one in local]  # type: ignore[union-attr]
            assert all(len(one.tokens) == len(one.logprobs) for one in found)
    engine.stop()
    assert "stop" not in wire.request_body(requests(STOPS, chat)[0], "run-0", covey=False)["sampling_params"]


@pytest.mark.parametrize("stop", ["7", [7], [""], ["x" * 1001], ["x"] * 17, None])
def test_a_server_refuses_strings_that_are_none(stop: Any) -> None:
    body = wire.request_body(requests((), policy_and_chat()[1])[0], "run-0", covey=True)
    body["sampling_params"]["stop"] = stop
    with pytest.raises(BadJson, match=r"sampling_params\.stop(\[0\])? must be"):
        wire.read_request(json.dumps(body).encode(), 84, ("run-0", 0), lambda strings: None)
