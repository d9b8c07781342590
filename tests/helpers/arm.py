"""covey on an ARM processor that qemu emulates: a part of the tests, and runs whose numbers are those of this machine.

    python tests/helpers/arm.py .arm        the folder keeps what is downloaded: Debian's Python, the wheels (3.5 GB)

It needs Debian's qemu-user and g++-aarch64-linux-gnu, and no rights: Debian's packages are unpacked, not installed. The
emulated processor has no bf16 instructions. The compiler runs on this machine's processor.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from helpers.run_helpers import reproducible_metrics, write_recipe
from helpers.tiny_models import tiny_folder

TESTS = Path(__file__).parents[1]
TOOLS = {"qemu-aarch64": "qemu-user", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}
DEBIAN = ("python3:arm64", "libstdc++6:arm64", "libgomp1:arm64")
BEGIN = ("covey", "pytest", "hypothesis", "pytest-timeout", "pytest-xdist", "pytest-random-order")
# The wheel of torch links CUDA's libraries, also where there is no GPU.
CUDA = (
    "nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cublas", "nvidia-cufft", "nvidia-cufile", "nvidia-curand",
    "nvidia-cusolver", "nvidia-cusparse", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13",
)  # fmt: skip
# Torch ends in a segmentation fault if one of the machine's processors is missing here.
PROCESSOR = """processor\t: {number}
Features\t: fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
IDENTIFICATION = "sys/devices/system/cpu/cpu0/regs/identification/midr_el1"  # which oneDNN reads
TESTED = ("llm/native/test_kernels.py", "core", "control/test_policy.py")
# Without bf16 instructions torch multiplies transposed bf16 matrices with twice the rounding; covey chooses fp32 there.
LEFT_OUT = "not weight_gradients_are_the_sums"
TOLERANCE = 1e-3  # relative difference of a metric after three steps
SMALL = 1e-3  # a smaller metric, such as the rounding between sampler and trainer, is compared in relation to this


def main(folder: Path) -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        sys.exit(f"install what is missing: apt-get install {' '.join(missing)}")
    if not (folder / "ready").exists():
        set_up(folder)
    python, environment = folder / "root/usr/bin/python", os.environ | {
        "CXX": str(folder / "c++"), "COVEY_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
    }  # fmt: skip
    say(f"tests of {', '.join(TESTED)}, {LEFT_OUT}")
    words = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "not slow"]
    subprocess.run([*words, "-k", LEFT_OUT, *TESTED], cwd=TESTS, env=environment, check=True)
    say("three steps of a tiny language model and of cartpole_grpo, on both processors")
    with tempfile.TemporaryDirectory() as scratch:
        recipe = write_recipe(Path(scratch), tiny_folder(Path(scratch) / "model"), steps=3)
        compare(recipe, python, environment, Path(scratch))
        compare(Path("cartpole_grpo"), python, environment, Path(scratch), "--steps", "3")
    say("cartpole_grpo")
    subprocess.run([str(python), "-m", "covey", "train", "cartpole_grpo"], cwd=folder, env=environment, check=True)
    say("all of it has run on ARM")


def say(what: str) -> None:
    """A line of the log, with the processor's seconds of all that has ended."""
    times = os.times()
    print(f"== {what} (after {times.children_user + times.children_system:.0f} s of the processor)", flush=True)


def compare(recipe: Path, python: Path, environment: dict[str, str], folder: Path, *words: str) -> None:
    """Train on both machines and say how far apart the metrics are."""
    found = []
    for name, interpreter in (("here", sys.executable), ("arm", str(python))):
        run_dir = folder / f"{recipe.stem}-{name}"
        train = [interpreter, "-m", "covey", "train", str(recipe), "--run-dir", str(run_dir), *words]
        here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        given = os.environ | here | {"CXX": os.environ.get("CXX", "")} if name == "here" else environment
        subprocess.run([*train, *precision(recipe)], env=given, stdout=subprocess.DEVNULL, check=True)
        found.append(reproducible_metrics(run_dir))
    furthest: dict[str, float] = {}
    for ours, theirs in zip(*found, strict=True):
        for name in ours.keys() | theirs.keys():
            one, other = ours.get(name), theirs.get(name)
            if isinstance(one, float) and isinstance(other, float):
                gap = abs(one - other) / max(abs(one), abs(other), SMALL)
            else:
                gap = float(one != other)
            furthest[name] = max(furthest.get(name, 0.0), gap)
    same = sum(gap == 0 for gap in furthest.values())
    worst = max(furthest, key=furthest.__getitem__)
    print(f"{recipe.stem}: {same} of {len(furthest)} metrics have the same bits; the furthest, {worst}, differs by "
          f"{furthest[worst]:.1e}", flush=True)  # fmt: skip
    if furthest[worst] > TOLERANCE:
        sys.exit(json.dumps({name: gap for name, gap in furthest.items() if gap > TOLERANCE}, indent=1))


def precision(recipe: Path) -> list[str]:
    return ["--precision", "fp32"] if recipe.suffix else []  # an agent has fp32 alone


def set_up(folder: Path) -> None:
    """Download Debian's Python and the wheels of `requirements.lock`, and write what the emulated machine lacks."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "debs/partial").mkdir(parents=True)
    apt = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Install-Recommends": "false",
        "Dir::State": folder / "state", "Dir::State::status": "/dev/null", "Dir::Cache": folder / "apt",
        "Dir::Cache::archives": folder / "debs", "Debug::NoLocking": "true", "APT::Sandbox::User": "",
    }  # fmt: skip
    (folder / "state/lists/partial").mkdir(parents=True)
    (folder / "apt").mkdir()
    options = [word for name, value in apt.items() for word in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
    subprocess.run(["apt-get", "-qq", "-y", "--download-only", *options, "install", *DEBIAN], check=True)
    root = folder / "root"
    for package in sorted((folder / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    interpreter = max(root.glob("usr/bin/python3.*[0-9]"))
    version, site = interpreter.name.removeprefix("python"), folder / "site"
    download = [sys.executable, "-m", "pip", "-q", "install", "--no-compile", "--no-deps", "--only-binary=:all:"]
    download += ["--target", str(site), "--python-version", version, "--implementation", "cp"]
    download += [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 26, 25, 24, 17)]
    subprocess.run([*download, "--platform=manylinux2014_aarch64", *sorted(set(packages())), *CUDA], check=True)
    metadata = Path(str(distribution("covey").locate_file(""))) / f"covey-{distribution('covey').version}.dist-info"
    shutil.copytree(metadata, site / metadata.name)
    (root / "usr/lib/python3/dist-packages/covey.pth").write_text(f"{site}\n{TESTS.parent / 'src'}\n")
    every = "".join(PROCESSOR.format(number=number) for number in range(os.cpu_count() or 1))
    files = {"proc/cpuinfo": every, IDENTIFICATION: "0x00000000411fd401\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    emulate = f'exec qemu-aarch64 -cpu max -L {root} -0 "$0" {interpreter} "$@"'
    scripts = {
        root / "usr/bin/python": emulate,
        folder / "c++": f'exec {list(TOOLS)[1]} "${{@/#-march=native/-march=armv8-a}}"',
    }
    for script, line in scripts.items():
        script.write_text(f"#!/bin/bash\n{line}\n")
        script.chmod(0o755)
    (folder / "ready").touch()


def packages() -> Iterator[str]:
    """covey, its tests and what they require, as pip's `name==version`, without covey itself."""
    waiting, seen = list(BEGIN), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen or name.startswith(("nvidia", "cuda", "triton", "pygame")):
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        if name != "covey":
            yield f"{name}=={found.version.partition('+')[0]}"
        for line in found.requires or []:
            if "extra ==" not in line:
                waiting.append(re.match(r"[\w.-]+", line)[0])  # type: ignore[index]


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
