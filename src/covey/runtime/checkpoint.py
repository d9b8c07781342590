"""Checkpoints that are either complete or absent, even after a crash while one was written.

A checkpoint is the folder `step-00000020` with three files: `tensors.safetensors`, `state.json` (everything else, with
a reference in place of each tensor) and `manifest.json` (size and SHA-256 of the other two, and the version of covey
that wrote them). Ranks with sharded weights write a file of tensors each, `tensors-00001-of-00002.safetensors`, and
rank 0 the others. It is written under a temporary name, every file is flushed to the disk, the manifest last, and then
the folder is renamed. Other files among the checkpoints are not touched.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from covey.config import ConfigError, MachineError
from covey.config.files import Refused, faults_of, machine_error, open_below, read_below, sync
from covey.config.model_sources import BEST_FILE, CHECKPOINT_NAME, MANIFEST_FILE
from covey.data import Checkpoints, Team
from covey.runtime.distributed import ALONE, borders_of, exchange_json, is_sharded, local

_log = logging.getLogger(__name__)

_TENSORS, _STATE = "tensors.safetensors", "state.json"
_PART = re.compile(r"tensors-(\d{5})-of-(\d{5})\.safetensors")  # of a sharded state: the file of a rank, from 1
_FORMAT = 1  # version of the file format
_UNFINISHED = ".unfinished-"  # prefix of folders that a crash may leave behind
_MASTERS = "/masters/"  # in the names of an optimizer's master weights
_SPARE_BYTES = 1 << 20  # for the manifest and the file system's metadata


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; one line with the reason and the fix."""


class OtherVersion(CheckpointError):
    """A checkpoint that another version of covey wrote."""


class CheckpointFolder(Checkpoints):
    """The checkpoints of one run.

    A state is a nested dict with string keys; its leaves are tensors, numbers, strings, bools, None, and lists of
    such leaves without tensors. `load` returns it exactly, with tensors on the CPU. One process writes at a time.
    """

    def __init__(
        self,
        path: str | Path,
        keep: int = 2,
        *,
        before_save: Callable[[], None] = lambda: None,
        team: Team = ALONE,
        keep_best: bool = False,
    ) -> None:
        """
        Args:
            path: the folder.
            keep: number of checkpoints that are kept.
            before_save: flushes the files that a checkpoint relies on, such as the records of its steps.
            team: ranks with sharded weights, which write a checkpoint together; otherwise one process writes.
            keep_best: also keep the checkpoint with the best held-out score, and name it in best.json.
        """
        if keep < 2:
            raise ConfigError(f"checkpoint.keep must be at least 2 (the newest may be damaged), got {keep}")
        self.path = Path(path)
        self.keep = keep
        self.before_save = before_save
        self.team = team
        self.keep_best = keep_best

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        """Write the checkpoint of `step`, then remove all except the newest `keep` and perhaps the best one.

        `best` is the step with the best held-out score, 0 without an evaluation.

        A checkpoint of the same step is replaced. Those of later steps are removed, because the run was rewound.

        Raises:
            TypeError: if the state holds something that cannot be stored exactly.
            ValueError: if two names hold the same tensor (tied weights): store one of them.
            MachineError: if it cannot be written, such as on a full disk; older checkpoints are untouched.
        """
        self.before_save()
        with faults_of(self.path):
            self._save(step, state, best)

    def _save(self, step: int, state: dict[str, Any], best: int) -> None:
        tensors: dict[str, Tensor] = {}
        document = json.dumps(take_out_tensors(state, "", tensors)).encode()
        refuse_shared(tensors)
        self.path.mkdir(exist_ok=True)  # without parents, so that a deleted run folder is not created again
        self._remove_leftovers()
        _check_free_space(self.path, sum(t.nbytes for t in tensors.values()) + len(document) + _SPARE_BYTES)
        draft = self._draft(step)
        try:
            draft.mkdir()
            exchange_json(self.team, None)  # the other ranks write their parts now
            own = file_of(self.team.rank, self.team.size)
            files = {
                own: write_file(draft / own, safetensors_pieces(tensors)),
                _STATE: write_file(draft / _STATE, [document]),
            }
            for parts in exchange_json(self.team, {}):
                files |= parts
            manifest = {"format": _FORMAT, "covey": version("covey"), "step": step, "files": files}
            write_file(draft / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
            sync(draft)
            self._publish(draft, self.folder(step))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._remove_old(step, best)

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
        """Load the state saved at `step`. Sharded tensors are `SavedParts`, which read the rows that are wanted.

        Raises:
            CheckpointError: if that checkpoint is missing or damaged.
        """
        folder = self._undamaged(step)
        with faults_of(folder):
            files = [safetensors.safe_open(path, framework="pt") for path in _tensor_files(folder)]
            document = read_below(folder, _STATE)
        try:
            state: dict[str, Any] = put_in_tensors(json.loads(document), files)
        except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint {folder} is not one that covey writes ({type(error).__name__} in {_STATE}): use another"
            ) from error
        return state

    def document(self, step: int) -> dict[str, Any]:
        """The state saved at `step` with references in place of tensors.

        Raises:
            CheckpointError: if it cannot be read.
        """
        folder = self.folder(step)
        try:
            with faults_of(folder):
                state: dict[str, Any] = json.loads(read_below(folder, _STATE))
        except (ValueError, RecursionError, FileNotFoundError) as error:
            raise CheckpointError(f"checkpoint {folder} has no {_STATE} that can be read") from error
        return state

    def tensors(self, step: int, below: str) -> dict[str, Tensor]:
        """Load only the tensors of a nested dict of the state, such as "optimizer/masters", by their names in it.

        Raises:
            CheckpointError: if that checkpoint is missing or damaged, or holds no such dict.
        """
        found: Any = self.load(step)
        for key in below.split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        if not found:
            raise CheckpointError(f"checkpoint {self.folder(step)} holds no {below}: name another")
        return {name: saved[:] if isinstance(saved, SavedParts) else saved for name, saved in found.items()}

    def _undamaged(self, step: int) -> Path:
        folder = self.folder(step)
        damage = self._find_damage(step)
        if damage is not None:
            raise CheckpointError(f"checkpoint {folder} cannot be loaded ({damage}): resume from an earlier one")
        return folder

    def _find_damage(self, step: int) -> str | None:
        with faults_of(self.folder(step)):
            damage = _damage(self.folder(step))
            if damage is None:
                found = (_not_finite(path) for path in _tensor_files(self.folder(step)))
                damage = next((fault for fault in found if fault is not None), None)
            return damage

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

    def tidy(self, newest: int, best: int = 0) -> None:
        """Remove the folders that an interrupted save did not remove; `newest` is kept. `best` is as for `save`.

        Raises:
            MachineError: if they cannot be removed because of the disk.
        """
        with faults_of(self.path):
            self._remove_old(newest, best)

    def name_best(self, step: int) -> None:
        """Name the checkpoint of `step` as the best one, if it is there and the run keeps it; nothing is removed.

        Raises:
            MachineError: if the name cannot be written because of the disk.
        """
        if self.keep_best:
            with faults_of(self.path):
                exists = step in self.steps() and _damage(self.folder(step), hashes=False) is None
                self._name_best(step, exists=exists)

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

    def _draft(self, step: int) -> Path:
        return self.path / f"{_UNFINISHED}{step:08d}"

    def _publish(self, draft: Path, target: Path) -> None:
        if os.path.lexists(target):  # a rewound run repeats a step, and a rename cannot replace a folder
            foreign = (self.path / f"{target.name}.foreign{number or ''}" for number in count())
            replaced = self.path / f"{_UNFINISHED}replaced-{target.name}"
            target.rename(replaced if _is_own(target) else next(path for path in foreign if not os.path.lexists(path)))
        draft.rename(target)
        sync(self.path)

    def _remove_old(self, newest: int, best: int) -> None:
        self._remove_leftovers()
        own = [step for step in self.steps() if _is_own(self.folder(step))]
        intact = [step for step in own if step <= newest and _damage(self.folder(step), hashes=False) is None]
        kept = {best} if self.keep_best else set()
        if self.keep_best:
            self._name_best(best, exists=best in intact)
        for step in set(own) - set(intact[-self.keep :]) - kept:
            # Renamed first, so that a crash in between leaves no damaged checkpoint.
            doomed = self.path / f"{_UNFINISHED}removed-{step:08d}"
            self.folder(step).rename(doomed)
            shutil.rmtree(doomed)

    def _name_best(self, best: int, *, exists: bool) -> None:
        """Name the best checkpoint in a file; `exists` is False if there is none of that step."""
        path = self.path / BEST_FILE
        if not exists:
            path.unlink(missing_ok=True)
            return
        content = json.dumps({"step": best}) + "\n"
        with suppress(OSError):
            if read_below(self.path, BEST_FILE) == content.encode():
                return
        draft = self.path / f"{BEST_FILE}.tmp"
        draft.unlink(missing_ok=True)
        draft.write_text(content)
        sync(draft)
        os.replace(draft, path)

    def _remove_leftovers(self) -> None:
        for entry in self.path.glob(f"{_UNFINISHED}*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


class PartOfCheckpoints(CheckpointFolder):
    """Checkpoints of sharded weights on a rank other than 0, which writes its own file only."""

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        """Write this rank's part of the checkpoint of `step`.

        Raises:
            MachineError: if it cannot be written.
        """
        exchange_json(self.team, None)
        draft, own = self._draft(step), file_of(self.team.rank, self.team.size)
        if not draft.is_dir():
            raise MachineError(
                f"rank {self.team.rank} does not see {draft}, which rank 0 has created: with sharded weights the run "
                "folder must be on a disk that all machines share"
            )
        tensors: dict[str, Tensor] = {}
        take_out_tensors(state, "", tensors)
        with faults_of(draft):
            parts = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
            written = write_file(draft / own, safetensors_pieces(parts))
        exchange_json(self.team, {own: written})

    def tidy(self, newest: int, best: int = 0) -> None:
        """Nothing to do: rank 0 removes folders."""


class ReadCheckpoints(CheckpointFolder):
    """Checkpoints that another rank writes."""

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        """Nothing to do."""

    def tidy(self, newest: int, best: int = 0) -> None:
        """Nothing to do."""


def file_of(rank: int, ranks: int) -> str:
    """The name of a rank's file of tensors."""
    return _TENSORS if ranks == 1 else f"tensors-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def _tensor_files(folder: Path) -> list[Path]:
    """The files of tensors of an undamaged checkpoint, by rank."""
    names = json.loads(read_below(folder, MANIFEST_FILE))["files"].keys() - {_STATE}
    return [folder / name for name in sorted(names)]


def _damage(folder: Path, *, hashes: bool = True) -> str | None:
    """The first fault in the files of a checkpoint, or None.

    Raises:
        OtherVersion: if another version of covey wrote it.
        OSError: if it cannot be read because of the disk.
    """
    try:
        manifest = json.loads(read_below(folder, MANIFEST_FILE))
        if type(manifest["format"]) is int and manifest["format"] != _FORMAT:
            raise OtherVersion(
                f"checkpoint {folder} was written by covey {manifest.get('covey', '(unknown)')!s:.20} (format "
                f"{manifest['format']}), and this is covey {version('covey')} (format {_FORMAT}): use that version"
            )
        files = manifest["files"]
        ranks = len(files) - 1
        if set(files) != {_STATE, *(file_of(rank, ranks) for rank in range(ranks))}:
            return f"{MANIFEST_FILE} names other files"
        if f"step-{manifest['step']:08d}" != folder.name:
            return f"{MANIFEST_FILE} names another step"
        for name, expected in files.items():
            with open_below(folder, name) as file:
                size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']!r:.20}"
        for name, expected in files.items() if hashes else ():
            with open_below(folder, name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (Refused, NotADirectoryError) as error:
        return f"a part of it is not a plain file: {error}"
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
            for name in file.keys():  # noqa: SIM118 -- it is not a dict
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
    names = {entry.name for entry in folder.iterdir()} - {_TENSORS, _STATE, MANIFEST_FILE}
    if not all(map(_PART.fullmatch, names)):
        return False
    try:
        _damage(folder, hashes=False)
    except OtherVersion:
        return False
    return True


def _check_free_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise MachineError(
            f"a checkpoint needs {_megabytes(needed)} but the disk of {path} has {_megabytes(free)} free: "
            "free some space on that disk"
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


_REFERENCE = "$tensor"  # {"$tensor": name} in the document refers to a tensor
_ROWS = "rows"  # beside it, for a sharded tensor: the first row of every part, and the number of all rows

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def take_out_tensors(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` in JSON's types, with each tensor moved to `tensors` and replaced by a reference."""
    if isinstance(value, Tensor):
        if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
            raise TypeError(f"cannot store {where}: tensor of {value.dtype}, {value.layout}")
        if where in tensors:
            raise ValueError(f"two tensors of the state have the path {where}: rename a key that contains '/'")
        tensors[where] = value
        return {_REFERENCE: where} | ({_ROWS: borders_of(value)} if is_sharded(value) else {})
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _REFERENCE:
                raise TypeError(f"cannot store the key {key!r} of {where or 'the state'}: keys are strings")
        return {k: take_out_tensors(v, f"{where}/{k}" if where else k, tensors) for k, v in value.items()}
    if isinstance(value, list):
        if any(isinstance(item, Tensor) for item in value):
            raise TypeError(f"cannot store {where}: tensors stand in dicts, not in lists")
        return [take_out_tensors(item, f"{where}/{index}", tensors) for index, item in enumerate(value)]
    # The exact type, because subclasses and tuples would be loaded as another type.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"cannot store {where}: {type(value).__name__} is not a tensor, number, string, bool, None or list")


class SavedParts:
    """A sharded tensor in the files of the ranks that wrote it. A slice of its rows reads only these."""

    def __init__(self, slices: Sequence[Any], first_rows: Sequence[int]) -> None:
        """
        Args:
            slices: safetensors' slice of the tensor in the file of every rank.
            first_rows: of every part, and the number of all rows.
        """
        if list(first_rows) != sorted(first_rows) or len(first_rows) != len(slices) + 1:
            raise ValueError(f"{len(slices)} parts have the rows {first_rows}")
        self.slices, self.first_rows = slices, first_rows
        self.shape = torch.Size([first_rows[-1], *slices[0].get_shape()[1:]])

    def __getitem__(self, rows: slice) -> Tensor:
        begin, end, _ = rows.indices(self.first_rows[-1])
        found = [
            part[max(begin - first, 0) : min(end, last) - first]
            for part, (first, last) in zip(self.slices, pairwise(self.first_rows), strict=True)
            if max(begin, first) < min(end, last)
        ]
        return torch.cat(found) if found else self.slices[0][0:0]


def put_in_tensors(value: Any, files: Sequence[Any]) -> Any:
    """The state of a document. Tensors that are not sharded are in the first file; the others become `SavedParts`.

    Args:
        files: open safetensors files of the ranks, in their order.
    """
    if isinstance(value, dict):
        if _REFERENCE in value:
            name = value[_REFERENCE]
            if _ROWS in value:
                return SavedParts([file.get_slice(name) for file in files], value[_ROWS])
            return files[0].get_tensor(name)
        return {key: put_in_tensors(item, files) for key, item in value.items()}
    if isinstance(value, list):
        return [put_in_tensors(item, files) for item in value]
    return value


def refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tied weights.

    Raises:
        ValueError: if two names hold the same tensor.
    """
    owners: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        rows = local(tensor)
        if rows.numel() == 0:
            continue
        owner = owners.setdefault((rows.device, rows.data_ptr()), name)
        if owner != name:
            raise ValueError(f"{owner} and {name} are the same tensor (tied weights): store it once")


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Generate a safetensors file piece by piece, without a second copy of the state; of sharded tensors this rank's
    rows.

    The format: length of the header (8 bytes, little endian), header (JSON, padded with spaces), the tensors' bytes.
    """
    header: dict[str, Any] = {}
    end = 0
    # Wide types first keeps every tensor aligned to its item size, like other writers of the format.
    own = {name: local(tensor) for name, tensor in tensors.items()}
    ordered = sorted(own.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    document = json.dumps(header).encode()
    document += b" " * (-len(document) % 8)
    yield len(document).to_bytes(8, "little")
    yield document
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync a file; returns its size and hash for the manifest."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
