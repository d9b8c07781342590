"""Starts vLLM as a child process: its flags, its environment, and its end.

vLLM has an environment of its own (`make scale`), because it needs another transformers than covey; covey imports
nothing of it. The package `covey_vllm` in that environment has the guard of all routes and the transports of weights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from covey.config import ConfigError, RunError
from covey.config.token_text import hide

NAME = "policy"  # of the model in vLLM's routes
MOST_BATCHED_TOKENS = 1 << 17
LEAST_BATCHED_TOKENS = 2048  # a smaller batch makes prompts wait without need
START_SECONDS = 1800.0  # vLLM starts within two minutes on two cores, and in ten if they have other work
STOP_SECONDS = 30.0
POLL_SECONDS = 0.25
PROGRESS_SECONDS = 15.0
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
LOG_LINES = 3  # of vLLM's errors in a message
# Of the parent's environment, what vLLM must not have: its libraries are others than covey's.
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")


@dataclass(frozen=True)
class VllmSettings:
    """What vLLM is started with."""

    python: Path  # interpreter of its environment
    folder: Path  # of the model, in transformers' layout
    host: str
    port: int
    token_file: Path
    weights_folders: Sequence[Path]  # below which files with weights are read
    precision: str  # bf16 or fp32
    slots: int = 64  # completions generated at once
    max_model_len: int = 2048  # tokens of a prompt with its completion
    batched_tokens: int = 0  # in a forward pass; 0: chosen
    kv_gib: int = 2  # memory of keys and values on CPUs
    threads: int = 0  # 0: vLLM's choice
    eager: bool = False  # starts sooner and generates more slowly

    def check(self) -> None:
        """Refuse settings with which vLLM would not start, or would end in the middle of a run.

        Raises:
            ConfigError: with the fix.
        """
        if not os.access(self.python, os.X_OK):
            raise ConfigError(
                f"--vllm-python: there is no vLLM environment at {self.python}: `make scale` in covey's repository "
                "creates .scale-venv; name its bin/python"
            )
        if self.max_model_len > MOST_BATCHED_TOKENS:
            raise ConfigError(f"--max-model-len must be at most {MOST_BATCHED_TOKENS}: set it to what the run needs")
        if self.batched_tokens and self.batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--batched-tokens {self.batched_tokens} is below --max-model-len {self.max_model_len}, so a long "
                "prompt would be cut, which ends vLLM on CPUs if the request has a seed: raise it, or leave it out"
            )

    @property
    def arguments(self) -> list[str]:
        """Command line of vLLM's API server.

        Prompts are never cut into parts (chunked prefill), because on CPUs a seeded request with a cut prompt ends the
        engine of vLLM 0.32 (`CPU Generator does not use offset`). So the batch must have room for the longest sequence.
        """
        batched = self.batched_tokens or max(self.max_model_len, LEAST_BATCHED_TOKENS)
        options = {
            "--model": str(self.folder),
            "--served-model-name": NAME,
            "--host": self.host,
            "--port": str(self.port),
            "--dtype": DTYPES[self.precision],
            "--max-model-len": str(self.max_model_len),
            "--max-num-seqs": str(self.slots),
            "--max-num-batched-tokens": str(batched),
            "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from, temperature included
            "--generation-config": "vllm",  # the model's own would change top_p and the temperature
            "--middleware": "covey_vllm.Guard",
            "--weight-transfer-config": json.dumps({"backend": "covey"}),  # of covey_vllm
        }
        # Without --enable-scale-out the token-in token-out route answers 403.
        flags = ["--enable-scale-out", "--no-enable-chunked-prefill", *(["--enforce-eager"] if self.eager else [])]
        return [str(self.python), "-m", "covey_vllm", *(part for pair in options.items() for part in pair), *flags]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the child. The token is in a file: arguments are readable by other users of the machine."""
        inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        return inherited | threads | {
            "COVEY_PARENT": str(os.getpid()),
            "COVEY_TOKEN_FILE": str(self.token_file),
            "COVEY_WEIGHTS_FOLDERS": os.pathsep.join(map(str, self.weights_folders)),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight updates
            "VLLM_PLUGINS": "covey",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",
        }  # fmt: skip


class VllmProcess:
    """A running vLLM server, the child of this process. A context manager that ends it."""

    def __init__(self, settings: VllmSettings, log: Path, token: str = "") -> None:
        """Start the process.

        Args:
            settings: checked here.
            log: file for its output.
            token: the access token, which no message quotes from the output.

        Raises:
            ConfigError: if the settings or the environment cannot be used.
        """
        settings.check()
        self.log, self._token = log, token
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                settings.arguments,
                env=settings.environment,
                cwd=log.parent,  # vLLM must not find modules in the user's folder
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches covey alone, which then ends the child
            )

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until(self, answers: Callable[[], bool], say: Callable[[str], None]) -> float:
        """Wait until the server answers; the seconds that it took.

        Args:
            answers: asks the server once.
            say: prints a line about the progress.

        Raises:
            RunError: if it ends, or does not answer within `START_SECONDS`.
        """
        began = told = time.monotonic()
        while not answers():
            now = time.monotonic()
            self.check_alive("did not start")
            if now - began > START_SECONDS:
                raise RunError(f"vLLM did not answer within {START_SECONDS:g} s; its output is in {self.log}")
            if now - told > PROGRESS_SECONDS:
                told = now
                say(f"vLLM is starting ({now - began:.0f} s): {self._last_line()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def check_alive(self, what: str) -> None:
        """Raises RunError with the last errors in the log if the process has ended."""
        if self.process.poll() is not None:
            raise RunError(
                f"vLLM {what}: status {self.process.returncode} ({self._errors()}); its output is in {self.log}"
            )

    def wait(self) -> None:
        """Wait until the process ends, which is an error.

        Raises:
            RunError: when it has ended.
        """
        self.process.wait()
        self.check_alive("has ended")

    def stop(self) -> None:
        """End the process and those that it has started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(ProcessLookupError):  # its workers, if it could not end them
            os.killpg(self.process.pid, signal.SIGKILL)

    def _lines(self) -> list[str]:
        with suppress(OSError):
            return [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return []

    def _last_line(self) -> str:
        lines = self._lines()
        return self._plain(lines[-1]) if lines else "no output yet"

    def _errors(self) -> str:
        lines = self._lines()
        wrong = [line for line in lines if "Error" in line] or lines
        return "; ".join(map(self._plain, wrong[-LOG_LINES:])) or "no output"

    def _plain(self, line: str) -> str:
        """A line of the log as part of a message, without the token."""
        text = "".join(c for c in hide(line, self._token) if c.isprintable()).strip()
        return text if len(text) <= 160 else text[:160] + "..."
