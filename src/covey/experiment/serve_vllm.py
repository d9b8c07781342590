"""`covey serve --vllm`: starts vLLM with the right flags, and probes it before a run uses it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.config import ConfigError
from covey.config.faults import path_error
from covey.config.fields import command
from covey.config.files import make_folder, user_path
from covey.config.model_sources import ModelKind, locate_model
from covey.config.serving import ServeOptions, VllmOptions
from covey.config.terminal import say
from covey.config.token_file import default_token_file
from covey.experiment.llm import build_machine
from covey.llm.model.architecture import position_limit
from covey.llm.model.loading import LoadedModel, load_model, model_folder, resolve_checkpoint
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.proof import probe
from covey.llm.remote.vllm_launcher import VllmProcess, VllmSettings
from covey.llm.remote.weights import FileTransport, dtype_name, private_folder, private_folders
from covey.runtime.cache import cache_folder

TIMEOUT_SECONDS = 600.0  # of a request of the probe
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


def serve_vllm(options: ServeOptions, vllm: VllmOptions) -> None:
    """Start vLLM, probe it, and wait until Ctrl-C.

    Raises:
        ConfigError: if an option, the environment or the model cannot be used.
        RunError: if vLLM does not start, ends, or does not take weights.
    """
    token = options.token()
    settings = _settings(options, vllm, Path())
    settings.check()
    machine = build_machine("cpu", options.precision, options.threads)
    loaded = load_model(options.model, dtype=machine.dtype, device=machine.device)
    _check_length(loaded, vllm.max_model_len)
    with _local_folder(loaded, options.model) as folder:
        port = options.port or _free_port(options.host)
        address = f"http://[{options.host}]:{port}" if ":" in options.host else f"http://{options.host}:{port}"
        settings = _settings(options, vllm, folder, port, PRECISIONS[dtype_name(machine.dtype)])
        client = Client(address, token, TIMEOUT_SECONDS)
        say(f"starting vLLM with {options.model} in {dtype_name(machine.dtype)} at {address}; this takes minutes")
        with VllmProcess(settings, _log_file(port), token) as process:
            seconds = process.wait_until(lambda: _answers(client), say)
            say(f"vLLM has started after {seconds:.0f} s; its output is in {process.log}")
            policy = LanguagePolicy(loaded.module.requires_grad_(False))
            transport = FileTransport(str(settings.weights_folders[0]))
            found = probe(client, policy, transport, loaded.chat.end_ids)
            del loaded, policy  # vLLM needs the memory
            say(f"updates of its weights take: log-probabilities differ from covey's by {found.line}")
            say(f"Use it: {command('train', 'RECIPE', '--sampler.kind', 'vllm', '--servers', address)}")
            process.wait()


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
        yield model_folder(source)
        return
    # A checkpoint of a run has the masters of its weights alone.
    with tempfile.TemporaryDirectory(prefix="covey-vllm-") as folder:
        loaded.module.save_pretrained(folder)
        loaded.chat.tokenizer.save_pretrained(folder)
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
    except OSError as error:
        raise path_error(error, f"the output of vLLM cannot be written to {folder}") from error
    return folder / f"{port}.log"


def _answers(client: Client) -> bool:
    try:
        asyncio.run(client.get(wire.HEALTH))
    except LostServer:
        return False
    return True
