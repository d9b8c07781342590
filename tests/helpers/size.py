"""How large the code is: lines, files, functions, config fields and modules with one importer, by package.

`make size` prints the working tree; `make size SINCE=REVISION` puts that commit of the repository beside it.
`python size.py --picture` prints the picture of docs/design.md.
"""

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from itertools import chain
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
COLUMNS = ("files", "lines", "code", "docstrings", "functions", "fields", "one importer")


def tree(revision=None):
    """Text by path of the Python files under src, extras and tests: of a commit, or of the working tree."""
    if revision is None:
        paths = (path for top in ("src", "extras", "tests") for path in (ROOT / top).rglob("*.py"))
        return {PurePosixPath(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    archive = subprocess.run(["git", "archive", revision, "src", "extras", "tests"], cwd=ROOT, check=True, stdout=-1)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        members = [member for member in files if member.name.endswith(".py")]
        return {PurePosixPath(member.name): files.extractfile(member).read().decode() for member in members}


def docstring_lines(module):
    """Lines of all docstrings of a module."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (node for node in ast.walk(module) if isinstance(node, owners) and ast.get_docstring(node) is not None)
    return sum(node.body[0].end_lineno - node.body[0].lineno + 1 for node in documented)


def config_fields(module):
    """Annotated fields of the classes of a module whose names end with Config."""
    classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name.endswith("Config"))
    return sum(isinstance(field, ast.AnnAssign) for node in classes for field in node.body)


def module_name(path):
    """Dotted name of a file under src."""
    parts = path.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(modules):
    """The modules that each module imports; a package that only passes names on counts as an importer."""
    found = {}
    for name, module in modules.items():
        imported = set()
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = (imported & modules.keys()) - {name}
    return found


def source_modules(files):
    """Syntax trees of the modules under src by dotted name."""
    return {module_name(path): ast.parse(text) for path, text in files.items() if path.parts[0] == "src"}


def picture():
    """A Mermaid graph of the imports between the packages of src, without those that follow from others."""
    edges = {}
    for name, imported in imports(source_modules(tree())).items():
        package = name.split(".")[1:2]
        below = {other.split(".")[1] for other in imported if other.count(".")}
        if package:
            edges.setdefault(package[0], set()).update(below - set(package))

    def reached(package):
        return edges[package].union(*map(reached, edges[package]))

    lines = [
        f"    {package} --> {below}"
        for package in sorted(edges)
        for below in sorted(edges[package])
        if not any(below in reached(other) for other in edges[package])
    ]
    return "\n".join(["graph TD", *lines])


def measure(files):
    """Rows of (package, figures in the order of COLUMNS) of src, and one row each for extras and tests."""
    parsed = {path: ast.parse(text) for path, text in files.items()}
    used = Counter(chain.from_iterable(imports(source_modules(files)).values()))
    rows = {}
    for path, text in files.items():
        package = path.parts[0] if path.parts[0] != "src" else "/".join(path.parts[2:-1][:2]) or "covey"
        module, lines = parsed[path], text.splitlines()
        documentation = docstring_lines(module)
        functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(module))
        figures = {
            "files": 1,
            "lines": len(lines),
            "code": sum(bool(line.strip()) for line in lines) - documentation,
            "docstrings": documentation,
            "functions": functions,
            "fields": config_fields(module) if path.parts[0] == "src" else 0,
            "one importer": int(path.parts[0] == "src" and used[module_name(path)] == 1),
        }
        rows.setdefault(package, Counter()).update(figures)
    total = sum((row for package, row in rows.items() if package not in ("extras", "tests")), Counter())
    return {**dict(sorted(rows.items())), "all of src": total}


def main(revision=None):
    now = measure(tree())
    before = measure(tree(revision)) if revision else {}
    width = 24 if revision else 12
    print(f"{'package':<22}" + "".join(f"{column:>{width}}" for column in COLUMNS))
    for package in sorted({*now, *before}, key=lambda name: (name in ("extras", "tests", "all of src"), name)):
        cells = (str(now.get(package, {}).get(column, 0)) for column in COLUMNS)
        if revision:
            was = (before.get(package, {}).get(column, 0) for column in COLUMNS)
            cells = (f"{old} -> {new}" for old, new in zip(was, cells, strict=True))
        print(f"{package:<22}" + "".join(f"{cell:>{width}}" for cell in cells))


if __name__ == "__main__":
    if sys.argv[1:] == ["--picture"]:
        print(picture())
    else:
        main(*sys.argv[1:2])
