"""Interface between the sampler and a generator of completions: requests -> completions or failures.

`LocalGenerator` implements it on the policy's weights in this process. A client of an external server can implement it
too: the interface has no model, decoder or device, and the failure of a request is a return value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from covey.data import EndReason
from covey.llm.generation.token_sampling import WHOLE, Truncation
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
