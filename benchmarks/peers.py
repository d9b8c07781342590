"""Runs a contestant in a process and an environment of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS_ENVIRONMENT = HERE.parent / ".peers-venv"
LOCK = HERE / "peers.lock"
PUFFER_LOCK = HERE / "puffer.lock"  # PufferLib needs an older Gymnasium and NumPy than the others
PUFFERLIB = "3.0.0"
RESULTS = HERE / "results"


def peers_python() -> str:
    """The interpreter of the peers' environment, made from benchmarks/peers.lock when that is new or has changed."""
    return _python_of(PEERS_ENVIRONMENT, LOCK)


def puffer_python() -> str:
    """The interpreter of PufferLib's environment.

    PufferLib is compiled without its own environments, whose libraries come from no package registry, and without CUDA.
    """
    return _python_of(PEERS_ENVIRONMENT / "puffer", PUFFER_LOCK, f"pufferlib=={PUFFERLIB}")


def _python_of(folder: Path, lock: Path, compiled: str = "") -> str:
    python = folder / "bin" / "python"
    installed = folder / "installed"  # a copy of the lock file
    if not installed.exists() or installed.read_text() != lock.read_text():
        print(f"creating the environment of {lock.name} (some minutes, once) ...", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "-r", str(lock)], check=True)
        if compiled:
            # Without its environments, the setup.py of 3.0.0 reads a name that it has not set.
            mended = next(folder.glob("lib/python*/site-packages")) / "mended.pth"
            mended.write_text("import builtins; builtins.c_extension_paths = []\n")
            variables = os.environ | {"NO_OCEAN": "1", "PATH": "/usr/bin:/bin"}  # where no nvcc is
            subprocess.run([*pip, "--no-deps", "--no-build-isolation", compiled], check=True, env=variables)
            mended.unlink()
        installed.write_text(lock.read_text())
    return str(python)


def peer_version(name: str) -> str:
    """The version of a peer that peers.lock names."""
    return next(line.partition("==")[2] for line in LOCK.read_text().splitlines() if line.startswith(f"{name}=="))


def run_contestant(script: str, python: str, work: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run `run_<script>.py` with its work as JSON; returns what it reports, which is its last line."""
    command = [python, str(HERE / f"run_{script}.py"), json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-3000:]}")
    numbers: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return numbers
