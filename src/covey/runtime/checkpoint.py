"""Checkpoints that are either complete or absent, even after a crash while one was written.

A checkpoint is the folder `step-00000020` with three files: `tensors.safetensors`, `state.json` (everything else, with
a reference in place of each tensor) and `manifest.json` (size and SHA-256 of the other two, and the version of covey
that wrote them). It is written under a temporary name, every file is flushed to the disk, the manifest last, and then
the folder is renamed. Other files among the checkpoints are not touched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from covey.config import ConfigError, MachineError
from covey.config.faults import faults_of, machine_error
from covey.config.files import sync
from covey.config.model_sources import CHECKPOINT_NAME, MANIFEST_FILE

_log = logging.getLogger(__name__)

_TENSORS, _STATE = "tensors.safetensors", "state.json"
_FORMAT = 1  # version of the file format
_UNFINISHED = ".unfinished-"  # prefix of folders that a crash may leave behind
_MASTERS = "/masters/"  # in the names of an optimizer's master weights
_REFERENCE = "$tensor"  # {"$tensor": name} in state.json refers to a tensor
_SPARE_BYTES = 1 << 20  # for the manifest and the file system's metadata

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; one line with the reason and the fix."""


class OtherVersion(CheckpointError):
    """A checkpoint that another version of covey wrote."""


class CheckpointFolder:
    """The checkpoints of one run; meets `covey.data.Checkpoints`.

    A state is a nested dict with string keys; its leaves are tensors, numbers, strings, bools, None, and lists of
    such leaves without tensors. `load` returns it exactly, with tensors on the CPU. One process writes at a time.
    """

    def __init__(self, path: str | Path, keep: int = 2, *, before_save: Callable[[], None] = lambda: None) -> None:
        """`before_save` flushes the files that a checkpoint relies on, such as the records of its steps."""
        if keep < 2:
            raise ConfigError(f"checkpoint.keep must be at least 2 (the newest may be damaged), got {keep}")
        self.path = Path(path)
        self.keep = keep
        self.before_save = before_save

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then remove all except the newest `keep`.

        A checkpoint of the same step is replaced. Those of later steps are removed, because the run was rewound.

        Raises:
            TypeError: if the state holds something that cannot be stored exactly.
            ValueError: if two names hold the same tensor (tied weights): store one of them.
            MachineError: if it cannot be written, such as on a full disk; older checkpoints are untouched.
        """
        self.before_save()
        with faults_of(self.path):
            self._save(step, state)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        document = json.dumps(_take_out_tensors(state, "", tensors)).encode()
        _refuse_shared(tensors)
        self.path.mkdir(exist_ok=True)  # without parents, so that a deleted run folder is not created again
        self._remove_leftovers()
        self._check_free_space(sum(t.nbytes for t in tensors.values()) + len(document) + _SPARE_BYTES)
        draft = self.path / f"{_UNFINISHED}{step:08d}"
        try:
            draft.mkdir()
            files = {
                _TENSORS: _write(draft / _TENSORS, _safetensors_pieces(tensors)),
                _STATE: _write(draft / _STATE, [document]),
            }
            manifest = {"format": _FORMAT, "covey": version("covey"), "step": step, "files": files}
            _write(draft / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
            sync(draft)
            self._publish(draft, self.folder(step))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._remove_old(step)

    def latest(self) -> int | None:
        """The newest step whose checkpoint is complete and undamaged, or None; reads the whole checkpoint to check it.

        Raises:
            OtherVersion: if another version of covey wrote it.
            MachineError: if it cannot be read because of the disk.
        """
        for step in reversed(self.steps()):
            damage = self._find_damage(step)
            if damage is None:
                return step
            _log.warning("checkpoint %s is damaged (%s); trying the one before", self.folder(step), damage)
        return None

    def load(self, step: int) -> dict[str, Any]:
        """Load the state saved at `step`.

        Raises:
            CheckpointError: if that checkpoint is missing or damaged.
        """
        folder = self._undamaged(step)
        with faults_of(folder):
            tensors = safetensors.torch.load_file(folder / _TENSORS)
            document = (folder / _STATE).read_bytes()
        try:
            state: dict[str, Any] = _put_in_tensors(json.loads(document), tensors)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint {folder} is not one that covey writes ({type(error).__name__} in {_STATE}): use another"
            ) from error
        return state

    def tensors(self, step: int, below: str) -> dict[str, Tensor]:
        """Load only the tensors of a nested dict of the state, such as "optimizer/masters", by their names in it.

        Raises:
            CheckpointError: if that checkpoint is missing or damaged, or holds no such dict.
        """
        folder = self._undamaged(step)
        with safetensors.safe_open(folder / _TENSORS, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(f"{below}/")]  # noqa: SIM118 -- it is no dict
            if not names:
                raise CheckpointError(f"checkpoint {folder} holds no {below}: name another")
            return {name.removeprefix(f"{below}/"): file.get_tensor(name) for name in names}

    def _undamaged(self, step: int) -> Path:
        folder = self.folder(step)
        damage = self._find_damage(step)
        if damage is not None:
            raise CheckpointError(f"checkpoint {folder} cannot be loaded ({damage}): resume from an earlier one")
        return folder

    def _find_damage(self, step: int) -> str | None:
        with faults_of(self.folder(step)):
            return _damage(self.folder(step)) or _not_finite(self.folder(step) / _TENSORS)

    def folder(self, step: int) -> Path:
        """Path of the checkpoint of `step`, whether or not it exists."""
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending, with damaged ones. Other files and links are ignored."""
        if not self.path.is_dir():
            return []
        with faults_of(self.path):
            names = [entry.name for entry in self.path.iterdir() if entry.is_dir()]
        steps = (int(match[1]) for match in map(CHECKPOINT_NAME.fullmatch, names) if match)
        return sorted(step for step in steps if self.folder(step).name in names)

    def tidy(self, newest: int) -> None:
        """Remove the folders that an interrupted save did not remove; `newest` is kept.

        Raises:
            MachineError: if they cannot be removed because of the disk.
        """
        with faults_of(self.path):
            self._remove_old(newest)

    def remove(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it.

        Raises:
            MachineError: if they cannot be removed because of the disk.
        """
        with faults_of(self.path):
            self._remove_leftovers()
            for step in self.steps():
                if _is_own(self.folder(step)):
                    shutil.rmtree(self.folder(step))
            if self.path.is_dir() and not any(self.path.iterdir()):
                self.path.rmdir()

    def _check_free_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise MachineError(
                f"a checkpoint needs {_megabytes(needed)} but the disk of {self.path} has {_megabytes(free)} free: "
                "free some space on that disk"
            )

    def _publish(self, draft: Path, target: Path) -> None:
        if os.path.lexists(target):  # a rewound run repeats a step, and a rename cannot replace a folder
            foreign = (self.path / f"{target.name}.foreign{number or ''}" for number in count())
            replaced = self.path / f"{_UNFINISHED}replaced-{target.name}"
            target.rename(replaced if _is_own(target) else next(path for path in foreign if not os.path.lexists(path)))
        draft.rename(target)
        sync(self.path)

    def _remove_old(self, newest: int) -> None:
        self._remove_leftovers()
        own = [step for step in self.steps() if _is_own(self.folder(step))]
        intact = [step for step in own if step <= newest and _damage(self.folder(step), hashes=False) is None]
        for step in set(own) - set(intact[-self.keep :]):
            # Renamed first, so that a crash in between leaves no damaged checkpoint.
            doomed = self.path / f"{_UNFINISHED}removed-{step:08d}"
            self.folder(step).rename(doomed)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for entry in self.path.glob(f"{_UNFINISHED}*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


class ReadCheckpoints(CheckpointFolder):
    """Checkpoints that another rank writes."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Nothing to do."""

    def tidy(self, newest: int) -> None:
        """Nothing to do."""


def _take_out_tensors(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` in JSON's types, with each tensor moved to `tensors` and replaced by a reference."""
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPE_NAMES or value.layout != torch.strided:
            raise TypeError(f"cannot store {where}: tensor of {value.dtype}, {value.layout}")
        if where in tensors:
            raise ValueError(f"two tensors of the state have the path {where}: rename a key that contains '/'")
        tensors[where] = value
        return {_REFERENCE: where}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _REFERENCE:
                raise TypeError(f"cannot store the key {key!r} of {where or 'the state'}: keys are strings")
        return {k: _take_out_tensors(v, f"{where}/{k}" if where else k, tensors) for k, v in value.items()}
    if isinstance(value, list):
        if any(isinstance(item, Tensor) for item in value):
            raise TypeError(f"cannot store {where}: tensors stand in dicts, not in lists")
        return [_take_out_tensors(item, f"{where}/{index}", tensors) for index, item in enumerate(value)]
    # The exact type, because subclasses and tuples would be loaded as another type.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"cannot store {where}: {type(value).__name__} is not a tensor, number, string, bool, None or list")


def _put_in_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _REFERENCE in value:
            return tensors[value[_REFERENCE]]
        return {key: _put_in_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_in_tensors(item, tensors) for item in value]
    return value


def _refuse_shared(tensors: dict[str, Tensor]) -> None:
    owners: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        owner = owners.setdefault((tensor.device, tensor.data_ptr()), name)
        if owner != name:
            raise ValueError(f"{owner} and {name} are the same tensor (tied weights): store it once")


def _safetensors_pieces(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Generate a safetensors file piece by piece, without a second copy of the state.

    The format: length of the header (8 bytes, little endian), header (JSON, padded with spaces), the tensors' bytes.
    """
    header: dict[str, Any] = {}
    end = 0
    # Wide types first keeps every tensor aligned to its item size, like other writers of the format.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    document = json.dumps(header).encode()
    document += b" " * (-len(document) % 8)
    yield len(document).to_bytes(8, "little")
    yield document
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync a file; returns its size and hash for the manifest."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _damage(folder: Path, *, hashes: bool = True) -> str | None:
    """The first fault in the files of a checkpoint, or None.

    Raises:
        OtherVersion: if another version of covey wrote it.
        OSError: if it cannot be read because of the disk.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
        if type(manifest["format"]) is int and manifest["format"] != _FORMAT:
            raise OtherVersion(
                f"checkpoint {folder} was written by covey {manifest.get('covey', '(unknown)')!s:.20} (format "
                f"{manifest['format']}), and this is covey {version('covey')} (format {_FORMAT}): use that version"
            )
        files = manifest["files"]
        if set(files) != {_TENSORS, _STATE}:
            return f"{MANIFEST_FILE} names other files"
        if f"step-{manifest['step']:08d}" != folder.name:
            return f"{MANIFEST_FILE} names another step"
        for name, expected in files.items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']!r:.20}"
        for name, expected in files.items() if hashes else ():
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (IsADirectoryError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is no file"
    except OtherVersion:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST_FILE} cannot be read ({type(error).__name__})"
    return None


def _not_finite(path: Path) -> str | None:
    """Description of the first weight of a checkpoint that is NaN or infinite; None if all are finite.

    Raises:
        MachineError: if it cannot be read because of the disk.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no dict
                if _MASTERS in name and not torch.isfinite(file.get_tensor(name)).all():
                    return f"the weights {name.partition(_MASTERS)[2]} are not finite"
    except safetensors.SafetensorError as error:
        if fault := machine_error(error, path):
            raise fault from error
        return f"{path.name} cannot be read ({str(error)[:60]})"
    return None


def _is_own(folder: Path) -> bool:
    """True if the folder has only files of a checkpoint of this format, all or some of them."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    if not {entry.name for entry in folder.iterdir()} <= {_TENSORS, _STATE, MANIFEST_FILE}:
        return False
    try:
        _damage(folder, hashes=False)
    except OtherVersion:
        return False
    return True


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
