"""The file with the access token of samplers, which only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from covey.config.common import ConfigError
from covey.config.faults import path_error
from covey.config.fields import missing_file
from covey.config.files import make_folder
from covey.config.token_text import token_in

LARGEST_TOKEN = 1 << 10  # bytes, as in covey_vllm


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
            content = file.read(2 * LARGEST_TOKEN)
    except OSError as error:
        raise path_error(error, f"{name}: {path} cannot be read") from error
    if found.st_uid != os.getuid():
        raise ConfigError(f"{name}: {path} belongs to another user: use a file of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{name}: {path} may be read or changed by others: run chmod 600 {path}")
    if not (token := token_in(content, LARGEST_TOKEN)):
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
