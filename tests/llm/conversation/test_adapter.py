"""Adapters: turns and responses, and what a run makes of their options and prompts."""

import json
from dataclasses import replace

import pytest

from covey.config import ConfigError, ConversationConfig, EnvironmentTaskConfig, RewardConfig, RunConfig
from covey.data import Start
from covey.experiment.problem import build_problem, build_rollout_kind
from covey.llm.conversation.adapter import WrongEnvironment, function_schema
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.environment import HostedEnvironment, check_options, style_of
from covey.llm.conversation.processes import EnvironmentProcesses
from covey.llm.conversation.sampler import ConversationSampler
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tool_calls import FORMATS, ToolCall
from covey.llm.conversation.tools import Tool, ToolError, check_call
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from helpers.chat_models import chat_of, tiny_chat
from helpers.shop_adapter import PRICE, Shop
from helpers.tiny_models import tiny_model

PRICES = [Tool("price", function_schema("price", "Price of an item.", PRICE))]
CONFIG = RunConfig(
    task=EnvironmentTaskConfig(), conversation=ConversationConfig(environment="helpers.shop_adapter:Shop")
)


def answered(hosted: HostedEnvironment, **request: object) -> dict[str, object]:
    return hosted.answer({"do": "respond", "message": "", "calls": [], **request})


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "mistral", "smollm"])
def test_results_of_calls_come_before_the_text_of_the_adapter(name: str) -> None:
    chat = chat_of(name)
    style = Style(chat, "respond", PRICES)
    hosted = HostedEnvironment(Shop, 100)
    calls = [ToolCall("price", {"item": "cup"}), ToolCall("price", {"item": 3}), ToolCall("price", {"item": "pen"})]
    turn = style.read(chat.encode_text(style.format.write(calls)))
    assert turn.request is not None
    assert turn.request["calls"] == [{"name": "price", "arguments": {"item": item}} for item in ("cup", "pen")]
    answer = style.take(turn, hosted.answer(turn.request))
    assert [reply["content"] for reply in answer.replies] == [
        "cup: 3", "Error: the argument 'item' of price must be a string, and is an integer", "pen: 3",
        "Anything else?",
    ]  # fmt: skip
    assert (answer.reward, answer.done) == (0.25, False)
    assert answer.replies[-1]["role"] == "user"
    assert {reply["role"] for reply in answer.replies} == {*style.reply_roles}
    encoder = ConversationEncoder(chat)
    encoder.check(style.reply_roles)
    assert encoder.after_turn(answer.replies, ended=True)


def test_a_turn_without_a_call_goes_to_the_adapter_and_one_with_wrong_calls_alone_does_not() -> None:
    chat = chat_of("qwen2.5")
    style = Style(chat, "respond", PRICES)
    turn = style.read(chat.encode_text("bye"))
    assert turn.request == {"do": "respond", "message": "bye", "calls": []}
    answer = style.take(turn, HostedEnvironment(Shop, 100).answer(turn.request))
    assert (answer.replies, answer.reward, answer.done) == ([], 0.25, True)
    wrong = style.read(chat.encode_text(style.format.write([ToolCall("cost", {})])))
    assert wrong.request is None
    assert style.take(wrong, {}).replies[0]["content"].startswith("Error: there is no tool 'cost'")


def test_without_tools_no_call_is_looked_for() -> None:
    chat = chat_of("qwen2.5")
    style = Style(chat, "respond", [])
    text = FORMATS["hermes"].write([ToolCall("price", {})])
    turn = style.read(chat.encode_text(text))
    assert turn.request == {"do": "respond", "message": text, "calls": []}
    assert style.reply_roles == ("user",)
    assert style.encode([{"role": "user", "content": "u"}]) == chat.encode([{"role": "user", "content": "u"}])


def test_the_requests_of_a_conversation() -> None:
    assert style_of(Shop) == style_of(Shop()) == "respond"
    hosted = HostedEnvironment(lambda: Shop(score=2), 8)
    assert hosted.answer({"do": "describe"}) == {"style": "respond", "tools": [PRICES[0].schema]}
    assert hosted.answer({"do": "reset", "columns": {"kind": 7}})["text"] == "Kind 7,  ... (7 more characters)"
    said = answered(hosted, message="a", calls=[{"name": "price", "arguments": {"item": "teapot"}}])
    assert said["texts"] == ["teapot:  ... (1 more characters)"]
    assert "finite number" in str(answered(hosted, message="odd")["failed"])
    assert hosted.answer({"do": "end"}) == {"attributes": {"said": ["a", "odd"]}, "reward": 2.0}
    assert hosted._environment.said[-1] == "closed"
    assert HostedEnvironment(lambda: Shop(score=None), 8).answer({"do": "end"})["reward"] is None
    assert "finite number" in HostedEnvironment(lambda: Shop(score="x"), 8).answer({"do": "end"})["failed"]


def test_options_that_a_class_does_not_take_are_refused() -> None:
    check_options(Shop, {"prices": [2]})
    with pytest.raises(
        WrongEnvironment, match="got an unexpected keyword argument 'price'; its options are prices, score: "
    ):
        check_options(Shop, {"price": [1]})
    check_options(lambda id, **others: None, {"id": 1, "anything": 1})


def test_foreign_schemas_are_read_for_the_check_of_calls() -> None:
    parameters = {
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "b": {"oneOf": [{"const": "x"}, {"type": "integer", "minimum": 3}], "title": "B"},
            "c": {"type": "array", "items": {"type": "object", "additionalProperties": False}},
            "d": {"type": "object", "additionalProperties": {"type": "string"}},
            "e": True,
        },
        "required": ["a", "unknown"],
    }
    tool = Tool("t", function_schema("t", "", parameters))
    check_call([tool], ToolCall("t", {"a": [1], "b": "x", "c": [{"k": 1}], "d": {"k": "v"}, "e": None}))
    for name, value in {"b": "y", "c": [1], "d": {"k": 1}}.items():
        with pytest.raises(ToolError):
            check_call([tool], ToolCall("t", {"a": 1, name: value}))
    with pytest.raises(ToolError, match="needs the argument 'a'"):
        check_call([tool], ToolCall("t", {}))
    assert function_schema("t", "", {})["function"]["parameters"]["properties"] == {}


def test_a_run_has_the_prompts_of_its_adapter() -> None:
    kind = build_rollout_kind(CONFIG)
    problem = build_problem(CONFIG, kind=kind)
    assert kind.default_rewards == (RewardConfig(name="environment"),)
    held_out = {json.dumps(start.prompt) for start in problem.held_out}
    assert len(held_out) == 2
    drawn = problem.task.draw(0, 1, 6)
    assert len({json.dumps(start.prompt) for start in drawn} - held_out) == 6
    assert problem.notes(2, "evaluation.problems") == [
        "environment helpers.shop_adapter:Shop: 6 different prompts to train on, 2 held out (environment "
        "helpers.shop_adapter:Shop, held-out rows); 2 lines dropped that environment helpers.shop_adapter:Shop, "
        "held-out rows holds too"
    ]
    rollout = kind.example(Start(0, "p", {"kind": 4, "answer": "bye"}))
    assert rollout.messages is not None
    assert rollout.messages[0]["content"] == "Kind 4, 1 shop.", "it is prepared once, before the processes fork"
    assert rollout.turn_rewards == [0.75]
    problem.grader.close()
    with pytest.raises(ConfigError, match=r"brings prompts of its own: remove it"):
        kind.task(EnvironmentTaskConfig(instruction="Go"))
    kind.close()


def test_an_adapter_that_cannot_be_prepared_is_refused() -> None:
    wrong = replace(CONFIG, conversation=replace(CONFIG.conversation, options=("prices = []",)))
    with pytest.raises(ConfigError, match=r"Shop cannot be loaded: the option prices is empty$"):
        build_rollout_kind(wrong)


@pytest.mark.slow
def test_conversations_of_a_model_with_an_adapter() -> None:
    chat = tiny_chat()
    options = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "is_slippery": False}
    environments = EnvironmentProcesses("covey_environments.gymnasium:Gymnasium", 60.0, 100, options)
    sampler = ConversationSampler(
        LocalGenerator(LanguagePolicy(tiny_model())), chat, seed=5, max_new_tokens=6, turns=3, total_tokens=150,
        environments=environments, style=Style(chat, "respond", []),
    )  # fmt: skip
    [group] = sampler.sample([Start(0, "Walk.", {"seed": 1})], 3, step=1)
    environments.close()
    assert len({rollout.context for rollout in group.rollouts}) == 1
    for rollout in group.rollouts:
        assert "[S]FFF\nFHFH" in chat.tokenizer.decode(list(rollout.context))
        assert rollout.messages is not None
        assert [message["role"] for message in rollout.messages] == ["assistant", "user"] * 3
        assert rollout.messages[1]["content"] == "Reply with one of: left, down, right, up."
        assert (rollout.turn_rewards, rollout.failure) == ([0.0] * 3, "")


def test_a_small_model_is_told_of_the_tools() -> None:
    style = Style(tiny_chat(), "respond", PRICES)
    assert "price" in style.chat.tokenizer.decode(list(style.encode([{"role": "user", "content": "u"}])))
