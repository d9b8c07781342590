"""The environment `python`: programs of the model, run in the sandbox of the reward `code` (docs/code_rewards.md)."""

from math import ceil
from typing import Any

from covey.llm.rewards.sandbox.backends import choose_sandbox
from covey.llm.rewards.sandbox.session import Limits, ProgramFault, Session

SPARE_CPU_SECONDS = 2  # for the start of the interpreter


class Python:
    """Runs Python programs without network and files. Every call is a new process; nothing is kept between calls.

    Args:
        time_limit_seconds: of one program.
        memory_mb: address space of one program.
        most_characters: of the output that the model gets.
        unsafe_without_sandbox: run programs without protection.

    Raises:
        ConfigError: if this machine has no sandbox.
    """

    def __init__(
        self,
        time_limit_seconds: float = 5.0,
        memory_mb: int = 256,
        most_characters: int = 1000,
        unsafe_without_sandbox: bool = False,
    ) -> None:
        self.limits = Limits(
            seconds=time_limit_seconds,
            cpu_seconds=ceil(time_limit_seconds) + SPARE_CPU_SECONDS,
            memory_mb=memory_mb,
        )
        self.most_characters = most_characters
        self._sandbox = choose_sandbox(unsafe=unsafe_without_sandbox)

    def reset(self, **columns: Any) -> None:
        """Nothing is kept between calls."""

    def run_python(self, code: str) -> str:
        """Run a Python program and get what it prints.

        Args:
            code: the program, which prints its results
        """
        program = code.encode("utf-8", "replace").decode()  # a lone surrogate is not text
        with Session(self._sandbox, self.limits) as session:
            try:
                printed = session.run_script(program, b"", self.limits.output_bytes)
            except ProgramFault as error:
                return f"Error: the program {error}" if " " in str(error).partition(":")[0] else f"Error: {error}"
        text = printed.decode("utf-8", "replace")
        if len(text) > self.most_characters:
            return text[: self.most_characters] + f"... ({len(text):,} characters)"
        return text.rstrip("\n") or "(the program printed nothing)"
