"""The texts of single tokens: joined they are the text of the sequence, for every kind of decoder."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey.llm.model.chat import TokenTexts
from covey.tracking.run_store import encode


def of_bytes() -> PreTrainedTokenizerFast:
    """One token for each byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def of_words() -> PreTrainedTokenizerFast:
    """SentencePiece's way: '▁' is a space, and the first space of a text is not there."""
    words = ["<unk>", "▁a", "▁b", "c", "▁", "d"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


def test_a_character_of_several_tokens_is_the_text_of_the_last() -> None:
    tokenizer = of_bytes()
    ids = [*tokenizer("aé🦆b")["input_ids"], tokenizer.eos_token_id]
    assert TokenTexts(tokenizer)(ids) == ["a", "", "é", "", "", "", "🦆", "b", "<end>"]


def test_bytes_that_are_no_character_are_a_replacement_character() -> None:
    tokenizer = of_bytes()
    duck, letter = tokenizer("🦆")["input_ids"], tokenizer("a")["input_ids"]
    for ids in (duck[:3], [*duck[:2], *letter], [duck[1], *duck], [*letter, duck[3], duck[3], *letter]):
        texts = TokenTexts(tokenizer)(ids)
        assert "".join(texts) == tokenizer.decode(ids)
        assert len(texts) == len(ids)


def test_a_first_space_that_is_not_there() -> None:
    tokenizer = of_words()
    assert tokenizer.decode([1, 2]) == "a b"
    assert TokenTexts(tokenizer)([1, 2, 3, 1]) == ["a", " b", "c", " a"]
    assert TokenTexts(tokenizer)([]) == []


def test_a_decoder_that_rewrites_everything_has_its_text_at_the_last_token() -> None:
    class Reverses:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(chr(97 + number) for number in reversed(ids))

    assert TokenTexts(Reverses())([0, 1, 2]) == ["", "", "cba"]


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_a_lone_surrogate_is_written_and_read(text: str) -> None:
    """Tokenizers do not make them, but a reward function may log one."""
    assert json.loads(encode({"texts": [text], "advantages": [float("nan"), 1.0]})) == {
        "texts": [text],
        "advantages": [None, 1.0],
    }
