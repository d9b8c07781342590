"""The task reasoning_gym: problems from seeds, scored by the package in a process with limits."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config import ConfigError, ReasoningGymConfig, RewardConfig
from covey.config.recipe import read_recipe
from covey.data import EndReason, Group, Rollout, Start
from covey.llm.grader import RewardGrader, build_grader
from covey.llm.rewards.reasoning_gym_process import is_plain_expression
from covey.llm.rewards.runner import RewardPool
from covey.llm.tasks import ReasoningGym, reasoning_gym
from covey.llm.tasks.reasoning_gym import PROCESS
from helpers.contracts import TaskContract

pytestmark = pytest.mark.slow  # the package takes many seconds to import

# Their scorers evaluate the answer's text.
EVALUATING = [
    *("countdown", "string_insertion", "polynomial_multiplication", "n_queens"),
    *(
        pytest.param(dataset, marks=pytest.mark.slow)
        for dataset in ("binary_matrix", "intermediate_integration", "puzzle24", "simple_integration", "spiral_matrix")
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _tasks_share_a_process() -> Iterator[None]:
    """One process generates the problems of all tasks, because importing the package takes a second."""
    process = RewardPool(f"{PROCESS}:generate", load_seconds=reasoning_gym.SECONDS_PER_CALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reasoning_gym, "RewardPool", lambda *_, **__: SimpleNamespace(call=process.call, close=lambda: None)
        )
        yield
    process.close()


@pytest.fixture(scope="module")
def grader():
    one = build_grader([RewardConfig(name="reasoning_gym", timeout_seconds=120.0)], ())
    yield one
    one.close()


def task_of(dataset: str, **fields: Any) -> ReasoningGym:
    return ReasoningGym(**({"source_dataset": dataset, "held_out_problems": 4} | fields))


def score(grader: RewardGrader, start: Start, *texts: str) -> list[float | None]:
    rollouts = [
        Rollout(context=(), actions=[1], behavior_logprobs=[0.0], end=EndReason.STOP, text=text) for text in texts
    ]
    return [result.value for result in grader.rewards[0].evaluate([Group(start, rollouts)])]


def question(start: Start) -> str:
    return str(start.prompt[0]["content"])


@pytest.fixture(scope="module")
def legs() -> ReasoningGym:
    return task_of("leg_counting", options=("max_animals = 4", "min_animals = 2"), held_out_problems=20)


class TestReasoningGym(TaskContract):
    @pytest.fixture
    def task(self, legs: ReasoningGym) -> ReasoningGym:
        return legs


def test_options_reach_the_data_set_and_the_instruction_ends_the_question(legs: ReasoningGym) -> None:
    for start in legs.draw(0, 1, 20):
        assert 2 <= len(re.findall(r"\d+ [a-z]", question(start).partition("if you have")[2])) <= 4
        assert question(start).endswith("\n\nGive the final answer between <answer> and </answer>.")


def test_held_out_problems_are_different_and_never_drawn() -> None:
    """A data set with few problems: training meets all but those that are held out."""
    task = task_of("coin_flip", options=("min_trials = 1", "max_trials = 2"), held_out_problems=4)
    held_out = {question(start) for start in task.held_out(100)}
    assert len(held_out) == 4
    assert task.held_out(2) == task.held_out(100)[:2]
    assert not held_out & {question(start) for step in range(1, 10) for start in task.draw(1, step, 16)}


def test_a_data_set_whose_problems_are_all_held_out_is_refused() -> None:
    task = task_of("coin_flip", options=("min_trials = 1", "max_trials = 1"), held_out_problems=100)
    assert len(task.held_out(100)) == 4
    with pytest.raises(ConfigError, match=r"lower task\.held_out_problems"):
        task.draw(0, 1, 4)


def test_the_right_answer_counts_with_and_without_the_tag(legs: ReasoningGym, grader: RewardGrader) -> None:
    [start] = legs.draw(0, 1, 1)
    answer = start.columns["answer"]
    texts = (
        answer,
        f"5 + 3\n<answer>1</answer> no, <answer> {answer} </answer>.",
        "no idea",
        "",
        f"<answer>{answer}0</answer>",
    )
    assert score(grader, start, *texts)[:4] == [1.0, 1.0, 0.0, 0.0]
    assert 0 < (score(grader, start, *texts)[4] or 0) < 1  # the package's credit for a text with the answer in it
    grader.check([start])


@pytest.mark.parametrize("dataset", EVALUATING)
def test_right_answers_of_evaluating_scorers_pass_and_hostile_ones_are_wrong(
    dataset: str, grader: RewardGrader, tmp_path: Path
) -> None:
    [start] = task_of(dataset).draw(0, 1, 1)
    mark = tmp_path / "mark"
    hostile = f"open({str(mark)!r}, 'w')"
    right, wrong = score(grader, start, start.columns["answer"], hostile)
    assert right == 1.0
    assert wrong == 0.0
    assert not mark.exists()


def test_answers_in_the_form_of_python_still_count(grader: RewardGrader) -> None:
    """The scorers evaluate text for answers that are Python's lists, with less credit."""
    [start] = task_of("spiral_matrix").draw(0, 1, 1)
    as_list = f"[{', '.join(start.columns['answer'].split())}]"
    assert score(grader, start, as_list) == [0.1]
    [start] = task_of("simple_integration").draw(0, 1, 1)
    assert score(grader, start, f"({start.columns['answer']}) + sin(1)", "x**2 +") == [1.0, 0.0]


def test_an_answer_that_the_scorer_cannot_read_is_wrong(grader: RewardGrader) -> None:
    [start] = task_of("prime_factorization").draw(0, 1, 1)
    assert score(grader, start, "hello", "[]", start.columns["answer"]) == [0.0, 0.0, 1.0]


def test_an_expensive_expression_costs_neither_the_run_nor_memory(grader: RewardGrader) -> None:
    [start] = task_of("countdown").draw(0, 1, 1)
    assert score(grader, start, "9**9**9", "9**(9**9)", "((9**999)**999)**999", "9" * 3000) == [0.0] * 4


def test_metadata_that_json_would_change_is_scored_as_in_the_package(grader: RewardGrader) -> None:
    """These compare tuples, which JSON makes lists."""
    for dataset in ("rearc", "arc_agi", "graph_color"):
        [start] = task_of(dataset, held_out_problems=1).draw(0, 1, 1)
        if start.columns["answer"] is not None:
            assert score(grader, start, start.columns["answer"]) == [1.0]
        else:
            assert score(grader, start, "none") == [0.0]


def test_problems_do_not_depend_on_the_hashes_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This data set iterates over sets of strings."""
    monkeypatch.setattr(reasoning_gym, "RewardPool", RewardPool)  # one for each task
    draws = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        draws.append(task_of("polynomial_multiplication").draw(0, 1, 8))
    assert draws[0] == draws[1]


def test_every_data_set_gives_problems_whose_answers_score_as_in_the_package(grader: RewardGrader) -> None:
    from reasoning_gym.factory import DATASETS

    process = RewardPool(f"{PROCESS}:generate", load_seconds=reasoning_gym.SECONDS_PER_CALL)
    for dataset in sorted(DATASETS.keys() - {"composite"}):
        made = process.call({"completions": [7], "source_dataset": dataset, "options": {}}, 0, 120.0).extras
        assert made["error"] == [""]
        row = {"source_dataset": dataset, "options": {}, "seed": 7}
        start = Start(0, [{"role": "user", "content": made["question"][0]}], {"reasoning_gym": row})
        if made["answer"] != [None]:
            assert score(grader, start, made["answer"][0]) == [1.0], dataset
    process.close()


# ---- text that may be evaluated ----


@pytest.mark.parametrize(
    "text",
    [
        '1 + 2 * (3 - 4) / 5', 'x**2/2 + C', '3*x**3 - sin(2*x)*exp(-x)', '[[1, 0], [0, 1]]', '[\'A\', "B"]',
        '_ _ Q _\nQ _ _ _', '1.5e3 + .5', '2**-1 + x**(1/2)', 'exp(x)**(2*x)', 'a if b else c', '', '[1][0]',
        '5 % 3 // 2',
    ],
)  # fmt: skip
def test_plain_expressions(text: str) -> None:
    assert is_plain_expression(text)


HOSTILE = [
    "__import__('os').system('true')", "open('x','w')", '().__class__', 'x.real', '1 .real', '1..real', '(1).real',
    '[].append(1)', "exec('1')", "eval ('1')", "(exec)('1')", "[exec][0]('1')", "f'{open}'", "rb'x'", 'lambda: 1',
    'lambda x:1', 'a:=1', 'print(1)', "'a'*9", "9*'a'", '[0]*9', '9*[0]', "'a' 'b'.x", "'\\x41'", 'x = 1',
    'import os', '9**9**9', '9**(9**9)', '9**9999', '9**10**10', '(9**999)**999', '1' * 21, '(' * 41, 'x; y', '{1}',
    '@x', '`x`', "'a'('b')", 'globals()', 'sin.x', "S('x')", '5!', 'x' * 2001, '9**((9**9))', 'é', '9**(99*99)',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_expressions_that_are_not_plain(text: str) -> None:
    assert not is_plain_expression(text)


@given(st.text(alphabet="ab_1.('[)]*, +=:{}\"fe", max_size=12))
def test_a_plain_expression_reaches_no_attribute_and_calls_known_functions_only(text: str) -> None:
    if not is_plain_expression(text):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Attribute | ast.Lambda | ast.NamedExpr | ast.JoinedStr | ast.Await)
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") in ("sin", "exp", "abs", "log")


# ---- the fields ----


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"source_dataset": "leg_count"}, r"has no data set 'leg_count' \(did you mean 'leg_counting'\?\)"),
        ({"source_dataset": "composite"}, "has no data set 'composite'"),
        (
            {"source_dataset": "leg_counting", "options": ("max_animal = 4",)},
            r"no option 'max_animal' \(did you mean 'max_an",
        ),
        ({"source_dataset": "leg_counting", "options": ("max_animals = 0",)}, "data set leg_counting: "),
        ({"source_dataset": "leg_counting", "options": ("max_animals",)}, "an option is a name and its value in TOML"),
        ({"source_dataset": "leg_counting", "options": ("a = 1\nb = 2",)}, "an option is a name and its value in TOML"),
        ({"source_dataset": "leg_counting", "options": ("seed = 1",)}, "has seed, which covey sets itself"),
        ({"source_dataset": "leg_counting", "options": ("max_animals = 4", "max_animals = 5")}, "max_animals twice"),
        ({"source_dataset": "leg_counting", "options": ('max_animals = "many"',)}, "leg_counting"),
    ],
)
def test_a_wrong_field_is_one_line(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        ReasoningGym(**fields)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.config.tasks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs a package: pip install "covey\[reasoning-gym\]"'):
        ReasoningGymConfig(source_dataset="leg_counting").check()


def test_a_recipe_with_the_task_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[task]\nname = "reasoning_gym"\nsource_dataset = "leg_counting"\noptions = ["max_animals = 4"]\n'
    )
    assert read_recipe(tmp_path / "r.toml").task == ReasoningGymConfig("leg_counting", ("max_animals = 4",))  # type: ignore[union-attr]


def test_the_answer_of_a_conversation_is_in_its_last_turn(grader: RewardGrader) -> None:
    start = task_of("chain_sum", options=("min_terms = 2", "max_terms = 2")).held_out(1)[0]
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "1 + 2"}}}
    right = f"<answer>{start.columns['answer']}</answer>"

    def conversation(first: str, last: str) -> Rollout:
        messages = [
            {"role": "assistant", "content": first, "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": last},
        ]
        return Rollout(
            context=(), actions=[1], behavior_logprobs=[0.0], end=EndReason.STOP, text="", messages=messages,
            turn_rewards=[0.0, 0.0], step_ends=[0, 0], environment={},
        )  # fmt: skip

    group = Group(start, [conversation("", f"It is {right}"), conversation(right, "<answer>none</answer>")])
    grader.grade([group])
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
