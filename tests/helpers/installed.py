"""covey as its users have it: the wheel, installed in a new environment outside the repository."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from helpers.pages import ROOT

SERVER = Path(__file__).with_name("entries.py")
OURS = ("PYTHONPATH", "COLUMNS", "COVEY_CACHE", "VIRTUAL_ENV")  # variables of the tests


class Environment:
    """A new environment in `folder`, with a cache of its own; other packages are those of the tests' environment.

    Args:
        folder: empty; gets `.venv`, and `home` and `cache` for what covey keeps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        sources = [ROOT, *(ROOT / "extras" / name for name in ("covey_cluster", "covey_environments"))]
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, *sources], check=True)
        venv = folder / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        subprocess.run(
            [*pip, "--python", venv, "install", "--no-deps", "--no-index", *folder.glob("covey*.whl")], check=True
        )
        (self.packages,) = venv.glob("lib/python*/site-packages")
        # Files in it that name further folders, such as the one of the repository, do not count there.
        (self.packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
        own = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(self.cache), "HF_HUB_OFFLINE": "1"}
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # as `covey` sets it before its imports
        others = {name: value for name, value in os.environ.items() if name not in OURS}
        (folder / "home").mkdir()
        self._server = subprocess.Popen(
            [venv / "bin" / "python", "-P", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=folder, env=others | own | quiet,
        )  # fmt: skip
        self.imported_from = Path(self._answer())

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def run(
        self, script: str, words: Sequence[str], folder: Path, *, scope: Sequence[str] = (), stop_at: str = "\0"
    ) -> tuple[int, str]:
        """Exit code and output of a script, such as `.venv/bin/covey`, with these words in a folder.

        Args:
            scope: names of covey that a Python program has without importing them; with some, the calls that it
                advises are carried out after it.
            stop_at: Ctrl-C when this was said.
        """
        assert self._server.stdin is not None
        pipe = self.folder / "output"
        os.mkfifo(pipe)
        job = {"script": script, "words": list(words), "folder": str(folder), "output": str(pipe), "scope": list(scope)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        child = int(self._answer())
        said, stopped = "", False
        try:
            with open(pipe, encoding="utf-8", errors="replace") as output:
                for line in output:
                    said += line
                    if stop_at in said and not stopped:
                        os.kill(child, signal.SIGINT)
                        stopped = True
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            code = int(self._answer())
            pipe.unlink()
        return code, said

    def close(self) -> None:
        with self._server:  # closes its pipes and waits
            pass
