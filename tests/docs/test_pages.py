"""What README, docs/ and examples/ print can be run: every command, option, program, recipe and link of them exists.

`test_as_printed.py` runs it.
"""

import ast
import importlib
import re
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import gymnasium  # noqa: F401 -- before the tests: it changes the environment when it is first imported
import pytest

from covey.cli.evaluate import evaluation_config
from covey.cli.main import build_parser, parse
from covey.comparison.compare import read_contestants
from covey.config import ControlConfig, RunConfig
from covey.config.recipe import config_from_dict, describe_fields, read_recipe
from covey.config.rules import validate
from covey.config.servers import VLLM_PYTHON, default_token_file, own_token
from helpers import size
from helpers.pages import (
    EXAMPLES,
    PAGES,
    ROOT,
    Block,
    blocks_of,
    inline_commands,
    shown_alone,
    whole_recipe,
    write_files,
)

BLOCKS = [block for page in [*PAGES, *EXAMPLES] for block in blocks_of(page)]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page prints, the examples and an environment of vLLM, where `covey serve` has
    created the user's access token."""
    write_files(request.getfixturevalue("page"), tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    python = tmp_path / VLLM_PYTHON
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own_token(default_token_file())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_words(words: Sequence[str]) -> None:
    """Read a command as covey does, as far as that is possible without a model and without the runs that it names."""
    arguments, fields = parse(words[1:])
    if any(word.startswith("runs/") for word in words):
        return
    for path in Path().glob("*.toml"):
        for reward in tomllib.loads(path.read_text()).get("rewards", ()):
            pretend_reward_model(reward.get("model"))
    if arguments.command in ("train", "iterate", "check") and arguments.recipe:
        read_recipe(arguments.recipe, fields)
    elif arguments.command == "compare":
        read_contestants(arguments.recipes, fields)
    elif arguments.command == "eval":
        evaluation_config(arguments, fields)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_read_without_a_mistake(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        for words in block.commands() if block.kind == "commands" else ():
            if Path(words[0]).name == "covey":
                check_words(words)
    for words in inline_commands(page):
        if not shown_alone(words):
            check_words(words)


def test_every_command_of_a_script_is_read_without_a_mistake() -> None:
    for script in ROOT.glob("benchmarks/*.sh"):
        lines = re.findall(r"^ *covey (.*)$", script.read_text(encoding="utf-8").replace("\\\n", " "), re.M)
        assert lines, script.name
        for line in lines:
            parse(shlex.split(line))


def test_commands_are_found_on_the_pages() -> None:
    """The tests of this folder would pass if nothing was found any more."""
    commands = [words for block in BLOCKS if block.kind == "commands" for words in block.commands()]
    assert sum(Path(words[0]).name == "covey" for words in commands) >= 40
    assert sum(block.kind == "python" for block in BLOCKS) >= 12
    assert {"my_recipe.toml", "my_agent.toml", "thermostat.toml", "things.toml"} <= {block.file for block in BLOCKS}


def test_every_block_is_run_or_marked_as_an_excerpt() -> None:
    """A block that is neither a command nor a file nor a program has the language `text`, a drawn one `mermaid`."""
    runnable = {"commands", "python", "toml", "jsonl"}
    assert not [block.where for block in BLOCKS if block.kind not in runnable | {"text", "mermaid"}]


def test_a_block_that_is_no_command_prints_none() -> None:
    unseen = [block.where for block in BLOCKS if block.kind == "text" and re.search(r"^\s*covey ", block.text, re.M)]
    assert not unseen


ROWS = [row for root in (RunConfig, ControlConfig) for row in describe_fields(root)]


def test_every_option_that_is_named_exists() -> None:
    _, commands = build_parser()
    known = {option for command in commands.values() for option in command._option_string_actions}
    known.add("--sampler")  # short for --sampler.kind
    for row in ROWS:
        dashed = row.name.replace("_", "-")
        known |= {f"--{dashed}", f"--{row.section.split()[0]}.{dashed}" if row.section else ""}
    for page in PAGES:
        spans = re.findall(r"`((?:covey |--)[^`]+)`", page.read_text(encoding="utf-8"))
        assert {option for span in spans for option in re.findall(r"--[a-z][\w.-]*", span)} <= known, page.name


def test_every_field_that_is_named_with_its_table_exists() -> None:
    known = {f"{row.section.split()[0]}.{row.name}" for row in ROWS if row.section}
    tables = {name.partition(".")[0] for name in known}
    for page in PAGES:
        named = re.findall(r"`([a-z]+\.[a-z_0-9]+)(?: = [^`]*)?`", page.read_text(encoding="utf-8"))
        fields = {name for name in named if name.partition(".")[0] in tables and Path(name).suffix != ".py"}
        assert fields <= known, page.name


def test_the_pages_have_at_most_55_000_words() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in ROOT.glob("docs/*.md")) <= 55_000


def test_every_page_is_two_clicks_from_the_readme() -> None:
    assert "](docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [
        page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md" and f"]({page.name}" not in index
    ]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "python"], ids=lambda block: block.where)
def test_every_program_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page", [ROOT / block.page for block in BLOCKS if block.kind == "toml"], ids=lambda p: p.stem)
def test_every_recipe_of_a_page_is_one(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        if block.kind == "toml":
            tables = whole_recipe(block)
            for reward in tables.get("rewards", ()):
                pretend_reward_model(reward.get("model"))
            validate(config_from_dict(tables))


def pretend_reward_model(name: str | None) -> None:
    """A folder as validation sees one, for a model that the page's commands train."""
    if name and not Path(name).exists():
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
        Path(name, "model.safetensors").write_bytes(b"")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("docs/reference/*.md"), *ROOT.glob("docs/zh/*.md"), ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


SYMBOL = re.compile(r"\[`([\w.]+)`\]\((?:\.\./)*(src/[\w/]+\.py)\)")


def test_every_function_that_a_page_links_to_is_defined_there() -> None:
    links = [(page.name, *match.groups()) for page in PAGES for match in SYMBOL.finditer(page.read_text())]
    assert len(links) >= 20
    for page, name, file in links:
        if name == Path(file).name:
            continue
        scope: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        for part in name.removeprefix(f"{Path(file).stem}.").split(
            "."
        ):  # a function, `Class.method` or `module.function`
            defined = {
                node.name: node
                for node in ast.iter_child_nodes(scope)
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            }
            assert part in defined, f"{page}: {name} is not in {file}"
            scope = defined[part]


def test_every_file_of_the_code_and_the_tests_that_a_page_names_exists() -> None:
    tests = {path.name for folder in ("tests", "extras") for path in (ROOT / folder).rglob("test_*.py")}
    for page in [*PAGES, *ROOT.glob("docs/*/*.md"), ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"\btest_\w+\.py\b", text)) <= tests, page.name
        for name in re.findall(r"`((?:[\w.-]+/)+\w+\.(?:py|h|cpp|toml))`", text):
            assert any((ROOT / folder / name).exists() for folder in ("", "src/covey", "tests")), f"{page.name}: {name}"


def test_every_folder_that_the_page_on_design_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+)`", (ROOT / "docs" / "design.md").read_text(encoding="utf-8")))
    assert "llm/tasks/" in named
    assert not [name for name in named if not (ROOT / "src" / "covey" / name).is_dir()]


def test_the_picture_of_the_layout_has_the_imports():
    assert size.picture() in (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_table_of_gpus_is_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_tables

    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert gpu_tables.table() in text
    assert gpu_tables.time_table() in text
