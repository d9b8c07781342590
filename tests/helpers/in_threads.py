"""Environments in this process, for tests that look into them or steer them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from covey.llm.conversation.environment import HostedEnvironment
from covey.llm.conversation.processes import Reply
from covey.llm.rewards.runner import in_thread
from covey.runtime.worker.process import CallError


class EnvironmentThreads:
    """Environments of a class, each request in a thread and without a deadline; in place of `EnvironmentProcesses`."""

    def __init__(self, kind: Callable[[], Any], reply_characters: int = 1000) -> None:
        self._kind, self._reply_characters = kind, reply_characters

    def open(self, seed: int) -> _ThreadSession:
        return _ThreadSession(HostedEnvironment(self._kind, self._reply_characters))

    def close(self) -> None:
        pass


class _ThreadSession:
    def __init__(self, hosted: HostedEnvironment) -> None:
        self._hosted = hosted

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> Future[Reply]:
        def answer() -> Reply:
            reply = self._hosted.answer(request)
            if "failed" in reply:
                raise CallError(reply["failed"])
            return reply

        return in_thread(answer)

    def close(self) -> None:
        pass
