"""Replies of judges on disk, so that a question is asked once, also by a run that is killed and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config.files import make_folder


@dataclass(frozen=True)
class Reply:
    """A judge's reply."""

    text: str
    cut: bool  # it ended at its token limit


class ReplyCache:
    """A file for each reply, named by a hash of address and request.

    A file appears whole or not at all: it is written under another name, which is then changed. A damaged file counts
    as missing. A question keeps its first reply, also if several runs ask it at the same time.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is made when the first reply is stored."""
        self.folder = folder

    @staticmethod
    def key(address: str, request: Mapping[str, Any]) -> str:
        """The name of a question: SHA-256 of the address and the whole request."""
        return hashlib.sha256(json.dumps([address, request], sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Reply | None:
        """The stored reply; None if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            stored = json.loads(self._file(key).read_bytes())
            reply = Reply(stored["text"], stored["cut"])
            if stored["key"] == key and isinstance(reply.text, str) and isinstance(reply.cut, bool):
                return reply
        return None

    def put(self, key: str, request: Mapping[str, Any], reply: Reply) -> Reply:
        """Store a reply, which only the user can read, unless another run has stored one; returns the stored one.

        Raises:
            OSError: if it cannot be written.
        """
        file = self._file(key)
        make_folder(file.parent)
        document = {"key": key, "request": request, "text": reply.text, "cut": reply.cut}
        beside = file.with_name(f".{key}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as out:
                json.dump(document, out)
            with contextlib.suppress(OSError):  # it exists, or the file system has no links
                os.link(beside, file)
            stored = self.get(key)
            if stored is None:
                beside.rename(file)
            return stored or reply
        finally:
            beside.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
