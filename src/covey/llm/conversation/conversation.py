"""One conversation while it is sampled: its tokens, its messages, its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from covey.config import ConfigError
from covey.data import EndReason, Rollout
from covey.llm.conversation.encoding import ConversationEncoder, ReplyNotEncodable
from covey.llm.conversation.processes import Reply, Session
from covey.llm.conversation.styles import Answer, Style
from covey.llm.generation.generator import Completion
from covey.llm.generation.turns import Continuation
from covey.llm.model.chat import Message
from covey.runtime.worker.child import one_line
from covey.runtime.worker.process import CallError

FAILED = "its environment failed: "


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
    """The messages with which a conversation begins: the prompt, and the first observation if there is one."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return with_observation(messages, observation) if observation else messages


def with_observation(messages: Sequence[Message], observation: str) -> list[Message]:
    """The prompt with the first observation, which follows the text of the last message of the user."""
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
