"""The generator of a run, from its [sampler] table: in this process, or on servers."""

from __future__ import annotations

from covey.config import RunConfig
from covey.config.fields import plural
from covey.config.files import user_path
from covey.config.sampler import SamplerConfig
from covey.config.token_file import default_token_file, read_token
from covey.data import Team
from covey.llm.generation.generator import Generator
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client
from covey.llm.remote.fleet import Fleet
from covey.llm.remote.generator import RemoteGenerator
from covey.llm.remote.proof import Proof
from covey.llm.remote.weights import FileTransport
from covey.runtime.distributed import ALONE


def build_generator(config: RunConfig, policy: LanguagePolicy, team: Team = ALONE) -> Generator:
    """The generator of a run.

    Raises:
        ConfigError: if the access token cannot be read.
    """
    sampler = config.sampler
    if sampler.kind == "local":
        return LocalGenerator(policy)
    token = token_of(sampler)
    fleet = Fleet(
        policy,
        [Client(address.rstrip("/"), token, sampler.timeout) for address in sampler.servers],
        FileTransport(str(user_path(sampler.folder)) if sampler.folder else ""),
        sampler.kind == "covey",
        team,
        sampler.timeout,
    )
    return RemoteGenerator(fleet, Proof(policy, sampler.max_mismatch), sampler.attempts)


def token_of(sampler: SamplerConfig) -> str:
    """The access token of a run's samplers."""
    if sampler.token_file:
        return read_token(user_path(sampler.token_file), "sampler.token_file")
    return read_token(default_token_file(), "sampler.token_file is not set, and the default file cannot be used")


def describe_sampler(sampler: SamplerConfig) -> str:
    """For the first lines of a run; empty if it samples in its own process."""
    if sampler.kind == "local":
        return ""
    if sampler.start:
        return f"; sampled by {plural(sampler.start, 'covey serve process')}"
    name = "covey serve" if sampler.kind == "covey" else "vLLM"
    return f"; sampled by {name} at {', '.join(sampler.servers)}, weights by {sampler.transport}"
