"""Runs scripts, each in a fork of one process that has imported covey: the imports alone take seconds.

The interpreter of an environment in which covey is installed runs this file, and `Environment` in `installed.py` talks
to it: a JSON object a line on standard input, the process's number and its exit code on standard output.
"""

import contextlib
import io
import json
import os
import re
import runpy
import sys
import traceback

import covey
import covey.cli.main
import covey.experiment.control
import covey.experiment.llm
import covey.experiment.run

CALL = re.compile(r"Next: [^:\n]*: (import covey; .*)$", re.M)  # advice of a run from Python


def main() -> None:
    print(covey.__file__, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            _run(**job)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(script: str, words: list[str], folder: str, output: str, scope: list[str]) -> None:
    """Be `script` with these words, in a folder; then carry out the Python calls that it advises."""
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    code: object = 0
    try:
        _execute(script, {name: getattr(covey, name) for name in scope})
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _execute(script: str, scope: dict[str, object]) -> None:
    if not scope:
        runpy.run_path(script, run_name="__main__")
        return
    said = _Tee(sys.stdout)
    with contextlib.redirect_stdout(said):
        names = runpy.run_path(script, scope, "__main__")
    for call in CALL.findall(said.getvalue()):
        print(f">>> {call}")
        exec(call, names)


class _Tee(io.StringIO):
    """Keeps what is written, and passes it on."""

    def __init__(self, stream: io.TextIOBase) -> None:
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(text)
        return super().write(text)


if __name__ == "__main__":
    main()
