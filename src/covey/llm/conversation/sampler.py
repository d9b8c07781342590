"""Sampler of conversations: the model and an environment take turns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from covey.data import Group, Start
from covey.llm.conversation.conversation import Conversation, Limits, first_messages
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.processes import Environments, Reply
from covey.llm.data.rows import stable_hash
from covey.llm.generation.generator import Completion, FailureReason, GenerationFailure, GenerationRequest
from covey.llm.model.chat import Message
from covey.llm.sampler import GivenPrompt, LanguageSampler, completions_of

if TYPE_CHECKING:
    from covey.llm.conversation.styles import Style
    from covey.llm.generation.turns import Continuation, TurnGenerator


@dataclass
class ConversationSampler(LanguageSampler):
    """Samples `group_size` conversations from every start; implements `covey.data.Sampler`.

    `max_new_tokens` is the limit of one turn. The environments of a group are reset with the same columns and the same
    seed of the global random generators, a function of (seed, step, start).
    """

    environments: Environments = None  # type: ignore[assignment]  # the fields before it have defaults
    style: Style = None  # type: ignore[assignment]
    turns: int = 8
    total_tokens: int = 512  # of a conversation after its prompt

    @cached_property
    def encoder(self) -> ConversationEncoder:
        """Encodes what follows a turn; it remembers the template's text."""
        return ConversationEncoder(self.chat)

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Groups in the order of `starts`. A conversation whose environment fails has a `failure`."""
        limits = Limits(self.turns, self.max_new_tokens, self.total_tokens)
        opened = [
            [Conversation(self._open(start, step), self.style, self.encoder, limits) for _ in range(group_size)]
            for start in starts
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

    def _open(self, start: Start, step: int) -> Any:
        return self.environments.open(environment_seed(self.seed, step, start.index))

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
