"""Checks that a user's function exists, by parsing the text of its file without running it.

So a syntax error or a missing function is reported at once. The file itself is run in a process of its own.
"""

from __future__ import annotations

import ast
import os
import threading
import warnings
from importlib.util import decode_source
from pathlib import Path

from covey.config.common import ConfigError
from covey.config.fields import check_text, did_you_mean, missing_file
from covey.config.files import read_file, user_path
from covey.config.named_modules import find_module, refuse_installed

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
        raise ConfigError(f"{where}: {source} is no Python file; a file's name ends with .py")
    else:
        _check_module(source, name, where, kind)


def _check_module(module: str, name: str, where: str, kind: str) -> None:
    """Look for a module as the function's process will."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{where}: {module!r} is no module's name, nor a Python file: a file's name ends with .py")
    first, found = module.partition(".")[0], find_module(module, where)
    if found is None:
        raise ConfigError(f"{where}: there is no module {first!r}; a file is named file.py:function")
    if first != module and found.submodule_search_locations is None:
        raise ConfigError(f"{where}: {first!r} is no package, so there is no module {module!r}")
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
        raise ConfigError(f"{where}: {name!r} in {path} is no {kind}")


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
