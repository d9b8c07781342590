"""The prompts of a teacher, and whether it knows the policy's tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.config import ConfigError
from covey.data import Group, Rollout, Start
from covey.llm.data.rows import Row, filled, places
from covey.llm.model.chat import Chat, Message, TokenPrompt
from covey.llm.tasks.prompt_limit import length_fault

PROMPT, BEST_SIBLING, FEEDBACK = "prompt", "best_sibling", "feedback"  # places that are no columns of the data
OF_GROUP = (BEST_SIBLING, FEEDBACK)  # those that a group fills when it is graded


@dataclass(frozen=True)
class TeacherPrompts:
    """The prompts of a teacher: the policy's with more in them, such as the right answer.

    Self-distillation: the template has what makes the teacher better than the policy (OPSD: the right answer), or what
    the group has found (SDPO, arXiv 2601.20802: the completion of a better sibling, feedback).

    Args:
        template: `teacher.prompt`.
        context_of: token ids of a prompt and of the first observation of a conversation (`LanguageSampler.context_of`).
        models: transformers' configs of the models that read the prompts.
    """

    template: str
    context_of: Callable[[Any, str], Sequence[int]]
    models: Sequence[Any]

    def contexts(self, group: Group) -> list[tuple[int, ...]]:
        """For each rollout the token ids of the teacher's prompt; empty if a place of the template cannot be filled, or
        if the prompt and the completion are too long for a model.
        """
        known: dict[str, tuple[int, ...]] = {}
        found = []
        for rollout in group.rollouts:
            columns = dict(_found_by(group, rollout)) | dict(group.start.columns)
            context: tuple[int, ...] = ()
            if {*places(self.template)} <= {*columns, PROMPT}:
                key = repr((rollout.observation, {name: columns.get(name) for name in OF_GROUP}))
                if key not in known:
                    known[key] = self._context(group.start.prompt, columns, rollout.observation)
                context = known[key]
            found.append(() if context and self._fault(len(context), len(rollout.actions)) else context)
        return found

    def check(self, rows: Sequence[Start | Row], new_tokens: int, *, drop: bool) -> None:
        """Refuse a template that the data cannot fill, or with which a prompt is too long.

        Args:
            rows: prompts with their columns.
            new_tokens: the most tokens after a prompt.
            drop: prompts that are too long have no teacher.

        Raises:
            ConfigError: naming the first row.
        """
        for row in rows:
            place = row.place or "a prompt of the task"
            there = (PROMPT, *OF_GROUP, *row.columns)
            if missing := [name for name in places(self.template) if name not in there]:
                listed = ", ".join(f"{{{name}}}" for name in there)
                raise ConfigError(
                    f"{place}: teacher.prompt has {{{missing[0]}}}, but there is only {listed}: change the place, or "
                    "the columns of the data"
                )
            context = self._context(row.prompt, dict.fromkeys(OF_GROUP, "") | dict(row.columns), "")
            if (fault := self._fault(len(context), new_tokens)) and not drop:
                raise ConfigError(
                    f'{place}: for the teacher, {fault}; or set sampling.long_prompts = "drop", with which completions '
                    "of such prompts have no teacher"
                )

    def _context(self, prompt: Any, columns: Mapping[str, Any], observation: str) -> tuple[int, ...]:
        return tuple(self.context_of(asked(self.template, prompt, columns), observation))

    def _fault(self, tokens: int, new_tokens: int) -> str:
        faults = (length_fault(model, tokens, new_tokens, additions=" with teacher.prompt") for model in self.models)
        return next(filter(None, faults), "")


def asked(template: str, prompt: str | Sequence[Message], columns: Mapping[str, Any]) -> str | list[Message]:
    """The teacher's prompt: the last message of the user, or the text, with the template before it or in its place.

    Raises:
        ConfigError: for a prompt of token ids.
    """
    if isinstance(prompt, TokenPrompt):
        raise ConfigError("teacher.prompt is a text, and a prompt of the data is token ids: give texts or messages")
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not messages or messages[-1].get("role") != "user":
        messages.append({"role": "user", "content": ""})
    question = messages[-1]["content"]
    text = filled(template, {**columns, PROMPT: question})
    if PROMPT not in places(template):
        text = f"{text}\n\n{question}" if question else text
    return text if isinstance(prompt, str) else [*messages[:-1], {**messages[-1], "content": text}]


def _found_by(group: Group, rollout: Rollout) -> Iterator[tuple[str, str]]:
    """What the group knows about a rollout when it is graded."""
    graded = [one for one in group.rollouts if one.reward is not None]
    best = max(graded, key=lambda one: one.reward or 0.0, default=rollout)
    if rollout.reward is not None and (best.reward or 0.0) > rollout.reward:
        yield BEST_SIBLING, best.text
    logged = [str(columns[FEEDBACK]) for columns in rollout.extras.values() if columns.get(FEEDBACK)]
    if logged:
        yield FEEDBACK, "\n\n".join(logged)


def check_tokens(chat: Chat, teacher: Chat, name: str) -> None:
    """Refuse a teacher that does not know the policy's tokens by the same numbers.

    Args:
        chat: of the policy.
        teacher: of the teacher, called `name`.

    Raises:
        ConfigError: with the first token that differs.
    """
    known = teacher.tokenizer.get_vocab()
    own = sorted((number, token) for token, number in chat.tokenizer.get_vocab().items() if known.get(token) != number)
    if own:
        number, token = own[0]
        theirs = f"number {known[token]}" if token in known else "unknown"
        raise ConfigError(
            f"teacher.model: {name} has another tokenizer than the policy: {token!r}, number {number} of the policy, "
            f"is {theirs} there ({len(own):,} such tokens); a teacher reads the policy's tokens, so take a model of "
            "the same family"
        )
