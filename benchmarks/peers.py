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
RESULTS = HERE / "results"


def peers_python() -> str:
    """The interpreter of the peers' environment, made from benchmarks/peers.lock when that is new or has changed."""
    python = PEERS_ENVIRONMENT / "bin" / "python"
    installed = PEERS_ENVIRONMENT / "installed"  # a copy of the lock file
    if not installed.exists() or installed.read_text() != LOCK.read_text():
        print("creating the environment of the peers (some minutes, once) ...", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(PEERS_ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "-r", str(LOCK)], check=True)
        installed.write_text(LOCK.read_text())
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
