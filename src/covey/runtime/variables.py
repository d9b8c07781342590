"""Environment variables: the ranks that torchrun has started, the cache folder, safe paths. Imports no torch."""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from covey.config import ConfigError, ControlConfig, RunConfig
from covey.config.common import check_shards
from covey.config.files import user_path
from covey.config.machine import world_size
from covey.config.sft import RewardModelTraining


def own_rank() -> int:
    """The rank of this process, from 0; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@dataclass
class _State:
    joined: bool = False  # True from the moment at which this process has met the other ranks


STATE = _State()


def is_echo() -> bool:
    """True if an error of this process is also that of another one, which reports it: every rank of a machine reads the
    same recipe and the same data before the ranks meet.
    """
    return local_rank() > 0 and not STATE.joined


def check_ranks(config: RunConfig | ControlConfig | RewardModelTraining, *, sft: bool = False) -> None:
    """Check that the ranks that torchrun has started can train this config; with `sft`, that they can fine-tune it.

    Raises:
        ConfigError: naming the fix.
    """
    size = world_size()
    if size == 1:
        return
    if isinstance(config, ControlConfig):
        raise ConfigError(f"an agent is trained by one process, and torchrun has started {size}: leave out torchrun")
    if isinstance(config, RewardModelTraining):
        chosen, items, of_step = config.shards, config.batch_size, "batch_size"
    elif sft:
        chosen, items, of_step = config.cluster.shards, config.sft.batch_size, "sft.batch_size"
    else:
        chosen, items, of_step = config.cluster.shards, config.sampling.prompts_per_step, "sampling.prompts_per_step"
        if config.iteration.steps:
            raise ConfigError(
                f"an iterative run is trained by one process, and torchrun has started {size}: leave out torchrun"
            )
        if config.sampler.sleep or (config.sampler.kind == "vllm" and config.sampler.started):
            raise ConfigError(
                f"a vLLM that shares a GPU with the run is for one process, and torchrun has started {size}: start "
                "covey serve --vllm on another GPU, name it in sampler.servers, and leave out sampler.sleep"
            )
    if size & (size - 1):
        raise ConfigError(f"the number of ranks must be a power of two, got {size}: change --nproc-per-node")
    shards = chosen or size
    if shards % size:
        raise ConfigError(
            f"{size} ranks cannot divide cluster.shards = {shards}: start {shards} ranks or fewer, or begin a run with "
            "more shards"
        )
    check_shards(shards, items, of_step)


CACHE_VARIABLE = "COVEY_CACHE"


def cache_folder() -> Path:
    """`$COVEY_CACHE`, else `covey/` in `$XDG_CACHE_HOME`, else `~/.cache/covey`; it need not exist.

    An empty variable counts as unset. An `$XDG_CACHE_HOME` that is not absolute is ignored, as the XDG Base Directory
    Specification requires.

    Raises:
        ConfigError: if the home folder cannot be determined.
    """
    try:
        if named := os.environ.get(CACHE_VARIABLE):
            return user_path(named, f"{CACHE_VARIABLE}: ").absolute()
        root = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "covey"
    except RuntimeError as error:
        raise ConfigError(f"there is no home folder for the cache: set {CACHE_VARIABLE} to a folder") from error


def check_private(path: Path) -> None:
    """Refuse a file or a folder that belongs to another user, or that other users may write.

    Raises:
        OSError: if it does not exist; PermissionError also if it is refused.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a symbolic link: remove it")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user: set {CACHE_VARIABLE} to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write {path}: chmod go-w it, or set {CACHE_VARIABLE} to another folder")


SAFE_PATH, HERE = "PYTHONSAFEPATH", "covey"  # Python's variable, and a value that says who has set it


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Context manager with a variable of the environment, unless it is there already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def safe_path() -> AbstractContextManager[None]:
    """Context manager in which processes of multiprocessing, its servers included, import no module of the working
    folder: a stranger's folder may have a `random.py`. Processes that covey starts itself have `-P`.
    """
    return variable(SAFE_PATH, HERE)


def leave_safe_path() -> None:
    """Let the scripts that a process starts find the modules beside them again: the user's code may start some."""
    if os.environ.get(SAFE_PATH) == HERE:
        del os.environ[SAFE_PATH]
