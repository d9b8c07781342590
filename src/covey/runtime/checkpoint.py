"""Checkpoints that are either complete or absent, whatever happened while they were written.

A checkpoint is the folder `step-00000020` with three files: `tensors.safetensors`, `state.json` (everything else, with
a reference where each tensor stood) and `manifest.json` (size and SHA-256 of the other two, and the version of covey
that wrote them). It is written under a temporary name, every file is flushed to the disk, the manifest last, and then
the folder is renamed. Whatever else lies among the checkpoints is left alone.
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
_FORMAT = 1  # of the files; another number is another version's
_UNFINISHED = ".unfinished-"  # prefix of what a crash may leave behind
_MASTERS = "/masters/"  # in the name of a tensor: the weights that an optimizer trains
_REFERENCE = "$tensor"  # {"$tensor": name} in state.json stands for a tensor
_SPARE_BYTES = 1 << 20  # for the manifest and the file system's own records

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; one line that says why and what to do."""


class OtherVersion(CheckpointError):
    """A checkpoint that another version of covey wrote."""


class CheckpointFolder:
    """The checkpoints of one run; meets `covey.data.Checkpoints`.

    A state is a nested dict with string keys; its leaves are tensors, numbers, strings, bools, None, and lists of
    such leaves without tensors. Everything comes back exactly, tensors on the CPU. One process writes at a time.
    """

    def __init__(self, path: str | Path, keep: int = 2, *, before_save: Callable[[], None] = lambda: None) -> None:
        """`before_save` brings to the disk what a checkpoint takes for granted, such as the record of its steps."""
        if keep < 2:
            raise ConfigError(f"checkpoint.keep must be at least 2 (the newest may be damaged), got {keep}")
        self.path = Path(path)
        self.keep = keep
        self.before_save = before_save

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, then drop all but the newest `keep`.

        A checkpoint of the same step is replaced and those of later steps are dropped: the run has gone back.

        Raises:
            TypeError: if the state holds something that cannot be stored exactly.
            ValueError: if two names hold the same tensor (tied weights): store one of them.
            MachineError: if it cannot be written, because the disk is full or for another fault of the machine; older
                checkpoints are untouched.
        """
        self.before_save()
        with faults_of(self.path):
            self._save(step, state)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        document = json.dumps(_take_out_tensors(state, "", tensors)).encode()
        _refuse_shared(tensors)
        self.path.mkdir(exist_ok=True)  # not its parents: a run folder that was deleted does not come back
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
        """The newest step whose checkpoint is complete and undamaged, or None; reads it through once to be sure.

        Raises:
            OtherVersion: if another version of covey wrote it.
            MachineError: if the disk does not let it be read.
        """
        for step in reversed(self.steps()):
            damage = self._find_damage(step)
            if damage is None:
                return step
            _log.warning("checkpoint %s is damaged (%s); trying the one before", self.folder(step), damage)
        return None

    def load(self, step: int) -> dict[str, Any]:
        """The state saved at `step`.

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
        """Only the tensors of a nested dict of the state, such as "optimizer/masters", by their names in it.

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
        """Steps that have a checkpoint folder, ascending, damaged ones included. Other files and links are no steps."""
        if not self.path.is_dir():
            return []
        with faults_of(self.path):
            names = [entry.name for entry in self.path.iterdir() if entry.is_dir()]
        steps = (int(match[1]) for match in map(CHECKPOINT_NAME.fullmatch, names) if match)
        return sorted(step for step in steps if self.folder(step).name in names)

    def tidy(self, newest: int) -> None:
        """Remove what a save before would have removed, had it not been killed or met a fault; `newest` is kept.

        Raises:
            MachineError: if the disk does not let it be removed.
        """
        with faults_of(self.path):
            self._remove_old(newest)

    def _check_free_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise MachineError(
                f"a checkpoint needs {_megabytes(needed)} but the disk of {self.path} has {_megabytes(free)} free: "
                "free some space on that disk"
            )

    def _publish(self, draft: Path, target: Path) -> None:
        if os.path.lexists(target):  # a run that went back repeats a step; nothing can be renamed over a folder
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
            # Renamed first, so that a crash half-way leaves no damaged checkpoint behind.
            doomed = self.path / f"{_UNFINISHED}removed-{step:08d}"
            self.folder(step).rename(doomed)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for entry in self.path.glob(f"{_UNFINISHED}*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _take_out_tensors(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON has it, with each tensor moved to `tensors` and replaced by a reference."""
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
    # The exact type: subclasses and tuples would come back as something else.
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
    """A safetensors file piece by piece, so that no second copy of the state is made.

    The format: length of the header (8 bytes, little endian), header (JSON, padded with spaces), the tensors' bytes.
    """
    header: dict[str, Any] = {}
    end = 0
    # Wide types first keeps every tensor aligned to its own size, as the format's other writers do.
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
    """Write a file through to the disk; its size and hash for the manifest."""
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
        OSError: if the disk does not let it be read.
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
    """The first weight of a checkpoint that is NaN or infinite, in words; or None.

    Raises:
        MachineError: if the disk does not let it be read.
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
    """Whether a folder holds what a checkpoint of this format does, whole or in part, and nothing else."""
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
