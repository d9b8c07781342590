"""Plays conversations of a taskset by the package verifiers alone, with its programs in processes of their own.

    python verifiers_rollout.py id index 'CASES'     in the folder of the taskset

A case has `turns`, each a text or a list of calls, `max_turns`, and fields of the environment's config. The package
asks a script of these turns. The output is a line of JSON for each case: the requests, the reward and the metrics.
"""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

from verifiers.v1.clients import Client, ModelContext, TrainClientConfig
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils import loaders

ENDPOINT = TrainClientConfig()


class Script(Client):
    def __init__(self, turns):
        self.turns, self.requests = list(turns), []

    async def get_response(self, dialect, body, sampling, **named):
        self.requests.append({"messages": body["messages"], "tools": body.get("tools") or []})
        turn = self.turns.pop(0)
        message = {"role": "assistant", "content": turn if isinstance(turn, str) else ""}
        if not isinstance(turn, str):
            message["tool_calls"] = [
                {
                    "id": f"{len(self.turns)}-{place}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for place, call in enumerate(turn)
            ]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        raw = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


async def play(taskset, index, case):
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": case.pop("max_turns")}
    turns, fields = case.pop("turns"), case.pop("taskset", {})
    own = {"taskset": {"id": taskset, **fields}, "agent": agent, "interception": {"type": "server"}}
    environment = loaders.load_environment(loaders.resolve_env_config(case | own))
    [task] = environment.taskset.include(idx=[index])
    script = Script(turns)
    async with environment.serving():
        environment._interception.clients[ENDPOINT.model_dump_json()] = script
        episode = await environment.run_episode(task, ModelContext(model="m", client=ENDPOINT))
    [trace] = episode.traces
    assert episode.ok, trace.errors
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    print(json.dumps({"requests": script.requests, "reward": trace.reward, "metrics": scores | trace.metrics}))


def main(taskset, index, cases):
    # The package makes an environment of its own for its program, with uv; the one of the tests has all that it needs.
    program = f"{SubprocessRuntime.scripts_dir}/{hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest()}.py"
    Path(program).parent.mkdir(parents=True, exist_ok=True)
    Path(program).write_text(CHAT_PROGRAM_SOURCE)
    SubprocessRuntime._interpreters[program] = sys.executable
    os.environ["PYTHONPATH"] = os.getcwd()  # of the servers of tools
    for case in json.loads(cases):
        asyncio.run(play(taskset, int(index), case))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(*sys.argv[1:])
