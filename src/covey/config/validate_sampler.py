"""Validates the [sampler] table. No server is contacted."""

from __future__ import annotations

import re
from dataclasses import fields
from urllib.parse import urlsplit

from covey.config.common import ConfigError
from covey.config.fields import command
from covey.config.files import shortened, user_path
from covey.config.llm import RunConfig
from covey.config.sampler import SamplerConfig
from covey.config.token_file import default_token_file, read_token
from covey.config.validate_judge import is_local


def check_sampler(config: RunConfig) -> None:
    """Refuse fields of [sampler] that contradict each other, addresses that are none, and an unusable access token.

    Raises:
        ConfigError: naming the field and the fix. The token is not in the message.
    """
    sampler = config.sampler
    if sampler.kind == "local":
        for field in fields(SamplerConfig):
            if getattr(sampler, field.name) != field.default:
                raise ConfigError(
                    f"sampler.{field.name} is set, but completions are generated in the training process: take it out, "
                    "or set sampler.kind to covey or vllm"
                )
        return
    if config.iteration.steps:
        raise ConfigError(
            "an iterative run generates its completions in its own process: take out sampler.kind, or iteration.steps"
        )
    if sampler.kind == "vllm" and config.sampling.min_new_tokens:
        raise ConfigError(
            "sampling.min_new_tokens is for covey's own samplers, because vLLM's log-probabilities are those of the "
            "whole distribution: take it out, or set sampler.kind to covey"
        )
    _check_servers(sampler)
    hosts = [_host(address) for address in sampler.servers]
    if len(set(hosts)) < len(hosts):
        raise ConfigError("sampler.servers has an address twice: name each server once")
    elsewhere = [host for host, _ in hosts if not is_local(host)]
    if elsewhere and not sampler.token_file:
        raise ConfigError(
            f"sampler.servers: {elsewhere[0]} is another machine, so sampler.token_file must name the file with its "
            "access token; keep the connection on a private network, because it is not encrypted"
        )
    _check_folder(sampler, elsewhere)
    if sampler.token_file:
        read_token(user_path(sampler.token_file, "sampler.token_file: "), "sampler.token_file")
    elif not sampler.start:
        read_token(default_token_file(), f"{command('serve', config.model)} creates the access token, start it first")


def _check_servers(sampler: SamplerConfig) -> None:
    """Check that servers are named or started, and not both."""
    if sampler.kind == "vllm" and sampler.start:
        raise ConfigError(
            "sampler.start starts covey serve: for vLLM, start covey serve --vllm, and name it in sampler.servers"
        )
    if sampler.start and sampler.servers:
        raise ConfigError("sampler has both servers and start: name running servers, or let the run start them")
    if not sampler.start and not sampler.servers:
        start = "covey serve --vllm" if sampler.kind == "vllm" else "covey serve, or set sampler.start"
        raise ConfigError(f"sampler.kind is {sampler.kind}, and sampler.servers names no server: start {start}")


def _host(address: str) -> tuple[str, int]:
    """Host and port of a server's address."""
    try:
        parts = urlsplit(address)
        port = parts.port
        if port == 0:
            raise ValueError("the port is 0")
    except ValueError as error:
        raise ConfigError(f"sampler.servers: {shortened(address)} is no address ({error})") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("sampler.servers has an address with a user name: the access token is in sampler.token_file")
    plain = not (parts.query or parts.fragment or parts.path.strip("/") or re.search(r"[\s\\]", address))
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise ConfigError(
            f"sampler.servers must be addresses such as http://127.0.0.1:8801, without a path (is {shortened(address)})"
        )
    return parts.hostname, port if port is not None else (443 if parts.scheme == "https" else 80)


def _check_folder(sampler: SamplerConfig, elsewhere: list[str]) -> None:
    if sampler.transport == "group":
        if sampler.folder:
            raise ConfigError("sampler.folder is for files, and sampler.transport is group: take one of them out")
        return
    if elsewhere and not sampler.folder:
        raise ConfigError(
            f"sampler.servers: {elsewhere[0]} is another machine, so sampler.folder must name a folder that both see "
            "under this path, or sampler.transport must be group"
        )
    if sampler.folder and not user_path(sampler.folder, "sampler.folder: ").is_dir():
        raise ConfigError(f"sampler.folder: there is no folder {sampler.folder}: create it")
