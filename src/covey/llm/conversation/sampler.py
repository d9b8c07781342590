"""Sampler of conversations: the model and an environment take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from covey.config import ConfigError
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.conversation.encoding import ConversationEncoder, ReplyNotEncodable
from covey.llm.conversation.processes import EnvironmentProcesses, Reply
from covey.llm.conversation.styles import Answer, Style
from covey.llm.data.rows import stable_hash
from covey.llm.generation.generator import (
    Completion,
    Continuation,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    TurnGenerator,
)
from covey.llm.model.chat import Message
from covey.llm.sampler import GivenPrompt, LanguageSampler, completions_of
from covey.runtime.worker.child import one_line
from covey.runtime.worker.process import CallError
from covey.runtime.worker.sessions import Session

FAILED = "its environment failed: "


@dataclass
class ConversationSampler(LanguageSampler):
    """Samples `group_size` conversations from every start; implements `covey.data.Sampler`.

    `max_new_tokens` is the limit of one turn. The environments of a group are reset with the same columns and the same
    seed of the global random generators, a function of (seed, step, start).
    """

    environments: EnvironmentProcesses = None  # type: ignore[assignment]  # the fields before it have defaults
    style: Style = None  # type: ignore[assignment]
    turns: int = 8
    total_tokens: int = 512  # of a conversation after its prompt

    @cached_property
    def encoder(self) -> ConversationEncoder:
        """Encodes what follows a turn; it remembers the template's text."""
        return ConversationEncoder(self.style.chat)

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Groups in the order of `starts`. A conversation whose environment fails has a `failure`."""
        limits = Limits(self.turns, self.max_new_tokens, self.total_tokens)
        opened = [
            [Conversation(self.environments.open(seed), self.style, self.encoder, limits) for _ in range(group_size)]
            for seed in (environment_seed(self.seed, step, start.index) for start in starts)
        ]
        every = [conversation for conversations in opened for conversation in conversations]
        try:
            self._reset(starts, opened)
            contexts = self._converse(starts, opened, step, first_rollout, limits)
            ends = [None if one.failure else one.session.ask({"do": "end"}) for one in every]
            for conversation, end in zip(every, ends, strict=True):
                if end is not None:
                    conversation.finish(end)
        finally:
            for conversation in every:
                conversation.session.close()
        groups = [
            Group(start, [one.rollout(context) for one, context in zip(*both, strict=True)])
            for start, *both in zip(starts, opened, contexts, strict=True)
        ]
        for group in groups:
            self.ready(group)
        return groups

    def prompt_of(self, prompt: str | Sequence[Message], observation: str) -> GivenPrompt:
        return first_messages(prompt, observation), [tool.schema for tool in self.style.tools]

    def context_of(self, prompt: str | Sequence[Message], observation: str) -> tuple[int, ...]:
        return self.style.encode(first_messages(prompt, observation))

    def truncated(self, groups: Sequence[Group], max_new_tokens: int) -> list[Group]:
        """The groups themselves: conversations are evaluated at their own limits only."""
        return list(groups)

    def _reset(self, starts: Sequence[Start], opened: Sequence[Sequence[Conversation]]) -> None:
        """Reset all environments. One that fails has the prompt of a sibling, so that its rollout has tokens."""
        resets: list[list[Future[Reply]]] = [
            [one.session.ask({"do": "reset", "columns": dict(start.columns)}) for one in conversations]
            for start, conversations in zip(starts, opened, strict=True)
        ]
        for start, conversations, replies in zip(starts, opened, resets, strict=True):
            for conversation, reply in zip(conversations, replies, strict=True):
                conversation.begin(start.prompt, reply)
            sound = next((one for one in conversations if not one.failure), conversations[0])
            for conversation in conversations:
                if conversation.failure:
                    conversation.prompt = sound.prompt

    def _converse(
        self,
        starts: Sequence[Start],
        opened: Sequence[Sequence[Conversation]],
        step: int,
        first_rollout: int,
        limits: Limits,
    ) -> list[list[tuple[int, ...]]]:
        """Generate all turns; returns the prompts. A first observation that leaves no room for a turn is a failure."""
        parts: list[_Part] = []
        for start, conversations in zip(starts, opened, strict=True):
            first = first_rollout
            for _, same in groupby(conversations, key=lambda one: one.prompt):
                parts.append(_Part(start, first, list(same)))
                first += len(parts[-1].conversations)
        refused = []
        for part, failure in zip(parts, self._generate(parts, step, limits), strict=True):
            if failure is not None and not part.refuse_observation(failure):
                completions_of(failure)  # raises
            refused += [part] if failure is not None else []
        for failure in self._generate(refused, step, limits):
            if failure is not None:
                completions_of(failure)
        contexts = iter(part.context for part in parts for _ in part.conversations)
        return [[next(contexts) for _ in conversations] for conversations in opened]

    def _generate(self, parts: Sequence[_Part], step: int, limits: Limits) -> Sequence[GenerationFailure | None]:
        """Generate the turns of each part by one request; the failure of each or None."""
        if not parts:
            return []
        settings = self.settings(limits.first_turn)
        requests = []
        for part in parts:
            part.context = self.style.encode(part.conversations[0].prompt)
            key = self._key(part.start, step, part.first)
            requests.append(GenerationRequest(part.context, len(part.conversations), key, settings))

        def respond(number: int, index: int, completion: Completion) -> Future[Continuation | None]:
            return parts[number].conversations[index].answer(completion)

        generator: TurnGenerator = self.generator  # type: ignore[assignment]
        return generator.converse(requests, respond, limits.tokens)


@dataclass
class _Part:
    """Neighbouring conversations of a group with the same prompt, which one request generates."""

    start: Start
    first: int  # number of the first rollout
    conversations: list[Conversation]
    context: tuple[int, ...] = ()  # tokens of the prompt

    def refuse_observation(self, failure: GenerationFailure) -> bool:
        """Fail the conversations if their prompt is too long because of an observation, which is then taken out."""
        plain = first_messages(self.start.prompt, "")
        if failure.reason is not FailureReason.PROMPT_TOO_LONG or self.conversations[0].prompt == plain:
            return False
        for conversation in self.conversations:
            conversation.prompt = plain
            conversation.failure = f"the first observation of its environment is too long: {failure.message}"
        return True


def environment_seed(seed: int, step: int, index: int) -> int:
    """Seed of the global random generators in the process of an environment.

    Held-out starts, of step 0, have the same environments for every seed of a run.
    """
    return stable_hash("environment", seed if step else 0, step, index) % 2**63


@dataclass(frozen=True)
class Limits:
    """Limits of every conversation."""

    turns: int
    turn_tokens: int  # of one turn
    tokens: int  # of all turns and replies

    @property
    def first_turn(self) -> int:
        return min(self.turn_tokens, self.tokens)


class Conversation:
    """One rollout. After each turn of the model, `answer` asks the environment for what follows.

    If the environment fails, the conversation ends, and `failure` has the reason.
    """

    def __init__(self, session: Session, style: Style, encoder: ConversationEncoder, limits: Limits) -> None:
        self.session, self.style, self.encoder, self.limits = session, style, encoder, limits
        self.prompt: list[Message] = []
        self.messages: list[dict[str, Any]] = []
        self.turn_rewards: list[float] = []
        self.failure = ""
        self.observation = ""  # the first one
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._decided: list[bool] = []
        self._turn_ends: list[int] = []  # last decision of each turn
        self._between: tuple[int, ...] = ()  # what follows the last turn, if the model goes on
        self._end = EndReason.LENGTH
        self._version = 0
        self._attributes: Mapping[str, Any] = {}

    def begin(self, prompt: str | Sequence[Message], reset: Future[Reply]) -> None:
        """Set the prompt, after which the first observation follows."""
        try:
            self.observation = reset.result()["text"] or ""
        except CallError as error:
            self.failure = f"{FAILED}{error}"
        self.prompt = first_messages(prompt, self.observation)

    def answer(self, completion: Completion) -> Future[Continuation | None]:
        """Add a turn of the model, and ask for what follows; None if the conversation is over."""
        answered: Future[Continuation | None] = Future()
        self._add(completion)
        if self.failure:
            answered.set_result(None)
            return answered
        ended = completion.tokens[-1] in self.encoder.chat.end_ids  # else by its limit, or by a stop string
        control = completion.tokens[-1] in self.encoder.control_ids  # as a stop string may be
        turn = self.style.read(completion.tokens[:-1] if ended or control else completion.tokens)
        self.messages.append(turn.message)
        self.turn_rewards.append(0.0)

        def take(reply: Future[Reply]) -> None:
            try:
                follows = self._continue(self.style.take(turn, reply.result()), completion, ended=ended)
            except CallError as error:
                follows, self.failure = None, f"{FAILED}{error}"
            except Exception as error:  # in the thread of the environments, where nobody would see it
                known = isinstance(error, (ReplyNotEncodable, ConfigError))
                follows, self.failure = None, f"a reply of its environment {error if known else one_line(error)}"
            answered.set_result(follows)

        if turn.request is None:
            nothing: Future[Reply] = Future()
            nothing.set_result({})
            take(nothing)
        else:
            self.session.ask(turn.request).add_done_callback(take)
        return answered

    def finish(self, end: Future[Reply]) -> None:
        """Take the environment's attributes, and its own reward if it is paid at the end."""
        try:
            reply = end.result()
        except CallError as error:
            self.failure = self.failure or f"{FAILED}{error}"
            return
        self._attributes = reply["attributes"]
        if reply["reward"] is not None and self.turn_rewards:
            self.turn_rewards[-1] += reply["reward"]

    def rollout(self, context: tuple[int, ...]) -> Rollout:
        """The sampled conversation; `context` are the tokens of its prompt."""
        return Rollout(
            context=context,
            actions=self._tokens,
            behavior_logprobs=self._logprobs,
            end=EndReason.CUT if self.failure else self._end,
            text=transcript(self.messages),
            decided=self._decided,
            messages=self.messages,
            observation=self.observation,
            turn_rewards=self.turn_rewards,
            step_ends=self._turn_ends,
            environment=self._attributes,
            failure=self.failure,
            version=self._version,
        )

    def _add(self, completion: Completion) -> None:
        before = len(self._between)
        self._tokens += [*self._between, *completion.tokens]
        self._logprobs += [0.0] * before + completion.logprobs
        self._decided += [False] * before + [True] * len(completion.tokens)
        self._turn_ends.append(len(self._tokens) - 1)
        self._between, self._version = (), completion.version

    def _continue(self, answer: Answer, completion: Completion, *, ended: bool) -> Continuation | None:
        self.turn_rewards[-1] = answer.reward
        self.messages += answer.replies
        if answer.done or not answer.replies:
            self._end = EndReason.TERMINATED if answer.done else completion.end
            return None
        if len(self.turn_rewards) >= self.limits.turns:
            return None
        between = self.encoder.after_turn(answer.replies, ended=ended)
        last = completion.tokens[-1]
        if between[:1] == (last,) and last in self.encoder.control_ids:  # the turn ended with it: by a stop string
            between = between[1:]
        left = self.limits.tokens - len(self._tokens) - len(between)
        if left < 1:
            return None
        self._between = between
        return Continuation(between, min(left, self.limits.turn_tokens))


def first_messages(prompt: str | Sequence[Message], observation: str) -> list[Message]:
    """The messages with which a conversation begins: the prompt, whose last text the first observation follows."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not observation:
        return messages
    last = messages[-1]
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": observation}]
    text = f"{last['content']}\n\n{observation}" if last["content"] else observation
    return [*messages[:-1], {**last, "content": text}]


def transcript(messages: Sequence[Message]) -> str:
    """The messages as text for people: the model's turns as they are, others after their role."""
    parts = []
    for message in messages:
        role, content = message["role"], str(message["content"])
        calls = [
            f"{call['function']['name']}({', '.join(f'{k}={v!r}' for k, v in call['function']['arguments'].items())})"
            for call in message.get("tool_calls", ())
        ]
        text = "\n".join([content, *calls] if content or not calls else calls)
        parts.append(text if role == "assistant" else f"[{role}] {text}")
    return "\n".join(parts)
