"""Conversations are sampled with exact tokens: what the model wrote, what it did not, and where it stopped."""

import threading

import pytest
import torch

from covey.config import ConfigError
from covey.data import EndReason, Group, Start, collate, decode_groups, encode_groups
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.sampler import ConversationSampler
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tools import Tool, describe_tools
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.grader import build_grader
from covey.llm.model.stop_strings import stop_strings
from covey.llm.policy import LanguagePolicy
from covey.train.metrics import describe_conversations
from helpers.chat_models import chat_of, tiny_chat
from helpers.guessing import Faulty
from helpers.in_threads import EnvironmentThreads
from helpers.tiny_models import tiny_model

STARTS = [Start(0, [{"role": "user", "content": "1+2"}], {"answer": "3"}), Start(1, "7-5", {"answer": "2"})]


class Echo:
    """Answers with the length of the message, and ends at its `last` turn."""

    def reset(self, first="", last=10**9, faults=()):
        self.turns, self.last, self.faults = 0, last, faults
        return first or None

    def step(self, message):
        self.turns += 1
        return f"{len(message)} (a)", float(len(message)), self.turns == self.last


def sampler_of(kind="llama", environment=Echo, **settings):
    policy = LanguagePolicy(tiny_model(kind))
    chat = tiny_chat()
    fields = {"seed": 5, "max_new_tokens": 6, "turns": 3, "total_tokens": 60} | settings
    return ConversationSampler(
        LocalGenerator(policy), chat, environments=EnvironmentThreads(environment),
        style=Style(chat, "step"), **fields,
    )  # fmt: skip


def with_columns(**columns):
    return [Start(start.index, start.prompt, columns) for start in STARTS]


def rollouts_of(groups):
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_one_forward_pass_over_the_same_tokens(kind, temperature):
    sampler = sampler_of(kind, temperature=temperature)
    policy = LanguagePolicy(sampler.generator.policy.module, temperature=temperature)
    groups = sampler.sample(with_columns(first="go on"), 4, step=1)
    build_grader(["environment"], ()).grade(groups)
    batch = collate(groups)
    assert bool((~batch.mask_BT & (batch.actions_BT != 0)).any()), "there are tokens that the model did not write"
    with torch.no_grad():
        logprobs_BT = policy.evaluate(batch).logprobs_BT
        difference_BT = (logprobs_BT - batch.behavior_logprobs_BT)[batch.mask_BT]
        for rollout, logprob_T in zip(rollouts_of(groups), batch.behavior_logprobs_BT, strict=True):
            tokens_L = torch.tensor([*rollout.context, *rollout.actions])
            logits = policy.module(tokens_L[None]).logits[0, len(rollout.context) - 1 : -1] / temperature
            every_T = logits.log_softmax(-1).gather(1, tokens_L[len(rollout.context) :, None])[:, 0]
            decided_T = torch.tensor(rollout.decided)
            torch.testing.assert_close(logprob_T[: len(decided_T)][decided_T], every_T[decided_T], atol=2e-5, rtol=0)
    assert float(difference_BT.abs().max()) < 2e-5
    assert float(logprobs_BT[~batch.mask_BT].abs().max()) == 0


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_tokens_are_turns_of_the_model_and_text_of_template_and_environment(kind):
    sampler = sampler_of(kind)
    encoder = ConversationEncoder(sampler.chat)
    prompts = [sampler.chat.encode_text(f"[{question}\n\nGuess]=") for question in ("1+2", "7-5")]
    for rollout in rollouts_of(sampler.sample(with_columns(first="Guess"), 6, step=2)):
        assert rollout.context in prompts
        tokens, decided, place = [], [], 0
        turns = [message for message in rollout.messages if message["role"] == "assistant"]
        assert len(turns) == 3 == len(rollout.turn_rewards)
        for number, turn in enumerate(turns):
            end = place
            while end < len(rollout.actions) and rollout.decided[end]:
                end += 1
            written = rollout.actions[place:end]
            assert sampler.chat.decode(written) == turn["content"]
            assert len(written) <= 6
            assert rollout.turn_rewards[number] == len(turn["content"])
            tokens += written
            decided += [True] * len(written)
            if number < 2:
                reply = {"role": "user", "content": f"{len(turn['content'])} (a)"}
                assert rollout.messages[2 * number + 1] == reply
                between = encoder.after_turn([reply], ended=written[-1] == 1)
                tokens += between
                decided += [False] * len(between)
            place = end + (len(between) if number < 2 else 0)
        assert (list(rollout.actions), list(rollout.decided)) == (tokens, decided)
        assert {rollout.behavior_logprobs[i] for i, own in enumerate(decided) if not own} == {0.0}
        assert rollout.end is EndReason.LENGTH
        assert rollout.environment == {"turns": 3, "last": 10**9, "faults": []}


def test_conversations_end_when_the_environment_says_so():
    sampler = sampler_of(turns=9, total_tokens=100)
    groups = sampler.sample(with_columns(last=2), 4, step=1)
    rollouts = rollouts_of(groups)
    assert {rollout.end for rollout in rollouts} == {EndReason.TERMINATED}
    assert {len(rollout.turn_rewards) for rollout in rollouts} == {2}
    assert all(rollout.decided[-1] for rollout in rollouts)
    metrics = describe_conversations(groups)
    assert metrics["conversation/turns"] == 2.0
    assert metrics["conversation/failed"] == 0


@pytest.mark.parametrize("total_tokens", [6, 7, 20, 33])
def test_no_conversation_is_longer_than_its_limit(total_tokens):
    sampler = sampler_of(turns=50, total_tokens=total_tokens)
    rollouts = rollouts_of(sampler.sample(STARTS, 6, step=1))
    assert all(len(rollout.actions) <= total_tokens for rollout in rollouts)
    assert all(rollout.decided[-1] for rollout in rollouts)
    assert all(rollout.end is EndReason.LENGTH for rollout in rollouts)
    if total_tokens == 33:
        assert max(len(rollout.turn_rewards) for rollout in rollouts) > 1


def test_a_call_for_all_rollouts_gives_those_of_several_calls():
    sampler = sampler_of()
    whole = sampler.sample(STARTS, 4, step=3)
    parts = [sampler.sample(STARTS, 2, step=3, first_rollout=first) for first in (0, 2)]
    for number, group in enumerate(whole):
        assert group.rollouts == [*parts[0][number].rollouts, *parts[1][number].rollouts]


def test_a_stop_string_ends_a_turn_which_the_template_then_ends():
    chat = tiny_chat()
    sampler = sampler_of(stop=stop_strings(chat, tuple("abcdefghijkl")), total_tokens=100)
    encoder = ConversationEncoder(chat)
    stopped = 0
    for rollout in rollouts_of(sampler.sample(STARTS, 8, step=1)):
        contents = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
        first = 0
        for end, content, reply in zip(rollout.step_ends[:-1], contents, rollout.messages[1::2], strict=False):
            by_text = content[-1:] in tuple("abcdefghijkl")
            stopped += by_text
            assert chat.decode(rollout.actions[first : end + 1 - (rollout.actions[end] == 1)]) == content
            between = encoder.after_turn([reply], ended=rollout.actions[end] == 1)
            first = end + 1 + len(between)
            assert tuple(rollout.actions[end + 1 : first]) == between
            assert (between[0] == 1) == (rollout.actions[end] != 1), "the end token that the model did not write"
            if by_text:
                assert rollout.actions[end] != 1
    assert stopped > 10


class Some(Echo):
    """Fails in one conversation of a group, at the moment that the column `faults` names."""

    lock = threading.Lock()
    made = 0

    def __init__(self):
        with self.lock:
            Some.made += 1
            self._bad = Some.made % 4 == 2

    def reset(self, **columns):
        super().reset(first="Go", faults=columns["fault"])
        if self._bad and self.faults == "reset":
            raise RuntimeError("no")
        return "Go"

    def step(self, message):
        if self._bad and self.faults == f"step {self.turns + 1}":
            raise RuntimeError("no")
        return super().step(message)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ["reset", "step 1", "step 3"])
def test_an_environment_that_fails_takes_its_own_rollout_out_of_the_group(fault):
    Some.made = 0
    clean = sampler_of().sample(with_columns(first="Go"), 4, step=1)
    sampler = sampler_of(environment=Some)
    groups = sampler.sample(with_columns(fault=fault), 4, step=1)
    assert describe_conversations(groups)["conversation/failed"] == 2
    for group, expected in zip(groups, clean, strict=True):
        assert [bool(rollout.failure) for rollout in group.rollouts] == [False, True, False, False]
        assert "RuntimeError: no" in group.rollouts[1].failure
        assert group.rollouts[1].decisions > 0
        for rollout, other in zip(group.rollouts, expected.rollouts, strict=True):
            if not rollout.failure:
                assert (rollout.actions, rollout.behavior_logprobs) == (other.actions, other.behavior_logprobs)


def graded(groups, *rewards):
    grader = build_grader(list(rewards), ())
    failures = grader.grade_part(groups, 100)
    return failures, [[rollout.reward for rollout in group.rollouts] for group in groups]


def test_rewards_of_the_environment_and_over_the_conversation():
    Some.made = 0
    groups = sampler_of(environment=Some).sample(with_columns(fault="step 2"), 4, step=1)
    seen = []

    def turns(completions, environments, fault, **columns):
        seen.append([completion[-1]["role"] for completion in completions])
        assert fault == ["step 2"] * len(completions)
        return [float(environment.turns) for environment in environments]

    failures, rewards = graded(groups, "environment", turns)
    assert failures[0] == 2
    assert "RuntimeError: no" in failures[2]
    assert seen == [["user"] * 6], "failed conversations are not graded"
    for group, values in zip(groups, rewards, strict=True):
        assert [value is None for value in values] == [False, True, False, False]
        for rollout, value in zip(group.rollouts, values, strict=True):
            if value is not None:
                assert value == sum(rollout.turn_rewards) + 3.0
                assert rollout.reward_parts == {"environment": sum(rollout.turn_rewards), "turns": 3.0}


def test_a_group_without_a_sound_conversation_has_no_rewards():
    groups = sampler_of(environment=Faulty).sample([Start(0, "1", {"fault": "raise no"})], 4, step=1)
    failures, rewards = graded(groups, "environment")
    assert (failures[0], rewards) == (4, [[None] * 4])


def test_conversations_travel_between_ranks():
    Some.made = 0
    groups = sampler_of(environment=Some).sample(with_columns(fault="step 2"), 4, step=1)
    arrived = decode_groups(encode_groups(groups), [group.start for group in groups])
    for group, other in zip(groups, arrived, strict=True):
        for rollout, received in zip(group.rollouts, other.rollouts, strict=True):
            for name in ("messages", "turn_rewards", "environment", "failure", "decided", "actions", "text"):
                assert getattr(rollout, name) == getattr(received, name), name


class Sums:
    """A tool of tests."""

    def reset(self, **columns):
        self.reward = 0.0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        self.reward += 1
        return a + b


@pytest.mark.parametrize("name", ["smollm", "qwen2.5", "qwen3", "llama3", "mistral"])
def test_calls_become_requests_and_results_become_messages(name):
    from covey.llm.conversation.tool_calls import ToolCall

    chat = chat_of(name)
    style = Style(chat, "tools", describe_tools(Sums()))
    prompt = chat.tokenizer.decode(list(style.encode([{"role": "user", "content": "17 + 25?"}])))
    assert "add" in prompt
    session = EnvironmentThreads(Sums).open(0)
    session.ask({"do": "reset", "columns": {}}).result(60)
    calls = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": "x", "b": 2}), ToolCall("add", {"a": 3, "b": 4})]
    turn = style.read(chat.encode_text(style.format.write(calls)))
    assert len(turn.request["calls"]) == 2
    answer = style.take(turn, session.ask(turn.request).result(60))
    assert [reply["content"] for reply in answer.replies] == [
        "3", "Error: the argument 'a' of add must be an integer, and is a string", "7",
    ]  # fmt: skip
    assert {reply["role"] for reply in answer.replies} == {*style.reply_roles}
    ConversationEncoder(chat).after_turn(answer.replies, ended=True)
    assert session.ask({"do": "end"}).result(60)["reward"] == 2.0
    last = style.read(chat.encode_text("It is 42."))
    assert last.request is None
    assert style.take(last, {}).replies == [], "a turn without a call ends the conversation"


def test_a_call_that_cannot_be_read_is_answered_with_an_error():
    chat = chat_of("qwen2.5")
    style = Style(chat, "tools", [Tool(tool.name, tool.schema) for tool in describe_tools(Sums())])
    turn = style.read(chat.encode_text('<tool_call>{"name": "add", "arguments": {</tool_call>'))
    assert turn.request is None
    [reply] = style.take(turn, {}).replies
    assert reply["content"].startswith("Error: a tool call cannot be read: ")


def test_groups_whose_prompts_differ_are_counted():
    class Different(Echo):
        made = 0

        def reset(self, **columns):
            super().reset()
            Different.made += 1
            return str(Different.made % 2)

    sampler = sampler_of(environment=Different)
    groups: list[Group] = sampler.sample(STARTS, 3, step=1)
    assert len({rollout.context for rollout in groups[0].rollouts}) == 2
    assert describe_conversations(groups)["conversation/different_prompts"] == 2


def test_a_first_observation_that_is_too_long_fails_its_own_group():
    """The tiny model knows 256 positions, and its tokens are characters."""
    starts = with_columns(first="Go")
    clean = sampler_of().sample(starts, 3, step=1)
    sampler = sampler_of()
    long = sampler.sample([Start(0, STARTS[0].prompt, {"first": "x" * 300}), starts[1]], 3, step=1)
    assert long[1].rollouts == clean[1].rollouts
    for rollout in long[0].rollouts:
        assert rollout.failure.startswith("the first observation of its environment is too long: a prompt of 30")
        assert "exceed the model's 256 positions" in rollout.failure
        assert rollout.decisions > 0
        assert rollout.context == sampler.chat.encode(STARTS[0].prompt)
    assert describe_conversations(long)["conversation/failed"] == 3


def test_a_prompt_that_is_too_long_without_an_observation_is_refused():
    with pytest.raises(ConfigError, match=r"a prompt of 303 tokens .* exceed the model's 256 positions"):
        sampler_of().sample([Start(0, "x" * 300), STARTS[1]], 2, step=1)
