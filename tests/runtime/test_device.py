"""What the machine offers, and what is said when it offers less than was asked."""

import logging
import mmap
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from covey.config import ConfigError
from covey.runtime import device as device_module
from covey.runtime.device import (
    build_machine,
    choose_device,
    choose_precision,
    differences,
    environment,
    idle_gpus_note,
    in_huge_pages,
    peak_memory_bytes,
    return_unused,
    set_threads,
    total_memory_bytes,
)

CPU = torch.device("cpu")


@pytest.fixture
def cpu_flags(monkeypatch):
    """Pretend that /proc/cpuinfo lists these flags."""

    def pretend(flags, field="flags"):
        monkeypatch.setattr(device_module, "cpu_info", lambda name: flags if name == field else "")

    return pretend


@pytest.fixture
def same_threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that torch sees GPUs."""

    def pretend(capability=(8, 0), built=("sm_80", "sm_90"), count=1, free=70, total=80):
        answers = {
            "is_available": True, "current_device": 0, "device_count": count, "get_device_capability": capability,
            "get_arch_list": list(built), "get_device_name": "Card", "memory_reserved": 0,
            "mem_get_info": (int(free * 2**30), int(total * 2**30)),
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        is_bf16_supported = lambda including_emulation: capability >= (8, 0)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
        device_module.gpu_memory.cache_clear()

    yield pretend
    device_module.gpu_memory.cache_clear()


def test_device_with_a_gpu(gpu, monkeypatch):
    gpu()
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="auto, cpu, cuda or mps"):
        choose_device("tpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has started 2 ranks on a machine with 1 GPU: start one for each "):
        choose_device("auto")
    assert choose_device("cpu") == CPU
    gpu(count=2)
    assert choose_device("auto").type == "cuda"


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_apples_gpu_is_used_if_asked_for_and_said_to_be_untried(
    precision, monkeypatch, caplog, same_threads, cpu_flags
):
    cpu_flags("avx512_bf16")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == CPU
    machine = build_machine("mps", precision, 1)
    assert machine.device == torch.device("mps", 0)
    assert machine.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert [line.partition(",")[0] for line in caplog.messages] == ["device is mps"]
    assert total_memory_bytes(machine.device) == total_memory_bytes(CPU)
    assert peak_memory_bytes(machine.device) > 0
    assert return_unused(machine.device) is None
    assert environment(machine.device, machine.dtype)["device"] == "mps"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^device is mps, which several ranks cannot use: start one"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"^device is mps but this torch .* sees no GPU of Apple's: use device = 'auto'"
    ):
        choose_device("mps")


NO_GPU = (
    # CUDA in torch's build, CUDA_VISIBLE_DEVICES, what torch raises; the reason
    (False, None, AssertionError("Torch not compiled with CUDA enabled"), "(Torch not compiled with CUDA enabled)"),
    (False, "0", AssertionError("Torch not compiled with CUDA enabled"), "(Torch not compiled with CUDA enabled)"),
    (True, "", None, "CUDA_VISIBLE_DEVICES is '' and selects no GPU: unset it"),
    (True, "7", None, "CUDA_VISIBLE_DEVICES is '7' and selects no GPU: unset it"),
    (True, None, RuntimeError("The NVIDIA driver on your system is too old\n(found 11). Please update"),
     "sees no GPU (The NVIDIA driver on your system is too old (found 11)): install the driver"),
    (True, None, None, "sees no GPU: compare it with nvidia-smi"),
)  # fmt: skip


@pytest.mark.parametrize(("built", "visible", "error", "reason"), NO_GPU)
def test_why_there_is_no_gpu_is_one_line(built, visible, error, reason, monkeypatch, caplog, same_threads):
    def init():
        if error:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("a page about drivers", stacklevel=1))
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as refused:
        choose_device("cuda")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    for has_gpu, lines in ((True, 1), (False, 0)):
        monkeypatch.setattr(device_module, "_has_nvidia_gpu", lambda has_gpu=has_gpu: has_gpu)
        caplog.clear()
        assert build_machine("auto", "fp32", 1).device == CPU
        assert build_machine("cpu", "fp32", 1).device == CPU
        assert len(caplog.messages) == lines
        assert all(line.startswith("the CPU is used, because ") and reason in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), "sm_75 sm_80 sm_90 sm_100 sm_120", False),  # V100 with CUDA 13
        ((7, 0), "sm_70 sm_75", True),
        ((8, 6), "sm_75 sm_80 sm_90", True),
        ((8, 0), "sm_86", False),
        ((9, 0), "sm_80 sm_90a", True),
        ((10, 3), "sm_90 sm_100a", False),
        ((10, 3), "sm_90 sm_100f", True),
        ((9, 0), "sm_80 compute_80", True),
        ((7, 5), "sm_80 compute_80", False),
        ((12, 0), "sm_80 sm_90", False),
        ((12, 1), "sm_90 sm_120", True),
        ((9, 0), "gfx90a gfx942", True),
        ((9, 0), "", True),
    ],
)
def test_a_gpu_for_which_torch_is_not_built_is_not_used(gpu, capability, built, runs):
    gpu(capability, built.split())
    assert choose_device("auto").type == ("cuda" if runs else "cpu")
    if not runs:
        with pytest.raises(ConfigError) as refused:
            choose_device("cuda")
        assert f"Card has compute capability {capability[0]}.{capability[1]}, for which this torch" in str(
            refused.value
        )
        assert f"is not built ({', '.join(built.split())})" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "precision", "usable", "lines"),
    [
        ({}, "auto", 71, ["other processes use 9.0 of the GPU's 80.0 GiB, so this one plans with 71.0 GiB"]),
        ({"free": 79.2}, "auto", 80, []),  # its own context
        ({"free": 15.5, "total": 16, "capability": (7, 5), "built": ("sm_75",)}, "auto", 16,
         ["precision is fp32, because Card has no bf16 instructions; weights need twice the memory of bf16"]),
        ({"free": 15.5, "total": 16, "capability": (7, 5), "built": ("sm_75",)}, "fp32", 16, []),
    ],
)  # fmt: skip
def test_what_a_gpu_lacks_is_said(gpu, given, precision, usable, lines, caplog, same_threads, monkeypatch):
    gpu(**given)
    assert build_machine("auto", precision, 1).device.type == "cuda"
    assert caplog.messages == lines
    gpu_now = torch.device("cuda", 0)
    assert total_memory_bytes(gpu_now) == usable << 30
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (0, 0)
    )  # asked for once, so rows do not change during a run
    assert total_memory_bytes(gpu_now) == usable << 30


def test_gpus_that_a_run_leaves_idle_are_named(gpu, monkeypatch):
    for count, ranks in ((1, 0), (2, 2), (3, 2), (8, 8)):
        gpu(count=count)
        note = idle_gpus_note(torch.device("cuda", 0))
        assert bool(note) == bool(ranks)
        assert not ranks or f"one of {count} GPUs: torchrun --nproc-per-node {ranks} -m covey train" in note
    assert idle_gpus_note(CPU) == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert idle_gpus_note(torch.device("cuda", 0)) == ""


@pytest.mark.parametrize(
    ("flags", "field", "expected"),
    [
        ("fpu avx512f avx512_bf16", "flags", torch.bfloat16),
        ("fpu amx_bf16 amx_tile", "flags", torch.bfloat16),
        ("fp asimd bf16", "Features", torch.bfloat16),
        ("fpu avx2 avx512f", "flags", torch.float32),
        ("", "flags", torch.float32),
    ],
)
def test_auto_precision_follows_the_cpu(cpu_flags, flags, field, expected):
    cpu_flags(flags, field)
    assert choose_precision("auto", CPU) == expected


def test_asked_for_bf16_without_hardware_works_and_warns_once(cpu_flags, caplog):
    cpu_flags("fpu avx2")
    with caplog.at_level(logging.WARNING):
        assert choose_precision("bf16", CPU) == torch.bfloat16
    assert len(caplog.messages) == 1
    assert "fp32 will be faster" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def test_no_warning_where_there_is_hardware(cpu_flags, caplog):
    cpu_flags("avx512_bf16")
    assert choose_precision("bf16", CPU) == torch.bfloat16
    assert choose_precision("fp32", CPU) == torch.float32
    assert not caplog.messages
    with pytest.raises(ConfigError, match="auto, bf16 or fp32"):
        choose_precision("fp16", CPU)


def test_gpu_precision(gpu):
    for capability, expected in (((8, 0), torch.bfloat16), ((7, 5), torch.float32)):
        gpu(capability)
        assert choose_precision("auto", torch.device("cuda")) == expected


def test_threads(monkeypatch, same_threads):
    assert set_threads(1) == torch.get_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads(0) == 1  # as the variable says; torch read it when it started
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(device_module.os, "sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    assert set_threads(0) == torch.get_num_threads() == 3
    with pytest.raises(ConfigError, match="threads"):
        set_threads(-1)


def test_environment_and_differences():
    recorded = environment(CPU, torch.bfloat16)
    assert recorded["torch"] == torch.__version__
    assert recorded["device"] == "cpu"
    assert recorded["precision"] == "bfloat16"
    assert recorded["cpu"]
    assert differences(recorded, environment(CPU, torch.bfloat16)) == []
    changed = {**recorded, "torch": "2.0", "threads": 7}
    assert differences(changed, recorded) == [
        f"torch was 2.0, is {torch.__version__}",
        f"threads was 7, is {torch.get_num_threads()}",
    ]
    assert differences({"a": 1}, {"b": 2}) == ["b was not recorded, is 2", "a was 1, is not known"]


@pytest.mark.slow
def test_peak_memory_is_in_bytes_and_never_falls():
    before = peak_memory_bytes(CPU)
    assert 50e6 < before < 1e12
    block = torch.ones(100_000_000)  # 400 MB, touched
    assert peak_memory_bytes() >= max(before, block.nbytes)
    del block
    assert peak_memory_bytes(CPU) >= 400_000_000


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back")
def test_freed_memory_is_given_again_without_new_pages():
    script = """
import resource, torch
from covey.runtime.device import keep_freed_memory
keep_freed_memory()
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(20 << 18) for _ in range(10)]  # 20 MB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(touch(), touch())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, again = map(int, run.stdout.split())
    assert first > 10 * 20 * 256 * 0.9  # pages of 4 KB
    assert again < first / 4  # without it: as many


@pytest.mark.slow
@pytest.mark.skipif(not device_module._multiplies_bf16(CPU), reason="without bf16 nothing is compiled for a shape")
def test_memory_does_not_grow_with_the_number_of_shapes():
    script = """
import os, torch
from covey.runtime.device import limit_kernel_caches
limit_kernel_caches()
torch.set_num_threads(1)
weights = [torch.zeros(n, k, dtype=torch.bfloat16, requires_grad=True) for n, k in ((96, 32), (32, 64))]
for tokens in range(1, 301):
    for weight in weights:
        x = torch.zeros(tokens, weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.linear(x, weight).float().sum().backward()
    if tokens in (100, 300):
        print(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
"""
    unset = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    run = subprocess.run([sys.executable, "-c", script], env=unset, capture_output=True, text=True, check=True)
    early, late = map(int, run.stdout.split())
    assert late - early < 40e6  # without the limit 170 MB


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_huge_pages_are_asked_for_where_a_tensor_has_room_for_one():
    def asked_for(tensor: torch.Tensor) -> bool:
        """Whether the middle of the tensor is in memory that the kernel knows to be `hg`."""
        middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                begin, end = (int(number, 16) for number in words[0].split("-"))
                inside = begin <= middle < end
            if inside and words[0] == "VmFlags:":
                return "hg" in words
        raise AssertionError("the tensor lies nowhere")

    # Mapped here, since what the allocator hands out may be memory that an earlier test asked for.
    fresh = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    large, small = torch.frombuffer(fresh, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8)
    assert not asked_for(large)
    assert in_huge_pages(large) is large
    assert in_huge_pages(small) is small
    assert asked_for(large)
