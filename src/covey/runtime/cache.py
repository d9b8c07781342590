"""The user's cache of files that all runs use, such as converted models and compiled kernels."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from covey.config import ConfigError
from covey.config.files import user_path

VARIABLE = "COVEY_CACHE"


def cache_folder() -> Path:
    """`$COVEY_CACHE`, else `covey/` in `$XDG_CACHE_HOME`, else `~/.cache/covey`; it need not exist.

    An empty variable counts as unset. An `$XDG_CACHE_HOME` that is not absolute is ignored, as the XDG Base Directory
    Specification requires.

    Raises:
        ConfigError: if the home folder cannot be determined.
    """
    try:
        if named := os.environ.get(VARIABLE):
            return user_path(named, f"{VARIABLE}: ").absolute()
        root = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "covey"
    except RuntimeError as error:
        raise ConfigError(f"there is no home folder for the cache: set {VARIABLE} to a folder") from error


def check_private(path: Path) -> None:
    """Refuse a file or a folder that belongs to another user, or that other users may write.

    Raises:
        OSError: if it does not exist; PermissionError also if it is refused.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a symbolic link: remove it")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user: set {VARIABLE} to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write {path}: chmod go-w it, or set {VARIABLE} to another folder")
