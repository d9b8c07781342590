"""Access tokens as text: whether one can be sent, and texts from a server without it."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from functools import cache
from urllib.parse import unquote

LARGEST_TOKEN = 1 << 12  # bytes
HIDDEN = "[token]"
_ROUNDS = 5  # of encodings within each other
_ESCAPE = re.compile(r"\\(?:(?:x|u00|U000000|u\{0{0,4})([0-9a-fA-F]{2})\}?|([01][0-7]{2}))")
_URL_SAFE = str.maketrans("-_", "+/")
_SHORTEST_FORM = 8  # characters of an encoded token; fewer occur by chance


def token_in(content: bytes, most: int = LARGEST_TOKEN) -> str:
    """The token that a file or variable holds; "" if it holds none that can be sent in a header.

    A token is one word of at most `most` printable ASCII characters; white space around it is left out.
    """
    word = content.strip()
    return word.decode() if re.fullmatch(rb"[\x21-\x7e]{1,%d}" % most, word) else ""


def hide(text: str, token: str) -> str:
    """A text from a server without the token that was sent to it.

    The token itself is replaced. A text that has it in another form (escaped as in JSON, Python, HTML and URLs, also
    several times; hexadecimal; base64, also within a longer text, as in basic authentication) is replaced as a whole.
    Call it before the text is cut or changed in any other way.
    """
    if not token:
        return text
    shown = text.replace(token, HIDDEN)
    plain, known = _plain(shown), _plain(token)
    if known and known in plain:
        return HIDDEN
    joined = "".join(plain.split()).translate(_URL_SAFE)
    hexadecimal = token.encode().hex()
    found = len(hexadecimal) >= _SHORTEST_FORM and hexadecimal in joined.lower()
    return HIDDEN if found or any(form in joined for form in _base64(token)) else shown


def _plain(text: str) -> str:
    """The text without escapes and backslashes, for comparisons alone."""
    for _ in range(_ROUNDS):
        before, text = text, html.unescape(unquote(_unescaped(text)))
        if text == before:
            break
    return text.replace("\\", "")


def _unescaped(text: str) -> str:
    single = re.sub(r"\\{2,}", r"\\", text)
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16) if match[1] else int(match[2], 8)), single)


@cache
def _base64(token: str) -> list[str]:
    """The characters of base64 that the token decides, for each of its places among the groups of three bytes."""
    forms = []
    for before in range(3):
        known = bytes(before) + token.encode()
        forms.append(b64encode(known).decode()[-(-8 * before // 6) : 8 * len(known) // 6])
    return [form for form in forms if len(form) >= _SHORTEST_FORM]
