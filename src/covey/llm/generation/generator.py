"""Interfaces between the samplers and a generator of completions: requests -> completions or failures.

`LocalGenerator` implements it on the policy's weights in this process. A client of an external server can implement it
too: the interface has no model, decoder or device, and the failure of a request is a return value.

`TurnGenerator` is the interface for conversations. A turn is a completion of all tokens so far: `OpenConversations`
makes the request of the next turn when its continuation arrives.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from covey.data import EndReason
from covey.llm.generation.token_sampling import WHOLE, Truncation
from covey.llm.model.architecture import longest_row
from covey.llm.model.stop_strings import StopStrings
from covey.runtime.rng import SAMPLING


@dataclass(frozen=True)
class RandomKey:
    """Key of the random numbers of a request.

    Completion i is rollout `first_rollout + i`, and its first token has the position `first_position`. A token is a
    function of (seed, step, group, rollout, position) and of its distribution alone, so a repeated request gives the
    same completions, independent of other requests.
    """

    seed: int
    step: int
    group: int
    first_rollout: int = 0
    stream: int = SAMPLING  # numbers of different streams are independent
    first_position: int = 0  # number of tokens of the rollout before this request, for turns of a conversation


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a request. Requests with equal settings are generated in one batch."""

    max_new_tokens: int
    temperature: float  # divides the logits; 0: argmax
    end_ids: frozenset[int]  # a completion ends with the first of these
    version: int  # required version of the weights
    max_rows: int = 0  # maximal number of completions in a batch; 0: the generator chooses
    deadline_seconds: float | None = None  # from the call of `generate` on; None: no limit
    # Number of tokens that all prompts of a batch share and that are fed once; None: chosen from the requests of a
    # call. The last bits of log-probabilities depend on it.
    shared_prefix: int | None = None
    stop: StopStrings | None = None  # a completion also ends with the token that completes one of these
    truncation: Truncation = WHOLE  # tokens that may not be drawn
    continues: bool = False  # True: a turn of a conversation, which later requests may begin with


@dataclass(frozen=True)
class GenerationRequest:
    """A request for completions of one prompt."""

    prompt: tuple[int, ...]  # token ids
    completions: int  # number of completions
    key: RandomKey
    settings: GenerationSettings


@dataclass(frozen=True)
class Completion:
    """A completion of a prompt."""

    tokens: list[int]  # token ids, including the end token
    logprobs: list[float]  # of each token, in nats, at the sampling temperature (at 1 if that is 0)
    end: EndReason  # STOP or LENGTH
    version: int  # of the weights that generated it
    cached_tokens: int = 0  # tokens of the prompt whose keys and values a server had kept


class FailureReason(StrEnum):
    """Reason for the failure of a request."""

    PROMPT_TOO_LONG = "prompt too long"  # prompt and max_new_tokens exceed the model's maximal length
    OTHER_WEIGHTS = "other weights"  # the version of the generator's weights is not that of the request
    NON_FINITE_LOGITS = "non-finite logits"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class GenerationFailure:
    """Failure of a request. Partial completions are never returned, because their lengths would be biased."""

    reason: FailureReason
    message: str  # one line for the user, with the remedy


GenerationResult = list[Completion] | GenerationFailure
Ready = Callable[[int, list[Completion]], None]  # called with the number of a request and its completions


class Generator(Protocol):
    """Generator of completions."""

    def generate(self, requests: Sequence[GenerationRequest], ready: Ready = lambda *_: None) -> list[GenerationResult]:
        """The completions or the failure of each request, in their order.

        `ready` is called for each request as soon as its completions have ended, while others are still generated.
        """

    def refresh(self, version: int) -> None:
        """Generate with the policy's current weights from now on, whose version is `version`."""

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call; empty if there are none."""

    def close(self) -> None:
        """End what runs beside this process."""


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a turn of the model."""

    tokens: tuple[int, ...]  # ids that are appended: the template's text and the environment's reply; not decided
    max_new_tokens: int  # limit of the next turn, at least 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens of a turn is {self.max_new_tokens}: it must be at least 1")


# (number of the request, number of the rollout in it, the turn that ended) -> the continuation; None ends the
# conversation. It returns at once.
Respond = Callable[[int, int, Completion], Future[Continuation | None]]


class TurnGenerator(Protocol):
    """Generator of conversations."""

    def converse(
        self, requests: Sequence[GenerationRequest], respond: Respond, max_tokens: int | None = None
    ) -> list[GenerationFailure | None]:
        """Generate the turns of `completions` conversations for each request; the failure of each request or None.

        `settings.max_new_tokens` is the limit of the first turn. A turn ends with an end token or at its limit. The
        limit of a later turn is lowered to the model's maximal length. If there is no room for one token after a
        continuation, the conversation ends, and `respond` is not called again (see `room`).

        In this process, requests with other settings or numbers of completions begin when the others have ended.

        The random number of a token has its index among all tokens after the prompt as position, so a result does not
        depend on the time that an answer takes. A future that has failed or was cancelled ends its conversation alone;
        the caller, who made it, knows. `max_tokens` is about the largest number of tokens after the prompt, by which
        memory is planned; None: the limit of the first turn. `settings.deadline_seconds` includes the time of the
        answers.
        """


def room(model_config: Any, tokens: int) -> int | None:
    """Number of tokens that a model with this config can append to `tokens` tokens; None: no limit."""
    longest = longest_row(model_config)
    return None if longest is None else max(longest - tokens, 0)


@dataclass(frozen=True, eq=False)
class TurnAnswer:
    """What follows one turn: the number of its request, of its completion in it, and the future of the continuation."""

    turn: int
    index: int
    completion: Completion
    future: Future[Continuation | None]

    @property
    def continuation(self) -> Continuation | None:
        """What the future has as result; None if it has failed."""
        failed = self.future.cancelled() or self.future.exception() is not None
        return None if failed else self.future.result()


@dataclass
class OpenConversations:
    """The conversations of one call of `converse`, each of which is in a turn or waits for an answer.

    `turns` are the requests of all turns, with those of the first turns at the beginning. It grows.
    """

    turns: list[GenerationRequest]
    respond: Respond
    model_config: Any
    put: Callable[[TurnAnswer], None]  # called with every answer when it arrives, in any thread
    unanswered: set[tuple[int, int]] = field(default_factory=set)  # (turn, index of the completion)

    def __post_init__(self) -> None:
        self.requests = len(self.turns)  # number of first turns
        # Of every turn: number of the conversation's request, and of the rollout of the first completion.
        self.places = [(number, 0) for number in range(len(self.turns))]

    def end_turns(self, turn: int, completions: Sequence[Completion]) -> None:
        """Ask for the continuations of all completions of a turn's request."""
        for index, completion in enumerate(completions):
            self.end_turn(turn, index, completion)

    def end_turn(self, turn: int, index: int, completion: Completion) -> None:
        """Ask for the continuation of a completion of a turn's request."""
        number, first = self.places[turn]
        self.unanswered.add((turn, index))
        future = self.respond(number, first + index, completion)
        answer = TurnAnswer(turn, index, completion, future)
        future.add_done_callback(lambda _: self.put(answer))

    def next_turn(self, answer: TurnAnswer) -> int | None:
        """Add the request of the turn after an answer; returns its number, None if the conversation ends."""
        if (answer.turn, answer.index) not in self.unanswered:  # it came after `stop_waiting`
            return None
        self.unanswered.remove((answer.turn, answer.index))
        continuation, before = answer.continuation, self.turns[answer.turn]
        if continuation is None:
            return None
        appended = (*answer.completion.tokens, *continuation.tokens)
        prompt = (*before.prompt, *appended)
        left = room(self.model_config, len(prompt))
        limit = continuation.max_new_tokens if left is None else min(continuation.max_new_tokens, left)
        if limit == 0:
            return None
        key = replace(
            before.key,
            first_rollout=before.key.first_rollout + answer.index,
            first_position=before.key.first_position + len(appended),
        )
        settings = replace(before.settings, max_new_tokens=limit)
        self.turns.append(GenerationRequest(prompt, 1, key, settings))
        number, first = self.places[answer.turn]
        self.places.append((number, first + answer.index))
        return len(self.turns) - 1

    def stop_waiting(self) -> list[int]:
        """Wait for no answer any more; returns the turns that had none."""
        turns = sorted({turn for turn, _ in self.unanswered})
        self.unanswered.clear()
        return turns

    def failures(self, failed: Mapping[int, GenerationFailure]) -> list[GenerationFailure | None]:
        """The first failure of each conversation's request, from the failures of turns; None without one."""
        found: list[GenerationFailure | None] = [None] * self.requests
        for turn in sorted(failed):
            number = self.places[turn][0]
            found[number] = found[number] or failed[turn]
        return found
