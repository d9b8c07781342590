"""The library of kernels: from a wheel, else compiled from kernels.cpp, with a cache in the user's cache folder.

A compiled library is loaded only if no other user can have modified it. Its name contains a hash of everything that it
depends on. Its checksum is stored beside it, so a damaged or incomplete file is detected before it is loaded, and
compiled again.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from covey.config.files import make_folder
from covey.llm.native import variants
from covey.llm.native.variants import SOURCE
from covey.runtime.device import cpu_info
from covey.runtime.variables import cache_folder, check_private

# Apple's clang names the processor by -mcpu alone: older ones refuse -march=native on ARM.
PROCESSOR = "-mcpu=native" if (sys.platform, platform.machine()) == ("darwin", "arm64") else "-march=native"
FLAGS = ("-O3", PROCESSOR, *variants.FLAGS, "-shared")
OPENMP = (["-fopenmp"], ["-Xclang", "-fopenmp"])  # of gcc and clang; of Apple's clang
OPENMP_LIBRARY = re.compile(r"lib(gomp|omp|iomp5)\b.*\.(so|dylib)\b")
COMPILE_SECONDS = 300.0
SCRATCH = ".compiling-"  # prefix of the folders in which compilers write
CHECKSUM = ".sha256"  # suffix of the file that holds a library's checksum

# The self-test of a library runs in another process, because a crash of the library would end the run. Torch's OpenMP
# is loaded first, as in the run: it may lie where the system does not look for it, and a wheel's library does not name
# it.
SELF_TEST = """
import ctypes, sys
*needed, library = sys.argv[1:]
needed = [ctypes.CDLL(name, ctypes.RTLD_GLOBAL) for name in needed]
sys.exit(not ctypes.CDLL(library).self_test())
"""

_log = logging.getLogger("covey")


class BuildError(Exception):
    """The library cannot be built or loaded; the message is one line."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `$CXX`, which may have arguments, else the first that is installed.

    Raises:
        BuildError: if there is none.
    """
    named = os.environ.get("CXX", "").strip()
    if named:
        try:
            return shlex.split(named)
        except ValueError as error:
            raise BuildError(f"CXX is not a command ({error})") from error
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise BuildError("no C++ compiler was found")
    return [found]


def load_prebuilt() -> ctypes.CDLL | None:
    """The library of a wheel for this processor; None if there is none, or if it cannot be used, with a warning.

    It has a C interface and gets addresses, so it depends on no version of torch. Of OpenMP it uses the library that
    torch has loaded, whatever its name is.
    """
    name = variants.fitting(platform.machine(), (cpu_info("flags") or cpu_info("Features")).split())
    library, openmp = variants.FOLDER / f"{name}.so", str(_openmp_of_torch() or "libgomp.so.1")
    if name is None or not library.exists():
        return None
    try:
        _self_test(library, openmp)
        ctypes.CDLL(openmp, ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        _log.warning("the kernels of the wheel, %s, are not used, but compiled ones: %s", library, error)
        return None


def variant_of(library: ctypes.CDLL) -> str | None:
    """The name of its variant if a wheel brought it, else None."""
    path = Path(library._name)
    return path.stem if path.parent == variants.FOLDER else None


def load_library(compiler: Sequence[str], flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """The compiled kernels, from the cache or compiled now.

    Args:
        compiler: the command that `find_compiler` returns.
        flags: of the compiler. Each set of flags has its own library.

    Raises:
        BuildError: if the kernels cannot be compiled, or the cache cannot be trusted or written.
    """
    try:
        folder = cache_folder() / f"kernels-{os.geteuid()}"  # several users may share a cache, but not its libraries
        make_folder(folder)
        check_private(folder)
        library = folder / f"kernels-{_fingerprint(compiler, flags)}.so"
        if not _is_whole(library):
            with _lock(folder):
                if not _is_whole(library):  # another process may have compiled it meanwhile
                    if library.exists():
                        _log.warning("the compiled kernels %s are damaged and will be compiled again", library)
                    _compile(compiler, flags, library)
        return ctypes.CDLL(str(library))
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler {compiler[0]} did not finish in {error.timeout:g} s") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in a name
        raise BuildError(str(error)) from error


def _fingerprint(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """A hash of sources, compiler, flags, processor and OpenMP library."""
    version = _output_of([*compiler, "--version"], timeout_seconds=60)
    # The code that -march=native generates depends on the processor, and several machines may share a home folder.
    processor = [platform.machine(), *(cpu_info(field) for field in ("model name", "flags", "CPU part", "Features"))]
    sources = [source.read_text() for source in sorted([SOURCE, *SOURCE.parent.glob("*.h")])]
    parts = [*sources, *compiler, version, *flags, str(_openmp_of_torch()), *processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """True if the library exists and matches its checksum.

    Raises:
        PermissionError: if another user may have written one of them.
    """
    checksum = library.with_suffix(CHECKSUM)
    if not (os.path.lexists(library) and os.path.lexists(checksum)):
        return False
    check_private(library)
    check_private(checksum)
    return checksum.read_bytes() == _checksum_of(library)


def _checksum_of(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock that lets one process compile at a time; the system releases it when the process ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # some network file systems have no locks; compiling twice only takes longer
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for abandoned in folder.glob(f"{SCRATCH}*"):  # of a compiler process that was killed
            shutil.rmtree(abandoned, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
    """Compile the library and write it and its checksum, each atomically.

    Raises:
        BuildError: if the compiler or the self-test fails.
    """
    _log.info("compiling covey's kernels once (about 20 s)")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=library.parent) as scratch:
        draft, checksum = Path(scratch) / library.name, Path(scratch) / "checksum"
        openmp = _openmp(compiler, Path(scratch))
        _output_of([*compiler, *flags, str(SOURCE), *openmp, "-o", str(draft)], COMPILE_SECONDS)
        if not draft.is_file():
            raise BuildError(f"the compiler {compiler[0]} wrote no library")
        draft.chmod(0o700)
        _self_test(draft, *(file for file in openmp if Path(file).is_file()))
        checksum.write_bytes(_checksum_of(draft))
        checksum.chmod(0o600)
        library.with_suffix(CHECKSUM).unlink(missing_ok=True)
        draft.replace(library)
        checksum.replace(library.with_suffix(CHECKSUM))
    if not openmp:
        _log.warning("the compiler %s has no OpenMP, so covey's kernels compute with one thread", compiler[0])


def _self_test(library: Path, *needed: str) -> None:
    _output_of([sys.executable, "-I", "-c", SELF_TEST, *needed, str(library)], timeout_seconds=60)


def _openmp(compiler: Sequence[str], scratch: Path) -> list[str]:
    """The arguments that link a program with OpenMP, by torch's library if possible; [] if the compiler has none."""
    program, runtime = scratch / "openmp.cpp", _openmp_of_torch()
    program.write_text("int main() {\n#pragma omp parallel\n{}\n}\n")
    for flags in OPENMP:
        arguments = [*flags, *([str(runtime)] if runtime else [])]
        with suppress(BuildError):
            _output_of([*compiler, str(program), *arguments, "-o", str(scratch / "openmp")], COMPILE_SECONDS)
            return arguments
    return []


def _output_of(command: Sequence[str], timeout_seconds: float) -> str:
    """Standard output of a command, which is ended with all processes that it started at the time limit.

    Raises:
        BuildError: if it fails, with the first line of its messages that contains "error".
        subprocess.TimeoutExpired: at the time limit.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0
    ) as process:
        try:
            output, messages = process.communicate(timeout=timeout_seconds)
        except BaseException:
            with suppress(ProcessLookupError, PermissionError):  # it has ended; macOS says the second
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        return output
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    message = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    reason = "".join(c for c in message if c.isprintable())[:200] or f"exit status {process.returncode}"
    raise BuildError(f"{Path(command[0]).name}: {reason}")


def _openmp_of_torch() -> Path | None:
    """The OpenMP library of the installed torch, because another one would create a second thread pool."""
    folder = Path(torch.__file__).parent
    files = sorted([*folder.glob("lib/lib*"), *folder.parent.glob("torch.libs/lib*")])
    return next((file for file in files if OPENMP_LIBRARY.match(file.name)), None)
