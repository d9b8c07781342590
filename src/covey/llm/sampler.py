"""Sampler of language models: prompts -> chat template -> generator -> groups of rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from covey.config import ConfigError, RunError
from covey.data import EndReason, Group, Rollout, Start, Stateless
from covey.llm.generation.generator import (
    Completion,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationSettings,
    Generator,
    RandomKey,
)
from covey.llm.generation.token_sampling import WHOLE, Truncation
from covey.llm.model.chat import Chat, Message, ToolSchema
from covey.llm.model.stop_strings import StopStrings

GivenPrompt = tuple[str | Sequence[Message], Sequence[ToolSchema]]  # and the tools that the model may call


@dataclass
class LanguageSampler(Stateless):
    """Samples `group_size` completions of every prompt; implements `covey.data.Sampler`.

    Every token is drawn with one uniform random number, a function of (seed, step, group, rollout, position). The draw
    does not depend on the order in which rows are decoded, nor on the other rows of the batch.
    """

    generator: Generator
    chat: Chat
    seed: int
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    rows_at_once: int = 0  # 0: the generator chooses
    version: int = 0  # of the weights
    deadline_seconds: float | None = None  # for one call of `sample`
    ready: Callable[[Group], None] = lambda group: None  # called for each group when its completions have ended
    stop: StopStrings | None = None  # a completion also ends with the token that completes one of these
    truncation: Truncation = WHOLE  # tokens that may not be drawn

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """Groups in the order of `starts`. If an end token was sampled, it is the last action.

        The text of a rollout is that of all its tokens but an end token. So it contains a stop string that ended it,
        and what the last token has after that string.

        Raises:
            ConfigError: if a prompt is too long for the model.
            RunError: if the logits are not finite, or the deadline passes.
        """
        settings = self.settings(self.max_new_tokens)
        requests = [
            GenerationRequest(
                self.chat.encode(start.prompt), group_size, self._key(start, step, first_rollout), settings
            )
            for start in starts
        ]
        groups: dict[int, Group] = {}

        def add_group(number: int, completions: list[Completion]) -> None:
            prompt = requests[number].prompt
            groups[number] = Group(starts[number], [self._rollout(prompt, found) for found in completions])
            self.ready(groups[number])

        for result in self.generator.generate(requests, add_group):
            completions_of(result)  # raises if a request failed
        return [groups[number] for number in range(len(starts))]

    def prompt_of(self, prompt: str | Sequence[Message], observation: str) -> GivenPrompt:
        """What a model was given for a start's prompt; `observation` is the first one of a conversation, or ""."""
        return prompt, ()

    def context_of(self, prompt: str | Sequence[Message], observation: str) -> tuple[int, ...]:
        """The token ids of what it was given."""
        return self.chat.encode(prompt)

    def settings(self, max_new_tokens: int) -> GenerationSettings:
        """Settings of requests with this token limit."""
        return GenerationSettings(
            max_new_tokens, self.temperature, self.chat.end_ids, self.version, self.rows_at_once,
            self.deadline_seconds, stop=self.stop, truncation=self.truncation,
        )  # fmt: skip

    def truncated(self, groups: Sequence[Group], max_new_tokens: int) -> list[Group]:
        """The groups that this sampler would have returned with a lower token limit; not graded."""

        def truncate(rollout: Rollout) -> Completion:
            tokens = rollout.actions[:max_new_tokens]
            end = rollout.end if len(tokens) == len(rollout.actions) else EndReason.LENGTH
            return Completion(tokens, rollout.behavior_logprobs[:max_new_tokens], end, rollout.version)

        return [
            Group(group.start, [self._rollout(rollout.context, truncate(rollout)) for rollout in group.rollouts])
            for group in groups
        ]

    def refresh(self, version: int) -> None:
        """Sample with the policy's current weights from now on."""
        self.generator.refresh(version)
        self.version = version

    def metrics(self) -> dict[str, float]:
        """Metrics of the generator since the last call."""
        return self.generator.metrics()

    def _key(self, start: Start, step: int, first_rollout: int) -> RandomKey:
        return RandomKey(self.seed, step, start.index, first_rollout)

    def _rollout(self, prompt: tuple[int, ...], completion: Completion) -> Rollout:
        ended = completion.tokens[-1] in self.chat.end_ids
        return Rollout(
            context=prompt,
            actions=completion.tokens,
            behavior_logprobs=completion.logprobs,
            end=completion.end,
            text=self.chat.decode(completion.tokens[:-1] if ended else completion.tokens),
            version=completion.version,
        )


def completions_of(result: list[Completion] | GenerationFailure) -> list[Completion]:
    """The completions of a request's result.

    Raises:
        ConfigError: if the prompt is too long for the model.
        RunError: for every other failure, because a step needs all of its groups.
    """
    if not isinstance(result, GenerationFailure):
        return result
    error = ConfigError if result.reason is FailureReason.PROMPT_TOO_LONG else RunError
    raise error(result.message)


def greedy(
    sampler: LanguageSampler, max_new_tokens: int, ready: Callable[[Group], None] = lambda group: None
) -> LanguageSampler:
    """A greedy sampler (argmax) on the same policy, for evaluation; `ready` is called for each answer."""
    return replace(sampler, max_new_tokens=max_new_tokens, temperature=0.0, ready=ready)
