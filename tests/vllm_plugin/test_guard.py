"""The middleware that asks every request to vLLM for the access token."""

import asyncio
from pathlib import Path

import pytest

from covey_vllm import Guard

TOKEN = "secret-word"


@pytest.fixture
def token_file(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("COVEY_TOKEN_FILE", str(path))
    return path


def ask(headers=(), path="/update_weights", kind="http"):
    """Whether the guarded app was called, and the messages that the guard sent."""
    called, sent = [], []

    async def app(scope, receive, send):
        called.append(scope["path"])

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers)}
    asyncio.run(Guard(app)(scope, receive, send))
    return bool(called), sent


def bearer(token: bytes):
    return (b"authorization", b"Bearer " + token)


def test_the_token_opens(token_file):
    assert ask([bearer(TOKEN.encode())]) == (True, [])
    assert ask([bearer(TOKEN.encode())], kind="websocket") == (True, [])
    assert ask(kind="lifespan") == (True, [])


@pytest.mark.parametrize(
    "headers",
    [
        [], [bearer(b"")], [bearer(b"secret-wor")], [bearer(b"secret-word2")], [bearer(b"SECRET-WORD")],
        [(b"authorization", b"secret-word")], [(b"authorization", b"Basic secret-word")],
        [(b"x-token", b"secret-word")],
        [bearer(b"\xff\xfe")], [bearer(b"secret-word"), bearer(b"other")],
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/update_weights", "/v1/models", "/collective_rpc", "/health/", "//health", "/docs"])
def test_nothing_else_opens(token_file, headers, path):
    called, sent = ask(headers, path)
    assert not called
    assert [sent[0]["status"], len(sent)] == [401, 2]
    called, sent = ask(headers, path, kind="websocket")
    assert not called
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_health_is_open(token_file):
    assert ask(path="/health") == (True, [])
    assert ask(path="/health", kind="websocket")[0] is False


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        *((TOKEN.encode(), mode, "chmod 600") for mode in (0o640, 0o604, 0o620)),
        *((content, 0o600, "has no token") for content in (b"", b"two words", b"\xff", b"x" * 2000)),
        (None, 0, "must name the file"),
    ],
)
def test_a_file_that_others_may_use_or_without_a_token_is_refused(token_file, content, mode, message, monkeypatch):
    if content is None:
        token_file.unlink()
    else:
        token_file.write_bytes(content)
        token_file.chmod(mode)
    with pytest.raises(ValueError, match=message):
        Guard(None)
    monkeypatch.delenv("COVEY_TOKEN_FILE")
    with pytest.raises(ValueError, match="must name the file"):
        Guard(None)
