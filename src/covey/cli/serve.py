"""`covey serve`: its options, and the command."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import fields

from covey.cli.options import MODEL, Command, Parser, number, option, option_of
from covey.config import ConfigError
from covey.config.model_sources import locate_model
from covey.config.named_modules import entry_points_of
from covey.config.serving import ServeOptions, VllmOptions

LONGEST_PROBE = 64  # tokens; the probe at the start needs less


def _options(parser: Parser) -> None:
    parser.epilog = (
        "A run uses it with --sampler.kind covey (with --vllm: vllm) --servers ADDRESS, and gives it its weights.\n"
        "--vllm starts vLLM in an environment of its own, which `make scale` creates. Every route but /health\n"
        "needs the access token. The connection is not encrypted: keep other addresses than 127.0.0.1 on a private\n"
        "network, or use an ssh tunnel."
    )
    option(parser, "MODEL", MODEL)
    option(parser, "--host ADDRESS", "address to accept connections at", default="127.0.0.1")
    option(parser, "--port PORT", "its port; 0: a free one", number(int, 0, 65535), 8801)
    option(parser, "--token-file FILE", "file with the access token, which only its owner may read", default="")
    option(parser, "--folder DIR", "folder below which files with weights are read (a private one)", default="")
    option(parser, "--child", argparse.SUPPRESS)  # of a run with sampler.start
    option(parser, "--device auto|cpu|cuda", "device", default="auto")
    option(parser, "--precision auto|bf16|fp32", "precision, that of the run", default="auto")
    option(parser, "--threads N", "CPU threads; 0: one per core (0)", number(int, 0, 100_000), 0)
    option(parser, "--rows N", "completions decoded together; 0: by memory (0)", number(int, 0, 1_000_000), 0)
    option(parser, "--vllm", "start vLLM instead of covey's own decoder")
    vllm = parser.add_argument_group("with --vllm")
    option(vllm, "--vllm-python FILE", "the interpreter of its environment", default=".scale-venv/bin/python")
    option(vllm, "--slots N", "completions generated at once", number(int, 1, 4096), 64)
    longest = number(int, LONGEST_PROBE, 1 << 20)
    option(vllm, "--max-model-len TOKENS", "longest prompt with its completion", longest, 2048)
    batched = "tokens in a forward pass, at least --max-model-len; 0: chosen (0)"
    option(vllm, "--batched-tokens TOKENS", batched, number(int, 0, 1 << 20), 0)
    option(vllm, "--kv-gib N", "on CPUs: GiB of keys and values", number(int, 1, 1024), 2)
    option(vllm, "--eager", "start sooner, without compilation, and generate more slowly")


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
            raise ConfigError(f"{option_of(item.name)} is for vLLM: add --vllm, or leave it out")
    options.token()  # these two raise, before torch is loaded
    options.weights_folder()
    if arguments.vllm:
        launcher = entry_points_of("covey.servers").get("vllm", "")
        if not launcher:
            raise ConfigError('--vllm needs the package covey-vllm here, beside covey: pip install "covey[vllm]"')
        module, _, serve = launcher.partition(":")
        getattr(importlib.import_module(module), serve)(options, vllm)
    else:
        from covey.experiment.serve import serve_model

        serve_model(options)


COMMAND = Command("serve", "generate completions for runs in other processes", _options, serve_command, lasting=True)
