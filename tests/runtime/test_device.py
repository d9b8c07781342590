"""What the machine offers, and what is said when it offers less than was asked."""

import logging
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from covey.config import ConfigError
from covey.runtime import device as device_module
from covey.runtime.device import (
    choose_device,
    choose_precision,
    differences,
    environment,
    in_huge_pages,
    peak_memory_bytes,
    set_threads,
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


def test_device_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    assert choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="no GPU"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match="auto, cpu or cuda"):
        choose_device("tpu")


def test_device_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == CPU


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


def test_gpu_precision(monkeypatch):
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
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
