"""What a recipe names is the user's own code, or that of a package made for covey; `covey check` tells it first."""

import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from covey.cli.main import main
from covey.config import ConfigError, ConversationConfig
from covey.config.named_modules import find_module, search_path
from covey.config.recipe import read_recipe
from covey.control.envs.registration import find_spec
from covey.llm.conversation.processes import EnvironmentProcesses
from covey.llm.rewards.runner import RewardPool
from covey.runtime.worker.process import CallError
from helpers.tiny_models import tiny_folder

LANGUAGE = """
model = "model"
[task]
name = "arithmetic"
{rest}
"""
AGENT = '[environment]\nid = "{name}"\n'
FIELDS = {
    "reward": '[[rewards]]\nfunction = "{name}"',
    "boundary": '[[rewards]]\nfunction = "own.py:reward"\nper_step = true\n[loss]\ncredit = "process"\n'
    '[process]\nboundary = "{name}"',
    "environment": '[conversation]\nenvironment = "{name}"',
}
FOREIGN = {
    "a class that starts programs": "subprocess:Popen",
    "a module in a package": "os.path:join",
    "built in": "builtins:exec",
    "imported by nothing": "antigravity:geohash",
    "the tests of Python": "test.support:swap_attr",
    "the file of a module": f"{subprocess.__file__}:Popen",
    "covey's own": "covey.runtime.worker.process:Child",
    "an installed package": "numpy:mean",
    "a file of an installed package": f"{numpy.__file__}:mean",
    "a link to a file": "linked.py:Popen",
    "a link that is a module": "linked:Popen",
}
REFUSED = r"recipe names your own files|of Python's module"
OWN = "from subprocess import Popen\n\ndef reward(completions, **columns):\n    return [0.0 for _ in completions]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module and a package of the user's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "rewards.py").write_text(OWN)
    (tmp_path / "linked.py").symlink_to(subprocess.__file__)
    return tmp_path


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("name", FOREIGN.values(), ids=FOREIGN)
def test_foreign_code_is_refused_before_a_model_is_looked_for(field: str, name: str, folder: Path) -> None:
    Path("mine.toml").write_text(LANGUAGE.format(rest=field.format(name=name)))
    with pytest.raises(ConfigError, match="a recipe names your own files") as caught:
        read_recipe("mine.toml", [])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*FOREIGN.values(), "own.py:Popen"], ids=[*FOREIGN, "of an own file"])
def test_its_process_refuses_it_too(name: str, folder: Path) -> None:
    """As a resumed run, whose folder may be a stranger's, does not read a recipe."""
    if name.startswith("covey."):
        pytest.skip("the processes of covey's own functions are the same")
    ran, arguments = folder / "ran", {"args": ["touch", "ran"]}
    process = RewardPool(name)
    with pytest.raises((ConfigError, CallError), match=REFUSED):
        process.call({"completions": ["a"], **arguments}, 1, 60.0)
    process.close()
    environments = EnvironmentProcesses(name, 60.0, 100, arguments)
    with pytest.raises(ConfigError, match=REFUSED):
        environments.start()
    assert not ran.exists()


@pytest.mark.parametrize("name", ["antigravity:CartPole-v1", "numpy:CartPole-v1", "linked:CartPole-v1"])
def test_an_environments_module_is_not_imported(name: str, folder: Path) -> None:
    before = {*sys.modules}
    with pytest.raises(ConfigError, match=r"environment\.id: .*a recipe names your own files"):
        find_spec(name)
    Path("mine.toml").write_text(
        LANGUAGE.format(rest=f"[conversation]\nenvironment = 'gymnasium'\noptions = ['id = \"{name}\"']")
    )
    with pytest.raises(ConfigError, match=r"conversation.options: id: .*a recipe names your own files"):
        read_recipe("mine.toml", [])
    Path("agent.toml").write_text(AGENT.format(name=name))
    assert main(["check", "agent.toml"]) == 2
    assert not {"antigravity", "linked"} & ({*sys.modules} - before)


def test_the_modules_that_adapters_import_by_an_option() -> None:
    for environment, name, module in [
        ("gymnasium", "mine:Game-v0", "mine"),
        ("gymnasium", "CartPole-v1", ""),
        ("verifiers", "owner/my-game", "my_game"),
        ("calculator", "subprocess:x", ""),
    ]:
        assert ConversationConfig(environment, options=(f"id = {name!r}",)).imported_module == (module, environment)


def test_own_modules_are_found_and_installed_ones_that_depend_on_the_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder / "elsewhere" / "site-packages"
    for name, needs in {
        "made_for_covey": "covey>=0.1; extra == 'all'",
        "games": "gymnasium",
        "other": "covey-x",
    }.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
        (site / f"{name}-1.0.dist-info").mkdir()
        (site / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n"
        )
        (site / f"{name}-1.0.dist-info" / "top_level.txt").write_text(name)
    (folder / "games.py").touch()
    monkeypatch.syspath_prepend(site)
    for module, library, found in (
        ("own", "covey", folder / "own.py"),
        ("package.rewards", "covey", folder / "package" / "__init__.py"),
        ("made_for_covey", "covey", site / "made_for_covey" / "__init__.py"),
        ("games", "gymnasium", site / "games" / "__init__.py"),
        ("games", "covey", folder / "games.py"),
    ):
        spec = find_module(module, "field", library)
        assert spec is not None, module
        assert spec.origin == str(found)
    with pytest.raises(ConfigError, match=r"^field: .*other.* does not depend on covey"):
        find_module("other", "field")
    assert find_module("nowhere", "field") is None
    here, elsewhere = str(folder), str(site)
    assert here not in search_path("made_for_covey:f")
    assert search_path("own:f").index(here) < search_path("own:f").index(elsewhere)
    assert here not in search_path("covey.llm.rewards.numbers:numeric")


def test_check_tells_what_a_recipe_runs_before_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    tiny_folder(folder / "model")
    Path("package", "rewards.py").write_text(OWN + "\nraise ValueError('imported')\n")
    Path("mine.toml").write_text(LANGUAGE.format(rest=FIELDS["boundary"].format(name="package.rewards:reward")))
    assert main(["check", "mine.toml"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [
        f"[[rewards]] number 1 runs reward of {folder / 'own.py'}",
        f"process.boundary runs reward of {folder / 'package' / '__init__.py'}",
    ]
    assert "imported" in err
    Path("games.py").write_text("raise ValueError('imported')")
    Path("agent.toml").write_text(AGENT.format(name="games:Game-v0"))
    assert main(["check", "agent.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == f"environment.id runs games of {folder / 'games.py'}\n"
    assert "imported" in err
