"""Servers that a config names: their addresses, and the access tokens that they take."""

from __future__ import annotations

import html
import ipaddress
import os
import re
import secrets
import stat
from base64 import b64encode
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from covey.config.common import ConfigError
from covey.config.faults import path_error
from covey.config.fields import missing_file
from covey.config.files import make_folder, read_file, shortened

ENDPOINT = "/chat/completions"


def parse_address(address: str, where: str) -> tuple[SplitResult, int | None]:
    """The parts of an address, and its port if it names one.

    Args:
        where: beginning of the message, which names the field.

    Raises:
        ConfigError: for text that is not an address, and for port 0.
    """
    try:
        parts = urlsplit(address)
        port = parts.port  # raises ValueError too
        if port == 0:
            raise ValueError("the port is 0")
    except ValueError as error:
        raise ConfigError(f"{where}{shortened(address)} is not an address ({error})") from None
    return parts, port


def public_address(address: str) -> str:
    """The address without a query, which may hold secrets."""
    return urlsplit(address)._replace(query="", fragment="").geturl()


def endpoint(address: str) -> str:
    """The address of the chat completions API below a server's address."""
    bare = address.rstrip("/")
    return bare if bare.endswith(ENDPOINT) else bare + ENDPOINT


def is_this_machine(address: str) -> bool:
    """True for a loopback address of IPv4 or IPv6. Raises ValueError for a name."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def is_local(host: str) -> bool:
    """True for a loopback address and for "localhost"."""
    try:
        return is_this_machine(host)
    except ValueError:
        return host == "localhost"


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


def judge_token(variable: str, file: str) -> str:
    """The token in an environment variable, or in a file if no variable is named.

    Raises:
        ConfigError: if there is none that can be sent in a header. The token is not in the message.
        MachineError: if the file cannot be read.
    """
    source = f"the environment variable {variable}" if variable else file
    content = os.environb.get(os.fsencode(variable), b"") if variable else read_file(Path(file), 2 * LARGEST_TOKEN)
    if not (token := token_in(content)):
        raise ConfigError(
            f"{source} holds no token: one word of at most {LARGEST_TOKEN:,} printable ASCII characters is needed"
        )
    return token


LARGEST_SAMPLER_TOKEN = 1 << 10  # bytes, as in covey_vllm


def default_token_file() -> Path:
    """The file of servers on this machine, in the user's config folder."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "covey" / "token"


def read_token(path: Path, name: str) -> str:
    """The token in a file.

    Args:
        name: the field or option, for messages.

    Raises:
        ConfigError: if there is no such file, others may read it, it belongs to somebody else, or has no token.
    """
    if not path.is_file():
        raise ConfigError(f"{name}: {missing_file(path, str(path))}")
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(2 * LARGEST_SAMPLER_TOKEN)
    except OSError as error:
        raise path_error(error, f"{name}: {path} cannot be read") from error
    if found.st_uid != os.getuid():
        raise ConfigError(f"{name}: {path} belongs to another user: use a file of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{name}: {path} may be read or changed by others: run chmod 600 {path}")
    if not (token := token_in(content, LARGEST_SAMPLER_TOKEN)):
        raise ConfigError(f"{name}: {path} has no token: one word of printable ASCII characters is needed")
    return token


def own_token(path: Path) -> str:
    """The token in the default file, which is created with a random one if it does not exist.

    Raises:
        ConfigError: as `read_token`.
        MachineError: if the file cannot be written.
    """
    if path.exists():
        return read_token(path, "the access token")
    try:
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with suppress(FileExistsError):  # another process was faster
            os.link(temporary, path)
        temporary.unlink()
    except OSError as error:
        raise path_error(error, f"the access token cannot be written to {path}") from error
    return read_token(path, "the access token")
