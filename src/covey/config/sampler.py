"""Fields of the [sampler] table: where completions are generated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from covey.config.common import ConfigError, Fault, Table, config_field
from covey.config.files import shortened, user_path
from covey.config.servers import is_local, parse_address, read_token


@dataclass(frozen=True)
class SamplerConfig(Table):
    SWITCH = ("kind",)

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

    def faults(self) -> Iterator[Fault]:
        if self.kind == "local":
            return
        if self.kind == "vllm" and self.start:
            yield Fault(
                "sampler.start starts covey serve: for vLLM, start covey serve --vllm, and name it in sampler.servers"
            )
        if self.start and self.servers:
            yield Fault("sampler has both servers and start: name running servers, or let the run start them")
        if not self.start and not self.servers:
            start = "covey serve --vllm" if self.kind == "vllm" else "covey serve, or set sampler.start"
            yield Fault(f"sampler.kind is {self.kind}, and sampler.servers names no server: start {start}")
        if self.transport == "group" and self.folder:
            yield Fault("sampler.folder is for files, and sampler.transport is group: remove one of them")

    def check(self) -> None:
        if self.kind == "local":
            return
        hosts = [_host(address) for address in self.servers]
        if len(set(hosts)) < len(hosts):
            raise ConfigError("sampler.servers has an address twice: name each server once")
        elsewhere = next((host for host, _ in hosts if not is_local(host)), "")
        if elsewhere and not self.token_file:
            raise ConfigError(
                f"sampler.servers: {elsewhere} is another machine, so sampler.token_file must name the file with its "
                "access token; keep the connection on a private network, because it is not encrypted"
            )
        if elsewhere and self.transport == "file" and not self.folder:
            raise ConfigError(
                f"sampler.servers: {elsewhere} is another machine, so sampler.folder must name a folder that both see "
                "under this path, or sampler.transport must be group"
            )
        if self.folder and not user_path(self.folder, "sampler.folder: ").is_dir():
            raise ConfigError(f"sampler.folder: there is no folder {self.folder}: create it")
        if self.token_file:
            read_token(user_path(self.token_file, "sampler.token_file: "), "sampler.token_file")


def _host(address: str) -> tuple[str, int]:
    """Host and port of a server's address."""
    parts, port = parse_address(address, "sampler.servers: ")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("sampler.servers has an address with a user name: the access token is in sampler.token_file")
    plain = not (parts.query or parts.fragment or parts.path.strip("/") or re.search(r"[\s\\]", address))
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise ConfigError(
            f"sampler.servers must be addresses such as http://127.0.0.1:8801, without a path (is {shortened(address)})"
        )
    return parts.hostname, port if port is not None else (443 if parts.scheme == "https" else 80)
