"""Conversations of a run: its environments, tried before the model is loaded, and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from covey.config import ConfigError, EnvironmentTaskConfig, RewardConfig, RunConfig
from covey.config.files import user_path
from covey.config.named_modules import search_path
from covey.data import Rollout, Start, Task
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.processes import EnvironmentProcesses, copied_environment
from covey.llm.conversation.sampler import ConversationSampler, environment_seed, first_messages, transcript
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tools import Tool
from covey.llm.grader import RewardGrader, right_rollout
from covey.llm.model.chat import Chat, Message
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import EnvironmentRows, Prompts, build_task
from covey.llm.tasks.prompt_limit import PromptLimit
from covey.runtime.worker.process import CallError
from covey.runtime.worker.sessions import Session

DESCRIBE_SECONDS = 60.0  # to describe tools, which imports transformers
ROWS_SECONDS = 300.0  # to send the prompts of an adapter


class RolloutKind(Protocol):
    """What a rollout of a run is: a completion, or a conversation."""

    @property
    def tools(self) -> Sequence[Tool] | None:
        """The tools of a conversation; None: rollouts are not conversations."""

    @property
    def default_rewards(self) -> tuple[RewardConfig, ...]:
        """Rewards in place of the task's own, if the recipe has none."""

    def task(self, config: Any) -> Task:
        """The task of a config of `TASK_CONFIGS`. Raises ConfigError as `build_task` does."""

    def example(self, start: Start) -> Rollout:
        """A rollout with which rewards are tried."""

    def pays_steps(self, grader: RewardGrader) -> bool:
        """Whether a reward is paid by reasoning step, or by turn."""

    def notes(self) -> Sequence[str]:
        """Notes for the user."""

    def prompt_limit(self, chat: Chat, model_config: Any, new_tokens: int, *, drop: bool) -> PromptLimit:
        """The check of the length of prompts; after `example`.

        Args:
            chat: encodes the prompts.
            model_config: transformers' config of the model.
            new_tokens: the most tokens after a prompt.
            drop: prompts that are too long are dropped, not refused.
        """

    def sampler(self, sampler: LanguageSampler) -> LanguageSampler:
        """The sampler of these rollouts with the settings of `sampler`."""

    def close(self) -> None:
        """End what runs beside this process."""


class Completions:
    """Rollouts of one turn."""

    tools: Sequence[Tool] | None = None
    default_rewards: tuple[RewardConfig, ...] = ()

    def task(self, config: Any) -> Task:
        return build_task(config)

    def example(self, start: Start) -> Rollout:
        return right_rollout(start)

    def pays_steps(self, grader: RewardGrader) -> bool:
        return grader.splitter is not None

    def notes(self) -> Sequence[str]:
        return ()

    def prompt_limit(self, chat: Chat, model_config: Any, new_tokens: int, *, drop: bool) -> PromptLimit:
        return PromptLimit(chat, model_config, new_tokens, drop)

    def sampler(self, sampler: LanguageSampler) -> LanguageSampler:
        return sampler

    def close(self) -> None:
        """Nothing to end."""


COMPLETIONS = Completions()


class Conversations:
    """Conversations with the environments of a run."""

    def __init__(self, config: RunConfig, environments: EnvironmentProcesses) -> None:
        """Describe an environment.

        Raises:
            ConfigError: if it cannot be made, or has a tool without a description.
        """
        self._config, self._environments = config.conversation, environments
        self._repeats = True
        self._observations: list[str] = []  # first ones of the environments that were tried
        described = self._try(0, lambda session: session.ask({"do": "describe"}, DESCRIBE_SECONDS).result())
        self._style = described["style"]
        self.tools = [Tool(schema["function"]["name"], schema) for schema in described["tools"]]
        self._pays_turns = self._style in ("step", "respond")
        self.default_rewards = (RewardConfig(name="environment"),) if self._pays_turns else ()

    def task(self, config: Any) -> Task:
        """The task of a config; the task environment has the rows of an adapter, if there are any."""
        if isinstance(config, EnvironmentTaskConfig):
            rows: Prompts | None = self._try(0, lambda session: session.ask({"do": "rows"}, ROWS_SECONDS).result())[
                "rows"
            ]
            if rows is not None:
                return EnvironmentRows(rows, config, f"environment {self._config.environment}")
        return build_task(config)

    def example(self, start: Start) -> Rollout:
        """The right answer as a turn, in two environments, whose replies should be the same.

        Raises:
            ConfigError: if the environment fails.
        """
        answer = right_rollout(start)
        first, second = (self._try(start.index, lambda session: self._play(session, start, answer)) for _ in range(2))
        self._repeats &= (first.messages, first.turn_rewards) == (second.messages, second.turn_rewards)
        return first

    def pays_steps(self, grader: RewardGrader) -> bool:
        by_environment = self._pays_turns and any(reward.per_turn for reward in grader.rewards)
        return by_environment or grader.splitter is not None

    def notes(self) -> Sequence[str]:
        if self._repeats:
            return ()
        return (
            f"environment {self._config.environment} is not repeatable: two with the same columns and the same message "
            "answered differently, so a resumed run may differ from an uninterrupted one, and the rollouts of a group "
            "may not begin alike; its numbers should come from `random`, or from the columns",
        )

    def prompt_limit(self, chat: Chat, model_config: Any, new_tokens: int, *, drop: bool) -> PromptLimit:
        """A prompt is encoded with the descriptions of the tools and the shortest first observation that was tried.
        Longer observations of other rows fail their conversations.

        Raises:
            ConfigError: if the model's chat template cannot continue a conversation.
        """
        style = Style(chat, self._style, self.tools)
        ConversationEncoder(chat).check(style.reply_roles)
        observation = min(self._observations, key=len, default="")

        def encode(prompt: Any) -> Sequence[int]:
            return style.encode(first_messages(prompt, observation))

        sample: list[Message] = [{"role": "user", "content": "u"}]
        of_tools = len(style.encode(sample)) - len(chat.encode(sample))
        of_observation = len(encode(sample)) - len(style.encode(sample))
        parts = [(of_tools, "the descriptions of tools"), (of_observation, "the environment's first observation")]
        counted = [f"{count} for {what}" for count, what in parts if count]
        additions = f" ({' and '.join(counted)})" if counted else ""
        return PromptLimit(chat, model_config, new_tokens, drop, encode, "conversation.total_tokens", additions)

    def sampler(self, sampler: LanguageSampler) -> LanguageSampler:
        """The sampler of conversations.

        Raises:
            ConfigError: if the model's chat template cannot continue a conversation.
        """
        style = Style(sampler.chat, self._style, self.tools)
        of_conversations = ConversationSampler(
            **vars(sampler),
            environments=self._environments,
            style=style,
            turns=self._config.turns,
            total_tokens=self._config.total_tokens,
        )
        of_conversations.encoder.check(style.reply_roles)
        return of_conversations

    def close(self) -> None:
        self._environments.close()

    def _try(self, index: int, use: Callable[[Session], Any]) -> Any:
        session = self._environments.open(environment_seed(0, 0, index))
        try:
            return use(session)
        except CallError as error:
            raise ConfigError(f"environment {self._config.environment}, in a dry run: {error}") from None
        finally:
            session.close()

    def _play(self, session: Session, start: Start, answer: Rollout) -> Rollout:
        observation = session.ask({"do": "reset", "columns": dict(start.columns)}).result()["text"]
        self._observations.append(observation or "")
        messages = [{"role": "user", "content": observation}] if observation else []
        messages.append({"role": "assistant", "content": answer.text})
        reward = 0.0
        if self._pays_turns:
            reply = session.ask({"do": self._style, "message": answer.text, "calls": []}).result()
            messages.append({"role": "user", "content": reply["text"] or ""})
            reward = reply["reward"]
        end = session.ask({"do": "end"}).result()
        return replace(
            answer,
            text=transcript(messages),
            messages=messages,
            turn_rewards=[reward + (end["reward"] or 0.0)],
            environment=end["attributes"],
        )


def tools_of(config: RunConfig) -> Sequence[Tool] | None:
    """The tools of a recipe's conversations; None if it has none.

    Raises:
        ConfigError: as `build_rollout_kind`.
    """
    kind = build_rollout_kind(config)
    kind.close()
    return kind.tools


def build_rollout_kind(config: RunConfig, environment: Any = None) -> RolloutKind:
    """The kind of rollouts of a run; the environments of conversations are started and described.

    Args:
        config: has the name of the environment, and its limits.
        environment: the environment of a Python program, in the forms of `covey.Conversation`; None: the config's name.

    Raises:
        ConfigError: if an environment cannot be loaded.
    """
    settings = config.conversation
    if not config.has_conversations:
        return COMPLETIONS
    source, _, name = settings.source.rpartition(":")
    options = settings.assigned_options
    module, library = settings.imported_module
    environments = EnvironmentProcesses(
        f"{user_path(source)}:{name}" if source.endswith(".py") else settings.source,
        settings.timeout_seconds,
        settings.reply_characters,
        options,
        None if environment is None else copied_environment(environment, settings.given_in_python),
        search_path(f"{module}:", "conversation.options: id", library) if module else (),
    )
    try:
        environments.start()
        return Conversations(config, environments)
    except ConfigError:
        environments.close()
        raise
