"""Downloads models of the Hugging Face hub; the only module that asks the hub."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from covey.config import ConfigError

ANSWER_SECONDS = 8.0  # deadline of the hub's answer; the download itself has none
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja"]  # no pickle
NOT_HERE = (
    "name a folder or a .gguf file, or download it where there is a network (hf download {name} --local-dir FOLDER) "
    "and copy the folder here"
)

_log = logging.getLogger("covey")


def cached_folder(name: str) -> Path | None:
    """The local folder of a hub's model without asking the hub; None if it is not downloaded completely."""
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None


def download(name: str) -> Path:
    """Download a hub's model if the hub has a newer version than this machine; returns its folder.

    The hub is asked once, with a deadline. If it does not answer, or `HF_HUB_OFFLINE` is set, the local version is
    used.

    Raises:
        ConfigError: if the hub has no such model, or does not answer and there is no local version.
    """
    offline = constants.is_offline_mode()
    failure = "HF_HUB_OFFLINE is set" if offline else ""
    if not offline:
        try:
            _ask(name)
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise ConfigError(
                f"model {name!r} is neither a folder nor a model of the hub (or it is private): check its name"
            ) from error
        except GatedRepoError as error:
            raise ConfigError(
                f"model {name!r} asks for its licence to be accepted: do so on {constants.ENDPOINT}/{name}, then hf "
                "auth login"
            ) from error
        except Exception as error:  # any of the layers below: names, sockets, TLS, proxies, HTTP
            failure = type(error).__name__
            if "Timeout" in failure:
                failure = f"it did not answer within {ANSWER_SECONDS:g} s"
            if isinstance(error, HfHubHTTPError) and error.response is not None:
                failure = f"HTTP status {error.response.status_code}"
    if failure:
        folder = cached_folder(name)
        if folder is None:
            raise ConfigError(
                f"model {name!r} is not on this machine, and the hub cannot be asked ({failure}): "
                + NOT_HERE.format(name=name)
            )
        _log.info("the hub cannot be asked (%s): %s is the version downloaded before", failure, name)
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:
        raise ConfigError(
            f"model {name!r} cannot be downloaded ({type(error).__name__}: {error}): try again"
        ) from error


def _ask(name: str) -> None:
    """Ask the hub for a model, in a thread, because a name server, a proxy or a hub that never answers can delay a
    request beyond its own time limit.

    Raises:
        TimeoutError: at the deadline. Exception: any of the request.
    """
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=ANSWER_SECONDS)
            answers.put(None)
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name="covey-hub").start()
    try:
        error = answers.get(timeout=ANSWER_SECONDS)
    except Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
