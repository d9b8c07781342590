"""Rollouts, task, rewards and held-out problems of a run on a language model, tried before the model is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from covey.config import CRITIC_FREE, ConfigError, EnvironmentTaskConfig, RewardConfig, RunConfig
from covey.config.fields import plural, printable
from covey.config.files import user_path
from covey.config.named_modules import search_path
from covey.config.rules import unpaid_credit
from covey.data import Rollout, Start, Task
from covey.experiment.job import Reward
from covey.llm.conversation.encoding import ConversationEncoder
from covey.llm.conversation.processes import EnvironmentProcesses, copied_environment
from covey.llm.conversation.sampler import ConversationSampler, environment_seed, first_messages, transcript
from covey.llm.conversation.styles import Style
from covey.llm.conversation.tools import Tool
from covey.llm.data.images import ImagePrompt
from covey.llm.grader import RewardGrader, build_grader, check_answers, right_rollout, rows_of_every_kind
from covey.llm.model.chat import Chat, Message
from covey.llm.model.loading import find_chat
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks import EnvironmentRows, PromptDataset, Prompts, build_task, task_of
from covey.llm.tasks.prompt_limit import FittingTask, Note, PromptLimit, refuse_first_starts
from covey.llm.teacher import OF_GROUP, TeacherPrompts, asked
from covey.runtime.worker.process import CallError
from covey.runtime.worker.sessions import Session

WITH_IMAGES = "the prompts have images, which"
DESCRIBE_SECONDS = 60.0  # to describe tools, which imports transformers
ROWS_SECONDS = 300.0  # to send the prompts of an adapter
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")  # the placeholders of an image


class Completions:
    """What a rollout of a run is: a completion of one turn."""

    tools: Sequence[Tool] | None = None  # of conversations
    default_rewards: tuple[RewardConfig, ...] = ()  # in place of the task's own, if the recipe has none

    def task(self, config: Any) -> Task:
        """The task of a config of `TASK_CONFIGS`. Raises ConfigError as `build_task` does."""
        return build_task(config)

    def example(self, start: Start) -> Rollout:
        """A rollout with which rewards are tried."""
        return right_rollout(start)

    def pays_steps(self, grader: RewardGrader) -> bool:
        """Whether a reward is paid by reasoning step, or by turn."""
        return grader.splitter is not None

    def notes(self) -> Sequence[str]:
        """Notes for the user."""
        return ()

    def prompt_limit(self, chat: Chat, model_config: Any, new_tokens: int, *, drop: bool) -> PromptLimit:
        """The check of the length of prompts; after `example`.

        Args:
            chat: encodes the prompts.
            model_config: transformers' config of the model.
            new_tokens: the most tokens after a prompt.
            drop: prompts that are too long are dropped, not refused.
        """
        return PromptLimit(chat, model_config, new_tokens, drop)

    def sampler(self, sampler: LanguageSampler) -> LanguageSampler:
        """The sampler of these rollouts with the settings of `sampler`."""
        return sampler

    def close(self) -> None:
        """End what runs beside this process."""


COMPLETIONS = Completions()


class Conversations(Completions):
    """A rollout is a conversation with an environment, which is tried before the model is loaded."""

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
        self.tools = self._tools = [Tool(schema["function"]["name"], schema) for schema in described["tools"]]
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
        return super().task(config)

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
        return by_environment or super().pays_steps(grader)

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
        style = Style(chat, self._style, self._tools)
        ConversationEncoder(style.chat).check(style.reply_roles)
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
        style = Style(sampler.chat, self._style, self._tools)
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
    with closing(build_rollout_kind(config)) as kind:
        return kind.tools


def build_rollout_kind(config: RunConfig, environment: Any = None) -> Completions:
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


@dataclass(frozen=True)
class Problem:
    """Task and grader of a run, and its held-out problems."""

    config: RunConfig
    kind: Completions  # of its rollouts, with which the rewards were tried
    task: Task
    grader: RewardGrader
    held_out: list[Start]  # at least one, at most evaluation.problems

    def metrics(self) -> dict[str, float]:
        """Counts of the task since the last call."""
        return self.task.metrics() if isinstance(self.task, FittingTask) else {}

    @property
    def image_prompt(self) -> ImagePrompt | None:
        """The first prompt with images; None if there is none."""
        rows = self.task.rows if isinstance(self.task, PromptDataset) else self.held_out
        prompts = (row.prompt for row in rows)
        return next((prompt for prompt in prompts if isinstance(prompt, ImagePrompt) and prompt.pictures), None)

    def refuse_images(self, what: str) -> None:
        """Raises ConfigError if a prompt has images, which `what` cannot read."""
        if self.image_prompt is not None:
            raise ConfigError(f"{WITH_IMAGES} {what} does not read: use covey train, or other data")

    def prompt_as_read(self) -> list[str]:
        """The first held-out prompt as the model reads it: with the chat template, the system text, the tools and the
        first observation of the environment that was tried; also as a teacher with a prompt of its own does. [] if the
        model's tokenizer is not on this machine.
        """
        found = find_chat(self.config.model)
        if found is None:
            return []
        chat, model_config = found[0].with_config(self.config.chat), found[1]
        limit = self.kind.prompt_limit(chat, model_config, self.config.rollout_limit, drop=True)
        first, template = self.held_out[0], self.config.teacher.prompt
        readers: dict[str, Any] = {"the model": first.prompt}
        if template:
            found_later = {name: f"{{{name}}}" for name in OF_GROUP}
            readers["the teacher"] = asked(template, first.prompt, found_later | dict(first.columns))
        shown = []
        for reader, prompt in readers.items():
            ids = (limit.encode or chat.encode)(prompt)
            text = _REPEATED.sub(_counted, str(chat.tokenizer.decode(list(ids))))
            read = f"{reader} reads the first held-out prompt as {plural(len(ids), 'token')}{_images_of(prompt)}:"
            shown += [read, *printable(text).split("\n"), ""]
        return shown

    def fit(self, chat: Chat, model_config: Any, note: Note, *, training: bool = True, teacher: Any = None) -> Problem:
        """The problem without prompts that are too long for the model.

        With `sampling.long_prompts` = "drop" long prompts are removed, else they are errors.

        Args:
            chat: encodes the prompts.
            model_config: transformers' config of the model.
            note: called with a line for the user about dropped prompts, and with `text_notes`.
            training: if False, only held-out prompts are checked.
            teacher: transformers' config of a teacher that reads the same training prompts.

        Raises:
            ConfigError: naming the first prompt that is too long; a line of a file by its number.
        """
        config, sampling, task = self.config, self.config.sampling, self.task
        tried = list(self.held_out)
        if isinstance(task, PromptDataset):
            tried += task.draw(config.seed, 1, sampling.prompts_per_step, first=0, before=0)
        for line in text_notes((start.prompt for start in tried), chat):
            note(line)
        drop = sampling.long_prompts == "drop"
        limit = self.kind.prompt_limit(chat, model_config, config.rollout_limit, drop=drop)
        evaluated = replace(limit, max_new_tokens=max(config.rollout_limit, *config.evaluation.token_limits, 0))
        limit = replace(limit, teacher=teacher)
        if isinstance(task, PromptDataset):
            task.keep_fitting(limit if training else None, evaluated)
            return replace(self, held_out=task.held_out(config.evaluation.problems))
        held_out = evaluated.taken(self.held_out, note)
        if training and not drop:
            refuse_first_starts(task, limit, config.seed, config.steps, sampling.prompts_per_step)
        return replace(self, task=FittingTask(task, limit, note), held_out=held_out)

    def check_teacher(self, chat: Chat, models: Sequence[Any]) -> None:
        """Fill the teacher's template with the rows of the data, or with the first ones that a task draws.

        Args:
            chat: encodes the prompts.
            models: transformers' configs of the policy and, if it is another model, of the teacher.

        Raises:
            ConfigError: as `TeacherPrompts.check`.
        """
        config, task = self.config, self.task
        limit = self.kind.prompt_limit(chat, models[0], config.rollout_limit, drop=True)
        encode = limit.encode or chat.encode
        rows: Sequence[Any] = (
            task.rows
            if isinstance(task, PromptDataset)
            else [*self.held_out, *task.draw(config.seed, 1, config.sampling.prompts_per_step, first=0, before=0)]
        )
        prompts = TeacherPrompts(config.teacher.prompt, lambda prompt, observation: encode(prompt), models)
        prompts.check(rows, config.rollout_limit, drop=config.sampling.long_prompts == "drop")

    def notes(self, asked: int, name: str) -> list[str]:
        """Notes on the data for the user, such as fewer held-out problems than asked for.

        Args:
            asked: requested number of held-out problems.
            name: of the field or option with this number.
        """
        notes = [self.task.describe()] if isinstance(self.task, PromptDataset) else []
        if len(self.held_out) < asked:
            there = plural(len(self.held_out), "held-out problem")
            notes.append(f"evaluation: {there}, all that there are ({name} is {asked:,})")
        return notes


def build_problem(
    config: RunConfig,
    task: Any = None,
    rewards: Sequence[Reward | WeightedReward] = (),
    kind: Completions = COMPLETIONS,
) -> Problem:
    """Build task and grader, and test both on a few prompts before a model is loaded.

    Args:
        config: has the task and the rewards, unless they are given.
        task: a task of a script, in any form that `task_of` takes.
        rewards: Python functions with TRL's signature, of a script.
        kind: of the rollouts.

    Raises:
        ConfigError: if the data, the task or a reward is invalid.
    """
    if task is None and config.task is None:
        raise ConfigError("there is no task: add a [task] table, or call run(config, task=...)")
    task = kind.task(config.task) if task is None else task_of(task)
    default = kind.default_rewards or getattr(task, "default_rewards", ())
    if config.teacher.model and not kind.default_rewards and not _has_answers(task):
        default = (RewardConfig(name="zero"),)
    if not (rewards or config.rewards or default):
        raise ConfigError("there is no reward: add a [[rewards]] table, or call run(config, rewards=[...])")
    grader = build_grader(
        rewards or config.rewards, default, _shaping(config), config.process.rule, config.device, config.precision
    )
    if config.loss.credit != "outcome" and not kind.pays_steps(grader):
        grader.close()
        raise ConfigError(unpaid_credit(config))
    try:
        held_out = list(task.held_out(config.evaluation.problems))[: config.evaluation.problems]
        if not held_out:
            raise ConfigError("the task has no held-out problem, and evaluation needs at least one")
        rows = task.rows if isinstance(task, PromptDataset) else held_out
        check_answers(grader.rewards, rows)
        kinds = rows_of_every_kind(rows) if isinstance(task, PromptDataset) else []
        others = [Start(0, row.prompt, row.columns, place=row.place) for row in (kinds if len(kinds) > 1 else ())]
        problem = Problem(config, kind, task, grader, held_out)
        if problem.image_prompt is not None and (fault := _images_fault(config)):
            raise ConfigError(f"{WITH_IMAGES} {fault}, or remove the column with images from the data")
        grader.check(task.draw(config.seed, 1, 2, first=0, before=0), kind.example, others)
    except ConfigError:
        grader.close()
        raise
    return problem


def _counted(run: re.Match[str]) -> str:
    """Repeated placeholders as one and their number."""
    return f"{run[1]} x {len(run[0]) // len(run[1])} "


def _images_of(prompt: Any) -> str:
    """The images of a prompt with their sizes; "" if it has none."""
    pictures = prompt.pictures if isinstance(prompt, ImagePrompt) else ()
    sizes = ", ".join("{} x {}".format(*picture.open().size) for picture in pictures)
    return f", with {plural(len(pictures), 'image')} ({sizes} pixels)" if pictures else ""


def _images_fault(config: RunConfig) -> str:
    """What of a run takes no images in prompts, with the remedy; "" if it takes them."""
    faults = (
        (config.has_conversations, "conversations do not show: remove conversation.environment"),
        (config.sampler.kind != "local", 'servers are not sent: set sampler.kind = "local"'),
        (config.algorithm not in CRITIC_FREE, 'a critic does not read: set algorithm = "grpo"'),
        (any(reward.model for reward in config.rewards), "a reward model does not read: name another reward"),
        (config.teacher.model, "a teacher does not read: remove [teacher]"),
        (config.replay.groups, "replay does not keep: remove [replay]"),
        (config.lora.load_in_4bit, "are not tried with weights in 4 bits: set lora.load_in_4bit = false"),
    )
    return next((fault for found, fault in faults if found), "")


def _has_answers(task: Task) -> bool:
    """False for data without a right answer, and for a task that names no reward."""
    if isinstance(task, PromptDataset):
        return any("answer" in row.columns for row in task.rows)
    return bool(getattr(task, "default_rewards", ()))


@contextmanager
def opened_problem(config: RunConfig) -> Iterator[Problem]:
    """Context manager with the problem of a recipe, whose processes end with it.

    Raises:
        ConfigError: as `build_rollout_kind` and `build_problem` do.
    """
    with closing(build_rollout_kind(config)) as kind:
        problem = build_problem(config, kind=kind)
        with closing(problem.grader):
            yield problem


def text_notes(prompts: Iterable[Any], chat: Chat) -> list[str]:
    """Lines about prompts that are texts: rendered ones, to which the tokenizer adds its first token once more, and
    plain ones for a model with a chat template.
    """
    tried = list(prompts)
    begin, twice = chat.tokenizer.bos_token, sum(map(chat.begins_twice, tried))
    unmarked = sum(map(chat.is_unmarked, tried))
    return [
        f"{plural(twice, 'prompt')} of those that were tried, rendered by a chat template, begin with {begin!r}, and "
        "the tokenizer adds it, so the model reads it twice: take it out of the text, or give chat messages, which "
        "covey renders"
    ] * bool(twice) + [
        f"{plural(unmarked, 'tried prompt')} {'is' if unmarked == 1 else 'are'} plain text, which the model continues "
        "without its chat template; to ask it a question, name the column 'question', or give chat messages: "
        '[{"role": "user", "content": ...}]'
    ] * bool(unmarked)


def _shaping(config: RunConfig) -> list[WeightedReward]:
    """Reward terms that the config adds to the user's rewards: the penalty of overlong completions."""
    if not config.overlong_tokens:
        return []
    return [WeightedReward.overlong(config.rollout_limit, config.overlong_tokens)]
