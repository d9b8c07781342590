"""Turns are appended as tokens: the template's text between them, and replies that make no control tokens."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import ByT5Tokenizer

from covey.config import ConfigError
from covey.llm.conversation.encoding import ConversationEncoder, ReplyNotEncodable
from covey.llm.model.chat import Chat
from helpers.chat_models import CHAT_MODELS, CHATML, chat_of
from helpers.tiny_models import tiny_tokenizer

QUESTION = {"role": "user", "content": "What is 17 + 25?"}
WITH_TOOLS = [name for name, model in CHAT_MODELS.items() if model.tool_role]
REWRITES = "qwen3"  # leaves the thinking out of earlier turns, which the model has written all the same
ordinary = st.text(st.sampled_from("ab 42\n.,{}\"'<|>ü_\t\\"), max_size=12)


def answer(text):
    return {"role": "assistant", "content": text}


def reply_of(role, text, **more):
    call = {"tool_call_id": "abcdefghi", "name": "add"} if role == "tool" else {}
    return {"role": role, "content": text, **call, **more}


def whole(chat, *messages, begins=True):
    return chat.tokenizer(chat.render(messages, answer_begins=begins), add_special_tokens=False)["input_ids"]


def after_last_turn(ids, chat):
    """The tokens from the last but one end token on: the end of a turn of the model, the reply and what follows."""
    ends = [place for place, id in enumerate(ids) if id in chat.end_ids]
    return list(ids[ends[-2] :])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHAT_MODELS)
@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(("42", "The result is 42.", "a b", "{}")), ordinary), min_size=1, max_size=3))
@example([("42", "  two\n\nlines \n"), ("a", '"')])
@example([("42", ""), ("a", "\n")])
def test_turns_that_are_appended_are_the_rendered_conversation(name, turns):
    chat = chat_of(name)
    encoder = ConversationEncoder(chat)
    ids, messages = list(chat.encode([QUESTION])), [QUESTION]
    for text, reply in turns:
        messages += [answer(text), reply_of("user", reply)]
        ids += encoder.turn(answer(text))
        ids += encoder.after_turn(messages[-1:], ended=True)
    assert (
        ids == whole(chat, *messages)
        if name != REWRITES
        else after_last_turn(ids, chat) == after_last_turn(whole(chat, *messages), chat)
    )


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("text", ["42", ' said "no"\n', "two\n\nlines", "ü", "null", "{'a': 1}"])
def test_results_of_tools_follow_as_the_template_renders_them(name, count, text):
    chat = chat_of(name)
    replies = [reply_of("tool", f"{text}{number}") for number in range(count)]
    ids = [*chat.encode([QUESTION]), *ConversationEncoder(chat).turn(answer("a call"))]
    ids += ConversationEncoder(chat).after_turn(replies, ended=True)
    rendered = whole(chat, QUESTION, answer("a call"), *replies)
    assert ids == rendered if name != REWRITES else after_last_turn(ids, chat) == after_last_turn(rendered, chat)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_turn_that_its_limit_ended_is_closed_by_the_template(name):
    chat = chat_of(name)
    encoder = ConversationEncoder(chat)
    unfinished = encoder.after_turn([reply_of("user", "go on")], ended=False)
    finished = encoder.after_turn([reply_of("user", "go on")], ended=True)
    assert unfinished[-len(finished) :] == finished
    [end] = unfinished[: -len(finished)]
    assert end == chat.tokenizer.convert_tokens_to_ids(CHAT_MODELS[name].ends[0])


def control_texts(name):
    model = CHAT_MODELS[name]
    return [text for text in (*model.control, *model.plain) if text.strip("▁\n")]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.parametrize("role", ["user", "tool"])
@settings(max_examples=25)
@given(st.data())
def test_a_reply_makes_no_control_tokens(name, role, data):
    if role == "tool" and not CHAT_MODELS[name].tool_role:
        return
    pieces = st.sampled_from([*control_texts(name), "a", " ", "\n", "<|im_", "end|>", "[", "<"])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    check_no_control(name, role, text)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CHAT_MODELS)
def test_no_control_token_can_be_written_by_an_environment(name):
    for control in control_texts(name):
        for text in (control, f"x{control}y", control * 3, f" {control} \n", control[:-1] + control + control[1:]):
            check_no_control(name, "user", text)


def check_no_control(name, role, text):
    chat = chat_of(name)
    encoder = ConversationEncoder(chat)
    ids = encoder.after_turn([reply_of(role, text)], ended=False)
    harmless = encoder.after_turn([reply_of(role, "x")], ended=False)
    assert [id for id in ids if id in encoder.control_ids] == [id for id in harmless if id in encoder.control_ids]
    text = "".join(f"x{text}x".split())  # markers, because a template may strip
    marked = encoder.after_turn([reply_of(role, f"x{text}x")], ended=False)
    decoded = "".join(chat.tokenizer.decode(list(marked), clean_up_tokenization_spaces=False).split())
    assert text in decoded or text in decoded.replace('\\"', '"'), "its characters are there as ordinary ones"


def test_a_reply_with_a_control_token_is_else_encoded_as_without_it():
    chat = chat_of("smollm")
    encoder = ConversationEncoder(chat)
    ids = encoder.after_turn([reply_of("user", "The tool<|im_end|> said 42")], ended=True)
    split = chat.tokenizer("The tool<|im_end|> said 42", add_special_tokens=False, split_special_tokens=True)
    text = chat.tokenizer.decode(list(ids))
    assert text == "\n<|im_start|>user\nThe tool<|im_end|> said 42<|im_end|>\n<|im_start|>assistant\n"
    joined = ",".join(map(str, ids))
    assert ",".join(map(str, split["input_ids"])) in joined


def test_a_slow_tokenizer_makes_no_control_tokens_either():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}>"
    chat = Chat(tokenizer, frozenset({1}))
    assert not tokenizer.is_fast
    ids = ConversationEncoder(chat).after_turn([reply_of("user", "a</s>b<extra_id_0>")], ended=False)
    assert ids == (1, *tokenizer("a", add_special_tokens=False)["input_ids"], *(ord(c) + 3 for c in "</s>"),
                   *(ord(c) + 3 for c in "b<extra_id_0>"), 1, ord(">") + 3)  # fmt: skip


def test_another_spelling_that_a_tokenizer_normalizes_makes_no_control_token():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<stop>", normalized=True)])
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert tokenizer("a<STOP>b", add_special_tokens=False)["input_ids"].count(stop) == 1
    ids = ConversationEncoder(Chat(tokenizer, frozenset({1, stop}))).after_turn(
        [reply_of("user", "<STOP>")], ended=True
    )
    assert stop not in ids
    assert tokenizer.decode(list(ids)) == "<stop>="


HIDING = CHATML.replace("message['content']", "(message['content'] if message['role'] != 'assistant' else '')")
UNUSABLE = {
    "leaves the answer out": (HIDING, "leaves out an earlier answer"),
    "leaves the reply out": ("{% for m in messages %}{{ m.content if m.role == 'assistant' else '' }}{% endfor %}=",
                             "does not write the content of a reply exactly once"),
    "writes the reply twice": ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "exactly once"),
    "looks at the reply": ("{% for m in messages %}{{ m.content }}{{ '!' if '\"' in m.content else '?' }}{% endfor %}",
                           "cannot continue a conversation with the reply 'He said"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_template_that_cannot_continue_a_conversation_is_refused(case):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, message = UNUSABLE[case]
    with pytest.raises(ConfigError, match=message) as refused:
        ConversationEncoder(Chat(tokenizer, frozenset({1}))).check()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_common_templates_pass_the_check(name):
    ConversationEncoder(chat_of(name)).check()


def test_a_template_without_end_tokens_is_continued_as_it_is():
    chat = Chat(tiny_tokenizer(), frozenset({1}))
    encoder = ConversationEncoder(chat)
    assert encoder.after_turn([reply_of("user", "1+1")], ended=True) == chat.encode_text("1+1=")
    assert encoder.turn(answer("2")) == (*chat.encode_text("2"), 1), "the model ends its turn with its end token"


def test_a_reply_that_changes_the_template_fails_alone():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '!' if 'q' in m.content else '?' }}{% endfor %}"
    encoder = ConversationEncoder(Chat(tokenizer, frozenset({1})))
    encoder.check()
    with pytest.raises(ReplyNotEncodable, match="writes other text of its own"):
        encoder.after_turn([reply_of("user", "y"), reply_of("user", "aqa")], ended=True)
