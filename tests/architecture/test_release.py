"""What a release is made of agrees: versions, links, Python versions, workflows, the container file."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = sorted(path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.stem != "config")
HOLLOW = {"dev", "proc", "tmp", "opt"}  # folders of the sandbox's own


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert changes[0] == (PROJECT["version"], str(citation["date-released"]))
    extras = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("extras/*/pyproject.toml")]
    assert {citation["version"], *(extra["version"] for extra in extras)} == {PROJECT["version"]}
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert citation["url"] == PROJECT["urls"]["Documentation"]


def test_both_builds_of_torch_have_one_version_and_hashes() -> None:
    locks = [(ROOT / name).read_text() for name in ("torch.lock", "torch-cpu.lock")]
    assert len({re.findall(r"^torch==([\d.]+)", lock, re.M)[0] for lock in locks}) == 1
    for name in ("requirements.lock", "torch.lock", "torch-cpu.lock", "model.lock", "triton.lock", "bitsandbytes.lock"):
        lines = (ROOT / name).read_text().replace("\\\n", "").splitlines()
        assert [line for line in lines if not line.startswith("#") and "--hash=sha256:" not in line] == []


def test_the_lowest_versions_of_the_ranges_are_tested() -> None:
    """`make lowest` installs lowest.lock over the other locks; so a new range needs `make lock`."""
    installed: dict[str, str] = {}
    for name in ("requirements.lock", "torch.lock", "bitsandbytes.lock", "tests/helpers/lowest.lock"):
        installed |= re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / name).read_text(), re.M)
    (extras,) = re.findall(r"^LOWEST_EXTRAS := (.*)", (ROOT / "Makefile").read_text(), re.M)
    optional = [text for extra in extras.split() for text in PROJECT["optional-dependencies"][extra]]
    wanted = [Requirement(text) for text in PROJECT["dependencies"] + optional]
    lowest = {one.name: spec.version for one in wanted for spec in one.specifier if spec.operator == ">="}
    assert {name: Version(installed[name]) for name in lowest} == {
        name: Version(version) for name, version in lowest.items()
    }


def test_workflows_try_every_python_that_is_allowed() -> None:
    allowed = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)}
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    (matrix,) = re.findall(r"python: (\[.*\])", text)
    assert set(ast.literal_eval(matrix)) == allowed == {f"3.{minor}" for minor in range(11, 14)}
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = [step["run"] for step in steps(path) if "run" in step]
    targets = [target for command in commands for target in re.findall(r"make ([\w-]+)", command)]
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []
    scripts = [word for command in commands for word in re.findall(r"^(\.\w+/[\w-]+)", command)]
    assert [script for script in scripts if not (ROOT / script).stat().st_mode & 0o111] == []
    # no token of a step but the one that asks for it: GitHub's own is read-only unless a job says more
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_only_the_publishing_job_can_publish() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert set(jobs["publish"]["needs"]) == {"packages", "wheels"}
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_questions(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_each_version_of_the_site_stays(tmp_path: Path) -> None:
    """`.github/publish-site` twice, into the branch gh-pages of a repository on this disk."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "init.defaultBranch=main"]
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    subprocess.run([*git, "init", "-q", "--bare", origin], check=True)
    subprocess.run([*git, "clone", "-q", origin, clone], check=True, stderr=subprocess.DEVNULL)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "main"], cwd=clone, check=True)
    (clone / "site").mkdir()
    for version in ("v0.2.0", "v0.10.0"):
        (clone / "site/index.html").write_text(version)
        subprocess.run([ROOT / ".github/publish-site", version], cwd=clone, check=True)

    def published(name: str) -> str:
        return subprocess.run(
            [*git, "show", f"gh-pages:{name}"], cwd=origin, capture_output=True, text=True, check=True
        ).stdout

    folders = ("v0.2.0", "v0.10.0", "stable")
    assert [published(f"{folder}/index.html") for folder in folders] == ["v0.2.0", "v0.10.0", "v0.10.0"]
    assert re.findall(r'href="([^"]*)/"', published("versions.html")) == ["v0.10.0", "v0.2.0", "stable"]


def run_lines() -> list[str]:
    """The commands of the container file that need neither root nor Debian."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", "")
    return [line for line in re.findall(r"^RUN (.*)", text, re.M) if not re.match("apt-get|useradd", line)]


@pytest.mark.slow
@pytest.mark.alone
def test_the_commands_of_the_container_file_build_covey(tmp_path: Path) -> None:
    """In a sandbox that has this machine's files, read-only, and /src, /dist and /opt/covey of its own."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in (name for name in listed if not name.startswith(("tests", "docs", "benchmarks"))):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "src" / name)
    sandbox = ["bwrap", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for path in (path for path in [*Path("/").iterdir(), *Path("/opt").iterdir()] if path.name not in HOLLOW):
        sandbox += (
            ["--symlink", os.readlink(path), str(path)] if path.is_symlink() else ["--ro-bind", str(path), str(path)]
        )
    for own in ("src", "dist", "opt/covey"):
        (tmp_path / own).mkdir(parents=True, exist_ok=True)
        sandbox += ["--bind", str(tmp_path / own), f"/{own}"]
    commands = [
        *run_lines(),
        "cd /tmp",
        "/opt/covey/bin/covey train cartpole_grpo --steps 2",
        "/opt/covey/bin/covey check arithmetic_grpo",
    ]
    script = "set -e; python() { " + sys._base_executable + ' "$@"; }; ' + "; ".join(commands)
    done = subprocess.run(
        [*sandbox, "bash", "-c", script],
        env=os.environ | {"TORCH": "cpu", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "of the wheel" in done.stdout
