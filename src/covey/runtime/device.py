"""Device, precision, threads and memory of a run, and the environment that is compared when it is resumed."""

import ctypes
import logging
import os
import platform
import re
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.config.fields import or_list, plural
from covey.config.machine import (
    DEVICES,
    check_threads,
    memory_bytes,
    processors,
    ranks_of_machine,
    waiting,
    world_size,
)
from covey.runtime.variables import own_rank

_log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from glibc's malloc.h
_MADV_HUGEPAGE, _HUGE_PAGE = 14, 2 << 20  # Linux's constant, and the huge page size of x86 and most others

RETURNED_SHARE = 0.1  # of a GPU's memory: less is kept for reuse
CONTEXT_BYTES = 1 << 30  # at most, of a process on a GPU: its CUDA context and kernels

# Instructions that multiply bf16 matrices: x86 AVX-512 and AMX, ARM's bf16 extension.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def choose_device(name: str) -> torch.device:
    """Choose the device from `DEVICES`; `auto` is an NVIDIA GPU if there is one, else the CPU.

    Raises:
        ConfigError: if the GPU that is asked for is absent, ranks have to share one, or the name is unknown.
    """
    if name not in DEVICES:
        raise ConfigError(f"device must be {or_list(DEVICES)}, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if name == "mps":
        return _apple_gpu()
    fault = gpu_fault()
    if fault and name == "cuda":
        raise ConfigError(f"device is cuda but {fault}, or use device = 'auto' or 'cpu'")
    if fault:
        return torch.device("cpu")
    ranks, count = ranks_of_machine(), torch.cuda.device_count()
    if ranks > count:
        raise ConfigError(
            f"torchrun has started {plural(ranks, 'rank')} on a machine with {plural(count, 'GPU')}: start one for "
            "each (--nproc-per-node), or use device = 'cpu'"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _apple_gpu() -> torch.device:
    if not torch.backends.mps.is_available():
        raise ConfigError(
            f"device is mps but this torch ({torch.__version__}) sees no GPU of Apple's: use device = 'auto' or 'cpu'"
        )
    if world_size() > 1:
        raise ConfigError("device is mps, which several ranks cannot use: start one without torchrun, or use 'cpu'")
    return torch.device("mps", 0)


def gpu_fault() -> str:
    """Why this process cannot compute on a GPU, with the remedy; empty if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason, which is raised below
        if torch.cuda.is_available():
            return _architecture_fault()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.backends.cuda.is_built() and visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r} and selects no GPU: unset it or name one that nvidia-smi lists"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # without CUDA, without a driver, or with an older one
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        return f"this torch ({torch.__version__}) sees no GPU ({reason}): install the driver and the build that fit"
    return f"this torch ({torch.__version__}) sees no GPU: compare it with nvidia-smi"


def _architecture_fault() -> str:
    """Why the code of this torch does not run on the GPU; empty if it does.

    Code of a compute capability ("sm_80") runs on those of the same major number from its minor one on, that with the
    suffix "a" on no other one; PTX ("compute_90") is compiled for all later ones.
    """
    capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name) for name in built]
    for kind, major, minor, special in (found.groups() for found in known if found):
        has = int(major), int(minor)
        later = special != "a" and has < capability and (kind == "compute" or has[0] == capability[0])
        if later or has == capability:
            return ""
    if not any(known):  # another maker's, or not said
        return ""
    return (
        f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, for which this torch "
        f"({torch.__version__}) is not built ({', '.join(built)}): install a build of torch for it"
    )


def idle_gpus_note(device: torch.device) -> str:
    """A line for a run that uses one of several GPUs; empty for any other."""
    count = torch.cuda.device_count() if device.type == "cuda" and world_size() == 1 else 1
    if count == 1:
        return ""
    ranks = 1 << (count.bit_length() - 1)  # a power of two
    return (
        f"this run uses one of {count} GPUs: torchrun --nproc-per-node {ranks} -m covey train ... uses {ranks} of them"
    )


def device_kind(device: torch.device) -> str:
    """The key of settings that differ between GPUs and CPUs: "cuda", or "cpu" for every other device. Apple's GPU has
    neither CUDA graphs nor memory of its own."""
    return "cuda" if device.type == "cuda" else "cpu"


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Choose the precision from `auto` (bf16 if the hardware has instructions for it, else fp32), `bf16` or `fp32`.

    fp16 is not chosen on GPUs without bf16: its largest number, 65,504, is below activations of many models that were
    trained in bf16, and its gradients would need a loss scale. On Apple's GPUs, which are untried, `auto` is fp32.

    bf16 without such hardware works but is slow, so it is logged as a warning.

    Raises:
        ConfigError: if the name is unknown.
    """
    if name not in ("auto", "bf16", "fp32"):
        raise ConfigError(f"precision must be auto, bf16 or fp32, got {name!r}")
    if name == "fp32" or (name == "auto" and device.type == "mps"):
        return torch.float32
    if device.type == "mps" or _multiplies_bf16(device):
        return torch.bfloat16
    if name == "auto":
        return torch.float32
    if own_rank() == 0:
        _log.warning(
            "precision is bf16 but this %s has no instructions for it: fp32 will be faster", device.type.upper()
        )
    return torch.bfloat16


def set_threads(count: int) -> int:
    """Set the number of CPU threads, 0 for every core (or OMP_NUM_THREADS if it is set); returns the number.

    Raises:
        ConfigError: if the count is negative, or more than could help.
    """
    if count < 0:
        raise ConfigError(f"threads must be 0 (every core) or more, got {count}")
    if count == 0 and "OMP_NUM_THREADS" not in os.environ:
        count = processors()
    check_threads(count or torch.get_num_threads(), "threads" if count else "OMP_NUM_THREADS")
    if count:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GB of freed memory for later allocations; no effect with another C library.

    By default glibc returns the end of the heap to the system whenever 64 MB of it are free, in training at every
    layer, and the page faults of the next allocation take up to a third of an update on a virtual machine. Blocks of
    more than 32 MB are still mapped and unmapped one by one, which avoids fragmentation.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc's own choice, which setting the other parameter would disable
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def limit_kernel_caches() -> None:
    """Limit oneDNN's cache to the code of 128 shapes of matrix products. Call it before the first product.

    oneDNN compiles code for each new shape, and every update has another number of tokens. By default torch and oneDNN
    keep the code of 1,024 shapes, up to some hundred MB. One microbatch has fewer than 128, and compiling a shape again
    takes a millisecond. Values that the user has set are kept.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "128")


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Ask Linux to back a tensor with huge pages of 2 MB and return it; no effect on other systems.

    Call it before the first write to the tensor. For a large tensor that is allocated at every step, page faults are
    expensive: a fifth of the decoder's attention on a virtual machine.
    """
    if platform.system() == "Linux" and tensor.device.type == "cpu":
        begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        if begin < end:
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return tensor


@dataclass(frozen=True)
class Machine:
    """Device and precision of a run."""

    device: torch.device
    dtype: torch.dtype

    def describe(self) -> str:
        """Such as "cpu, bfloat16"."""
        return f"{self.device.type}, {str(self.dtype).removeprefix('torch.')}"


def build_machine(device: str, precision: str, threads: int) -> Machine:
    """Choose device and precision, and set the number of threads.

    Raises:
        ConfigError: if the device does not exist.
    """
    set_threads(threads)
    keep_freed_memory()
    limit_kernel_caches()
    chosen = choose_device(device)
    machine = Machine(chosen, choose_precision(precision, chosen))
    for line in _surprises(device, precision, machine) if own_rank() == 0 else ():
        _log.warning("%s", line)
    return machine


def _surprises(device: str, precision: str, machine: Machine) -> Iterator[str]:
    """What `auto` has chosen though the GPU suggests something else, and memory of it that others use."""
    if device == "auto" and machine.device.type == "cpu" and _has_nvidia_gpu():
        yield f"the CPU is used, because {gpu_fault()}"
    if machine.device.type == "mps":
        yield "device is mps, on which nobody has run covey yet: compare the first steps with device = 'cpu'"
    if machine.device.type != "cuda":
        return
    if precision == "auto" and machine.dtype == torch.float32:
        name = torch.cuda.get_device_name(machine.device)
        yield f"precision is fp32, because {name} has no bf16 instructions; weights need twice the memory of bf16"
    whole, usable = gpu_memory(machine.device)
    if usable < whole:
        yield (
            f"other processes use {(whole - usable) / 2**30:.1f} of the GPU's {whole / 2**30:.1f} GiB, so this one "
            f"plans with {usable / 2**30:.1f} GiB"
        )


def _has_nvidia_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def environment(device: torch.device, precision: torch.dtype) -> dict[str, Any]:
    """Settings beside seed and config that a result's bits depend on; recorded, and compared when a run resumes."""
    return {
        "covey": version("covey"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        WAITING: " ".join(f"{name}={value}" for name, value in waiting().items()) or "the library's choice",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(precision).removeprefix("torch."),
    }


WAITING = "waiting threads"  # recorded, but no bit depends on it


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each part of the environment that changed: a resumed run may then differ in its last bits."""
    return [
        f"{name} was {recorded.get(name, 'not recorded')}, is {now.get(name, 'not known')}"
        for name in [*now, *(name for name in recorded if name not in now)]
        if recorded.get(name) != now.get(name) and name != WAITING
    ]


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """Peak memory in bytes, of the process or of torch on a GPU."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def total_memory_bytes(device: torch.device) -> int | None:
    """Memory in bytes: of the machine or of the container's limit, of a GPU without what other processes used when it
    was first asked for; None if unknown.
    """
    return gpu_memory(device)[1] if device.type == "cuda" else memory_bytes()


@cache
def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Memory of a GPU, and how much of it this process may use, in bytes.

    It is asked for once, so that the rows that fit do not change during a run. The context of this process is not
    memory of others.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES
    return total, total - max(others, 0)


def return_unused(device: torch.device) -> None:
    """Return the memory that torch keeps for reuse to the GPU, if it is much: the blocks of the next phase have other
    sizes, and the ones in use would divide the large ones. No effect on a CPU.
    """
    if device.type != "cuda":
        return
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if kept > RETURNED_SHARE * gpu_memory(device)[0]:
        torch.cuda.empty_cache()


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    flags = cpu_info("flags") or cpu_info("Features")  # x86, ARM
    return torch.backends.mkldnn.is_available() and not _BF16_FLAGS.isdisjoint(flags.split())


@cache
def cpu_info(field: str) -> str:
    """A field of the first core in /proc/cpuinfo; empty if the file does not exist."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
