"""Adapters with the real packages openenv and verifiers. `make environments` runs these tests."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

import helpers
from covey.config import ConfigError, ConversationConfig
from covey.config.named_modules import search_path
from covey.llm.conversation.adapter import Response, WrongEnvironment
from covey.llm.conversation.processes import EnvironmentProcesses
from covey.runtime.variables import cache_folder
from covey.runtime.worker.process import CallError
from covey_environments.verifiers import Verifiers
from helpers.run_helpers import covey
from helpers.tiny_models import tiny_folder

pytestmark = pytest.mark.environments
HELPERS = Path(helpers.__path__[0])
OPENENV = "covey_environments.openenv:OpenEnv"
VERIFIERS = "covey_environments.verifiers:Verifiers"
START_SECONDS = 120
RECIPE = """
model = "{model}"
steps = 2
threads = 1
[task]
name = "environment"
[conversation]
environment = "{environment}"
options = {options}
turns = 3
total_tokens = 200
timeout_seconds = 60
[sampling]
prompts_per_step = 2
group_size = 3
max_new_tokens = 6
[evaluation]
problems = 2
"""


def serve(application: str, folder: Path) -> Iterator[str]:
    """The address of a server that runs until the end of a fixture."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "uvicorn", application, "--port", str(port), "--log-level", "warning"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx2.HTTPError:
                    time.sleep(0.2)
            else:
                pytest.fail((folder / "server.log").read_text())
            yield url
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The environment that `openenv init` writes, as its documentation runs it, with six sessions."""
    folder = tmp_path_factory.mktemp("openenv")
    made = subprocess.run(
        [sys.executable, "-m", "openenv.cli", "init", "talk_env"], cwd=folder, capture_output=True, text=True
    )
    assert (folder / "talk_env/server/app.py").exists(), made.stdout + made.stderr
    application = folder / "talk_env/server/app.py"
    text = application.read_text()
    assert text.count("max_concurrent_envs=1") == 1
    application.write_text(text.replace("max_concurrent_envs=1", "max_concurrent_envs=6"))
    yield from serve("server.app:app", folder / "talk_env")


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("adder")
    (folder / "adder.py").write_text((HELPERS / "openenv_adder.py").read_text())
    yield from serve("adder:app", folder)


def processes_of(kind: str, options: dict[str, Any]) -> EnvironmentProcesses:
    environment = kind.rpartition(":")[0].rpartition(".")[2]
    assigned = tuple(f"{key} = {value!r}" for key, value in options.items() if key == "id")
    name, library = ConversationConfig(environment, options=assigned).imported_module
    path = search_path(f"{name}:", library=library) if name else ()
    return EnvironmentProcesses(kind, 60.0, 1000, options, path=path)


def played(kind: str, options: dict[str, Any], turns: Sequence[Any], columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The replies to a conversation in a process: of the description, the reset, the turns, the end."""
    processes = processes_of(kind, options)
    try:
        session = processes.open(0)
        requests = [{"do": "describe"}, {"do": "reset", "columns": columns}]
        for turn in turns:
            message, calls = (turn, []) if isinstance(turn, str) else ("", turn)
            requests.append({"do": "respond", "message": message, "calls": calls})
        return [session.ask(request).result(90) for request in [*requests, {"do": "end"}]]
    finally:
        processes.close()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


# ---- openenv ----


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_the_echo_environment_of_openenv(echo: str, transport: str) -> None:
    options = {"url": echo, "observation": "echoed_message", "transport": transport}
    described, reset, first, second, end = played(OPENENV, options, ["Hello", "x" * 20], {"seed": 1})
    assert described["tools"] == []
    assert "ready" in reset["text"]
    assert (first["text"], first["reward"], first["done"]) == ("Hello", 0.5, False)
    assert (second["text"], second["reward"]) == ("x" * 20, 1.0)
    observation = end["attributes"]["observation"]
    assert observation["message_length"] == 20
    assert observation.get("metadata", {"step": 2})["step"] == (2 if transport == "websocket" else 1)


def test_hundreds_of_conversations_leave_no_session_open(echo: str) -> None:
    processes = EnvironmentProcesses(OPENENV, 60.0, 1000, {"url": echo})
    for _ in range(40):
        sessions = [processes.open(0) for _ in range(6)]
        resets = [session.ask({"do": "reset", "columns": {"seed": 0}}) for session in sessions]
        assert all("ready" in reset.result(90)["text"] for reset in resets)
        for session in sessions:
            session.close()
    sessions = [processes.open(0) for _ in range(7)]
    resets = [session.ask({"do": "reset", "columns": {"seed": 0}}) for session in sessions]
    failed = [error for reset in resets if (error := reset.exception(90))]
    processes.close()
    assert len(failed) == 1
    assert "has no free session" in str(failed[0])


def test_tools_of_an_mcp_environment(adder: str) -> None:
    calls = [call("add", a=3), call("fail", reason="no luck"), call("add", a=1, b=1)]
    described, _, first, last, _ = played(OPENENV, {"url": adder}, [calls, "The sum is 5."], {"seed": 1})
    names = {tool["function"]["name"]: tool["function"]["parameters"] for tool in described["tools"]}
    assert names["add"]["required"] == ["a"]
    assert names["add"]["properties"]["b"] == {"type": "integer"}
    assert first["texts"][0::2] == ["5", "2"]
    assert first["texts"][1].startswith("Error: ")
    assert "no luck" in first["texts"][1]
    assert not first["done"]
    assert last["done"]


# ---- verifiers ----


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of the environments, as a user has one."""
    (tmp_path / "guessing_games.py").write_text((HELPERS / "verifiers_games.py").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_row(number: int, side: str = "training") -> dict[str, Any]:
    return {"verifiers": {"side": side, "row": number}, "answer": "unused"}


def test_a_conversation_of_several_turns_has_the_reward_of_its_rubric(games: Path) -> None:
    options = {"id": "guessing-games", "kind": "hints", "evaluation": True}
    described, reset, first, second, end = played(VERIFIERS, options, ["5", "204"], of_row(2, "held_out"))
    assert (described["tools"], reset["text"]) == ([], None)
    assert (first["text"], first["reward"], first["done"]) == ("Not 5. That was guess 1.", 0.0, False)
    assert (second["text"], second["done"]) == ("Right.", True)
    assert end["attributes"]["metrics"]["messages"] == 4.0, "two turns and two replies"
    assert end["reward"] == 0.5
    with pytest.raises(CallError, match="changes earlier messages"):
        played(VERIFIERS, options, ["rewrite"], of_row(2))


def test_the_limit_of_turns_ends_a_conversation(games: Path) -> None:
    replies = played(VERIFIERS, {"id": "guessing_games", "kind": "hints"}, ["1", "2", "4"], of_row(2))
    assert [reply["done"] for reply in replies[2:5]] == [False, False, True]
    assert replies[4]["text"] is None
    assert replies[5]["reward"] == 1.0 + 5 / 8
    assert replies[5]["attributes"]["metrics"]["num_turns"] == 3


def test_tools_are_called_by_the_package(games: Path) -> None:
    turns = [[call("add", a=1, b=3), call("add", a=101, b=3)], "It is 4."]
    described, _, first, last, end = played(VERIFIERS, {"id": "guessing_games", "kind": "tools"}, turns, of_row(2))
    [tool] = described["tools"]
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    assert first["texts"] == ["4", "a is too large"]
    assert last["done"]
    assert end["reward"] == 1.0 + 4 / 8
    assert end["attributes"]["metrics"]["add_calls"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "guessing_games", "kind": "group"}, "has rewards of whole groups"),
        ({"id": "guessing_games", "kid": "x"}, "unexpected keyword argument 'kid'"),
        ({"id": "no-such-games"}, "verifiers cannot load 'no-such-games'"),
    ],
)
def test_what_cannot_be_loaded_is_refused(games: Path, options: dict[str, Any], message: str) -> None:
    processes = processes_of(VERIFIERS, options)
    with pytest.raises(ConfigError) as refused:
        processes.start()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_reward_function_that_raises_fails_the_conversation(games: Path) -> None:
    with pytest.raises(CallError, match=r"a reward function of its rubric failed: .*broken"):
        played(VERIFIERS, {"id": "guessing_games", "kind": "broken"}, ["4"], of_row(2))


# ---- tasksets of verifiers from 0.4 on ----

TAKE = {"id": "summing", "take": 12}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of a taskset."""
    (tmp_path / "summing.py").write_text((HELPERS / "verifiers_tasks.py").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "case", "turns"),
    [
        ({"hints": 3}, {"hints": 3, "max_turns": 2}, ["5", " six\n\u00e9 "]),
        (
            {"task": {"kind": "tools"}},
            {"taskset": {"task": {"kind": "tools"}}, "max_turns": 4},
            [[call("sums_add", a=1, b=3), call("sums_add", a=101)], [call("sums_count")], "4"],
        ),
    ],
    ids=["user", "tools"],
)
def test_taskset_conversations_are_those_of_the_packages_own_rollout(
    tasks: Path, options: dict[str, Any], case: dict[str, Any], turns: list[Any]
) -> None:
    words = [
        sys.executable,
        str(HELPERS / "verifiers_rollout.py"),
        "summing",
        "2",
        json.dumps([case | {"turns": turns}]),
    ]
    own = subprocess.run(words, cwd=tasks, capture_output=True, text=True)
    assert own.returncode == 0, own.stderr
    expected = json.loads(own.stdout)
    described, reset, *replies, end = played(VERIFIERS, TAKE | options, turns, of_row(2))
    heard = [
        message["content"] for message in expected["requests"][-1]["messages"][2:] if message["role"] != "assistant"
    ]
    assert reset["text"] is None
    assert [text for reply in replies[:-1] for text in [*reply["texts"], reply["text"]] if text is not None] == heard
    shown, offered = described["tools"], expected["requests"][0]["tools"]
    for mine, its in zip(shown, offered, strict=True):
        assert {key: mine["function"][key] for key in ("name", "description")}.items() <= its["function"].items()
        assert mine["function"]["parameters"]["properties"].keys() == its["function"]["parameters"]["properties"].keys()
    assert (end["reward"], end["attributes"]["metrics"]) == (expected["reward"], expected["metrics"])


def test_taskset_tools_for_all_tasks_have_the_state_of_each_conversation(tasks: Path) -> None:
    processes = processes_of(VERIFIERS, TAKE | {"shared": True})
    counted = []
    for _ in range(2):
        session = processes.open(0)
        session.ask({"do": "reset", "columns": of_row(1)}).result(90)
        turn = {"do": "respond", "message": "", "calls": [call("sums_count"), call("sums_count")]}
        counted += session.ask(turn).result(90)["texts"]
        assert session.ask({"do": "end"}).result(90)["attributes"]["metrics"]["calls"] == 2.0
        session.close()
    processes.close()
    assert counted == ["1 of 1", "2 of 2", "1 of 3", "2 of 4"]


def test_taskset_without_prompts_has_a_user_who_opens_the_conversation(tasks: Path) -> None:
    options = TAKE | {"asks": False, "hints": 3}
    _, reset, first, last, end = played(VERIFIERS, options, ["5", "4"], of_row(2))
    assert (reset["text"], first["text"], last["done"]) == ("Twice 2?", "Not 5. That was guess 1.", True)
    assert end["reward"] == 1.0 + 5 / 8


def test_taskset_stops_end_a_conversation(tasks: Path) -> None:
    *_, last, end = played(VERIFIERS, TAKE | {"hints": 3}, ["1", "stop, it is 4"], of_row(2))
    assert last["done"]
    assert end["reward"] == 1.0 + 5 / 8


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("broken", "task SumTask scoring: KeyError: 'missing'"),
        ("rewrite", "changes earlier messages"),
        ("tools", "the server of tools summing ended: OSError: no index"),
    ],
)
def test_taskset_conversations_that_fail(tasks: Path, kind: str, message: str) -> None:
    with pytest.raises(CallError, match=message):
        played(VERIFIERS, TAKE | {"task": {"kind": kind}}, ["4"], of_row(11))


HARNESS = """
import httpx
import verifiers.v1 as vf
import summing

class Sums(summing.SumsTaskset): pass

class Twice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": self.resolve_prompt(data)[1]}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, headers=headers) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                reply = (await client.post(f"{endpoint}/chat/completions", json=body)).json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Sums", "Twice"]
"""


def test_taskset_with_a_harness_of_its_own(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tasks / "twice.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(tasks)
    talk = Verifiers(id="twice", take=12)
    row = talk.rows()["training"][3]
    assert row["prompt"] == [{"role": "user", "content": "Be brief.\n\nWhat is 3 + 3?"}]
    talk.reset(**row)
    assert [talk.respond(text, []) for text in ("5", "6")] == [Response([], "Sure?"), Response([], done=True)]
    assert (talk.score(), talk.metrics["right"]) == (1.0 + 4 / 8, 1.0)
    talk.close()


CRITIC = """
import verifiers.v1 as vf
import summing

class Sums(summing.SumsTaskset): pass

class Config(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig({solver})
    {critic}

class Env(vf.Env[Config]):
    async def run(self, task, agents): await agents.solver.run(task)

__all__ = ["Sums", "Env"]
"""


def test_taskset_that_cannot_be_driven_is_refused(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tasks)
    docker, bash = "runtime={'type': 'docker'}", "harness={'id': 'bash'}"
    for name, solver, critic in [("two", "", "critic: vf.AgentConfig = vf.AgentConfig()"), ("docker", docker, "")]:
        (tasks / f"{name}.py").write_text(CRITIC.format(solver=solver, critic=critic))
    (tasks / "shell.py").write_text(CRITIC.format(solver=bash, critic=""))
    (tasks / "former.py").write_text("def load_environment(): pass")
    for options, message in [
        ({"id": "summing"}, "has tasks without end"),
        ({"id": "summing", "take": 0}, "has no tasks"),
        (TAKE | {"asks": False, "system": ""}, "neither a prompt nor a system prompt"),
        (TAKE | {"image": "python:3"}, "a task of 'summing' runs in a container"),
        (TAKE | {"task": {"judges": [{"id": "mine"}]}}, "task.judges imports what it names"),
        (TAKE | {"cnt": 3}, "taskset.cnt: Extra inputs are not permitted"),
        (TAKE | {"id": "two"}, "has the agents solver, critic"),
        (TAKE | {"id": "docker"}, "the agent of 'docker' runs in docker"),
        (TAKE | {"id": "shell"}, "has the harness bash"),
        ({"id": "former"}, "pip install 'verifiers<0.4'"),
        ({"id": "Summing"}, "write it in small letters"),
        ({"id": "verifiers.v1.tasksets.antigravity"}, "verifiers has no taskset"),
        ({"id": "no-such-tasks"}, "verifiers cannot load 'no-such-tasks'"),
    ]:
        with pytest.raises(WrongEnvironment) as refused:
            Verifiers.prepare(**options)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)


def test_taskset_whose_agent_has_a_model_of_its_own_asks_covey(tasks: Path) -> None:
    server = "model='other', client={'type': 'eval', 'base_url': 'http://127.0.0.1:9/v1'}"
    (tasks / "served.py").write_text(CRITIC.format(solver=server, critic=""))
    *_, last, end = played(VERIFIERS, {"id": "served", "take": 12}, ["4"], of_row(2))
    assert (last["done"], end["reward"]) == (True, 1.0 + 3 / 8)


# ---- runs ----


def rollouts_of(folder: Path, environment: str, options: list[str]) -> list[dict[str, Any]]:
    recipe = RECIPE.format(model=tiny_folder(folder / "model"), environment=environment, options=json.dumps(options))
    (folder / "talk.toml").write_text(recipe)
    code, output = covey("train", "talk.toml", "--run-dir", "run", cwd=folder, COVEY_CACHE=str(cache_folder()))
    assert code == 0, output
    assert "not repeatable" not in output
    lines = (folder / "run/rollouts/step_000002.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_on_a_server(echo: str, tmp_path: Path) -> None:
    found = rollouts_of(tmp_path, "openenv", [f'url = "{echo}"', 'observation = "echoed_message"'])
    assert len(found) == 6
    for rollout in found:
        said = [message["content"] for message in rollout["messages"] if message["role"] == "assistant"]
        heard = [message["content"] for message in rollout["messages"] if message["role"] == "user"]
        assert heard == said
        assert rollout["reward"] == pytest.approx(sum(min(len(text) / 10, 1.0) for text in said))


def test_a_run_on_prompts_and_rubric_of_verifiers(games: Path) -> None:
    found = rollouts_of(games, "verifiers", ['id = "guessing-games"', 'kind = "hints"'])
    assert len(found) == 6
    for rollout in found:
        assert rollout["prompt"][0] == {"role": "system", "content": "Be brief."}
        assert rollout["reward"] >= len(rollout["messages"]) / 8 - 1 / 8
        assert rollout["turn_rewards"][:-1] == [0.0] * (len(rollout["turn_rewards"]) - 1)


def test_a_run_on_prompts_and_rewards_of_a_taskset(tasks: Path) -> None:
    found = rollouts_of(tasks, "verifiers", ['id = "summing"', "take = 12", "hints = 3"])
    assert len(found) == 6
    for rollout in found:
        assert rollout["prompt"][0] == {"role": "system", "content": "Be brief."}
        assert rollout["prompt"][1]["content"].startswith("What is ")
        assert rollout["reward"] >= len(rollout["messages"]) / 8 - 1 / 8
        assert rollout["turn_rewards"][:-1] == [0.0] * (len(rollout["turn_rewards"]) - 1)
