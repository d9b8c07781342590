"""A server with the chat completions API, on this machine, whose replies and faults a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Asked"], None]


class Asked:
    """One request, and the means to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, request: dict[str, Any], number: int) -> None:
        self.handler, self.request, self.number = handler, request, number

    @property
    def question(self) -> str:
        return str(self.request["messages"][-1]["content"])

    @property
    def authorization(self) -> str:
        return self.handler.headers.get("Authorization", "")

    def send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()
        self.handler.wfile.write(content)

    def say(self, text: Any, finish_reason: str = "stop") -> None:
        """Reply with a chat completion."""
        choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
        self.send(json.dumps({"object": "chat.completion", "choices": [choice]}).encode())


class JudgeServer:
    """`with JudgeServer(lambda asked: asked.say("0.5")) as server:`; `server.address` is its base address."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked, self.at_once, self.most_at_once = answer, [], 0, 0
        self.questions: list[str] = []
        self.authorizations: list[str] = []
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    asked = Asked(self, request, len(owner.questions))
                    owner.asked.append(self.path)
                    owner.questions.append(asked.question)
                    owner.authorizations.append(asked.authorization)
                    owner.at_once += 1
                    owner.most_at_once = max(owner.most_at_once, owner.at_once)
                try:
                    owner.answer(asked)
                except (BrokenPipeError, ConnectionResetError):  # the client gave up
                    self.close_connection = True
                finally:
                    with owner.lock:
                        owner.at_once -= 1

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> JudgeServer:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
