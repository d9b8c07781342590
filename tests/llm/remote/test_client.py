"""What a sampler's server says never shows the access token that was sent to it."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest

from covey.llm.remote.client import Client

TOKEN = 'tok/en+5d41402%40"2abc\\4b2a76'


@pytest.mark.parametrize("status", [401, 403, 409, 422, 500])
@pytest.mark.parametrize(
    "text",
    [TOKEN, quote(TOKEN), json.dumps(TOKEN), repr(TOKEN), base64.b64encode(f"Bearer {TOKEN}".encode()).decode(),
     f"{TOKEN} " * 60, "a" * 990 + TOKEN],
)  # fmt: skip
def test_no_form_of_the_token_is_in_an_error(text: str, status: int) -> None:
    client = Client("http://127.0.0.1:1", TOKEN, 1.0)
    bodies = [{"error": {"reason": "prompt too long", "message": text}}, {"error": text}, {"error": [text]}, text]
    for body in [*(json.dumps(body).encode() for body in bodies), text.encode()]:
        error = str(client._refusal("/route", status, body))
        assert text not in error
        for first in range(len(TOKEN) - 8):  # no part of it either, where the text was cut
            assert TOKEN[first : first + 8] not in error
