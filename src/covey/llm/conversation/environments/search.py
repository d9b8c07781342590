"""The environment `search`: full-text search over texts, by SQLite's FTS5."""

import re
import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from covey.config import ConfigError
from covey.llm.conversation.tools import ToolError

SUFFIXES = (".txt", ".md")
MOST_WORDS = 32  # of a query; further ones are ignored


class Search:
    """Searches the files *.txt and *.md of a folder, or the texts in the column `documents` of a row.

    Results are ranked by BM25, equal ones by name. A folder is read once in a process.

    Args:
        folder: of the texts, with its subfolders; empty: each row has a column `documents`, name -> text or a list.
        results: of one search.
        most_characters: of a text that the model reads.

    Raises:
        ConfigError: if the folder has no texts, or SQLite has no full-text index.
    """

    def __init__(self, folder: str = "", results: int = 3, most_characters: int = 1000) -> None:
        self.folder, self.results, self.most_characters = folder, results, most_characters
        check_sqlite()
        self._texts: dict[str, str] = {}
        self._index: sqlite3.Connection | None = None
        if folder:
            self._texts, self._index = _folder_index(str(Path(folder).absolute()))

    def __getstate__(self) -> dict[str, Any]:
        """The settings; texts are read again."""
        return {"folder": self.folder, "results": self.results, "most_characters": self.most_characters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def reset(self, documents: Mapping[str, str] | Sequence[str] | None = None, **columns: Any) -> None:
        """Index the texts of a row.

        Raises:
            ValueError: if there is neither a folder nor a column `documents`.
        """
        if documents:
            named = documents if isinstance(documents, Mapping) else dict(enumerate(documents, start=1))
            self._texts = {str(name): str(text) for name, text in named.items() if text is not None}
            self._index = _indexed(self._texts)
        elif not self.folder:
            raise ValueError("the environment search has no texts: set a folder, or give rows a column 'documents'")

    def search(self, query: str) -> str:
        """Find texts that have words of a query.

        Args:
            query: words to search for
        """
        words = re.findall(r"\w+", query)[:MOST_WORDS]
        if not words:
            raise ToolError("the query has no words")
        assert self._index is not None
        found = self._index.execute(
            "SELECT name, snippet(texts, 1, '', '', '...', 24) FROM texts WHERE texts MATCH ? "
            "ORDER BY bm25(texts, 2.0, 1.0), name LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), self.results),
        ).fetchall()
        return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in found) or "no text was found"

    def read(self, name: str) -> str:
        """Read a text.

        Args:
            name: name of the text, as a search gives it
        """
        text = self._texts.get(name.strip())
        if text is None:
            raise ToolError("there is no text with this name: use a name that a search has given")
        return text if len(text) <= self.most_characters else text[: self.most_characters] + "..."


def check_sqlite() -> None:
    """Refuse an SQLite without FTS5.

    Raises:
        ConfigError: if it has none.
    """
    try:
        _indexed({}).close()
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"the environment search needs SQLite's full-text index FTS5 ({error}): use a Python whose sqlite3 has it"
        ) from None


def _indexed(texts: Mapping[str, str]) -> sqlite3.Connection:
    # A worker may call from another thread than the one that made it; calls never overlap.
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE texts USING fts5(name, content, tokenize = 'porter unicode61')")
    index.executemany("INSERT INTO texts VALUES (?, ?)", texts.items())
    return index


@lru_cache(maxsize=4)
def _folder_index(folder: str) -> tuple[dict[str, str], sqlite3.Connection]:
    """The texts of a folder by their paths in it, and their index."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"the environment search finds no folder {folder}: correct the setting folder")
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    try:
        texts = {path.relative_to(root).as_posix(): path.read_text("utf-8", errors="replace") for path in files}
    except OSError as error:
        raise ConfigError(f"the environment search cannot read {error.filename}: {error.strerror}") from None
    if not texts:
        raise ConfigError(f"the folder {folder} has no files {' or '.join(SUFFIXES)} for the environment search")
    return texts, _indexed(texts)
