"""The hub of models and data sets: its answer has a deadline, and what is missing there is one line.

`huggingface_hub` is loaded only if a name of the hub is used. It reads the access token, keeps downloaded files in its
cache, and asks the address of the environment variable HF_ENDPOINT.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from covey.config.common import ConfigError, MachineError
from covey.config.model_sources import HUB_NAME

ANSWER_SECONDS = 8.0  # deadline of the hub's answer; a download itself has none
DATA = "hub:"  # begins the name of a data set
CONVERTED = "refs/convert/parquet"  # the branch on which the hub keeps every public data set as SUBSET/SPLIT/*.parquet
# Subset and split of a file of that branch, and of a repository's own: main/train-00000-of-00002.parquet or
# main/train/0000.parquet.
_CONVERTED_PARQUET = re.compile(r"([^/]+)/([^/]+)/[^/]+\.parquet")
_OWN_PARQUET = re.compile(r"(?:(?:.*/)?([^/]+)/)?(?:([A-Za-z]\w*)[^/]*|([^/]+)/[0-9][^/]*)\.parquet")

Answer = TypeVar("Answer")


def ask(question: Callable[[], Answer], what: str, *, missing: str, page: str) -> Answer | str:
    """The hub's answer, or the reason why it cannot be asked.

    Args:
        question: a request, called in a thread, because a name server, a proxy or a hub that never answers can delay it
            beyond its own time limit.
        what: the model or data set, for messages.
        missing: what `what` is not, if the hub does not have it.
        page: its page on the hub.

    Raises:
        ConfigError: if the hub does not have it or does not give it.
        RevisionNotFoundError: if it has no such revision.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        return _in_time(question)
    except RevisionNotFoundError:
        raise
    except GatedRepoError as error:
        raise ConfigError(
            f"{what} asks for its licence to be accepted: do so on {constants.ENDPOINT}/{page}, then hf auth login"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{what} is {missing} (or it is private): check its name, or hf auth login") from error
    except Exception as error:  # any of the layers below: names, sockets, TLS, proxies, HTTP
        failure = type(error).__name__
        if "Timeout" in failure:
            failure = f"it did not answer within {ANSWER_SECONDS:g} s"
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            failure = f"HTTP status {error.response.status_code}"
        return failure


def _in_time(question: Callable[[], Answer]) -> Answer:
    """The answer to a question. Raises TimeoutError at the deadline, and any exception of the request."""
    answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

    def put() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=put, daemon=True, name="covey-hub").start()
    try:
        answer, error = answers.get(timeout=ANSWER_SECONDS)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    found: Answer = answer
    return found


# ---- models that are written ----


def new_repository(name: str, *, public: bool) -> None:
    """Create a repository for a model, private unless `public`; one that is there is used.

    Raises:
        ConfigError: in one line, if there is no access token, the hub refuses it, or a repository that is there is
            public although it should not be.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if "/" not in name or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"--push {name!r:.80} is not a name of the hub: write it as USER/MODEL")
    if not get_token():
        raise ConfigError("--push needs an access token of the hub: hf auth login, or set HF_TOKEN")
    page = f"{constants.ENDPOINT}/{name}"

    def create() -> bool:
        api = HfApi()
        made = api.create_repo(name, private=not public, exist_ok=True)
        return bool(api.model_info(made.repo_id, timeout=ANSWER_SECONDS).private)

    try:
        private = _in_time(create)
    except Exception as error:  # any of the layers below
        status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 0
        reason = f"HTTP status {status}" if status else type(error).__name__
        said = ": the access token may not write there" if status in (401, 403) else ""
        raise ConfigError(f"--push: {page} cannot be written ({reason}){said}") from error
    if not private and not public:
        raise ConfigError(f"--push: {page} is public: add --public, or give another name")


def upload(folder: Path, name: str) -> str:
    """Upload a folder to the repository of a model; returns its page.

    Raises:
        MachineError: if it cannot be uploaded.
    """
    from huggingface_hub import HfApi, constants

    page = f"{constants.ENDPOINT}/{name}"
    try:
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="covey export")
    except Exception as error:
        reason = " ".join(str(error).split())
        raise MachineError(
            f"{folder} is written, but cannot be uploaded to {page} ({type(error).__name__}: {reason:.150}): upload it "
            f"with: hf upload {name} {folder}"
        ) from error
    return page


# ---- data sets ----


class HubData(NamedTuple):
    """A data set of the hub: hub:REPOSITORY:SUBSET:SPLIT; an empty subset is the only one, or "default"."""

    repository: str
    subset: str
    split: str

    @property
    def name(self) -> str:
        """The name that `read` reads back."""
        return f"{DATA}{self.repository}:{self.subset}:{self.split}"

    @classmethod
    def read(cls, name: str) -> HubData | None:
        """The data set of a name; None if it names a file."""
        if not name.startswith(DATA):
            return None
        repository, subset, split = (*name.removeprefix(DATA).split(":"), "", "")[:3]
        return cls(repository, subset, split)

    def check(self, where: str) -> None:
        """Refuse a name that no data set can have; `where` is the field. Raises ConfigError."""
        if not HUB_NAME.fullmatch(self.repository):
            raise ConfigError(
                f"{where}: {self.repository!r:.80} is not a name of the hub: write it as hub:openai/gsm8k"
            )


KEPT: dict[HubData, tuple[Path, ...]] = {}  # the files that a resumed run began with


def hub_files(data: HubData) -> tuple[Path, ...]:
    """The Parquet files of a data set on this machine: those of KEPT, else downloaded if they are not there or the hub
    has newer ones.

    The hub's conversion is read, else the repository's own files.

    Raises:
        ConfigError: if the hub has no such data set, subset or split, or cannot be asked and nothing was downloaded.
    """
    return KEPT.get(data) or newest_files(data)


@cache  # the data are read before torch is loaded, and again by the task
def newest_files(data: HubData) -> tuple[Path, ...]:
    """As `hub_files`, without KEPT."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    what, name = f"data set {data.repository!r}", data.repository
    for revision in (CONVERTED, "main"):
        try:
            info = ask(
                partial(HfApi().dataset_info, name, revision=revision, timeout=ANSWER_SECONDS),
                what,
                missing="not a data set of the hub",
                page=f"datasets/{name}",
            )
        except RevisionNotFoundError:
            continue
        if isinstance(info, str):
            return _downloaded(data, info)
        tables = _tables((file.rfilename for file in info.siblings or ()), revision)
        if tables:
            chosen = _choose(tables, data)
            try:
                folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=chosen))
            except Exception as error:
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"{what} cannot be downloaded ({type(error).__name__}: {reason:.150}): try again"
                ) from error
            return tuple(folder / file for file in chosen)
    raise ConfigError(
        f"{what} has no Parquet files, and the hub has not converted it: hf download {name} --repo-type dataset "
        "--local-dir FOLDER, then name a file in JSONL"
    )


def _downloaded(data: HubData, failure: str) -> tuple[Path, ...]:
    """The files that were downloaded last. Raises ConfigError if there are none."""
    for revision in (CONVERTED, "main"):
        try:
            commit = (_cache_of(data) / "refs" / revision).read_text().strip()
        except OSError:
            continue
        for files in versions(data, commit):
            return files
    raise ConfigError(
        f"data set {data.repository!r} ({data.subset or 'default'}, {data.split}) is not on this machine, and the hub "
        f"cannot be asked ({failure}): name a file, or download it where there is a network and copy the cache here"
    )


def versions(data: HubData, commit: str = "*") -> Iterator[tuple[Path, ...]]:
    """The files of each version of a data set that is on this machine, or of one commit."""
    for folder in sorted((_cache_of(data) / "snapshots").glob(commit)):
        found = [file.relative_to(folder).as_posix() for file in folder.rglob("*.parquet")]
        for revision in (CONVERTED, "main"):
            with suppress(ConfigError):
                yield tuple(folder / file for file in _choose(_tables(found, revision), data))


def _cache_of(data: HubData) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=data.repository, repo_type="dataset")


def _tables(files: Iterable[str], revision: str) -> dict[tuple[str, str], list[str]]:
    """The Parquet files of each subset and split."""
    tables: dict[tuple[str, str], list[str]] = {}
    pattern = _CONVERTED_PARQUET if revision == CONVERTED else _OWN_PARQUET
    for match in filter(None, map(pattern.fullmatch, sorted(files))):
        subset = "default" if match[1] in (None, "data") else match[1]
        tables.setdefault((subset, match[2] or match[3]), []).append(match[0])
    return tables


def _choose(tables: dict[tuple[str, str], list[str]], data: HubData) -> list[str]:
    """The files of the wanted table. Raises ConfigError with those that there are."""
    subsets = list(dict.fromkeys(subset for subset, _ in tables))
    subset = data.subset or ("default" if "default" in subsets or len(subsets) != 1 else subsets[0])
    if subset not in subsets:
        said = f"has no subset {subset!r}" if data.subset else "has several subsets"
        raise ConfigError(f"data set {data.repository!r} {said}: set task.subset to one of {', '.join(subsets)}")
    splits = [split for own, split in tables if own == subset]
    if data.split not in splits:
        raise ConfigError(f"data set {data.repository!r} has no split {data.split!r}: it has {', '.join(splits)}")
    return tables[subset, data.split]
