"""Conversations: rollouts of several turns. The model writes, something answers, and the model goes on.

`TurnGenerator` is the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from covey.llm.generation.generator import Completion, GenerationFailure, GenerationRequest
from covey.llm.model.architecture import exact_length, position_limit


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a turn of the model."""

    tokens: tuple[int, ...]  # ids that are appended: the template's text and the environment's reply; not decided
    max_new_tokens: int  # limit of the next turn, at least 1


# (number of the request, number of the rollout in it, the turn that ended) -> the continuation; None ends the
# conversation. It returns at once. An exception of the future is raised by `converse`.
Respond = Callable[[int, int, Completion], Future[Continuation | None]]


class TurnGenerator(Protocol):
    """Generator of conversations."""

    def converse(self, requests: Sequence[GenerationRequest], respond: Respond) -> list[GenerationFailure | None]:
        """Generate the turns of `completions` conversations for each request; the failure of each request or None.

        `settings.max_new_tokens` is the limit of the first turn. A turn ends with an end token or at its limit. The
        limit of a later turn is lowered to the model's maximal length. If there is no room for one token after a
        continuation, the conversation ends, and `respond` is not called again (see `room`).

        The random number of a token has its index among all tokens after the prompt as position, so a result does not
        depend on the time that an answer takes. `settings.deadline_seconds` includes the time of the answers.
        """


def room(model_config: Any, tokens: int) -> int | None:
    """Number of tokens that a model with this config can append to `tokens` tokens; None: no limit."""
    exact = exact_length(model_config)
    limits = (position_limit(model_config), None if exact is None else exact[0])
    known = [limit for limit in limits if limit is not None]
    return max(min(known) - tokens, 0) if known else None
