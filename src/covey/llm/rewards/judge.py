"""A reward whose function is a language model behind an OpenAI-compatible address."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

from covey.config import RewardConfig
from covey.config.files import user_path
from covey.config.servers import endpoint
from covey.llm.rewards.judge_client import JudgeSettings
from covey.llm.rewards.reward_call import Results
from covey.llm.rewards.runner import RewardPool, RewardRunner, in_thread
from covey.runtime.cache import cache_folder
from covey.runtime.worker.child import InvalidResult

CLIENT = "covey.llm.rewards.judge_client:grade"
SPARE_SECONDS = 30.0  # of a call, beyond the deadlines of its questions
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


class Judge(RewardRunner):
    """Fills a template for every completion and asks a model for its score.

    The questions are asked in a process of its own (`judge_client.py`), equal ones once. A question has its own
    deadline, so one without a reply costs its own rollout only.
    """

    def __init__(self, config: RewardConfig) -> None:
        """The config is checked, and the template read.

        Raises:
            ConfigError: if the template cannot be read.
        """
        self.template = config.judge_question
        low, high = config.judge_range
        words = config.judge_scores
        self.settings = JudgeSettings(
            address=endpoint(config.judge),
            request=config.judge_body,
            score={
                "low": low, "high": high, "pattern": config.judge_pattern, "field": config.judge_field, "words": words,
            },
            seconds=config.timeout_seconds,
            concurrency=config.judge_concurrency,
            retries=config.judge_retries,
            allow_remote=config.allow_remote,
            cache=str(user_path(config.judge_cache) if config.judge_cache else cache_folder() / "judges"),
            token_variable=config.judge_token_variable,
            token_file=str(user_path(config.judge_token_file).absolute()) if config.judge_token_file else "",
        )  # fmt: skip
        self._pool = RewardPool(CLIENT)

    def call(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Results:
        """A score for each completion, or None and an entry in `errors`.

        Args:
            seconds: not used, because the config has a deadline for each question.

        Raises:
            CallError: if the process of the client ended.
            InvalidResult: if the template names a column that the data does not have.
        """
        questions = self._questions(arguments)
        different = list(dict.fromkeys(questions))
        asked = {"completions": different, "settings": asdict(self.settings)}
        rounds = math.ceil(len(different) / self.settings.concurrency)
        results = self._pool.call(asked, global_step, SPARE_SECONDS + rounds * self.settings.seconds)
        place = {question: number for number, question in enumerate(different)}
        rows = [place[question] for question in questions]
        values, replies, errors = results.values, results.extras["reply"], results.extras["error"]
        return Results(
            [None if errors[number] else values[number] for number in rows],
            results.metrics,
            {"reply": [replies[number] for number in rows]},
            {row: errors[number] for row, number in enumerate(rows) if errors[number]},
        )

    def start(
        self, arguments: Mapping[str, Any], global_step: int, seconds: float, step_counts: Sequence[int] | None = None
    ) -> Future[Results]:
        """As `call`, in the background."""
        return in_thread(partial(self.call, arguments, global_step, seconds))

    def close(self) -> None:
        """End the process of the client."""
        self._pool.close()

    def _questions(self, arguments: Mapping[str, Any]) -> list[str]:
        """The template filled for each completion. What is filled in is not searched for places again."""
        columns = {"prompt": arguments["prompts"], "completion": arguments["completions"], **arguments}
        for name in _PLACE.findall(self.template):
            if name not in columns:
                there = ", ".join(f"{{{name}}}" for name in columns if name not in ("prompts", "completions"))
                raise InvalidResult(f"has {{{name}}} in its question, but there is only {there}")
        return [
            _PLACE.sub(lambda match, row=row: _text(columns[match[1]][row]), self.template)  # type: ignore[misc]
            for row in range(len(arguments["completions"]))
        ]


def _text(value: Any) -> str:
    """A value as text: chat messages by their contents, with the roles if there are several."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n\n".join(f"{message.get('role', '')}: {message['content']}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)
