"""What `covey serve --vllm` finds if its interpreter is a script that runs this file: vLLM's routes, as vLLM has them,
over covey's own server; without vLLM.

    python fake_vllm.py EVENTS -m covey_vllm --model FOLDER --port PORT ...

Bodies have none of the keys that only covey's server takes. The routes /sleep and /wake_up are there if sleep mode is
enabled; a request for weights or completions while the server sleeps is an error. Every route that is asked is a line
of the file EVENTS.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from starlette.responses import Response

from covey.config.servers import read_token
from covey.llm.generation.local_generator import Engine
from covey.llm.model.loading import load_model
from covey.llm.policy import LanguagePolicy
from covey.llm.remote import wire
from covey.llm.remote.server import Server, serve
from covey.runtime.web_server import listen
from covey_vllm.__main__ import end_with_parent

UPDATING = "an update"  # vLLM hears of a version at its end


class FakeVllm(Server):
    """The server of a model. `events` is the file of the routes; `sleeps` says whether there is a sleep mode."""

    events: Path
    sleeps: bool
    asleep = False

    def app(self) -> Any:
        answer = super().app()

        async def routes(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await answer(scope, receive, send)
                return
            path, body = scope["path"], b""
            while (part := await receive()).get("more_body", False):
                body += part["body"]
            body += part["body"]
            if path != wire.HEALTH:
                with open(self.events, "a") as file:
                    file.write(path + "\n")
            if path in ("/sleep", "/wake_up"):
                found = self.sleeps and self.asleep is (path == "/wake_up")
                self.asleep = path == "/sleep"
                await Response(status_code=200 if found else 404)(scope, receive, send)
                return
            content = self._translated(path, json.loads(body)) if body else None
            assert not (self.asleep and path in (wire.GENERATE, wire.START, wire.UPDATE, wire.FINISH)), path
            version, sent = self.version, json.dumps(content).encode() if body else b""

            async def whole() -> Any:
                nonlocal sent
                if sent is None:
                    return await receive()
                message, sent = {"type": "http.request", "body": sent}, None
                return message

            await answer(scope, whole, send)
            if path == wire.FINISH and self.version != version:
                self.version = json.loads(body)["weight_version"]

        return routes

    def _translated(self, path: str, content: Any) -> Any:
        """The body for covey's server of a body for vLLM."""
        if path == wire.GENERATE:
            assert not {"covey", "weight_version"} & content.keys()
            seed = content["sampling_params"]["seed"] % 2**32
            return content | {"weight_version": content["cache_salt"], "covey": {"seed": seed}}
        if path == wire.START:
            assert not content
            return {"weight_version": UPDATING}
        if path == wire.UPDATE:
            return {"update_info": content["update_info"] | {"weight_version": UPDATING}}
        return {"weight_version": UPDATING} if path == wire.FINISH else content


def main() -> None:
    end_with_parent()
    words = sys.argv[1:]
    events = Path(words[0])
    given = dict(pairwise(words))
    with open(events, "a") as file:
        file.write(f"pid {os.getpid()}\n" + json.dumps(words) + "\n")
    dtype = getattr(torch, given["--dtype"])
    loaded = load_model(given["--model"], dtype=dtype, device=torch.device("cpu"))
    engine = Engine(LanguagePolicy(loaded.module.requires_grad_(False)), int(given["--max-num-seqs"]))
    folders = tuple(map(Path, os.environ["COVEY_WEIGHTS_FOLDERS"].split(os.pathsep)))
    server = FakeVllm(engine, loaded.chat, folders)
    server.events, server.sleeps = events, "--enable-sleep-mode" in words
    token = read_token(Path(os.environ["COVEY_TOKEN_FILE"]), "token")
    serve(server, token, listen(given["--host"], int(given["--port"])))


if __name__ == "__main__":
    main()
