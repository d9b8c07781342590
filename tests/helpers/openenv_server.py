"""A server with OpenEnv's routes whose environment is a counter. The seed of a reset chooses a fault."""

import json
import threading
import time
from http import HTTPStatus

from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import ServerConnection, serve

ACTION = {"properties": {"metadata": {"type": "object"}, "step": {"type": "integer"}}, "required": ["step"]}
OBSERVATION = {"properties": {"total": {"type": "integer"}, "word": {"type": "string"}, "done": {"type": "boolean"}}}
TOOLS = {"action": {"properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}}}
FAULTS = ("close", "garbage", "list", "no observation", "error", "slow", "full", "unknown", "binary")


class CounterServer:
    """Serves `ws` in threads. The seed of a reset is the place of a fault in `FAULTS`, from 1."""

    def __init__(self, schema: object = None) -> None:
        self.schema = {"action": ACTION, "observation": OBSERVATION} if schema is None else schema
        self.open, self.sessions, self.resets = 0, 0, []
        self.most = 10**9
        self.token = ""  # that requests must have
        # Without pings, whose threads draw from the global generator of `random`, in the middle of other tests too.
        options = {"process_request": self.answer, "compression": None, "ping_interval": None}
        self.server = serve(self.talk, "127.0.0.1", 0, **options)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()

    def answer(self, connection: ServerConnection, request: object) -> Response | None:
        path = request.path
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no access\n")
        if path == "/ws":
            return None
        if path == "/schema" and self.schema != "missing":
            body = self.schema if isinstance(self.schema, str) else json.dumps(self.schema)
            return Response(HTTPStatus.OK, "OK", Headers(), body.encode())
        return connection.respond(HTTPStatus.NOT_FOUND, "nothing here\n")

    def talk(self, connection: ServerConnection) -> None:
        if self.open >= self.most:
            error(connection, "CAPACITY_REACHED", "Server at capacity")
            return
        self.open += 1
        self.sessions += 1
        try:
            self.session(connection)
        finally:
            self.open -= 1

    def session(self, connection: ServerConnection) -> None:
        total, fault = 0, ""
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                return
            data = message["data"]
            if message["type"] == "reset":
                self.resets.append(data)
                total, fault = 0, ("", *FAULTS)[data["seed"]] if data["seed"] <= len(FAULTS) else ""
                seen(connection, 0, "begin")
                continue
            if fault == "close":
                return
            if str(data.get("type")).endswith(("_tool", "_tools")):
                total += use_tool(connection, data, total)
                continue
            if fault:
                commit(connection, fault)
                continue
            if not isinstance(data.get("step"), int):
                faults = [{"loc": ["step"], "msg": "Input should be a valid integer"}]
                send(connection, "error", {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": faults})
                continue
            total += data["step"]
            seen(connection, total, "go on", float(total), total >= 10)


class EchoServer(CounterServer):
    """Repeats messages, as the package's own example does; a message pays its length."""

    def __init__(self) -> None:
        message = {"properties": {"message": {"type": "string"}}, "required": ["message"]}
        super().__init__({"action": message, "observation": {"properties": {"echoed_message": {"type": "string"}}}})

    def session(self, connection: ServerConnection) -> None:
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                return
            said = message["data"].get("message", "begin")
            payload = {"observation": {"echoed_message": said}, "reward": float(len(said)), "done": False}
            send(connection, "observation", payload)


def use_tool(connection: ServerConnection, data: dict, total: int) -> int:
    """List the tools, or call `add`, which pays the sum so far and ends at 10; returns what was added."""
    if data["type"] == "list_tools":
        tool = {"name": "add", "description": "Add.", "input_schema": {"properties": {"n": {"type": "integer"}}}}
        send(connection, "observation", {"observation": {"tools": [tool]}})
        return 0
    added = data["arguments"]["n"]
    if added < 0:
        faults = [{"loc": ["arguments", "n"], "msg": "Input should be positive"}]
        send(connection, "error", {"code": "VALIDATION_ERROR", "errors": faults})
        return 0
    result = {"tool_name": "add", "result": total + added}
    payload = {"observation": result, "reward": float(total + added), "done": total + added >= 10}
    send(connection, "observation", payload)
    return added


def commit(connection: ServerConnection, fault: str) -> None:
    if fault == "garbage":
        connection.send("{not json")
    elif fault == "list":
        connection.send("[1, 2]")
    elif fault == "binary":
        connection.send(b"\xff\xfe")
    elif fault == "no observation":
        send(connection, "observation", {"reward": 1.0})
    elif fault == "error":
        error(connection, "EXECUTION_ERROR", "division\nby zero " + "x" * 1000)
    elif fault == "slow":
        time.sleep(20)
    elif fault == "full":
        error(connection, "CAPACITY_REACHED", "Server at capacity")
    else:
        send(connection, "surprise", [])


def send(connection: ServerConnection, kind: str, data: object) -> None:
    connection.send(json.dumps({"type": kind, "data": data}))


def error(connection: ServerConnection, code: str, message: str) -> None:
    send(connection, "error", {"message": message, "code": code})


def seen(connection: ServerConnection, total: int, word: str, reward: float | None = None, done: bool = False) -> None:
    observation = {"total": total, "word": word, "metadata": {"hidden": 1}}
    send(connection, "observation", {"observation": observation, "reward": reward, "done": done})
