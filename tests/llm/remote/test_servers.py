"""`covey serve` in real processes: the bits of this process, updates whole or not at all, every route guarded."""

import asyncio
import base64
import hashlib
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.llm.generation.generator import GenerationRequest, GenerationSettings, RandomKey
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import server as server_module
from covey.llm.remote import weights, wire
from covey.llm.remote.client import Client
from covey.llm.remote.server import Server
from covey.llm.remote.weights import gathered
from covey.runtime.foreign_json import BadJson, convert
from helpers.samplers import TOKEN, Serving, free_port, serving, token_file, wait_for
from helpers.tiny_models import tiny_folder, tiny_model

ENDS = frozenset(range(1, 85, 11))
SETTINGS = GenerationSettings(max_new_tokens=20, temperature=1.0, end_ids=ENDS, version=0)
VOCABULARY = 88
GUARDED = (
    "/weight_info", "/inference/v1/generate", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/pause?mode=keep", "/resume", "/reset_prefix_cache", "/docs",
    "/openapi.json", "/", "/collective_rpc", "/health/", "//health", "/Health", "/health/../weight_info", "/%68ealth2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    (folder / "weights").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with serving(tiny_folder(folder / "model"), folder, 1, ["--folder", str(folder / "weights")]) as (one,):
        yield one


def requests(settings: GenerationSettings = SETTINGS, completions: int = 4) -> list[GenerationRequest]:
    # A product in fp32 with fewer than about eight rows, such as the prefill of one short prompt, has other last bits.
    prompts = [tuple(range(5, 14)), tuple(range(5, 17)), (12,) * 10, (40,) * 30, (7, 3) * 6]
    return [GenerationRequest(p, completions, RandomKey(3, 1, group), settings) for group, p in enumerate(prompts)]


def generated(server: Serving, version: str, some: list[GenerationRequest]) -> list[Any]:
    """What a server generates for requests that are sent at once."""
    found: dict[int, Any] = {}

    def one(number: int) -> None:
        body = wire.request_body(some[number], version, covey=True)
        found[number] = server.ask("/inference/v1/generate", body)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(some))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(some))]


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return gathered(tiny_model(seed=seed), torch.float32)


def written(folder: Path, tensors: dict[str, torch.Tensor], name: str = "new") -> dict[str, str]:
    path = folder / "weights" / f"{name}.safetensors"
    save_file(tensors, path)
    return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def update(server: Serving, info: dict[str, Any], version: str) -> list[int]:
    """The statuses of the three routes of an update."""
    return [
        server.ask("/start_weight_update", {"weight_version": version})[0],
        server.ask("/update_weights", {"update_info": info | {"weight_version": version}})[0],
        server.ask("/finish_weight_update", {"weight_version": version})[0],
    ]


def choices(answers: list[Any]) -> list[Any]:
    assert [status for status, _ in answers] == [200] * len(answers)
    return [body["choices"] for _, body in answers]


def local(seed: int, some: list[GenerationRequest]) -> list[Any]:
    return LocalGenerator(LanguagePolicy(tiny_model(seed=seed))).generate(some)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, 3])
def test_completions_have_the_bits_of_this_process(server: Serving, folder: Path, seed: int) -> None:
    assert update(server, written(folder, weights_of(seed)), f"seed-{seed}") == [200] * 3
    some = requests()
    expected = local(seed, some)
    for request, choice, completions in zip(
        some, choices(generated(server, f"seed-{seed}", some)), expected, strict=True
    ):
        found = wire.read_answer(json.dumps({"choices": choice}).encode(), request, f"seed-{seed}", VOCABULARY)
        assert found == completions


def test_greedy_requests_and_others_at_once_have_their_own_numbers(server: Serving, folder: Path) -> None:
    assert update(server, written(folder, weights_of(0)), "mixed") == [200] * 3
    greedy = GenerationSettings(7, 0.0, ENDS, 0)
    some = [*requests(), *requests(greedy, completions=1), *requests(completions=2)]
    found = choices(generated(server, "mixed", some))
    for request, choice, completions in zip(some, found, local(0, some), strict=True):
        assert [one["token_ids"] for one in choice] == [one.tokens for one in completions], request
        assert [[p["logprob"] for p in one["logprobs"]["content"]] for one in choice] == [
            one.logprobs for one in completions
        ]


def test_a_request_for_other_weights_or_a_prompt_that_is_too_long_is_refused(server: Serving, folder: Path) -> None:
    assert update(server, written(folder, weights_of(0)), "now") == [200] * 3
    status, body = server.ask("/inference/v1/generate", wire.request_body(requests()[0], "other", covey=True))
    assert (status, body["error"]["reason"]) == (409, "WrongVersion")
    long = GenerationRequest((5,) * 250, 1, RandomKey(3, 1, 0), SETTINGS)
    status, body = server.ask("/inference/v1/generate", wire.request_body(long, "now", covey=True))
    assert (status, body["error"]["reason"]) == (422, "prompt too long")
    assert "positions" in body["error"]["message"]


def sparse(path: Path) -> Path:
    with open(path, "wb") as file:
        file.truncate(1 << 42)
    return path


def bad_updates(folder: Path) -> dict[str, dict[str, Any]]:
    """Updates that must fail, by what is wrong with them."""
    whole = weights_of(9)
    name = next(iter(whole))
    infinite = whole[name].index_fill(0, torch.tensor(0), torch.inf)
    good = written(folder, whole, "good")
    cut = folder / "weights" / "cut.safetensors"
    cut.write_bytes(Path(good["path"]).read_bytes()[:-100])
    outside = folder / "outside.safetensors"
    outside.write_bytes(Path(good["path"]).read_bytes())
    link = folder / "weights" / "link.safetensors"
    if not link.is_symlink():
        link.symlink_to(outside)
        os.mkfifo(folder / "weights" / "pipe")
        (folder / "weights" / "text").write_text("no tensors")
    text = hashlib.sha256(b"no tensors").hexdigest()
    return {
        "wrong checksum": good | {"sha256": "0" * 64},
        "no checksum": {"path": good["path"]},
        "cut, with the checksum of the whole": good | {"path": str(cut)},
        "cut, with its own checksum": {"path": str(cut), "sha256": hashlib.sha256(cut.read_bytes()).hexdigest()},
        "outside": good | {"path": str(outside)},
        "outside by dots": good | {"path": str(folder / "weights" / ".." / outside.name)},
        "outside by a link": good | {"path": str(link)},
        "no file": good | {"path": str(folder / "weights" / "missing")},
        "a folder": good | {"path": str(folder / "weights")},
        "a pipe": good | {"path": str(folder / "weights" / "pipe")},
        "a null byte": good | {"path": good["path"] + "\0"},
        "no safetensors": {"path": str(folder / "weights" / "text"), "sha256": text},
        "other shape": written(folder, whole | {name: whole[name][:-1]}, "shape"),
        "other dtype": written(folder, whole | {name: whole[name].bfloat16()}, "dtype"),
        "missing tensor": written(folder, {key: whole[key] for key in whole if key != name}, "missing_tensor"),
        "not a number": written(folder, whole | {name: torch.full_like(whole[name], torch.nan)}, "nan"),
        "one infinite row": written(folder, whole | {name: infinite}, "inf"),
        "larger than the model": good | {"path": str(sparse(folder / "weights" / "sparse"))},
        "further tensor": written(folder, whole | {"further": torch.zeros(1)}, "further"),
        "no path": {"sha256": good["sha256"]},
        "group without a group": {"names": [], "dtypes": [], "shapes": [], "sha256": good["sha256"]},
    }


def test_an_update_that_fails_leaves_the_old_weights(server: Serving, folder: Path) -> None:
    assert update(server, written(folder, weights_of(0)), "old") == [200] * 3
    before = choices(generated(server, "old", requests()))
    for wrong, info in bad_updates(folder).items():
        began, received, finished = update(server, info, "new")
        assert (began, finished) == (200, 409), wrong
        assert received in (400, 409), wrong
        assert server.ask("/weight_info") == (200, {"weight_version": "old"}), wrong
    assert choices(generated(server, "old", requests())) == before


def test_two_updates_at_once_end_both(server: Serving, folder: Path) -> None:
    assert update(server, written(folder, weights_of(0)), "old") == [200] * 3
    before = choices(generated(server, "old", requests()))
    info = written(folder, weights_of(9))
    begin_one = {"weight_version": "one"}
    assert server.ask("/start_weight_update", begin_one)[0] == 200
    assert server.ask("/update_weights", {"update_info": info | begin_one})[0] == 200
    assert server.ask("/start_weight_update", {"weight_version": "two"})[0] == 409
    assert server.ask("/finish_weight_update", begin_one)[0] == 409
    # What one run has sent is never put in place under the version of another.
    assert server.ask("/start_weight_update", begin_one)[0] == 200
    assert server.ask("/update_weights", {"update_info": info | begin_one})[0] == 200
    assert server.ask("/finish_weight_update", {"weight_version": "two"})[0] == 409
    assert choices(generated(server, "old", requests())) == before
    assert server.ask("/finish_weight_update", begin_one)[0] == 200
    assert choices(generated(server, "one", requests())) != before


def test_every_route_but_one_needs_the_token(server: Serving) -> None:
    for route in GUARDED:
        for method, body in (("GET", None), ("POST", {}), ("PUT", {}), ("DELETE", None), ("OPTIONS", None)):
            for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper()):
                assert server.ask(route, body, token, method)[0] == 401, (route, method, token)
    assert server.ask("/health", token=None) == (200, None)
    for route in ("/docs", "/openapi.json", "/collective_rpc", "/"):
        assert server.ask(route)[0] == 404


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"no json", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        ({}, "the JSON has no weight_version"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCABULARY]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": {"n": 0, "max_tokens": 4}}, "n must"),
        ({"sampling_params": {"n": 1, "max_tokens": 10**9}}, "max_tokens"),
        ({"sampling_params": {"n": 60_000, "max_tokens": 10**6}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 4, "temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_tokens": 4, "top_p": 0.9}}, "top_p"),
        ({"covey": {"seed": 2**32}}, "seed"),
        ({"covey": {"seed": "1"}}, "seed"),
        ({"covey": {"shared_prefix": 9}}, "shared_prefix"),
        ({"weight_version": 3}, "weight_version"),
        ({"weight_version": None}, "weight_version"),
    ],
)
def test_a_bad_body_is_refused_in_one_line(server: Serving, body: Any, named: str) -> None:
    whole = wire.request_body(requests()[0], "any", covey=True)
    status, answer = server.ask("/inference/v1/generate", whole | body if isinstance(body, dict) and body else body)
    assert status == 400
    assert named in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_a_server_refuses_to_start_where_others_could_use_it(folder: Path) -> None:
    model = tiny_folder(folder / "again")
    open_file = folder / "open"
    open_file.write_text(TOKEN)
    open_file.chmod(0o644)
    empty = folder / "empty"
    empty.touch(0o600)
    for words, named in (
        (["--host", "0.0.0.0"], "--token-file"),
        (["--host", "::"], "--token-file"),
        (["--host", "example.org"], "--host must be an address"),
        (["--token-file", str(open_file)], "chmod 600"),
        (["--token-file", str(folder / "missing")], "there is no file"),
        (["--token-file", str(empty)], "has no token"),
        (["--folder", str(folder / "missing"), "--token-file", str(token_file(folder))], "--folder"),
    ):
        from helpers.run_helpers import covey

        code, said = covey("serve", model, *words, cwd=folder, XDG_CONFIG_HOME=str(folder / "config"))
        assert code == 2, said
        assert named in said
        assert len(said.splitlines()) == 1


def test_the_token_of_this_machine_is_created_for_its_owner_alone(folder: Path) -> None:
    from helpers.run_helpers import start

    port = free_port()
    config = folder / "new_config"
    process = start(
        "serve", tiny_folder(folder / "third"), "--port", port, "--threads", 1, cwd=folder, XDG_CONFIG_HOME=str(config)
    )
    server = Serving(process, f"http://127.0.0.1:{port}")
    try:
        wait_for(server)
        path = config / "covey" / "token"
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.ask("/weight_info", token=path.read_text().strip()) == (200, {"weight_version": ""})
        process.send_signal(15)
        code, said = process.ended()
        assert code == 130
        assert f"--servers http://127.0.0.1:{port}" in said
        assert "Start again with: covey serve" in said
        assert path.read_text().strip() not in said
    finally:
        if process.poll() is None:
            server.kill()


@pytest.mark.slow
def test_a_second_architecture_is_served(folder: Path) -> None:
    """Its decoder's log-probabilities depend on the batch in their last bits, its tokens do not."""
    with serving(tiny_folder(folder / "bloom", "bloom"), folder, 1, ["--folder", str(folder / "weights")]) as (one,):
        tensors = gathered(tiny_model("bloom", seed=4), torch.float32)
        assert update(one, written(folder, tensors, "bloom"), "bloom-4") == [200] * 3
        expected = LocalGenerator(LanguagePolicy(tiny_model("bloom", seed=4))).generate(requests())
        for choice, completions in zip(choices(generated(one, "bloom-4", requests())), expected, strict=True):
            assert [one["token_ids"] for one in choice] == [one.tokens for one in completions]
            for found, completion in zip(choice, completions, strict=True):
                logprobs = [entry["logprob"] for entry in found["logprobs"]["content"]]
                assert logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_saved_weights_hold_a_tied_tensor_once(folder: Path) -> None:
    tensors = load_file(written(folder, gathered(tiny_model("bloom"), torch.float32))["path"])
    assert "lm_head.weight" not in tensors


GROUP = {"address": "127.0.0.1", "port": 1, "world_size": 2, "rank_offset": 1, "timeout_seconds": 60.0}


@pytest.mark.parametrize(
    "info",
    [
        None, {}, [], {"folder": 1}, {"folder": "a\0b"}, {"folder": "x" * 5000}, {"port": 1},
        *(GROUP | {name: wrong} for name, wrongs in {
            "address": ("localhost", "", "127.0.0.1:1", "1.2.3", 1, None, "::1%lo"),
            "port": (0, -1, 65536, 10**30, 1.0, "1", True, None),
            "world_size": (0, 1, 3, 10**9, 10**30, -2, 2.0, "2", None),
            "rank_offset": (0, 2, 10**9, -1, True, None),
            "timeout_seconds": (0, -1, 61, 10**400, 1e308, True, "1", None),
        }.items() for wrong in wrongs),
    ],
)  # fmt: skip
def test_a_group_that_no_run_makes_is_refused_at_once(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(server_module, "connect_to_sender", asked.append)
    unused: Any = None
    app = Server(unused, unused, ()).app()
    assert answer_of(app, wire.INIT, {"init_info": info})[0] in (400, 409)
    assert not asked


def test_a_sender_whom_nobody_reaches_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "TCPStore", lambda *_, **__: pytest.fail("it tries for as long as it may"))
    sender = convert(GROUP | {"port": free_port()}, weights.Sender)
    with pytest.raises(weights.BadWeights, match="could not be made"):
        weights.connect_to_sender(sender)


def test_a_shape_of_many_sizes_is_refused_before_they_are_multiplied() -> None:
    info = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2**39] * 100_000], "sha256": ""}
    with pytest.raises(BadJson, match=r"shapes\[0\] must be a list of length <= 8"):
        convert(info, weights.GroupUpdate)
    with pytest.raises(BadJson, match="that no weights have"):
        convert(info | {"shapes": [[2**39] * 8]}, weights.GroupUpdate).tensors()


@pytest.mark.parametrize(("route", "most"), [(wire.START, 64 << 10), (wire.PAUSE, None), (wire.UPDATE, 16 << 20)])
def test_a_body_is_read_up_to_what_its_route_needs(route: str, most: int | None) -> None:
    unused: Any = None
    status, read = answer_of(Server(unused, unused, ()).app(), route, itertools.repeat(b" " * 5000))
    assert status == (200 if most is None else 400)
    assert read <= (most or 0) + 5000


def answer_of(app: Any, route: str, body: Any) -> tuple[int, int]:
    """Status of a route in this process, and the bytes that it has read; the body is JSON, or chunks of it."""
    chunks = iter(body if isinstance(body, Iterator) else [json.dumps(body).encode()])
    read, statuses = [0], []

    async def receive() -> Any:
        chunk = next(chunks, b"")
        read[0] += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": isinstance(body, Iterator)}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    return statuses[0], read[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_without_a_traceback_while_requests_are_open(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests were started so that they ignore this signal, as by nohup")
    with serving(tiny_folder(tmp_path / "model"), tmp_path, 1) as (one,):
        port = int(one.address.rpartition(":")[2])
        head = f"POST {wire.START} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nExpect: 100-continue\r\n"
        with socket.create_connection(("127.0.0.1", port)) as opened, socket.create_connection(("127.0.0.1", port)):
            opened.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
            assert b"100 Continue" in opened.recv(1 << 10)  # so the route has begun
            one.process.send_signal(number)
            code, said = one.process.ended()
    assert code == 130
    assert [line.partition(":")[0] for line in said.splitlines()][-3:] == [
        "Use it",
        "",
        "interrupted. Start again with",
    ]
    assert "Traceback" not in said


SECRET = 'tok/en+5d41402%40"2abc\\4b2a76'


@pytest.mark.parametrize("status", [401, 403, 409, 422, 500])
@pytest.mark.parametrize(
    "text",
    [SECRET, quote(SECRET), json.dumps(SECRET), repr(SECRET), base64.b64encode(f"Bearer {SECRET}".encode()).decode(),
     f"{SECRET} " * 60, "a" * 990 + SECRET],
)  # fmt: skip
def test_no_form_of_the_token_is_in_an_error(text: str, status: int) -> None:
    client = Client("http://127.0.0.1:1", SECRET, 1.0)
    bodies = [{"error": {"reason": "prompt too long", "message": text}}, {"error": text}, {"error": [text]}, text]
    for body in [*(json.dumps(body).encode() for body in bodies), text.encode()]:
        error = str(client._refusal("/route", status, body))
        assert text not in error
        for first in range(len(SECRET) - 8):  # no part of it either, where the text was cut
            assert SECRET[first : first + 8] not in error
