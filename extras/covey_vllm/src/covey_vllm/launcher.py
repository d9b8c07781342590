"""`covey serve --vllm`: starts vLLM as a child process with the flags that a run needs, and probes it.

This module runs in covey's environment, where `covey serve` finds it by an entry point. vLLM has an environment of its
own (`make scale`), because it needs another transformers than covey; the other modules of this package are for that.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from covey.config import ConfigError, RunError
from covey.config.fields import command
from covey.config.files import make_folder, path_error, user_path
from covey.config.model_sources import ModelKind, locate_model
from covey.config.servers import ServeOptions, VllmOptions, default_token_file, hide, no_vllm
from covey.config.terminal import say
from covey.llm.model.architecture import position_limit
from covey.llm.model.loading import LoadedModel, load_model, model_folder, resolve_checkpoint
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.fleet import end_with_parent
from covey.llm.remote.proof import probe
from covey.llm.remote.weights import FileTransport, dtype_name, private_folder, private_folders
from covey.runtime.device import choose_device, choose_precision, set_threads
from covey.runtime.variables import cache_folder

NAME = "policy"  # of the model in vLLM's routes
MOST_BATCHED_TOKENS = 1 << 17
LEAST_BATCHED_TOKENS = 2048  # a smaller batch makes prompts wait without need
TIMEOUT_SECONDS = 600.0  # of a request of the probe
START_SECONDS = 1800.0  # vLLM starts within two minutes on two cores, and in ten if they have other work
STOP_SECONDS = 8.0  # less than a run gives its samplers to end
POLL_SECONDS = 0.25
PROGRESS_SECONDS = 15.0
KEPT_LOGS = 10  # of earlier servers
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
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
    gpu_memory: float = 0.0  # fraction of a GPU's memory; 0: vLLM's choice
    sleep: bool = False  # the routes /sleep and /wake_up free and take a GPU's memory
    threads: int = 0  # 0: vLLM's choice
    eager: bool = False  # starts sooner and generates more slowly

    def check(self) -> None:
        """Refuse settings with which vLLM would not start, or would end in the middle of a run.

        Raises:
            ConfigError: with the fix.
        """
        if not os.access(self.python, os.X_OK):
            raise ConfigError(f"--vllm-python: {no_vllm(str(self.python))}")
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
        if self.gpu_memory:
            options["--gpu-memory-utilization"] = f"{self.gpu_memory:g}"
        # Without --enable-scale-out the token-in token-out route answers 403.
        flags = ["--enable-scale-out", "--no-enable-chunked-prefill", *(["--enforce-eager"] if self.eager else [])]
        flags += ["--enable-sleep-mode"] if self.sleep else []
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
        with suppress(ProcessLookupError, PermissionError):  # its workers, if it could not end them
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


def serve_vllm(options: ServeOptions, vllm: VllmOptions) -> None:
    """Start vLLM, probe it, and wait until Ctrl-C. A run that starts it gives it weights at once, so it has no probe.

    Raises:
        ConfigError: if an option, the environment or the model cannot be used.
        RunError: if vLLM does not start, ends, or does not take weights.
    """
    ending = ExitStack()
    if options.child:
        end_with_parent(ending.close)
    token = options.token()
    settings = _settings(options, vllm, Path())
    settings.check()
    set_threads(options.threads)
    if options.precision == "auto":
        dtype = choose_precision("auto", choose_device("auto"))  # the GPU's if vLLM will have one
    else:
        dtype = getattr(torch, DTYPES[options.precision])
    loaded = load_model(options.model, dtype=dtype, device=torch.device("cpu"))
    _check_length(loaded, vllm.max_model_len)
    with _local_folder(loaded, options.model) as folder:
        port = options.port or _free_port(options.host)
        address = f"http://[{options.host}]:{port}" if ":" in options.host else f"http://{options.host}:{port}"
        settings = _settings(options, vllm, folder, port, PRECISIONS[dtype_name(dtype)])
        client = Client(address, token, TIMEOUT_SECONDS)
        say(f"starting vLLM with {options.model} in {dtype_name(dtype)} at {address}; this takes minutes")
        with VllmProcess(settings, _log_file(port), token) as process:
            ending.callback(process.stop)
            if not options.child:
                _prove(process, client, loaded, settings.weights_folders[0])
                say(f"Use it: {command('train', 'RECIPE', '--sampler.kind', 'vllm', '--servers', address)}")
            del loaded  # vLLM needs the memory
            process.wait()


def _prove(process: VllmProcess, client: Client, loaded: LoadedModel, folder: Path) -> None:
    """Wait until vLLM answers, and probe it; `folder` is for weights.

    Raises:
        RunError: if it does not start, or does not take weights.
    """
    seconds = process.wait_until(lambda: _answers(client), say)
    say(f"vLLM has started after {seconds:.0f} s; its output is in {process.log}")
    policy = LanguagePolicy(loaded.module.requires_grad_(False))
    found = probe(client, policy, FileTransport(str(folder)), loaded.chat.end_ids)
    say(f"updates of its weights take: log-probabilities differ from covey's by {found.line}")


def _settings(
    options: ServeOptions, vllm: VllmOptions, folder: Path, port: int = 0, precision: str = "bf16"
) -> VllmSettings:
    """What vLLM is started with.

    Raises:
        ConfigError: if there is no such folder for weights.
    """
    own = options.weights_folder()
    return VllmSettings(
        # Not resolved: the interpreter of an environment is a link, and what it is called by decides on the packages.
        python=user_path(vllm.vllm_python, "--vllm-python: ").absolute(),
        folder=folder,
        host=options.host,
        port=port,
        token_file=user_path(options.token_file).absolute() if options.token_file else default_token_file(),
        weights_folders=(own,) if own else (private_folder(0), *private_folders()),
        precision=precision,
        slots=vllm.slots,
        max_model_len=vllm.max_model_len,
        batched_tokens=vllm.batched_tokens,
        kv_gib=vllm.kv_gib,
        gpu_memory=vllm.gpu_memory,
        sleep=vllm.sleep,
        threads=options.threads,
        eager=vllm.eager,
    )


def _check_length(loaded: LoadedModel, tokens: int) -> None:
    limit = position_limit(loaded.module.config)
    if limit is not None and tokens > limit:
        raise ConfigError(f"--max-model-len {tokens} exceeds the model's {limit} positions: lower it")


@contextmanager
def _local_folder(loaded: LoadedModel, name: str) -> Iterator[Path]:
    """Context manager of a folder with the model in transformers' layout, for vLLM to read."""
    source = locate_model(resolve_checkpoint(name))
    if source.kind is not ModelKind.CHECKPOINT:
        del loaded
        yield model_folder(source)
        return
    # A checkpoint of a run has the masters of its weights alone.
    with tempfile.TemporaryDirectory(prefix="covey-vllm-") as folder:
        loaded.module.save_pretrained(folder)
        loaded.chat.tokenizer.save_pretrained(folder)
        del loaded
        yield Path(folder)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _log_file(port: int) -> Path:
    folder = cache_folder() / "vllm"
    try:
        make_folder(folder)
        logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
        for log in logs[:-KEPT_LOGS]:
            log.unlink(missing_ok=True)
    except OSError as error:
        raise path_error(error, f"the output of vLLM cannot be written to {folder}") from error
    return folder / f"{port}.log"


def _answers(client: Client) -> bool:
    try:
        asyncio.run(client.get(wire.HEALTH))
    except LostServer:
        return False
    return True
