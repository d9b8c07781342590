"""Task, rewards and held-out problems of a run on a language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from covey.config import ConfigError, RunConfig
from covey.config.fields import plural, printable
from covey.config.rules import unpaid_credit
from covey.data import Start, Task
from covey.experiment.build import Reward
from covey.experiment.conversations import COMPLETIONS, RolloutKind, build_rollout_kind
from covey.llm.grader import RewardGrader, build_grader, check_answers, rows_of_every_kind
from covey.llm.model.chat import Chat
from covey.llm.model.loading import find_chat
from covey.llm.rewards.weighted_reward import WeightedReward
from covey.llm.tasks import PromptDataset, task_of
from covey.llm.tasks.prompt_limit import FittingTask, Note, refuse_first_starts


@dataclass(frozen=True)
class Problem:
    """Task and grader of a run, and its held-out problems."""

    task: Task
    grader: RewardGrader
    held_out: list[Start]  # at least one, at most evaluation.problems

    def metrics(self) -> dict[str, float]:
        """Counts of the task since the last call."""
        return self.task.metrics() if isinstance(self.task, FittingTask) else {}

    def note_rendered_prompts(self, config: RunConfig, chat: Chat, note: Note) -> None:
        """Tell the user of a prompt that a chat template has rendered and the tokenizer begins once more."""
        starts = list(self.held_out)
        if isinstance(self.task, PromptDataset):
            starts += self.task.draw(config.seed, 1, config.sampling.prompts_per_step, first=0, before=0)
        for line in rendered_notes((start.prompt for start in starts), chat):
            note(line)

    def prompt_as_read(self, kind: RolloutKind, config: RunConfig) -> list[str]:
        """The first held-out prompt as the model reads it: with the chat template, the system text, the tools and the
        first observation of the environment that was tried; [] if the model's tokenizer is not on this machine.
        """
        found = find_chat(config.model)
        if found is None:
            return []
        chat, model_config = found[0].with_config(config.chat), found[1]
        limit = kind.prompt_limit(chat, model_config, config.rollout_limit, drop=True)
        ids = (limit.encode or chat.encode)(self.held_out[0].prompt)
        lines = printable(str(chat.tokenizer.decode(list(ids)))).split("\n")
        return [f"the model reads the first held-out prompt as {plural(len(ids), 'token')}:", *lines, ""]

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
    kind: RolloutKind = COMPLETIONS,
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
        grader.check(task.draw(config.seed, 1, 2, first=0, before=0), kind.example, others)
    except ConfigError:
        grader.close()
        raise
    return Problem(task, grader, held_out)


@contextmanager
def opened_problem(config: RunConfig) -> Iterator[tuple[Problem, RolloutKind]]:
    """Context manager with the problem of a recipe and the kind of its rollouts, which are closed at the end.

    Raises:
        ConfigError: as `build_rollout_kind` and `build_problem` do.
    """
    kind = build_rollout_kind(config)
    try:
        problem = build_problem(config, kind=kind)
        try:
            yield problem, kind
        finally:
            problem.grader.close()
    finally:
        kind.close()


def fit_prompts(
    problem: Problem,
    config: RunConfig,
    chat: Chat,
    model_config: Any,
    note: Note,
    *,
    kind: RolloutKind,
    training: bool = True,
) -> Problem:
    """The problem without prompts that are too long for the model.

    Args:
        problem: with all prompts.
        config: with the token limits, and `sampling.long_prompts`: "drop" removes long prompts, else they are errors.
        chat: encodes the prompts.
        model_config: transformers' config of the model.
        note: called with a line for the user about dropped prompts, and about those that a template has rendered.
        kind: of the rollouts, with which the rewards of the problem were tried.
        training: if False, only held-out prompts are checked.

    Raises:
        ConfigError: naming the first prompt that is too long; a line of a file by its number.
    """
    problem.note_rendered_prompts(config, chat, note)
    drop, sampling = config.sampling.long_prompts == "drop", config.sampling
    limit = kind.prompt_limit(chat, model_config, config.rollout_limit, drop=drop)
    longest = max(config.rollout_limit, *config.evaluation.token_limits, 0)
    evaluated = replace(limit, max_new_tokens=longest)
    task = problem.task
    if isinstance(task, PromptDataset):
        task.keep_fitting(limit if training else None, evaluated)
        return replace(problem, held_out=task.held_out(config.evaluation.problems))
    held_out = evaluated.taken(problem.held_out, note)
    if training and not drop:
        refuse_first_starts(task, limit, config.seed, config.steps, sampling.prompts_per_step)
    return replace(problem, task=FittingTask(task, limit, note), held_out=held_out)


def rendered_notes(prompts: Iterable[Any], chat: Chat) -> list[str]:
    """A line about prompts that begin with the token which the tokenizer adds; [] if there is none."""
    begin, count = chat.tokenizer.bos_token, sum(map(chat.begins_twice, prompts))
    return [
        f"{plural(count, 'prompt')} of those that were tried, rendered by a chat template, begin with {begin!r}, and "
        "the tokenizer adds it, so the model reads it twice: take it out of the text, or give chat messages, which "
        "covey renders"
    ] * bool(count)


def _shaping(config: RunConfig) -> list[WeightedReward]:
    """Reward terms that the config adds to the user's rewards: the penalty of overlong completions."""
    if not config.overlong_tokens:
        return []
    return [WeightedReward.overlong(config.rollout_limit, config.overlong_tokens)]
