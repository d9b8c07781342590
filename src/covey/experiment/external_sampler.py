"""The generator of a run, from its [sampler] table: in this process, or on servers."""

from __future__ import annotations

from covey.config import RunConfig
from covey.config.files import user_path
from covey.config.machine import processors
from covey.config.servers import SamplerConfig, default_token_file, own_token, read_token
from covey.data import SamplerWeights, Team
from covey.llm.generation.generator import Generator
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client
from covey.llm.remote.fleet import Children, Fleet
from covey.llm.remote.generator import RemoteGenerator
from covey.llm.remote.proof import Proof
from covey.llm.remote.weights import FileTransport, GroupTransport
from covey.runtime.distributed import ALONE, exchange_json
from covey.runtime.sharding import WHOLE


def build_generator(config: RunConfig, policy: LanguagePolicy, team: Team = ALONE) -> tuple[Generator, SamplerWeights]:
    """The generator of a run, and the weights that it reads in this process. Every rank must call it.

    Raises:
        ConfigError: if the access token cannot be read.
    """
    sampler = config.sampler
    if sampler.kind == "local":
        return LocalGenerator(policy), policy.weights
    children = Children(sampler.start if team.rank == 0 else 0, _words(config, policy), sampler.timeout)
    addresses = [address.rstrip("/") for address in sampler.servers] or exchange_json(team, children.addresses)[0]
    token = token_of(sampler)
    fleet = Fleet(
        policy,
        [Client(address, token, sampler.timeout) for address in addresses],
        FileTransport(str(user_path(sampler.folder)) if sampler.folder else "")
        if sampler.transport == "file"
        else GroupTransport(sampler.timeout),
        sampler.kind == "covey",
        children,
        team,
        sampler.timeout,
    )
    return RemoteGenerator(fleet, Proof(policy, sampler.max_mismatch), sampler.attempts), WHOLE


def _words(config: RunConfig, policy: LanguagePolicy) -> list[str]:
    """The command that starts a sampler on this machine, without its port."""
    sampler, precision = config.sampler, "fp32" if policy.dtype.itemsize == 4 else "bf16"
    threads = config.threads or max(processors() // max(sampler.start, 1), 1)
    words = ["serve", config.model, "--precision", precision, "--device", config.device, "--threads", str(threads)]
    words += ["--rows", str(config.sampling.rows_at_once)]
    if sampler.token_file:
        words += ["--token-file", str(user_path(sampler.token_file))]
    return [*words, "--folder", str(user_path(sampler.folder))] if sampler.folder else words


def token_of(sampler: SamplerConfig) -> str:
    """The access token of a run's samplers."""
    if sampler.token_file:
        return read_token(user_path(sampler.token_file), "sampler.token_file")
    return own_token(default_token_file())


def describe_sampler(sampler: SamplerConfig) -> str:
    """For the first line of a run; empty if it samples in its own process."""
    if sampler.kind == "local":
        return ""
    name = "covey serve" if sampler.kind == "covey" else "vLLM"
    where = (
        f"at {', '.join(sampler.servers)}" if sampler.servers else f"(processes that the run starts: {sampler.start})"
    )
    return f"; sampled by {name} {where}, weights by {sampler.transport}"
