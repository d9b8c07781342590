"""`covey serve`: its options, and the command."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from covey.cli.numbers import number
from covey.config.model_sources import locate_model


def add_serve_options(command: Any) -> None:
    """Add the options of `covey serve`."""
    command.epilog = (
        "A run uses it with --sampler.kind covey --servers ADDRESS, and gives it its weights. Every route but /health\n"
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
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (auto)")
    command.add_argument(
        "--precision", choices=("auto", "bf16", "fp32"), default="auto", help="precision, that of the run (auto)"
    )
    command.add_argument("--threads", type=number(int, 0, 100_000), default=0, help="CPU threads; 0: one per core (0)")
    command.add_argument(
        "--rows", type=number(int, 0, 1_000_000), default=0, help="completions decoded together; 0: by memory (0)"
    )


def serve_command(arguments: argparse.Namespace, _fields: list[str]) -> None:
    """`covey serve`."""
    locate_model(arguments.model)
    from covey.experiment.serve import ServeOptions, serve_model

    serve_model(ServeOptions(**{item.name: getattr(arguments, item.name) for item in fields(ServeOptions)}))
