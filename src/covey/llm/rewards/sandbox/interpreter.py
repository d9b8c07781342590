"""The Python interpreter of sandboxed programs: the files that it needs, and no others.

These are the executable of the present environment's base installation, its standard library without site-packages, and
the shared libraries that the executable and its extension modules map.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Extension modules that programs do not need, and whose libraries are many: terminals, windows, databases, TLS.
_WITHOUT = (
    "_tkinter", "readline", "_curses", "_curses_panel", "_dbm", "_gdbm", "_sqlite3", "_ssl", "nis", "ossaudiodev",
    "spwd", "_test", "_xx", "xx",
)  # fmt: skip
_LIST_FILES = """
import importlib, json, os, sys, sysconfig
folder = os.path.join(sysconfig.get_path("stdlib"), "lib-dynload")
for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
    if not file.startswith(tuple(sys.argv[1:])) and file.endswith(".so"):
        try:
            importlib.import_module(file.partition(".")[0])
        except Exception:
            pass
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if "/" in line})
print(json.dumps([sysconfig.get_path("stdlib"), [file for file in mapped if ".so" in os.path.basename(file)]]))
"""
LIST_SECONDS = 60.0


@dataclass(frozen=True)
class Interpreter:
    """Files of a Python interpreter."""

    executable: Path
    library: Path  # its standard library
    shared_objects: tuple[Path, ...]  # outside the standard library

    def arguments(self, source: str, *arguments: str) -> list[str]:
        """The command that runs a source text without site-packages, environment variables or bytecode files."""
        return [str(self.executable), "-I", "-S", "-B", "-X", "utf8", "-c", source, *arguments]

    def names_of(self, shared_object: Path) -> list[str]:
        """The names under which the dynamic linker may look for a shared object: its own and those of links to it."""
        folder = shared_object.parent
        links = [link.name for link in folder.iterdir() if link.is_symlink() and link.resolve() == shared_object]
        return [shared_object.name, *links]


class InterpreterError(Exception):
    """The interpreter's files could not be listed; one line."""


@lru_cache(maxsize=1)
def find_interpreter() -> Interpreter:
    """The interpreter of the base installation of this environment.

    Raises:
        InterpreterError: if it does not start.
    """
    executable = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
    command = [str(executable), "-I", "-S", "-B", "-c", _LIST_FILES, *_WITHOUT]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIST_SECONDS, env={}, check=True)
        library, mapped = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise InterpreterError(f"the interpreter {executable} does not start: {error}") from None
    outside = [Path(file).resolve() for file in mapped if not file.startswith(library + os.sep)]
    return Interpreter(executable, Path(library).resolve(), tuple(dict.fromkeys(outside)))


def site_packages(interpreter: Interpreter) -> list[Path]:
    """Folders of installed packages inside the standard library's folder, which programs must not see."""
    names = {"site-packages", "dist-packages", Path(sysconfig.get_path("purelib")).name}
    return [interpreter.library / name for name in sorted(names) if (interpreter.library / name).is_dir()]
