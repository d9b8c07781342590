"""README, docs/ and examples/ as a user follows them: what they print runs, and so does the advice that this prints.

covey is installed from its wheel in a new environment outside the repository. Every page has an empty folder of its
own, in which its files are written, and its commands, programs and recipes run in the order of the page, `covey check`
before each `covey train`. The commands are those of the page but for what `SHORT` appends, and the programs but for the
arguments and constants in `SHORT_CALLS` and `SHORT_CONSTANTS`, so that minutes become seconds.
"""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.config import ControlConfig
from covey.config.recipe import PACKAGED_RECIPES, config_from_dict, config_to_toml, read_tables, root_of
from covey.llm.model.gguf import EMBEDDED
from helpers.installed import Environment
from helpers.judge_server import Asked, JudgeServer
from helpers.openenv_server import EchoServer
from helpers.pages import EXAMPLES, PAGES, ROOT, Block, blocks_of, whole_recipe, write_files
from helpers.tiny_models import tiny_folder

SHORT = {
    "train language": "--steps 2 --prompts-per-step 4 --evaluation.problems 2 --evaluation.every 1 "
    "--checkpoint.every 2",
    "train control": "--steps 3 --evaluation.episodes 3 --evaluation.every 0",
    "compare": "--seeds 1",
    "eval language": "--problems 2",
    "reward-model label": "--prompts 6 --completions 4",
    "examples/sweep.py": "--steps 1 --seeds 1 --group-sizes 4 --clip-epsilons 0.2",
}
SHORT_CALLS = {
    "RunConfig": "steps=2, sampling=SamplingConfig(prompts_per_step=2, group_size=2, max_new_tokens=8), "
    "evaluation=EvaluationConfig(problems=2)",
    "ControlConfig": "steps=2, evaluation=ControlEvaluationConfig(episodes=3)",
}
SHORT_CONSTANTS = {"STEPS": 2}
SHORT_NAMES = ("SamplingConfig", "EvaluationConfig", "ControlEvaluationConfig")
PRINTED_JUDGE = "http://127.0.0.1:8000/v1"  # in place of these two, servers of this test answer
PRINTED_OPENENV = "http://127.0.0.1:8000"
LAST_STEP = ("step-00000060", "step-00000002")  # a checkpoint that a page names, and that of a short run
AS_PRINTED = ("README.md", *(str(path.relative_to(ROOT)) for path in EXAMPLES))  # the others train a tiny model instead

NOT_RUN = {
    "make test": "runs the tests",
    "make train TORCH=cpu": "downloads torch",
    "make oracle": "installs TRL and stable-baselines3; `make oracle` is a test of its own",
    "make bench": "times covey beside its peers for minutes, in the repository",
    ".venv/bin/python benchmarks/bench.py language --help": "belongs to the repository, not to what is installed",
    ".venv/bin/python benchmarks/curves.py": "takes an hour, in the repository",
    ".venv/bin/python benchmarks/uneven.py": "takes minutes, in the repository",
    ".venv/bin/python benchmarks/reward_hacking.py --frozen 'runs/frozen-*' --retrained 'runs/retrained-*'": "belongs "
    "to the repository, not to what is installed",
    "covey export runs/arithmetic_grpo-001@60 my_model_60": "the run of this test has two steps",
    "covey export runs/my_adapter-001@60 my_lora --adapter": "the run of this test has two steps",
    "covey export runs/arithmetic_grpo-001@best my_best_model": "the run of this test has no evaluation in between",
    "covey export runs/arithmetic_grpo-001 my_model --gguf q8_0": "the tiny model has other tokens",
    "pip install 'covey[math]'": "downloads math-verify",
    ".venv/bin/python benchmarks/ranks.py --rounds 3 --steps 3": "takes minutes, in the repository",
    ".venv/bin/covey serve smollm2-135m": "answers until Ctrl-C",
    ".venv/bin/covey train arithmetic_grpo --sampler.kind covey --servers http://127.0.0.1:8801": "needs that server",
    "make scale": "installs vLLM",
    ".venv/bin/covey serve smollm2-135m --vllm --max-model-len 512": "needs vLLM",
    ".venv/bin/covey train arithmetic_grpo --sampler vllm": "needs vLLM",
    ".venv/bin/covey train arithmetic_grpo --sampler vllm --servers http://127.0.0.1:8801": "needs vLLM",
    "covey sft --resume runs/sums_sft-001": "it is finished",
    "covey watch": "runs until Ctrl-C",
    "covey watch runs/my-001 runs/my-002": "runs until Ctrl-C",
    "covey watch runs/compare --port 9000": "runs until Ctrl-C",
    "pip install 'covey[tensorboard]'": "downloads TensorBoard",
    "tensorboard --logdir runs": "serves a page until Ctrl-C",
} | dict.fromkeys(
    (
        "covey sft calculator_grpo",
        "covey train calculator_grpo --model runs/calculator_grpo_sft-001/model",
    ),
    "takes minutes with the embedded model",
)
MAKE = {"make train": "covey train arithmetic_grpo --time-budget 8min"}  # what the Makefile runs

ADVICE = re.compile(r"Next: (?:[^:\n]*: )?(covey .*)$", re.M)
GO_ON = re.compile(r"Go on with: (covey .*)$", re.M)

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    environment = Environment(tmp_path_factory.mktemp("installed"))
    yield environment
    environment.close()


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    """Printed address -> that of a judge that likes every completion equally well, or of an OpenEnv server."""
    echo = EchoServer()

    def judge(asked: Asked) -> None:
        shown = asked.question.count("<completion number=")
        asked.say(json.dumps({"reason": "it is a text", "score": 7, "scores": [7] * shown}))

    with JudgeServer(judge) as server:
        yield {PRINTED_JUDGE: server.address, PRINTED_OPENENV: echo.url}
    echo.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes prompts as long as the embedded one does."""
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


class Reader:
    """Follows one page in a folder of its own."""

    def __init__(self, page: Path, folder: Path, environment: Environment, model: str, servers: dict[str, str]) -> None:
        self.page, self.folder, self.environment = page, folder, environment
        self.appended = ["--model", model] if model else []
        self.runs: dict[str, list[str]] = {}  # folder of a run -> the words that trained it
        self.followed: set[str] = set()  # advice
        (folder / ".venv").symlink_to(environment.folder / ".venv")
        (folder / "examples").mkdir()
        for example in EXAMPLES:
            (folder / "examples" / example.name).write_text(shorter(example.read_text(encoding="utf-8")))
        write_files(page, folder)
        for recipe in folder.glob("*.toml"):
            text = recipe.read_text(encoding="utf-8")
            for printed, address in servers.items():
                text = text.replace(f'"{printed}"', f'"{address}"')
            recipe.write_text(text, encoding="utf-8")

    def covey(self, words: Sequence[str], **options: Any) -> tuple[int, str]:
        print("$ covey", shlex.join(words))
        code, said = self.environment.run(".venv/bin/covey", words, self.folder, **options)
        print(said)
        assert "Traceback" not in said
        return code, said

    def follow(self, block: Block) -> None:
        """Run the commands of a block."""
        for words in block.commands() if block.kind == "commands" else ():
            self.carry_out([word.replace(*LAST_STEP) for word in words])

    def carry_out(self, words: list[str]) -> None:
        """One line of a block of commands."""
        line = shlex.join(words)
        words = shlex.split(MAKE.get(line, line))
        if line in NOT_RUN:
            return
        if words[0] == ".venv/bin/python":
            self.script(words[1], [*words[2:], *shlex.split(SHORT.get(words[1], ""))])
        elif words[1:3] == ["train", "--resume"]:
            self.resume(words[1:])
        elif words[1] in ("train", "iterate"):
            self.train(words[1:])
        else:
            self.command(words[1:])

    def train(self, words: list[str]) -> None:
        """`covey check`, whose advice is the command that was to come; then that."""
        words = self.shortened(words)
        assert self.said(["check", *words[1:]]).rstrip().endswith(f"all is well. Next: {shlex.join(['covey', *words])}")
        before = {*self.folder.glob("runs/*")}
        said = self.said(words)
        (run,) = {*self.folder.glob("runs/*")} - before
        self.runs[f"runs/{run.name}"] = words
        assert (run / "summary.json").is_file()
        self.follow_advice(said)

    def resume(self, words: list[str]) -> None:
        """Train again, stop after the first step, and do what is advised then: that is what the page prints."""
        run = words[2]
        if "arithmetic" in run:  # steps of control are too quick to be stopped
            shutil.rmtree(self.folder / run)
            code, said = self.covey([*self.runs[run], "--run-dir", run, "--steps", "9"], stop_at="step 1/9")
            assert code == 130
            assert GO_ON.findall(said) == [shlex.join(["covey", *words])]
            assert not (self.folder / run / "summary.json").exists()
        self.follow_advice(self.said(words))

    def command(self, words: list[str]) -> None:
        words = self.shortened(words)
        said = self.said(words)
        if words[0] == "eval" and "--output" in words:
            assert (self.folder / words[words.index("--output") + 1]).is_file()
        for file in re.findall(r"Next: read (\S+) and look at (\S+)$", said, re.M):
            assert all((self.folder / name).is_file() for name in file)
        self.follow_advice(said)

    def said(self, words: list[str]) -> str:
        code, said = self.covey(words)
        assert code == 0, said
        return said

    def follow_advice(self, said: str) -> None:
        """Carry out what a command advises, once; not what that advises in turn, which would never end."""
        for advised in ADVICE.findall(said):
            if advised not in self.followed:
                self.followed.add(advised)
                self.said(self.shortened(shlex.split(advised)[1:]))

    def programs(self, texts: Sequence[str]) -> None:
        """Run the programs of a page, one after the other in one script."""
        (self.folder / "programs.py").write_text(shorter("\n".join(texts)), encoding="utf-8")
        self.script("programs.py", [])

    def script(self, script: str, words: list[str]) -> None:
        print("$ python", script, shlex.join(words))
        code, said = self.environment.run(script, words, self.folder, scope=SHORT_NAMES)
        print(said)
        assert code == 0, said
        self.follow_advice(said)

    def shortened(self, words: list[str]) -> list[str]:
        """The words of a command with what `SHORT` appends."""
        command = words[0]
        if "--resume" in words:  # a finished run of 2 or 3 steps goes on
            return [*words[:-1], "4"] if words[-2] == "--steps" else words
        if command in ("train", "iterate", "check", "compare"):
            world = self.world_of(words[1].split()[0])
            named = "--model" in words and EMBEDDED not in words  # a run of the page, or the tiny model
            model = self.appended if world == "language" and not named else []
            return [*words, *model, *shlex.split(f"{SHORT.get(command, '')} {SHORT[f'train {world}']}")]
        if words[:2] == ["reward-model", "label"]:
            return [*words, *shlex.split(SHORT["reward-model label"])]
        if command == "eval" and self.world_of(words[1]) == "language":
            return [*words, *shlex.split(SHORT["eval language"])]
        return words

    def world_of(self, name: str) -> str:
        """Of a recipe, a run or a model."""
        files = [self.folder / name, self.folder / name / "config.toml", PACKAGED_RECIPES / f"{name}.toml"]
        found = [file for file in files if file.is_file()]
        return "control" if found and root_of(read_tables(found[0])) is ControlConfig else "language"


class _Shorter(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))  # covey.RunConfig(...) or RunConfig(...)
        if name in SHORT_CALLS:
            call = ast.parse(f"f({SHORT_CALLS[name]})", mode="eval").body
            assert isinstance(call, ast.Call)
            given = {keyword.arg for keyword in call.keywords}
            node.keywords = [*(keyword for keyword in node.keywords if keyword.arg not in given), *call.keywords]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        (target,) = node.targets
        if isinstance(target, ast.Name) and target.id in SHORT_CONSTANTS:
            node.value = ast.Constant(SHORT_CONSTANTS[target.id])
        return node


def shorter(program: str) -> str:
    """A program with the arguments of `SHORT_CALLS` and the constants of `SHORT_CONSTANTS`."""
    return ast.unparse(ast.fix_missing_locations(_Shorter().visit(ast.parse(program))))


@pytest.mark.slow
def test_covey_is_the_wheel_s(environment: Environment) -> None:
    assert environment.imported_from == environment.packages / "covey" / "__init__.py"
    assert environment.run(".venv/bin/covey", ["--version"], environment.folder)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [*EXAMPLES, *PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_runs_as_printed(
    page: Path, tmp_path: Path, environment: Environment, tiny: Path, servers: dict[str, str]
) -> None:
    printed = str(page.relative_to(ROOT)) in AS_PRINTED
    blocks = blocks_of(page)
    reader = Reader(page, tmp_path, environment, "" if printed else str(tiny), servers)
    for block in blocks:
        reader.follow(block)
    programs = [block.text for block in blocks if block.kind == "python" and not block.file]
    if programs:
        reader.programs(programs)
    trained = {word for words in reader.runs.values() for word in words}
    for block in blocks:
        if block.kind == "toml" and "vllm_python" not in block.text:  # that needs vLLM; test_pages.py reads it
            recipe = recipe_of(block, tmp_path)
            if recipe not in trained:
                reader.train(["train", recipe])
    trains = page.name != "sentences.py"
    assert not (printed and trains) or any(environment.cache.rglob("kernels-*.so")), "the wheel's kernels were compiled"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda notebook: notebook.stem)
def test_the_cells_of_a_notebook_run_one_after_the_other(
    notebook: Path, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, on a tiny model and with few steps; the file has no outputs."""
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, Any] = {}
    for cell in cells:
        program = shorter("".join(cell["source"])).replace("'smollm2-135m'", repr(str(tiny)))
        exec(compile(program, notebook.name, "exec"), names)
    assert (Path(names["result"]["run_dir"]) / "summary.json").is_file()


def test_what_is_not_run_is_still_printed() -> None:
    printed = {
        shlex.join(words)
        for page in [*PAGES, *EXAMPLES]
        for block in blocks_of(page)
        if block.kind == "commands"
        for words in block.commands()
    }
    assert set(NOT_RUN) | set(MAKE) <= printed
    makefile = (ROOT / "Makefile").read_text()
    for target, command in MAKE.items():
        assert f"{target.removeprefix('make ')}: $(STAMP)\n\t@$(BIN)/{command}\n" in makefile


def recipe_of(block: Block, folder: Path) -> str:
    """The file of a recipe of a page; a part of one is laid over a packaged recipe."""
    if not block.file:
        (folder / "part.toml").write_text(config_to_toml(config_from_dict(whole_recipe(block))), encoding="utf-8")
    return block.file or "part.toml"
