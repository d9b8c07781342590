"""The packages as they are published: built in `dist/`, looked into, installed in new environments, and used.

    python tests/helpers/packages.py python3.11 python3.12      interpreters to try them with; missing ones are left out

It runs in an environment with `build` and `twine`: `make packages`.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(path.parent for path in ROOT.glob("extras/*/pyproject.toml"))
# What a newcomer does first: an agent is trained, the run is shown.
TRAIN = "train cartpole_grpo --steps 3 --evaluation.episodes 3"
USES = ["--version", "recipes", TRAIN, "runs", "show runs/cartpole_grpo-001"]
SMALLEST_SDIST = {
    "PKG-INFO",
    "README.md",
    "LICENSE",
    "pyproject.toml",
    ".gitignore",
}  # beside what pyproject.toml names


def main(interpreters: list[str]) -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", dist)  # the sdist, and the wheel from it
    for extra in EXTRAS:
        run(sys.executable, "-m", "build", "--wheel", "--outdir", dist, extra)
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    for path in [*dist.glob("covey_*.whl")]:
        with zipfile.ZipFile(path) as archive:
            expect(f"licences of {path.name}", licences(archive.namelist()), {"LICENSE"})
    (wheel,), (sdist,) = dist.glob("covey-*-none-any.whl"), dist.glob("covey-*.tar.gz")
    check_contents(wheel, sdist)
    for interpreter in interpreters:
        # `--version`: a shim of pyenv is also there for versions that are not
        if shutil.which(interpreter) and not subprocess.run([interpreter, "--version"], check=False).returncode:
            use(interpreter, [*dist.glob("*.whl")])
        else:
            print(f"== left out: {interpreter}, because it is not installed")


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel has the files of src/covey that git knows, metadata and licences; the sdist has what builds that."""
    command = ["git", "ls-files", "src/covey"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    sources = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as archive:
        files = [member for member in archive if member.isfile()]
        of_sdist = {file.name.partition("/")[2]: content_of(archive, file) for file in files}
    expect("files of the wheel", {f"src/{name}" for name in inside if ".dist-info/" not in name}, sources)
    expect("licences", licences(inside), {"LICENSE", "src/covey/watch/static/vendor/uPlot.LICENSE"})
    expect("files of the sdist", set(of_sdist) - SMALLEST_SDIST, sources | {"CHANGELOG.md", "hatch_build.py"})
    for name, content in (inside | of_sdist).items():
        if str(ROOT).encode() in content:
            sys.exit(f"{name} has the path of the folder where it was built, {ROOT}")
    (metadata,) = (content.decode() for name, content in inside.items() if name.endswith("/METADATA"))
    relative = re.findall(r"\]\((?!https://|#)[^)]*\)", metadata)
    expect("relative links of the description", set(relative), set())


def content_of(archive: tarfile.TarFile, file: tarfile.TarInfo) -> bytes:
    opened = archive.extractfile(file)
    assert opened is not None
    return opened.read()


def licences(names: Iterable[str]) -> set[str]:
    return {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}


def expect(what: str, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        sys.exit(f"{what}: missing {sorted(wanted - found)[:9]}, superfluous {sorted(found - wanted)[:9]}")


def use(interpreter: str, wheels: list[Path]) -> None:
    """Install all wheels with what they depend on, in its newest allowed versions, and train an agent."""
    with tempfile.TemporaryDirectory() as folder:
        run(interpreter, "-m", "venv", f"{folder}/venv")
        pip = [f"{folder}/venv/bin/python", "-m", "pip"]
        run(*pip, "-q", "install", "--no-compile", *wheels)
        run(*pip, "check")
        for words in USES:
            run(f"{folder}/venv/bin/covey", *words.split(), cwd=folder)
    print(f"== {interpreter}: installed and used")


def run(*words: str | Path, cwd: Path | str = ROOT) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, cwd=cwd, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
