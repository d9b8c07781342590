"""Tokens that can be sent, and texts that have one in some form."""

import base64
import html
import json
import random
import string
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from covey.config.servers import HIDDEN, LARGEST_TOKEN, hide, token_in

TOKENS = (
    "sk-proj-5d41402abc4b2a76b9719d911017c592", "a/b+c=d&e\"f'g\\h<i>j%k", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.T-_x",
    "50%41off\\u0041\\\\x", "&amp;&lt;token;", "tok/en==", "x" * 300, "ends-with-\\", '"quoted-token"',
)  # fmt: skip
Encoding = Callable[[str], str]
ENCODINGS: dict[str, Encoding] = {
    "raw": str,
    "header": lambda token: f"Authorization: Bearer {token}\r\n",
    "json": lambda token: json.dumps({"error": f"bad key {token}!"}),
    "json with slashes": lambda token: json.dumps(token).replace("/", "\\/"),
    "json twice": lambda token: json.dumps(json.dumps({"key": token})),
    "json thrice": lambda token: json.dumps(json.dumps(json.dumps([token]))),
    "all of it escaped": lambda token: "".join(f"\\u{ord(c):04X}" for c in token),
    "python": lambda token: repr({"key": token}),
    "bytes": lambda token: repr(b"'\"" + token.encode()),
    "hexadecimal escapes": lambda token: "".join(f"\\x{ord(c):02x}" for c in token),
    "octal escapes": lambda token: "".join(f"\\{ord(c):03o}" for c in token),
    "escapes in braces": lambda token: "".join(f"\\u{{{ord(c):x}}}" for c in token),
    "long escapes": lambda token: "".join(f"\\U{ord(c):08x}" for c in token),
    "url": quote,
    "url without slashes": lambda token: f"https://a.example/?key={quote(token, safe='')}&b=1",
    "form": quote_plus,
    "all of it quoted": lambda token: "".join(f"%{ord(c):02x}" for c in token),
    "url twice": lambda token: quote(quote(token, safe=""), safe=""),
    "url in json": lambda token: json.dumps(quote(token, safe="")),
    "json in url": lambda token: quote(json.dumps(token)),
    "html": html.escape,
    "html numbers": lambda token: "".join(f"&#{ord(c)};" for c in token),
    "html hexadecimal": lambda token: "".join(f"&#x{ord(c):X};" for c in token),
    "html twice": lambda token: html.escape(html.escape(token)),
    "basic": lambda token: "Basic " + base64.b64encode(f"user:{token}".encode()).decode(),
    "base64": lambda token: base64.b64encode(token.encode()).decode(),
    "base64, second place": lambda token: base64.b64encode(f"x{token}yz".encode()).decode(),
    "base64, third place": lambda token: base64.b64encode(f"xy{token}".encode()).decode(),
    "base64 of urls": lambda token: base64.urlsafe_b64encode(f"Bearer {token}".encode()).decode(),
    "base64 in lines": lambda token: base64.encodebytes(f"Bearer {token} {token}".encode()).decode(),
    "base64 in json": lambda token: json.dumps(base64.b64encode(f"a:{token}".encode()).decode()).replace("/", "\\/"),
    "base64 in a url": lambda token: quote(base64.b64encode(f"ab:{token}".encode()), safe=""),
    "hexadecimal": lambda token: token.encode().hex(),
    "upper hexadecimal": lambda token: token.encode().hex().upper(),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("token", TOKENS)
def test_no_form_of_a_token_is_left_in_a_text(token: str, encoding: str) -> None:
    form = ENCODINGS[encoding](token)
    for text in (form, f"who is {form}?", f'\\"{form}\\"', f"[{form}, {form}]"):
        shown = hide(text, token)
        assert form not in shown
        assert token not in shown
        assert HIDDEN in shown


def test_the_rest_of_a_text_with_the_token_itself_remains() -> None:
    assert hide("Bearer sk-123456 is not a key, sk-123456!", "sk-123456") == "Bearer [token] is not a key, [token]!"


def test_texts_without_the_token_are_left_alone() -> None:
    draw = random.Random(3)
    for token in (*TOKENS, "EMPTY", "none", "\\", "%", "1"):
        for _ in range(50):
            text = (
                "".join(draw.choices(string.ascii_lowercase + " .,:\\%&;=", k=200)) + r' 100% \n {"a": "\\"} &amp; %20'
            )
            if token not in text and token.strip("\\"):
                assert hide(text, token) == text
    assert hide("any text", "") == "any text"


@pytest.mark.parametrize("text", ["\\" * (1 << 20), "%25" * (1 << 18), "&amp;" * (1 << 17), "\\u005c" * (1 << 17)])
def test_texts_of_escapes_alone_take_no_longer_than_others(text: str) -> None:
    """Hours, if the time were quadratic in their length."""
    assert hide(text, "sk-123456") == text


@pytest.mark.parametrize(
    ("content", "token"),
    [
        (b" sk-1\r\n", "sk-1"), (b"a" * LARGEST_TOKEN, "a" * LARGEST_TOKEN), (b"~!", "~!"),
        (b"", ""), (b" \n", ""), (b"two words", ""), (b"a\nb", ""), (b"a\r\nX-Header: b", ""), (b"a\0b", ""),
        (b"\xef\xbb\xbfabc", ""), ("café".encode(), ""), (b"\x7f", ""), (b"a" * (LARGEST_TOKEN + 1), ""),
    ],
)  # fmt: skip
def test_which_contents_hold_a_token(content: bytes, token: str) -> None:
    assert token_in(content) == token
