"""Which modules a recipe may name, and where the process that runs them looks for modules.

A recipe may be a stranger's, so a name in it must not reach any code that is installed: `subprocess:Popen` with options
would start a program. A recipe names the user's own files, and installed packages that depend on the library for which
they are named: covey, gymnasium or verifiers.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from covey.config.common import ConfigError
from covey.config.files import user_path

_SITE = {"site-packages", "dist-packages"}  # folders of installed packages
_OWN = "a recipe names your own files"


def find_module(module: str, where: str, library: str = "covey") -> ModuleSpec | None:
    """The module, or the package that begins its name, as its process finds it; None if there is none.

    Packages that depend on the library come before modules of the working folder. Nothing is imported.

    Args:
        where: the field, for messages.
        library: on which an installed package must depend.

    Raises:
        ConfigError: if it is of the standard library, of covey, or of another installed package.
    """
    first = module.partition(".")[0]
    if not first:
        return None
    if first in sys.stdlib_module_names or first == "covey":
        owner = "covey" if first == "covey" else "Python's standard library"
        raise ConfigError(f"{where}: {module!r} is a module of {owner}, and {_OWN}: name one of them")
    try:
        found = find_spec(first)
    except ValueError:  # a module of this process without a __spec__
        found = None
    own = PathFinder.find_spec(first, [os.getcwd()])
    if found is not None and is_installed(place_of(found)):
        if first == library or _depends_on(first, library):
            return found
        found = own or found
    found = found or own
    if found is not None:
        refuse_installed(place_of(found), where, library)
    return found


def refuse_installed(file: Path, where: str, library: str = "covey") -> None:
    """Refuse a file of the standard library or of an installed package.

    Raises:
        ConfigError: naming the file.
    """
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    if is_installed(file) or standard & {*file.resolve().parents}:
        raise ConfigError(
            f"{where}: {file} is of an installed package that does not depend on {library}, and {_OWN}: import it in "
            "one of them, and name that"
        )


def is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed package; one that is installed as editable is the user's own."""
    return bool(_SITE & {*file.resolve().parts})


def place_of(found: ModuleSpec) -> Path:
    """The file of a module, or the folder of a package without one."""
    return Path(found.origin or next(iter(found.submodule_search_locations or ()), ""))


@cache  # the lists of all packages are read
def entry_points_of(group: str) -> dict[str, str]:
    """Name -> module:object of the entry points of installed packages; what the working folder claims to be an
    installed package does not count.
    """
    return {
        point.name: point.value
        for point in metadata.entry_points(group=group)
        if point.dist is not None and is_installed(Path(str(point.dist.locate_file(""))))
    }


def search_path(name: str, where: str = "", library: str = "covey") -> list[str]:
    """`sys.path` of the process that runs `file.py:name` or `module:name`.

    The folder of the user's file or module comes after the standard library and before installed packages. The working
    folder is there only if the module is in it.

    Raises:
        ConfigError: as `find_module` and `refuse_installed`; covey's own modules pass.
    """
    source = name.rpartition(":")[0]
    folder = os.getcwd()
    if source.endswith(".py"):
        file = user_path(source, f"{where or name}: ").resolve()
        refuse_installed(file, where or name)
        folder = str(file.parent)
    elif source.startswith("covey.") or not _is_in(folder, find_module(source, where or name, library)):
        return [*sys.path]
    path = [entry for entry in sys.path if entry != folder]
    number = next((i for i, entry in enumerate(path) if is_installed(Path(entry))), len(path))
    return [*path[:number], folder, *path[number:]]


def _is_in(folder: str, found: ModuleSpec | None) -> bool:
    there = found and PathFinder.find_spec(found.name, [folder])
    return bool(there and found and place_of(there) == place_of(found))


@cache  # reading the lists of files of all packages takes a second
def _depends_on(first: str, library: str) -> bool:
    """Whether the package of a module names a library among its requirements, also those of extras."""
    named = re.compile(rf"{library}(?![\w.-])", re.IGNORECASE)
    packages = metadata.packages_distributions().get(first, [])
    return any(named.match(line) for package in packages for line in metadata.requires(package) or ())
