"""`covey serve`: its options, and the command."""

import argparse
import importlib

from covey.cli.options import MODEL, Command, Parser, add_fields, given_fields, option, option_of
from covey.config import ConfigError
from covey.config.model_sources import locate_model
from covey.config.servers import ServeOptions, VllmOptions, vllm_launcher


def _options(parser: Parser) -> None:
    parser.epilog = (
        "A run uses it with --sampler.kind covey (with --vllm: vllm) --servers ADDRESS, and gives it its weights.\n"
        "--vllm starts vLLM in an environment of its own, which `make scale` creates. Every route but /health\n"
        "needs the access token. The connection is not encrypted: keep other addresses than 127.0.0.1 on a private\n"
        "network, or use an ssh tunnel."
    )
    option(parser, "MODEL", MODEL)
    option(parser, "--child", argparse.SUPPRESS)  # of a run with sampler.start
    add_fields(parser, ServeOptions)
    option(parser, "--vllm", "start vLLM instead of covey's own decoder")
    add_fields(parser.add_argument_group("with --vllm"), VllmOptions)


def serve_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey serve`.

    Raises:
        ConfigError: if an option cannot be used, or is for the other kind of server.
    """
    locate_model(arguments.model)
    options = ServeOptions(arguments.model, child=arguments.child, **given_fields(arguments, ServeOptions))
    given = given_fields(arguments, VllmOptions)
    if arguments.vllm and (options.rows or options.device != "auto"):
        raise ConfigError("--rows and --device are for covey's own decoder; vLLM has --slots and chooses a device")
    for name in given if not arguments.vllm else ():
        raise ConfigError(f"{option_of(name)} is for vLLM: add --vllm, or leave it out")
    options.token()  # these two raise, before torch is loaded
    options.weights_folder()
    if arguments.vllm:
        module, _, serve = vllm_launcher("--vllm").partition(":")
        getattr(importlib.import_module(module), serve)(options, VllmOptions(**given))
    else:
        from covey.llm.remote.server import serve_model

        serve_model(options)


COMMAND = Command("serve", "generate completions for runs in other processes", _options, serve_command, lasting=True)
