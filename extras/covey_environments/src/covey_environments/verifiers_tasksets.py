"""Tasksets of verifiers from version 0.4 on, for `verifiers.py`, which imports this file.

The package's environment plays an episode with its one agent: with its harness `null`, which is a plain conversation
with the tools of the task, or with one that the taskset brings and that runs no commands of the model. The program of
`null` is run in this process, because a process for each turn, with packages of its own, takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import verifiers.v1 as vf
from verifiers.v1 import runtimes
from verifiers.v1.clients import Client, ModelContext, TrainClientConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils import compaction, core, mcp
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.interception import InterceptionServerConfig
from verifiers.v1.types import SystemMessage, UserMessage
from verifiers.v1.utils import loaders

from covey.llm.conversation.adapter import WrongEnvironment
from covey.runtime.worker.child import one_line, one_printable_line
from covey_environments.verifiers import MODEL, Ask, Message, Played, shown

_OWN = "verifiers.v1.tasksets."  # of the tasksets that come with the package
_FUNCTIONS = {"judges", "rewards", "metrics", "stops"}  # of the config of a task: they import what they name
_ENDPOINT = TrainClientConfig()  # of covey's client; nothing is sent to it


class TasksetSource:
    """The tasks of a taskset, and the environment that plays them."""

    def __init__(self, id: str, arguments: Mapping[str, Any]) -> None:
        if id.startswith(_OWN):
            if find_spec(id) is None:  # else the package would import any module of this name
                raise WrongEnvironment(f"verifiers has no taskset {id!r}")
            id = id.removeprefix(_OWN)
        config, agent = _config(id, {key: value for key, value in arguments.items() if key != "take"})
        environment = loaders.load_environment(config)
        taskset = environment.taskset
        if "take" in arguments:
            taskset = taskset.take(arguments["take"])
        if not taskset.bounded:
            raise WrongEnvironment(f"{id!r} has tasks without end: give their number, such as take = 1000")
        self.tools: list[dict[str, Any]] | None = None
        self.training = list(taskset)
        self.held_out: list[Any] = []
        if not self.training:
            raise WrongEnvironment(f"{id!r} has no tasks with these options")
        for task in self.training:
            if task.NEEDS_CONTAINER or task.data.image is not None:
                raise WrongEnvironment(f"a task of {id!r} runs in a container, which covey does not support")
            if task.data.prompt is None and not task.data.system_prompt:
                raise WrongEnvironment(f"a task of {id!r} has neither a prompt nor a system prompt: covey needs one")
        self._environment, self._harness = environment, loaders.load_harness(getattr(config, agent).harness)
        self._loop, self._shared = asyncio.new_event_loop(), contextlib.AsyncExitStack()
        tools = self._shared.enter_async_context(environment.shared_tools())  # servers for all conversations
        environment.shared_tools = partial(contextlib.nullcontext, self._loop.run_until_complete(tools))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())  # its threads, before processes fork

    def row(self, task: Any) -> dict[str, Any]:
        fields = task.data.model_dump(mode="json", exclude={*vf.TaskData.model_fields} - {"idx", "id", "name"})
        prompt = [message_to_wire(message) | {"content": shown(message)["content"]} for message in self.prompt(task)]
        return {**fields, "prompt": prompt}

    def prompt(self, task: Any) -> list[Message]:
        system, prompt = self._harness.resolve_prompt(task.data)
        begin = [SystemMessage(content=system)] if system else []
        return [*begin, *([UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or [])]

    async def play(self, task: Any, ask: Ask) -> Played:
        environment = self._environment
        async with environment.serving():
            environment._interception.clients[_ENDPOINT.model_dump_json()] = _Client(ask)
            episode = await environment.run_episode(task, ModelContext(model=MODEL, client=_ENDPOINT))
        if not episode.ok:
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            raise WrongEnvironment(one_printable_line(errors[0].message))
        [trace] = episode.traces
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise WrongEnvironment(f"its reward {missing[0]} was not computed ({trace.stop_condition})")
        scores = {name: reward.score for name, reward in trace.rewards.items()}
        return Played(trace.messages, trace.reward, scores | trace.metrics)


def _config(id: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """The config of a taskset's environment, and the name of its agent.

    Raises:
        WrongEnvironment: if covey cannot drive it.
    """
    if id != id.lower() or "@" in id:
        raise WrongEnvironment(f"{id!r} is not an id: write it in small letters, and without its version")
    module = loaders.import_taskset(id)
    if hasattr(module, "load_environment") and not hasattr(module, "__all__"):
        raise WrongEnvironment(
            f"{id!r} has a load_environment, which verifiers calls until version 0.3: pip install 'verifiers<0.4'"
        )
    if functions := _FUNCTIONS & {*(arguments.get("task") or {})}:
        raise WrongEnvironment(f"task.{functions.pop()} imports what it names, which a recipe cannot: use [[rewards]]")
    kind = loaders.env_config_type(id)
    own = {
        key
        for key, field in kind.model_fields.items()
        if key not in EnvConfig.model_fields and not isinstance(field.default, vf.AgentConfig)
    }
    fields: dict[str, Any] = {key: value for key, value in arguments.items() if key in own}
    taskset = {key: value for key, value in arguments.items() if key not in own}
    config = kind.model_validate({**fields, "taskset": {**taskset, "id": id}})
    agents = agent_config_fields(config)
    if len(agents) > 1:
        raise WrongEnvironment(f"{id!r} has the agents {', '.join(agents)}: covey drives one agent")
    [(name, agent)] = agents.items()
    if agent.runtime not in (vf.PrimeConfig(), vf.SubprocessConfig()):
        raise WrongEnvironment(f"the agent of {id!r} runs in {agent.runtime.type}, which covey does not support")
    default = id if loaders.default_harness_id(id) == id else "null"  # one that the taskset brings
    harness = agent.harness or loaders.harness_config_type(default)(id=default)
    program = loaders.harness_class(harness.id)
    if program.NEEDS_CONTAINER or program.EXECUTES_CODE:
        raise WrongEnvironment(
            f"{id!r} has the harness {harness.id}, in which the model runs programs: covey drives null and harnesses "
            "like it"
        )
    runtimes.SubprocessRuntime = Local
    seat = {"harness": harness, "runtime": vf.SubprocessConfig(), "retries": vf.RetryConfig(), "client": None}
    changed = {name: agent.model_copy(update=seat), "interception": InterceptionServerConfig()}
    return config.model_copy(update=changed), name


class _Client(Client):
    """A client whose model is covey's."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def get_response(self, dialect: Any, body: Any, sampling: Any, *_: Any, turn: Any = None, **__: Any) -> Any:
        request = dialect.parse_request(body)
        answer = await self._ask(request.messages, request.tools)
        if answer is None:
            turn.trace.stop("max_turns")  # then the package refuses this request and those that follow
        text, calls = answer or ("", [])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
                for call in calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        raw = {"id": "turn", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class Local(runtimes.SubprocessRuntime):
    """Runs the program of the harness `null` in this process, and servers of tools in forks of it."""

    async def prepare_uv_script(self, script: str | bytes, *arguments: Any, **named: Any) -> list[str]:
        if script != CHAT_PROGRAM_SOURCE:
            found: list[str] = await super().prepare_uv_script(script, *arguments, **named)
            return found
        return [_CHAT]

    async def run_program(self, argv: list[str], env: dict[str, str]) -> Any:
        if argv[0] != _CHAT:
            return await super().run_program(argv, env)
        file = "--initial-messages-file="
        words = [f"{file}{self.workdir / word.removeprefix(file)}" if word.startswith(file) else word for word in argv]
        sys.argv = words  # the program reads it before it first waits
        try:
            await _chat_program().main()
        except (Exception, SystemExit) as error:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=one_line(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        if argv[:2] != [sys.executable, "-m"]:
            await super().run_background(argv, env, log)
            return
        server = os.fork()
        if not server:
            _serve(argv[2], self.process_env(env), self.workdir, log)
        self._servers = {*getattr(self, "_servers", ()), server}
        while not _listens(Path(env["MCP_PORT_FILE"])):  # the package looks once a second, and at an ended one as well
            if os.waitpid(server, os.WNOHANG)[0]:
                self._servers.remove(server)
                raise vf.ToolsetError(f"the server of tools {argv[2]} ended: {(self.workdir / log).read_text()[-300:]}")
            await asyncio.sleep(0.01)

    async def teardown(self) -> None:
        for server in getattr(self, "_servers", ()):
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
        await super().teardown()


_CHAT = "covey-chat"


@cache
def _chat_program() -> Any:
    """The modules of the program, which the package joins to one file."""
    modules = (mcp, compaction, core)
    names = {name: value for module in modules for name, value in vars(module).items() if not name.startswith("__")}
    for module in modules:
        vars(module).update(names)
    return core


def _listens(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError), socket.create_connection(("127.0.0.1", int(file.read_text()))):
        return True
    return False


def _serve(module: str, env: dict[str, str], folder: Path, log: str) -> NoReturn:
    """What `python -m module` does, in a fork of this process."""
    try:
        os.chdir(folder)
        os.closerange(3, 1 << 12)  # sockets of this conversation, whose end is that of its process alone
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        for name in [name for name in os.environ if "API_KEY" in name.upper()]:  # as the package does
            del os.environ[name]
        os.environ.update(env)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException as error:
        print(one_line(error), file=sys.stderr, flush=True)
    os._exit(1)
