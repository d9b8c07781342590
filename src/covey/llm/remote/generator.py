"""Generates completions on servers; implements `Generator`.

Every request has a server, by the index of its group. If that one does not answer, or not as it should, the request
goes to the next, and the server is asked no more until the next refresh. Requests are sent all at once. Completions of
a server are handed out after its first ones have been proven (`proof.py`).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from covey.config import RunConfig, RunError, SamplerLost
from covey.config.files import user_path
from covey.config.machine import processors
from covey.config.servers import PROMPT_ROOM, SamplerConfig, default_token_file, own_token, read_token
from covey.data import SamplerWeights, Team
from covey.llm.generation.generator import (
    Completion,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    Generator,
    OpenConversations,
    Ready,
    Respond,
    TurnAnswer,
)
from covey.llm.generation.local_generator import LocalGenerator, missed_deadline, with_shared_prefix
from covey.llm.model.architecture import position_limit, vocabulary_of
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client, FailedRequest, LostServer, OtherWeights
from covey.llm.remote.fleet import Children, Fleet
from covey.llm.remote.proof import Proof
from covey.llm.remote.weights import FileTransport, GroupTransport, is_sharded
from covey.runtime.distributed import ALONE, WHOLE, exchange_json

MOST_SLOTS = 256  # completions that a vLLM generates at once which a run has started
MOST_WRONG_VERSIONS = 3  # servers in a row that answer with other weights, after which a run ends


@dataclass
class RemoteGenerator:
    """Generates on the servers of a fleet."""

    fleet: Fleet
    proof: Proof
    attempts: int = 3  # servers that a request is sent to, one after the other
    clock: Callable[[], float] = time.monotonic  # in seconds
    # Since the last call of `metrics`:
    rerouted: int = 0  # requests that were sent to another server
    prompt_tokens: int = 0  # of turns after the first
    cached_tokens: int = 0  # those of them whose keys and values a server had kept

    def generate(self, requests: Sequence[GenerationRequest], ready: Ready = lambda *_: None) -> list[GenerationResult]:
        """The completions or the failure of each request.

        Raises:
            SamplerLost: if no server is left.
            RunError: if a request has failed on several servers.
        """
        return self._run(_Call(self, with_shared_prefix(requests), ready))

    def converse(
        self, requests: Sequence[GenerationRequest], respond: Respond, max_tokens: int | None = None
    ) -> list[GenerationFailure | None]:
        """Generate conversations; implements `TurnGenerator`. Every turn after the first is a request of its own.

        Raises:
            SamplerLost, RunError: as `generate`.
        """
        turns = [replace(one, settings=replace(one.settings, continues=True)) for one in with_shared_prefix(requests)]
        call = _Call(self, turns)
        call.open = OpenConversations(turns, respond, self.fleet.policy.module.config, call.ended.put)
        call.ready = call.open.end_turns
        results = self._run(call)
        for request, result in zip(call.requests[len(requests) :], results[len(requests) :], strict=True):
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += 0 if isinstance(result, GenerationFailure) else result[0].cached_tokens
        failed = {turn: one for turn, one in enumerate(results) if isinstance(one, GenerationFailure)}
        return call.open.failures(failed)

    def _run(self, call: _Call) -> list[GenerationResult]:
        self.fleet.wake()
        try:
            results = call.run()
        except SamplerLost:
            call.prove_once()  # other ranks with sharded weights wait for it
            raise
        finally:
            call.cancel()
            self.rerouted += call.rerouted
        self.fleet.sleep()
        return results

    def refresh(self, version: int) -> None:
        """Give the policy's weights to the servers. A server that does not take them is not asked."""
        self.fleet.refresh(version)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call."""
        metrics = {"sampler/rerouted": float(self.rerouted), "sampler/servers": float(len(self.fleet.rotation))}
        if self.prompt_tokens and self.fleet.covey:
            metrics["sampler/cached_fraction"] = self.cached_tokens / self.prompt_tokens
        self.rerouted = self.prompt_tokens = self.cached_tokens = 0
        return metrics

    def close(self) -> None:
        """End the requests in the background."""
        self.fleet.close()


@dataclass(frozen=True, eq=False)
class Answer:
    """The end of one request to one server."""

    number: int  # of the request
    server: int
    given: int  # how often the server had taken weights when it was asked
    future: Future[list[Completion]]


@dataclass
class _Call:
    """One call of `generate` or `converse`: requests, each of which waits for one server at a time.

    Of conversations, the requests are turns, and more are added.
    """

    generator: RemoteGenerator
    requests: list[GenerationRequest]
    ready: Ready = lambda *_: None
    open: OpenConversations | None = None
    waiting: dict[int, Answer] = field(default_factory=dict)  # by the number of the request
    ended: queue.SimpleQueue[Answer | TurnAnswer] = field(default_factory=queue.SimpleQueue)
    tries: dict[int, int] = field(default_factory=dict)  # how often each request was sent
    results: dict[int, GenerationResult] = field(default_factory=dict)
    held: dict[int, dict[int, list[Completion]]] = field(default_factory=dict)  # server -> request -> not yet proven
    proven: set[int] = field(default_factory=set)  # servers
    proofs: int = 0
    rerouted: int = 0
    wrong_versions: int = 0  # in a row

    def __post_init__(self) -> None:
        self.fleet, self.proof = self.generator.fleet, self.generator.proof
        self.began = self.generator.clock()

    def run(self) -> list[GenerationResult]:
        for number, request in enumerate(self.requests[:]):
            self._refuse_or_send(number, request)
        while self.waiting or self.held or (self.open and self.open.unanswered):
            if self._can_prove():
                self._prove()
                continue
            try:
                event = self.ended.get(timeout=self._seconds_left())
            except queue.Empty:
                self._miss_deadline()
                continue
            if isinstance(event, TurnAnswer):
                assert self.open is not None
                if (turn := self.open.next_turn(event)) is not None:
                    self._send(turn)
            elif self.waiting.get(event.number) is event:  # else it was cancelled
                del self.waiting[event.number]
                self._take(event)
        self.prove_once()
        return [self.results[number] for number in range(len(self.requests))]

    def cancel(self) -> list[int]:
        """Wait for no answer any more; returns the requests that had none."""
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            answer.future.cancel()
        return list(waiting)

    def prove_once(self) -> None:
        """Evaluate the policy if nothing was proven, because ranks with sharded weights evaluate it together."""
        if not self.proofs:
            self.proofs += 1
            self.proof.refused({})

    def _refuse_or_send(self, number: int, request: GenerationRequest) -> None:
        if request.settings.version != self.fleet.version:
            message = (
                f"version {request.settings.version} of the weights is requested, the servers have {self.fleet.version}"
            )
            self.results[number] = GenerationFailure(FailureReason.OTHER_WEIGHTS, message)
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        """Send a request to the server of its group among those that can be asked."""
        candidates = self._candidates()
        if not candidates:
            self._revive()
            candidates = self._candidates()
        request, fleet = self.requests[number], self.fleet
        server = candidates[request.key.group % len(candidates)]
        self.tries[number] = self.tries.get(number, 0) + 1
        vocabulary = vocabulary_of(fleet.policy.module)
        ask = fleet.clients[server].generate(request, fleet.label, vocabulary, covey=fleet.covey)
        self.waiting[number] = answer = Answer(number, server, fleet.given[server], fleet.loop.submit(ask))
        answer.future.add_done_callback(lambda _: self.ended.put(answer))

    def _candidates(self) -> list[int]:
        """Ranks that share weights prove once in a call, so later only servers that are proven can be asked."""
        rotation = self.fleet.rotation
        once = self.proofs and is_sharded(self.fleet.policy.module)
        return [server for server in rotation if server in self.proven] if once else list(rotation)

    def _revive(self) -> None:
        if self.fleet.rotation:  # sharded, and none of them is proven
            raise SamplerLost(f"no sampler is left: {self.fleet.describe_faults()}")
        self.fleet.revive()
        self.proven.clear()

    def _take(self, answer: Answer) -> None:
        try:
            completions = answer.future.result()
        except FailedRequest as error:
            self.results[answer.number] = error.failure
        except LostServer as error:
            self._lose(answer, error)
        else:
            self.wrong_versions = 0
            if answer.server in self.proven:
                self._hand_out(answer.number, completions)
            elif answer.server in self.fleet.rotation:
                self.held.setdefault(answer.server, {})[answer.number] = completions
            else:  # it was refused while this request was under way
                self._send_again(answer.number)

    def _lose(self, answer: Answer, error: LostServer) -> None:
        if answer.given < self.fleet.given[answer.server]:  # before it was revived
            self._send_again(answer.number)
            return
        if answer.server in self.fleet.rotation:  # further answers of a lost server say nothing new
            self.wrong_versions = self.wrong_versions + 1 if isinstance(error, OtherWeights) else 0
        self.fleet.lose(answer.server, str(error))
        if self.wrong_versions >= MOST_WRONG_VERSIONS:
            raise RunError(
                f"{MOST_WRONG_VERSIONS} times in a row a sampler had other weights than it was given ({error}): "
                "another run may use the same samplers"
            )
        self._send_again(answer.number)

    def _send_again(self, number: int) -> None:
        """Send a request to another server.

        Raises:
            SamplerLost: if it has been sent to as many as allowed.
        """
        tries = self.tries[number]
        if tries >= self.generator.attempts:
            raise SamplerLost(
                f"the completions of a prompt failed on {tries} samplers (sampler.attempts): "
                f"{self.fleet.describe_faults()}"
            )
        self.rerouted += 1
        self._send(number)

    def _can_prove(self) -> bool:
        """True if there are completions to prove, and of every server that is asked and not proven."""
        servers = {answer.server for answer in self.waiting.values()}
        asked = (servers - self.proven) & set(self.fleet.rotation)
        return bool(self.held) and asked <= self.held.keys()

    def _prove(self) -> None:
        """Prove the servers whose completions are held, and hand those out; the others' requests are sent again."""
        self.proofs += 1
        held, self.held = self.held, {}
        refused = self.proof.refused(
            {
                server: [(self.requests[number], one) for number, found in by_number.items() for one in found]
                for server, by_number in held.items()
            }
        )
        for server, reason in refused.items():
            self.fleet.lose(
                server,
                f"{self.fleet.clients[server].address} is refused because {reason}: its weights or its temperature are "
                "not the run's, or it uses a prefix that was cached under older weights",
            )
        self.proven |= held.keys() - refused.keys()
        for server, by_number in held.items():
            for number, completions in by_number.items():
                if server in refused:
                    self._send_again(number)
                else:
                    self._hand_out(number, completions)

    def _hand_out(self, number: int, completions: list[Completion]) -> None:
        self.results[number] = completions
        self.ready(number, completions)

    def _seconds_left(self) -> float | None:
        """Seconds to the deadline of the requests; None without one."""
        limits = [request.settings.deadline_seconds for request in self.requests]
        known = [limit for limit in limits if limit is not None]
        return max(self.began + min(known) - self.generator.clock(), 0.0) if known else None

    def _miss_deadline(self) -> None:
        """The requests and the turns that still wait have failed."""
        for number in [*self.cancel(), *(self.open.stop_waiting() if self.open else ())]:
            self.results[number] = missed_deadline(self.requests[number].settings.deadline_seconds)


def build_generator(
    config: RunConfig, policy: LanguagePolicy, team: Team = ALONE, room: int | None = None
) -> tuple[Generator, SamplerWeights]:
    """The generator of a run, and the weights that it reads in this process. Every rank must call it.

    `room` is an argument of `LocalGenerator`.

    Raises:
        ConfigError: if the access token cannot be read.
    """
    sampler = config.sampler
    if sampler.kind == "local":
        return LocalGenerator(policy, room=room), policy.weights
    children = Children(sampler.started if team.rank == 0 else 0, _words(config, policy), sampler.timeout)
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
        _sleeps(sampler, policy),
    )
    return RemoteGenerator(fleet, Proof(policy, sampler.max_mismatch), sampler.attempts), WHOLE


def _words(config: RunConfig, policy: LanguagePolicy) -> list[str]:
    """The command that starts a sampler on this machine, without its port."""
    sampler, precision = config.sampler, "fp32" if policy.dtype.itemsize == 4 else "bf16"
    threads = config.threads or max(processors() // max(sampler.started, 1), 1)
    words = ["serve", config.model, "--precision", precision, "--threads", str(threads)]
    if sampler.kind == "covey":
        words += ["--device", config.device, "--rows", str(config.sampling.rows_at_once)]
    else:
        words += _vllm_words(config, policy)
    if sampler.token_file:
        words += ["--token-file", str(user_path(sampler.token_file))]
    return [*words, "--folder", str(user_path(sampler.folder))] if sampler.folder else words


def _sleeps(sampler: SamplerConfig, policy: LanguagePolicy) -> bool:
    """True if vLLM has the GPU of the policy, so that it frees its memory between samplings."""
    beside = sampler.kind == "vllm" and bool(sampler.started) and policy.device.type == "cuda"
    return sampler.sleep or beside


def _vllm_words(config: RunConfig, policy: LanguagePolicy) -> list[str]:
    """The options of `covey serve --vllm` for a run."""
    sampler, sampling = config.sampler, config.sampling
    longest = position_limit(policy.module.config) or 1 << 17
    tokens = sampler.vllm_tokens or min(config.rollout_limit + PROMPT_ROOM, longest)
    largest = sampling.prompts_per_step * max(sampling.group_size, sampling.final_group_size or 0)
    words = ["--vllm", "--vllm-python", str(user_path(sampler.vllm_python).absolute()), "--max-model-len", str(tokens)]
    words += ["--slots", str(min(sampling.rows_at_once or largest, MOST_SLOTS))]
    words += ["--gpu-memory", f"{sampler.vllm_memory:g}"] if sampler.vllm_memory else []
    return [*words, "--sleep"] if _sleeps(sampler, policy) else words


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
        f"at {', '.join(sampler.servers)}" if sampler.servers else f"(processes that the run starts: {sampler.started})"
    )
    return f"; sampled by {name} {where}, weights by {sampler.transport}"
