"""`covey serve`: its options, and the command."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import fields
from typing import Any

from covey.cli.numbers import number
from covey.config import ConfigError
from covey.config.model_sources import locate_model
from covey.config.named_modules import entry_points_of
from covey.config.serving import ServeOptions, VllmOptions

LONGEST_PROBE = 64  # tokens; the probe at the start needs less


def add_serve_options(command: Any) -> None:
    """Add the options of `covey serve`."""
    command.epilog = (
        "A run uses it with --sampler.kind covey (with --vllm: vllm) --servers ADDRESS, and gives it its weights.\n"
        "--vllm starts vLLM in an environment of its own, which `make scale` creates. Every route but /health\n"
        "needs the access token. The connection is not encrypted: keep other addresses than 127.0.0.1 on a private\n"
        "network, or use an ssh tunnel."
    )
    command.add_argument("model", metavar="MODEL", help="a model's name, folder or .gguf file, or a run folder")
    command.add_argument("--host", default="127.0.0.1", help="address to accept connections at (127.0.0.1)")
    command.add_argument("--port", type=number(int, 0, 65535), default=8801, help="its port; 0: a free one (8801)")
    command.add_argument(
        "--token-file", default="", metavar="FILE", help="file with the access token, which only its owner may read"
    )
    command.add_argument(
        "--folder", default="", metavar="DIR", help="folder below which files with weights are read (a private one)"
    )
    command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # of a run with sampler.start
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (auto)")
    command.add_argument(
        "--precision", choices=("auto", "bf16", "fp32"), default="auto", help="precision, that of the run (auto)"
    )
    command.add_argument("--threads", type=number(int, 0, 100_000), default=0, help="CPU threads; 0: one per core (0)")
    command.add_argument(
        "--rows", type=number(int, 0, 1_000_000), default=0, help="completions decoded together; 0: by memory (0)"
    )
    _add_vllm_options(command)


def _add_vllm_options(command: Any) -> None:
    command.add_argument("--vllm", action="store_true", help="start vLLM instead of covey's own decoder")
    command.add_argument(
        "--vllm-python",
        default=".scale-venv/bin/python",
        metavar="FILE",
        help="with --vllm: the interpreter of its environment (.scale-venv/bin/python)",
    )
    command.add_argument(
        "--slots", type=number(int, 1, 4096), default=64, help="with --vllm: completions generated at once (64)"
    )
    command.add_argument(
        "--max-model-len",
        type=number(int, LONGEST_PROBE, 1 << 20),
        default=2048,
        metavar="TOKENS",
        help="with --vllm: longest prompt with its completion (2048)",
    )
    command.add_argument(
        "--batched-tokens",
        type=number(int, 0, 1 << 20),
        default=0,
        metavar="TOKENS",
        help="with --vllm: tokens in a forward pass, at least --max-model-len; 0: chosen (0)",
    )
    command.add_argument(
        "--kv-gib", type=number(int, 1, 1024), default=2, help="with --vllm on CPUs: GiB of keys and values (2)"
    )
    command.add_argument(
        "--eager", action="store_true", help="with --vllm: start sooner, without compilation, and generate more slowly"
    )


def serve_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey serve`.

    Raises:
        ConfigError: if an option cannot be used, or is for the other kind of server.
    """
    locate_model(arguments.model)
    options = ServeOptions(**{item.name: getattr(arguments, item.name) for item in fields(ServeOptions)})
    vllm = VllmOptions(**{item.name: getattr(arguments, item.name) for item in fields(VllmOptions)})
    if arguments.vllm and (options.rows or options.device != "auto"):
        raise ConfigError("--rows and --device are for covey's own decoder; vLLM has --slots and chooses a device")
    for item in fields(VllmOptions):
        if not arguments.vllm and getattr(vllm, item.name) != item.default:
            raise ConfigError(f"--{item.name.replace('_', '-')} is for vLLM: add --vllm, or leave it out")
    options.token()  # these two raise, before torch is loaded
    options.weights_folder()
    if arguments.vllm:
        launcher = entry_points_of("covey.servers").get("vllm", "")
        if not launcher:
            raise ConfigError('--vllm needs the package covey-vllm here, beside covey: pip install "covey[vllm]"')
        module, _, serve = launcher.partition(":")
        getattr(importlib.import_module(module), serve)(options, vllm)
    else:
        from covey.llm.remote.server import serve_model

        serve_model(options)
