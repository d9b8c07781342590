"""`RemoteGenerator` on real servers: faults of any kind leave the bits as they are, and wrong weights are refused."""

import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import RunError, SamplerLost
from covey.llm.generation.generator import (
    Completion,
    Continuation,
    FailureReason,
    GenerationFailure,
    GenerationRequest,
    GenerationSettings,
    RandomKey,
)
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from covey.llm.remote.client import Client, LostServer
from covey.llm.remote.fleet import Children, Fleet
from covey.llm.remote.generator import Answer, RemoteGenerator, _Call
from covey.llm.remote.proof import Proof
from covey.llm.remote.weights import FileTransport, GroupTransport, Transport, private_folders
from covey.llm.remote.wire import SLEEP, WAKE
from helpers.samplers import TOKEN, Proxy, Serving, begin, is_generation, serving, wait_for
from helpers.tiny_models import tiny_folder, tiny_model

SETTINGS = GenerationSettings(max_new_tokens=20, temperature=1.0, end_ids=frozenset(range(1, 85, 11)), version=0)
NO_CHILDREN = Children(0, [], 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_folder(folder / "model")


@pytest.fixture(scope="module")
def servers(model: Path, folder: Path) -> Iterator[list[Serving]]:
    with serving(model, folder, 2) as found:
        yield found


@pytest.fixture
def policy() -> LanguagePolicy:
    return LanguagePolicy(tiny_model())


@contextmanager
def remote(
    policy: LanguagePolicy, addresses: Sequence[str], transport: Transport | None = None, **options: Any
) -> Iterator[RemoteGenerator]:
    timeout = options.pop("timeout", 120.0)
    clients = [Client(address, TOKEN, timeout) for address in addresses]
    fleet = Fleet(policy, clients, transport or FileTransport(), True, NO_CHILDREN, timeout_seconds=timeout)
    generator = RemoteGenerator(fleet, Proof(policy, 3.0), **options)
    try:
        generator.refresh(0)
        yield generator
    finally:
        generator.close()


def requests(step: int = 1, count: int = 8, version: int = 0, temperature: float = 1.0) -> list[GenerationRequest]:
    settings = GenerationSettings(20, temperature, SETTINGS.end_ids, version)
    return [
        GenerationRequest((*range(20), *range(3 + group, 13 + group)), 4, RandomKey(3, step, group), settings)
        for group in range(count)
    ]


def expected(policy: LanguagePolicy, asked: list[GenerationRequest]) -> list[Any]:
    return LocalGenerator(policy, asked[0].settings.version).generate(asked)


def change(policy: LanguagePolicy, factor: float = 1.05) -> None:
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(factor)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["file", "group"])
def test_two_servers_have_the_bits_of_this_process_before_and_after_an_update(
    servers: list[Serving], policy: LanguagePolicy, transport: str
) -> None:
    way = FileTransport() if transport == "file" else GroupTransport(60.0)
    with remote(policy, [server.address for server in servers], way) as generator:
        for version in range(3):
            seen: dict[int, list[Completion]] = {}
            asked = requests(version + 1, version=version)
            found = generator.generate(asked, lambda number, made, into=seen: into.update({number: made}))
            assert found == expected(policy, asked)
            assert [seen[number] for number in range(len(asked))] == found
            greedy = requests(version + 1, version=version, temperature=0.0)
            assert generator.generate(greedy) == expected(policy, greedy)
            assert generator.metrics() == {"sampler/rerouted": 0.0, "sampler/servers": 2.0}
            change(policy)
            generator.refresh(version + 1)
    for private in private_folders():
        assert not private.is_dir() or not list(private.glob(f"*{generator.fleet._run}*"))


def test_prompts_of_several_calls_and_prefixes_have_the_bits_of_this_process(
    servers: list[Serving], policy: LanguagePolicy
) -> None:
    """A server that prefills some of a call's prompts splits them where all of them together would be split."""
    other = GenerationRequest((7,) * 9, 4, RandomKey(3, 3, 9), SETTINGS)
    several = [requests(), requests(2, 1), [*requests(3, 3), other]]
    with remote(policy, [server.address for server in servers]) as generator:
        for asked in several:
            assert generator.generate(asked) == expected(policy, asked)


def test_a_file_with_weights_is_private(servers: list[Serving], policy: LanguagePolicy, tmp_path: Path) -> None:
    with FileTransport(str(tmp_path)).offered({"a": torch.zeros(3)}, "run-1") as offer:
        assert offer.path.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.iterdir())


def test_the_file_of_a_run_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr("covey.llm.remote.weights.SHARED_MEMORY", tmp_path)
    (own,) = (folder for folder in private_folders() if folder.parent == tmp_path)
    own.mkdir(mode=0o700)
    left, running = own / f"{ended.pid}-a-1.safetensors", own / f"{os.getppid()}-a-1.safetensors"
    for path in (left, running):
        path.touch()
    with FileTransport().offered({"a": torch.zeros(3)}, "run-1") as offer:
        assert offer.path.parent == own
    assert list(own.iterdir()) == [running]


def test_failures_of_requests_are_those_of_this_process(servers: list[Serving], policy: LanguagePolicy) -> None:
    asked = requests()
    asked[1] = GenerationRequest((5,) * 250, 4, RandomKey(3, 1, 1), SETTINGS)
    asked[2] = requests(version=4)[2]
    with remote(policy, [server.address for server in servers]) as generator:
        found = generator.generate(asked)
        reasons = [one.reason if isinstance(one, GenerationFailure) else None for one in found]
        assert reasons[1:3] == [FailureReason.PROMPT_TOO_LONG, FailureReason.OTHER_WEIGHTS]
        assert reasons[:1] + reasons[3:] == [None] * 6
        assert found[1] == expected(policy, asked)[1]
        assert generator.generate([]) == []
        with torch.no_grad():  # finite weights whose logits are not
            policy.module.model.norm.weight.mul_(1e25)
            policy.module.get_output_embeddings().weight.mul_(1e16)
        generator.refresh(1)
        found = generator.generate(requests(version=1))
        assert {one.reason for one in found if isinstance(one, GenerationFailure)} == {FailureReason.NON_FINITE_LOGITS}


@pytest.mark.slow
def test_a_server_that_is_killed_in_mid_step_changes_no_bit_and_returns(
    model: Path, folder: Path, servers: list[Serving], policy: LanguagePolicy
) -> None:
    other = begin(model, folder)
    wait_for(other)
    port = int(other.address.rpartition(":")[2])
    asked = requests(count=16)
    killed = threading.Event()

    def kill(request: bytes, answer: bytes) -> bytes:
        """Kill the server when it has generated completions; its answer is lost."""
        if is_generation(request) and not killed.is_set():
            killed.set()
            other.kill()
            return b""
        return answer

    with Proxy(other.address, kill) as proxy, remote(policy, [servers[0].address, proxy.address]) as generator:
        assert generator.generate(asked) == expected(policy, asked)
        assert killed.is_set()
        assert generator.metrics() == {"sampler/rerouted": 8.0, "sampler/servers": 1.0}
        other = begin(model, folder, port=port)
        try:
            wait_for(other)
            change(policy)
            generator.refresh(1)
            again = requests(2, 16, version=1)
            assert generator.generate(again) == expected(policy, again)
            assert generator.metrics() == {"sampler/rerouted": 0.0, "sampler/servers": 2.0}
        finally:
            other.kill()


def test_without_a_server_the_wait_ends_with_one_line(policy: LanguagePolicy) -> None:
    with Proxy("127.0.0.1:1") as proxy:
        address = proxy.address
    with (
        remote(policy, [address], timeout=1.0) as generator,
        pytest.raises(SamplerLost, match=r"no sampler is left: http://127.0.0.1:\d+ did not answer \(.*\)$"),
    ):
        generator.generate(requests())


def scaled(body: Any, field: Callable[[Any], None]) -> bytes:
    """An answer whose choices were changed."""
    for choice in body["choices"]:
        field(choice)
    content = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content


def of_body(change: Callable[[Any], None]) -> Callable[[bytes, bytes], bytes]:
    def bend(request: bytes, answer: bytes) -> bytes:
        if not is_generation(request):
            return answer
        return scaled(json.loads(answer.partition(b"\r\n\r\n")[2]), change)

    return bend


def only_generation(change: Callable[[bytes], bytes | None]) -> Callable[[bytes, bytes], bytes | None]:
    return lambda request, answer: change(answer) if is_generation(request) else answer


FAULTS: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "no answer": only_generation(lambda answer: None),
    "closed": only_generation(lambda answer: b""),
    "cut in the head": only_generation(lambda answer: answer[:20]),
    "cut in the body": only_generation(lambda answer: answer[:-200]),
    "garbled": only_generation(lambda answer: bytes(byte ^ 1 for byte in answer)),
    "garbled body": only_generation(lambda answer: answer.replace(b'"token_ids"', b'"token_idz"')),
    "redirected": only_generation(
        lambda answer: b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n"
    ),
    "compressed": only_generation(lambda answer: answer.replace(b"\r\n", b"\r\ncontent-encoding: gzip\r\n", 1)),
    "refused": only_generation(lambda answer: b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n"),
    "endless": only_generation(lambda answer: b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (40 << 20)),
    "aborted": of_body(lambda choice: choice.update(finish_reason="abort")),
    "one token less": of_body(lambda choice: choice["token_ids"].pop()),
    "one log-probability less": of_body(lambda choice: choice["logprobs"]["content"].pop()),
    "without spans": of_body(lambda choice: choice.pop("weight_versions")),
    "other version": of_body(lambda choice: choice["weight_versions"][0].update(version="other")),
    "another token": of_body(lambda choice: choice["token_ids"].__setitem__(0, (choice["token_ids"][0] + 2) % 11 + 70)),
    "halved": of_body(lambda choice: [one.update(logprob=one["logprob"] / 2) for one in choice["logprobs"]["content"]]),
}


@pytest.mark.slow
@pytest.mark.sampled(24)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_changes_no_bit_and_no_group_is_generated_twice(
    servers: list[Serving], policy: LanguagePolicy, fault: str
) -> None:
    asked = requests(count=6)
    handed: list[int] = []
    with (
        Proxy(servers[0].address, FAULTS[fault]) as bad,
        Proxy(servers[1].address) as good,
        remote(policy, [bad.address, good.address], timeout=2.0 if fault == "no answer" else 120.0) as generator,
    ):
        assert generator.generate(asked, lambda number, _: handed.append(number)) == expected(policy, asked)
        assert sorted(handed) == list(range(6))
        assert sorted(bad.groups()) == [0, 2, 4]
        assert sorted(good.groups()) == list(range(6))
        assert generator.metrics()["sampler/rerouted"] == 3.0
        assert generator.fleet.rotation == [1]


class Stolen:
    """Puts other weights into a server under the version that a run has given it."""

    def __init__(self, servers: list[Serving], seed: int) -> None:
        self.servers, self.seed = servers, seed

    def replace(self, number: int, version: str) -> None:
        other = LanguagePolicy(tiny_model(seed=self.seed))
        with remote(other, [self.servers[number].address]) as thief:
            thief.fleet._run, thief.fleet.version = version.rsplit("-", 1)[0], int(version.rsplit("-", 1)[1])
            thief.fleet._publish([0])
        assert self.servers[number].ask("/weight_info")[1] == {"weight_version": version}


@pytest.mark.slow
def test_a_server_that_lies_about_its_version_is_refused_before_anything_is_handed_out(
    servers: list[Serving], policy: LanguagePolicy
) -> None:
    asked, handed = requests(), []
    with remote(policy, [server.address for server in servers]) as generator:
        generator.generate(requests(7))
        Stolen(servers, seed=5).replace(0, generator.fleet.label)
        assert generator.generate(asked, lambda number, made: handed.append(made)) == expected(policy, asked)
        assert len(handed) == len(asked)
        assert generator.fleet.rotation == [1]
        Stolen(servers, seed=5).replace(1, generator.fleet.label)
        # Nobody is left, so both are given the weights again, and have them.
        assert generator.generate(asked) == expected(policy, asked)


def test_weights_that_are_one_percent_off_are_refused(servers: list[Serving], policy: LanguagePolicy) -> None:
    asked = requests()
    with remote(policy, [server.address for server in servers], attempts=2) as generator:
        generator.generate(asked)
        generator.fleet.policy = slightly = LanguagePolicy(tiny_model())
        change(slightly, 1.01)
        generator.refresh(0)  # published are other weights than the trainer's
        with pytest.raises(SamplerLost, match="cached under older weights"):
            generator.generate(asked)


def test_three_answers_of_another_run_end_this_one(servers: list[Serving], policy: LanguagePolicy) -> None:
    with remote(policy, [servers[0].address], attempts=9) as generator, remote(policy, [servers[0].address]) as other:
        publish = other.fleet._publish

        def steal(request: bytes, answer: bytes) -> bytes:
            if request.startswith(b"GET /weight_info"):  # the end of an update
                publish([0])
            return answer

        with Proxy(servers[0].address, steal) as proxy:
            generator.fleet.clients = [Client(proxy.address, TOKEN, 120.0)]
            generator.refresh(0)
            with pytest.raises(RunError, match="3 times in a row a sampler had other weights"):
                generator.generate(requests())


def test_a_deadline_is_that_of_the_whole_call(servers: list[Serving], policy: LanguagePolicy) -> None:
    settings = GenerationSettings(20, 1.0, SETTINGS.end_ids, 0, deadline_seconds=1.0)
    asked = [GenerationRequest(one.prompt, 4, one.key, settings) for one in requests(count=4)]
    with (
        Proxy(servers[0].address, FAULTS["no answer"]) as slow,
        remote(policy, [slow.address, servers[1].address]) as generator,
    ):
        found = generator.generate(asked)
        assert [isinstance(one, GenerationFailure) and one.reason for one in found] == [
            FailureReason.DEADLINE, False, FailureReason.DEADLINE, False,
        ]  # fmt: skip


def test_a_wrong_token_is_named_and_never_shown(servers: list[Serving], policy: LanguagePolicy) -> None:
    with remote(policy, [servers[0].address], timeout=1.0) as generator:
        generator.fleet.clients = [Client(servers[0].address, "secret-of-another", 1.0)]
        generator.refresh(1)
        with pytest.raises(SamplerLost, match=r"sampler\.token_file") as caught:
            generator.generate(requests(version=1))
        assert "secret" not in str(caught.value)


def test_the_policy_is_evaluated_once_in_each_call(servers: list[Serving], policy: LanguagePolicy) -> None:
    calls: list[int] = []
    with remote(policy, [server.address for server in servers]) as generator:
        evaluate = policy.evaluate
        policy.evaluate = lambda batch: calls.append(len(batch)) or evaluate(batch)  # type: ignore[method-assign,func-returns-value]
        generator.generate(requests())
        generator.generate([])
        generator.generate(requests(count=1))
    assert len(calls) == 3
    assert calls[1] == 1


# ---- conversations ----


class Reader:
    """Answers every turn with tokens that depend on all so far, three times; each answer comes from a thread."""

    def __init__(self, seed: int) -> None:
        self.delays = random.Random(seed)
        self.turns: dict[tuple[int, int], list[Completion]] = {}

    def __call__(self, number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        turns = self.turns.setdefault((number, rollout), [])
        turns.append(turn)
        written = sum(sum(one.tokens) for one in turns)
        reply = Continuation(tuple(3 + (written + place) % 70 for place in range(1 + written % 12)), 8)
        future: Future[Continuation | None] = Future()
        result = reply if len(turns) < 4 else None
        threading.Timer(self.delays.random() / 20, future.set_result, [result]).start()
        return future


def logprobs(turns: dict[tuple[int, int], list[Completion]]) -> list[float]:
    return [logprob for place in sorted(turns) for turn in turns[place] for logprob in turn.logprobs]


@pytest.mark.slow
def test_conversations_have_the_tokens_of_this_process(servers: list[Serving], policy: LanguagePolicy) -> None:
    """Log-probabilities differ by rounding, because a server computes the keys and values of every turn again."""
    asked, local, readers = requests(), Reader(0), [Reader(1), Reader(2)]
    assert LocalGenerator(policy).converse(asked, local) == [None] * 8
    with remote(policy, [server.address for server in servers]) as generator:
        for reader in readers:
            assert generator.converse(asked, reader) == [None] * 8
            assert [[turn.tokens for turn in reader.turns[place]] for place in local.turns] == [
                [turn.tokens for turn in turns] for turns in local.turns.values()
            ]
            assert logprobs(reader.turns) == pytest.approx(logprobs(local.turns), abs=1e-5)
    assert readers[0].turns == readers[1].turns
    assert {len(turns) for turns in local.turns.values()} == {4}
    assert len(local.turns) == 32


@pytest.mark.slow
def test_conversations_go_on_without_a_server_that_is_lost(servers: list[Serving], policy: LanguagePolicy) -> None:
    asked, whole, reader = requests(), Reader(0), Reader(1)
    with remote(policy, [server.address for server in servers]) as generator:
        generator.converse(asked, whole)
    answers = 0

    def lose(request: bytes, answer: bytes) -> bytes:
        nonlocal answers
        answers += is_generation(request)
        return answer if answers < 6 else b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"

    with Proxy(servers[0].address, lose) as proxy, remote(policy, [proxy.address, servers[1].address]) as generator:
        assert generator.converse(asked, reader) == [None] * 8
        metrics = generator.metrics()
        assert 0 < metrics.pop("sampler/cached_fraction") < 1, "another server has not kept the turns"
        assert metrics == {"sampler/rerouted": pytest.approx(30, abs=29), "sampler/servers": 1.0}
    assert [[turn.tokens for turn in reader.turns[place]] for place in whole.turns] == [
        [turn.tokens for turn in turns] for turns in whole.turns.values()
    ]
    assert logprobs(reader.turns) == pytest.approx(logprobs(whole.turns), abs=1e-5)


def test_conversations_that_wait_for_an_answer_past_the_deadline_have_failed(
    servers: list[Serving], policy: LanguagePolicy
) -> None:
    asked = requests(count=2)
    settings = replace(asked[0].settings, deadline_seconds=60.0)
    now, ended = [0.0], list[int]()

    def respond(number: int, rollout: int, turn: Completion) -> Future[Continuation | None]:
        future: Future[Continuation | None] = Future()
        if number == 0:
            future.set_result(None)
        ended.append(number)
        now[0] = 100.0 if len(ended) == 8 else 0.0
        return future

    with remote(policy, [servers[0].address], clock=lambda: now[0]) as generator:
        failures = generator.converse([replace(one, settings=settings) for one in asked], respond)
    assert failures[0] is None
    assert isinstance(failures[1], GenerationFailure)
    assert failures[1].reason is FailureReason.DEADLINE


def test_a_failure_from_before_a_server_was_revived_does_not_lose_it(
    servers: list[Serving], policy: LanguagePolicy
) -> None:
    with remote(policy, [servers[0].address]) as generator:
        fleet, call = generator.fleet, _Call(generator, requests(count=2))
        call.tries = {0: 1, 1: 1}
        late: Future[list[Completion]] = Future()
        late.set_exception(LostServer("it has ended"))
        for answer in [Answer(number, 0, fleet.given[0], late) for number in range(2)]:
            call._take(answer)
            assert (fleet.rotation, fleet.given[0]) == ([0], 2)
        call.cancel()


def test_servers_on_the_gpu_of_the_run_are_told_to_sleep_and_woken_once(policy: LanguagePolicy) -> None:
    told: list[tuple[int, str]] = []

    class Told:
        def __init__(self, number: int) -> None:
            self.number = number

        async def post(self, route: str, body: dict[str, Any]) -> None:
            told.append((self.number, route))
            if self.number == 1:
                raise LostServer("it has ended")

    for sleeps in (False, True):
        clients: Any = [Told(0), Told(1)]
        fleet = Fleet(policy, clients, FileTransport(), False, NO_CHILDREN, sleeps=sleeps, rotation=[0, 1])
        fleet.wake()
        assert told == []
        fleet.sleep()
        fleet.wake()
        fleet.wake()
        assert sorted(told, key=lambda one: one[0]) == (
            [(0, SLEEP), (0, WAKE), (1, SLEEP), (1, WAKE)] if sleeps else []
        )
        assert fleet.rotation == ([0] if sleeps else [0, 1])
        fleet.close()
