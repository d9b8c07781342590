"""Fields of the [sampler] table: where completions are generated."""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.common import Table, config_field


@dataclass(frozen=True)
class SamplerConfig(Table):
    kind: str = config_field(
        "local",
        "where completions are generated: in the training process (local), by covey serve (covey), or by covey serve "
        "--vllm (vllm)",
        choices=("local", "covey", "vllm"),
        advanced=True,
    )
    servers: tuple[str, ...] = config_field(
        (), 'addresses of running samplers, such as ["http://127.0.0.1:8801"]', advanced=True
    )
    start: int = config_field(
        0, "number of covey serve processes that the run starts on this machine, and ends", min=0, max=64, advanced=True
    )
    token_file: str = config_field(
        "",
        "file with the samplers' access token, which only its owner may read; empty: the one that covey serve creates "
        "in the user's config folder, for samplers on this machine",
        advanced=True,
    )
    transport: str = config_field(
        "file",
        "how weights travel: a file in memory or in sampler.folder, or a process group of torch.distributed",
        choices=("file", "group"),
        advanced=True,
    )
    folder: str = config_field(
        "",
        "transport file: folder that the run and its samplers see under this path; empty: a private one in memory or, "
        "if there is no room, in the folder of temporary files",
        advanced=True,
    )
    timeout: float = config_field(
        600.0, "seconds in which a sampler must answer a request, its waiting time included", above=0, max=86400,
        advanced=True,
    )  # fmt: skip
    attempts: int = config_field(
        3, "samplers that the completions of a prompt are asked for, one after the other", min=1, max=100, advanced=True
    )
    max_mismatch: float = config_field(
        3.0,
        "a sampler is refused if its log-probabilities differ from the trainer's by this multiple of the difference at "
        "the first weights",
        above=1,
        max=1000,
        advanced=True,
    )
