"""The client of OpenEnv servers, and faults of servers. `test_real_packages.py` has the package's own server."""

import base64
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import quote

import pytest

from covey.llm.conversation.adapter import Response, WrongEnvironment
from covey.llm.conversation.processes import EnvironmentProcesses
from covey.runtime.worker.process import CallError
from covey_environments import openenv_client
from covey_environments.openenv import OpenEnv, _tool_text, _value
from covey_environments.openenv_client import Address, RefusedAction
from helpers.openenv_server import FAULTS, TOOLS, CounterServer, send

CLASS = "covey_environments.openenv:OpenEnv"
TWO = {"properties": {"row": {"type": "integer"}, "mark": {"type": "string"}}, "required": ["row", "mark"]}


@pytest.fixture(scope="module")
def server() -> Iterator[CounterServer]:
    found = CounterServer()
    yield found
    found.close()


@pytest.fixture
def other_server(request: pytest.FixtureRequest) -> Iterator[CounterServer]:
    """A server with other schemas."""
    found = CounterServer(request.param)
    yield found
    found.close()


def test_an_episode(server: CounterServer) -> None:
    counter = OpenEnv(server.url)
    assert counter.reset(seed=0, answer=3) == '{"total": 0, "word": "begin"}'
    assert server.resets[-1] == {"seed": 0}
    assert counter.respond("I add 4.", []) == Response(text='{"total": 4, "word": "go on"}', reward=4.0)
    assert counter.respond("many", []) == Response(text="Error: step: Input should be a valid integer")
    assert counter.respond("6", []) == Response(text='{"total": 10, "word": "go on"}', reward=10.0, done=True)
    assert counter.observation == {"total": 10, "word": "go on", "metadata": {"hidden": 1}}, "rewards read it"
    counter.close()
    counter.close()


def test_an_open_connection_has_no_thread_that_draws_from_the_global_generator(server: CounterServer) -> None:
    """The pings of websockets draw from `random` after 20 s, in the middle of what an environment draws."""
    before = set(threading.enumerate())
    counter = OpenEnv(server.url)
    counter.reset(seed=0, answer=3)
    started = [thread.name for thread in set(threading.enumerate()) - before]
    counter.close()
    assert any("recv_events" in name for name in started), "the name by which the threads of a connection are known"
    assert not any("keepalive" in name for name in started)


def test_a_field_of_the_observation_and_columns_for_the_reset_are_chosen_by_options(server: CounterServer) -> None:
    counter = OpenEnv(server.url.replace("http", "ws") + "/", observation="word", columns=["level"])
    assert counter.reset(seed=0, level=[1, 2], answer=3) == "begin"
    assert server.resets[-1] == {"seed": 0, "level": [1, 2]}
    with pytest.raises(WrongEnvironment, match="the data has no such column"):
        counter.reset(seed=0, answer=3)
    seeds = []
    for seed in (1, 1, 2):
        random.seed(seed)
        counter.reset(level=1)
        seeds.append(server.resets[-1]["seed"])
    counter.close()
    assert seeds[0] == seeds[1] != seeds[2]


def wait_for_the_end_of_sessions(server: CounterServer) -> None:
    deadline = time.monotonic() + 60
    while server.open:
        assert time.monotonic() < deadline, f"{server.open} sessions are open"
        time.sleep(0.005)


@pytest.mark.slow
def test_sessions_end_with_their_conversations_in_whatever_way(server: CounterServer) -> None:
    processes = EnvironmentProcesses(CLASS, 30.0, 100, {"url": server.url})
    wait_for_the_end_of_sessions(server)  # of other tests
    before, server.most = server.sessions, 4
    for way in ("end", "close", "close", "end"):
        sessions = [processes.open(0) for _ in range(4)]
        resets = [session.ask({"do": "reset", "columns": {"seed": 0}}) for session in sessions]
        assert {reset.result(60)["text"] for reset in resets} == {'{"total": 0, "word": "begin"}'}
        for session in sessions:
            if way == "end":
                session.ask({"do": "end"}).result(60)
            session.close()
        wait_for_the_end_of_sessions(server)
    assert server.sessions - before == 16, "each conversation has one session"
    processes.close()
    server.most = 10**9


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("close", "closed the connection"),
        ("garbage", "answered something other than a JSON object"),
        ("list", "answered something other than a JSON object"),
        ("binary", "answered something other than a JSON object"),
        ("no observation", "answered without an observation"),
        ("unknown", "answered without an observation"),
        ("error", "answered with an error: EXECUTION_ERROR: division by zero xxx"),
    ],
)
def test_a_fault_of_the_server_is_named_in_one_line(server: CounterServer, fault: str, message: str) -> None:
    counter = OpenEnv(server.url)
    counter.reset(seed=1 + FAULTS.index(fault))
    with pytest.raises(WrongEnvironment) as failed:
        counter.respond("1", [])
    counter.close()
    assert message in str(failed.value)
    assert server.url in str(failed.value)
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) < 600


@pytest.mark.slow
def test_a_slow_server_and_one_without_sessions_fail_the_conversation(
    server: CounterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_client, "CAPACITY_SECONDS", 0.2)
    server.most = 0
    with pytest.raises(WrongEnvironment, match=r"no free session \(Server at capacity\): start it with max_concurrent"):
        OpenEnv(server.url).reset(seed=0)
    server.most = 10**9
    processes = EnvironmentProcesses(CLASS, 1.0, 100, {"url": server.url})
    session = processes.open(0)
    session.ask({"do": "reset", "columns": {"seed": 1 + FAULTS.index("slow")}}).result(60)
    with pytest.raises(CallError, match="took longer than 1 s for one call"):
        session.ask({"do": "respond", "message": "1", "calls": []}).result(60)
    processes.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "stp"}, "the option action is 'stp', but the server's actions have step"),
        ({"observation": "done"}, "the server's observations have total, word"),
        ({"transport": "tcp"}, "choose websocket or http"),
        ({"url": "127.0.0.1:8000"}, "give the address of an OpenEnv server"),
        ({"url": "http://"}, "give the address of an OpenEnv server"),
        ({"url": "http://127.0.0.1:x"}, "give the address of an OpenEnv server"),
        ({"url": "http://127.0.0.1:{free}"}, "start it, or correct the option url"),
        ({"url": "{url}/v1"}, "the server has no /schema: correct the option url"),
    ],
)
def test_options_that_do_not_fit_are_refused(server: CounterServer, options: dict[str, Any], message: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        known = {"free": free.getsockname()[1], "url": server.url}
        filled = {name: value.format(**known) for name, value in options.items()}
        with pytest.raises(WrongEnvironment) as refused:
            OpenEnv.prepare(**{"url": server.url} | filled)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def private_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CounterServer]:
    """A server that needs the access token of the variable RIGHT."""
    found = CounterServer()
    found.token = "s3cret"
    for name, value in {"RIGHT": " s3cret\n", "WRONG": "s3cret2", "EMPTY": "", "TWO_WORDS": "s3 cret"}.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


@pytest.mark.slow
def test_the_access_token_is_sent_to_a_private_server_by_every_process(private_server: CounterServer) -> None:
    options = {"url": private_server.url, "token_variable": "RIGHT"}
    OpenEnv.prepare(**options)
    processes = EnvironmentProcesses(CLASS, 30.0, 100, options)
    session = processes.open(0)
    assert session.ask({"do": "reset", "columns": {"seed": 0}}).result(60)["text"] == '{"total": 0, "word": "begin"}'
    processes.close()


def test_the_access_token_is_sent_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "s3cret")
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"observation": {}}')

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        client = openenv_client.HttpClient(Address(f"http://localhost:{server.server_port}", "RIGHT"))
        client.reset({})
        client.close()
        thread.join()
    assert seen == ["Bearer s3cret"]


@pytest.mark.parametrize(
    "form", [str, repr, quote, json.dumps, lambda token: base64.b64encode(token.encode()).decode()]
)
def test_an_access_token_that_the_server_repeats_is_in_no_observation(
    monkeypatch: pytest.MonkeyPatch, form: Callable[[str], str]
) -> None:
    token = 's3cret/\\token+"1'
    monkeypatch.setenv("RIGHT", token)
    address = Address("http://127.0.0.1:1", "RIGHT")
    shown = address.short(ValueError(f"the header {form(token)}"))
    try:
        shown += str(address.read(json.dumps({"observation": {"key": form(token)}})))
    except WrongEnvironment as refused:
        shown += str(refused)
    assert form(token) not in shown
    assert token not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "refuses access (status 401)"),
        ({"token_variable": "WRONG"}, "refuses access (status 401)"),
        ({"token_variable": "EMPTY"}, "there is no such variable"),
        ({"token_variable": "TWO_WORDS"}, "there is no such variable"),
        ({"token_variable": "s3cret"}, "is the name of an environment variable with an access token"),
        ({"token_variable": "RIGHT", "url": "http://192.0.2.1:8000"}, "which is not encrypted"),
        ({"token_variable": "RIGHT", "url": "ws://localhost.example:8000"}, "which is not encrypted"),
        ({"url": "http://me:s3cret@127.0.0.1:8000"}, "has a user name or a password"),
    ],
)
def test_an_access_token_that_is_missing_wrong_or_would_be_shown_is_refused(
    private_server: CounterServer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongEnvironment) as refused:
        OpenEnv.prepare(**{"url": private_server.url} | options)
    assert message in str(refused.value)
    assert "s3" not in str(refused.value)


@pytest.mark.parametrize("other_server", ["no json", {"action": 3}, ["x"]], indirect=True)
def test_a_server_of_another_kind_is_refused(other_server: CounterServer) -> None:
    with pytest.raises(WrongEnvironment, match="is not an OpenEnv server"):
        OpenEnv.prepare(url=other_server.url)


@pytest.mark.parametrize("other_server", ["missing"], indirect=True)
def test_a_server_without_schemas_needs_the_name_of_the_field(other_server: CounterServer) -> None:
    counter = OpenEnv(other_server.url, action="step")
    counter.reset(seed=0)
    assert counter.respond("3", []).text == "Error: step: Input should be a valid integer", "its type is not known"
    counter.close()


@pytest.mark.parametrize("other_server", [{"action": TWO}], indirect=True)
def test_an_action_of_several_fields_is_a_json_object(other_server: CounterServer) -> None:
    board = OpenEnv(other_server.url)
    assert board._action('I play\n```json\n{"row": 1, "mark": "{x}"}\n```') == {"row": 1, "mark": "{x}"}
    for text in ("row 1", "}{", "{1}", "[1]", '{"a": ' * 5000 + "}"):
        with pytest.raises(RefusedAction, match=r"a JSON object that has the fields row \(integer\), mark \(string\)"):
            board._action(text)
    assert OpenEnv(other_server.url, action="mark")._action(" 5 ") == {"mark": "5"}


@pytest.mark.parametrize("other_server", [TOOLS, {"action": {"properties": {"metadata": {}}}}], indirect=True)
def test_calls_of_tools_are_steps_until_the_episode_is_over(other_server: CounterServer) -> None:
    OpenEnv.prepare(url=other_server.url)
    counter = OpenEnv(other_server.url)
    [tool] = counter.tool_schemas()
    assert tool["function"]["parameters"]["properties"] == {"n": {"type": "integer"}}
    counter.reset(seed=0)
    calls = [{"name": "add", "arguments": {"n": n}} for n in (2, -1, 3, 6, 1)]
    assert counter.respond("", calls[:3]) == Response(
        ["2", "Error: arguments.n: Input should be positive", "5"], reward=2.0 + 5.0
    )
    assert counter.respond("", calls[3:]) == Response(["11", "Error: the episode is over"], reward=11.0, done=True)
    assert counter.respond("It is 11.", []) == Response([], done=True)
    counter.close()


@pytest.mark.parametrize("other_server", [{"action": {"properties": {}}}], indirect=True)
def test_a_server_with_neither_fields_nor_tools_is_refused(
    other_server: CounterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helpers.openenv_server.use_tool", no_tools)
    with pytest.raises(WrongEnvironment, match="has neither fields of actions nor tools"):
        OpenEnv.prepare(url=other_server.url)
    assert other_server.sessions == 1
    deadline = time.monotonic() + 5
    while other_server.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not other_server.open, "its session is closed"


def no_tools(connection: Any, data: dict[str, Any], total: int) -> int:
    send(connection, "observation", {"observation": {"tools": []}})
    return 0


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5"),
        ("5", {"$ref": "#/$defs/Move"}, "5"),
        ("first 3, then -07!", {"type": "integer"}, -7),
        ("about 2.50", {"type": "number"}, 2.5),
        ("none", {"type": "integer"}, "none"),
        ("true", {"type": "boolean"}, True),
        ("yes 1", {"type": "boolean"}, "yes 1"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
    ],
)
def test_a_text_becomes_the_value_of_its_field(text: str, schema: dict[str, Any], value: object) -> None:
    assert _value(text, schema) == value
    assert type(_value(text, schema)) is type(value)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"result": "5"}, "5"),
        ({"result": {"a": 1}}, '{"a": 1}'),
        ({"result": None}, "null"),
        ({"result": {"content": [{"text": "a"}, {"image": 1}, {"text": "b"}], "data": 3}}, "a\nb"),
        ({"result": {"content": [], "data": 3}}, "3"),
        ({"result": {"content": [{"text": "no"}], "is_error": True}}, "Error: no"),
        ({"error": {"message": "unknown tool"}, "result": None}, "Error: unknown tool"),
        ({"error": "broken"}, "Error: broken"),
    ],
)
def test_the_result_of_a_tool_becomes_text(observation: dict[str, Any], text: str) -> None:
    assert _tool_text(observation) == text


def test_addresses() -> None:
    assert Address("wss://host.example/path/").http == "https://host.example/path"
    assert Address("http://[::1]:80").websocket == "ws://[::1]:80/ws"
