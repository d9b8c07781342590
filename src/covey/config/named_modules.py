"""Functions, modules and data files that a recipe names: which ones it may, and where their process looks for modules.

A recipe may be a stranger's, so a name in it must not reach any code that is installed: `subprocess:Popen` with options
would start a program. A recipe names the user's own files, and installed packages that depend on the library for which
they are named: covey, gymnasium or verifiers.
"""

import ast
import os
import re
import sys
import sysconfig
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source, find_spec
from pathlib import Path

from covey.config.common import ConfigError
from covey.config.fields import check_text, did_you_mean, missing_file
from covey.config.files import read_file, read_json, user_path
from covey.config.hub import HubData, hub_files

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
    from importlib import metadata  # here, because few commands read it, and it loads much

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
    from importlib import metadata

    named = re.compile(rf"{library}(?![\w.-])", re.IGNORECASE)
    packages = metadata.packages_distributions().get(first, [])
    return any(named.match(line) for package in packages for line in metadata.requires(package) or ())


# Names with which a module can define names that its text does not contain.
_DYNAMIC = {"__getattr__", "globals", "locals", "vars", "exec", "eval", "setattr", "modules", "__dict__"}
# Python 3.11 raises SystemError if two threads parse at once; filters of warnings apply to the whole process.
_PARSING = threading.Lock()
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr)


def check_function_name(function: str, where: str, kind: str = "function") -> None:
    """Refuse a name that is not `file.py:function` or `module:function`, or does not exist. Messages call it a `kind`.

    Raises:
        ConfigError: beginning with `where`, which names the field: if the file or the module is missing, the file is
            no Python, or it has no such function.
    """
    check_text(function, where)
    source, _, name = function.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{where} must be file.py:function or module:function (is {function!r})")
    path = user_path(source, f"{where}: ")
    if source.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"{where}: {missing_file(path, source)}")
        refuse_installed(path, where)
        _check_source(path, name, where, kind)
    elif os.sep in source:
        raise ConfigError(f"{where}: {source} is not a Python file; a file's name ends with .py")
    else:
        _check_module(source, name, where, kind)


def _check_module(module: str, name: str, where: str, kind: str) -> None:
    """Look for a module as the function's process will."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{where}: {module!r} is not a module's name, nor a Python file: a file's name ends with .py")
    first, found = module.partition(".")[0], find_module(module, where)
    if found is None:
        raise ConfigError(f"{where}: there is no module {first!r}; a file is named file.py:function")
    if first != module and found.submodule_search_locations is None:
        raise ConfigError(f"{where}: {first!r} is not a package, so there is no module {module!r}")
    if first == module and found.origin and found.origin.endswith(".py"):
        _check_source(Path(found.origin), name, where, kind)


def _check_source(path: Path, name: str, where: str, kind: str) -> None:
    """Parse a file and look for a function among the names that it binds."""
    try:
        with _PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as those of invalid escapes
            tree = ast.parse(decode_source(read_file(path)), str(path))
    except SyntaxError as error:
        line = f" line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{where}: {path}{line} is not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error if isinstance(error, ValueError) else "nested too deeply"
        raise ConfigError(f"{where}: {path} is not valid Python: {reason}") from error
    bound = _bound_names(tree)
    if bound is None:
        return
    if name not in bound:
        functions = [known for known, node in bound.items() if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        raise ConfigError(f"{where}: {path} has no {kind} {name!r}{did_you_mean(name, functions)}")
    if isinstance(bound[name], _LITERALS):
        raise ConfigError(f"{where}: {name!r} in {path} is not a {kind}")


def _bound_names(tree: ast.Module) -> dict[str, ast.AST | None] | None:
    """Names bound at a module's top level: name -> a function's definition, a value, or None for anything else.

    None if the module may bind names that its text does not contain.
    """
    used = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(tree)}
    found: list[tuple[str, ast.AST | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += [(name, None) for name in node.names]
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append((node.name, node))
            continue  # names bound inside it are local to it
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [((alias.asname or alias.name).partition(".")[0], None) for alias in node.names]
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.append((node.targets[0].id, node.value))
            waiting.append(node.value)
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.id, None))
        waiting += ast.iter_child_nodes(node)
    names = [name for name, _ in found]
    if used & _DYNAMIC or {"*", "__getattr__"} & {*names}:
        return None
    return {name: value if names.count(name) == 1 else None for name, value in found}


SUFFIXES = (".parquet", ".arrow", ".feather")
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"  # of the package datasets


def check_data(name: str, where: str, others: Sequence[str] = ()) -> None:
    """Refuse a data file that is missing or cannot be read on this machine.

    Args:
        where: the field that names it, for messages.
        others: what the field may name besides files.

    Raises:
        ConfigError: in one line, with the fix.
    """
    path, of_hub = user_path(name, f"{where}: "), HubData.read(name)
    if of_hub is not None:
        of_hub.check(where)
    elif not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{where}: {missing_file(path, name)}{did_you_mean(name, list(others))}")
    elif is_arrow(path):
        data_files(path, f"{where}: {name}")
    if (of_hub is not None or is_arrow(path)) and find_spec("pyarrow") is None:
        raise ConfigError(f'{where}: {name} is read with pyarrow: pip install "covey[arrow]"')


def is_arrow(file: Path) -> bool:
    """True for a folder, and for a file with the suffix of Parquet or Arrow."""
    return file.suffix.lower() in SUFFIXES or file.is_dir()


def data_files(path: Path, name: str) -> list[Path]:
    """The data files of a path: the file itself, or those in a folder of the package datasets or a data set of the hub.

    Raises:
        ConfigError: if a folder holds no data set, or several; if the hub has no such data set.
    """
    if of_hub := HubData.read(name):
        return list(hub_files(of_hub))
    if not path.is_dir():
        return [path]
    if (path / SPLITS_FILE).is_file():
        splits = read_json(path / SPLITS_FILE)
        names = splits.get("splits") if isinstance(splits, dict) else None
        inside = ", ".join(f"{name.rstrip('/')}/{split}" for split in names) if isinstance(names, list) else ""
        raise ConfigError(f"{name} has several data sets; name one of them{': ' if inside else ''}{inside}")
    if not (path / STATE_FILE).is_file():
        raise ConfigError(
            f"{name} is a folder without {STATE_FILE}, so it is not a data set that datasets saved with save_to_disk; "
            "name a file, or such a folder"
        )
    state = read_json(path / STATE_FILE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    try:
        files = [Path(entry["filename"]) for entry in listed or ()]
    except (TypeError, KeyError):
        files = []
    if not files or any(len(file.parts) != 1 or file.parts[0] == ".." for file in files):
        raise ConfigError(f"{name}: {STATE_FILE} lists no data files; save the data set again")
    if missing := next((file for file in files if not (path / file).is_file()), None):
        raise ConfigError(f"{name}: the file {missing}, which {STATE_FILE} lists, is missing; save the data set again")
    return [path / file for file in files]
