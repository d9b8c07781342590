"""The [chat] table: system prompt, examples and the template's switches come before every prompt of messages."""

from pathlib import Path
from typing import Any

import pytest

from covey.config import ArithmeticConfig, ChatConfig, ConfigError, RunConfig, SamplingConfig
from covey.config.rules import validate
from covey.experiment.evaluation import sample_model
from covey.experiment.models import load_policy
from covey.llm.model.chat import Chat, TokenPrompt
from covey.llm.tasks.prompt_limit import PromptLimit
from covey.runtime.device import build_machine
from helpers.tiny_models import tiny_folder, tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}){% endfor %}"
    "{% if not (thinking is defined and thinking is false) %}<think>{% endif %}"
    "{% if add_generation_prompt %}={% endif %}"
)
ASKED = [{"role": "user", "content": "7?"}]
FULL = ChatConfig(
    system_prompt="Be brief.", examples=("1?", "one", "2?", "two"), template_options=("thinking = false",)
)


def chat_with(config: ChatConfig) -> Chat:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Chat(tokenizer, frozenset({1}), 84).with_config(config)


def encoded(config: ChatConfig, prompt: Any = ASKED) -> str:
    return chat_with(config).decode(chat_with(config).encode(prompt))


def test_a_prompt_begins_with_the_system_prompt_and_the_examples():
    assert encoded(ChatConfig()) == "(user:7?)<think>="
    assert encoded(ChatConfig(template_options=("thinking = false",))) == "(user:7?)="
    assert encoded(FULL) == "(system:Be brief.)(user:1?)(assistant:one)(user:2?)(assistant:two)(user:7?)="


def test_a_system_message_of_the_prompt_replaces_the_recipes():
    own = [{"role": "system", "content": "Sing."}, *ASKED]
    assert encoded(ChatConfig(system_prompt="Be brief."), own) == "(system:Sing.)(user:7?)<think>="


def test_examples_follow_a_system_message_of_the_prompt():
    own = [{"role": "system", "content": "Sing."}, *ASKED]
    expected = "(system:Sing.)(user:1?)(assistant:one)(user:2?)(assistant:two)(user:7?)="
    assert encoded(FULL, own) == expected


@pytest.mark.parametrize("config", [FULL, ChatConfig(system_prompt="x"), ChatConfig(template_options=("a = 1",))])
def test_a_plain_string_is_refused(config: ChatConfig) -> None:
    with pytest.raises(ConfigError, match=r"plain string, which is fed unchanged, and the table \[chat\]"):
        chat_with(config).encode("7?")
    assert chat_with(config).encode(TokenPrompt("7?", [9, 8])) == (9, 8)


def test_the_length_of_a_prompt_counts_what_is_added():
    config = tiny_model().config  # 256 positions
    long = ChatConfig(system_prompt="x" * 240)
    assert not PromptLimit(chat_with(ChatConfig()), config, 20).fault(ASKED)
    assert "exceed the model's 256 positions" in PromptLimit(chat_with(long), config, 20).fault(ASKED)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (ChatConfig(examples=("a", "b", "c")), "chat.examples has 3 texts"),
        (ChatConfig(examples=("a", " ")), "chat.examples has an empty text"),
        (ChatConfig(template_options=("thinking",)), "chat.template_options has 'thinking': an option is a name"),
        (ChatConfig(template_options=("messages = 1",)), "has messages, which covey sets itself"),
        (ChatConfig(template_options=("a = 1", "a = 2")), "chat.template_options has a twice"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(chat: ChatConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(RunConfig(task=ArithmeticConfig(), chat=chat))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stop", "message"),
    [(("",), "an empty string"), (("a\N{REPLACEMENT CHARACTER}",), "U\\+FFFD"), (("a", "a"), "a string twice")],
)
def test_stop_strings_that_cannot_be_used_are_refused(stop: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RunConfig(task=ArithmeticConfig(), sampling=SamplingConfig(stop=stop)))


@pytest.mark.slow
def test_a_run_and_samples_use_the_table(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    chat = ChatConfig(system_prompt="Be brief.")
    config = RunConfig(model=str(folder), task=ArithmeticConfig(), chat=chat, sampling=SamplingConfig(stop=("7", "a")))
    loaded = load_policy(config, build_machine("cpu", "fp32", 1))
    assert loaded.chat.decode(loaded.sampler.chat.encode(ASKED)) == "Be brief.7?="
    assert loaded.sampler.stop is not None
    assert loaded.sampler.stop.strings == ("7", "a")
    (text,) = sample_model(config, "2+2", 1, 1.0)
    assert text != sample_model(RunConfig(model=str(folder), task=ArithmeticConfig()), "2+2", 1, 1.0)[0]
