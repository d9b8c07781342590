"""The tasks: right answers, disjoint sides, draws that depend on their arguments alone, and broken data files."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    CountdownConfig,
    DatasetConfig,
    EnvironmentTaskConfig,
    RewardConfig,
    WordProblemsConfig,
)
from covey.llm.rewards.rules import solves_countdown
from covey.llm.tasks import (
    Arithmetic,
    CodeFunctions,
    Countdown,
    EnvironmentRows,
    EnvironmentSeeds,
    GuessNumberTask,
    Lookup,
    MazeTask,
    PromptDataset,
    RunningTotal,
    WordProblems,
    build_task,
)
from covey.llm.tasks.arithmetic import problem_kind
from covey.llm.tasks.environment import TRAINING_SEEDS
from helpers.contracts import TaskContract
from helpers.examples import write_rows

GENERATED = {
    "arithmetic": Arithmetic(),
    "arithmetic_mixed": Arithmetic(digits=(1, 2, 3), operators=("+", "-", "*"), terms=(2, 3, 4)),
    "countdown": Countdown(numbers=4, operators=("+", "-", "*", "/")),
    "word_problems": WordProblems(steps=(1, 2, 3, 4)),
}


TASKS = GENERATED | {
    "code_functions": CodeFunctions(),
    "guess_number": GuessNumberTask(),
    "maze": MazeTask(),
    "lookup": Lookup(),
    "environment_seeds": EnvironmentSeeds(),
}


def question(start):
    return start.prompt[0]["content"]


def evaluate(expression):
    """The reference for gold answers: Python's own arithmetic, on text that this test has vetted."""
    assert re.fullmatch(r"[0-9+\-*/() ]+", expression)
    return eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})


@pytest.fixture(params=GENERATED.values(), ids=GENERATED.keys())
def task(request):
    return request.param


# ---- what all generated tasks promise ----


def test_prompt_is_one_user_message_with_a_gold_answer(task):
    starts = task.draw(seed=3, step=5, count=8)
    assert [start.index for start in starts] == list(range(8))
    for start in starts:
        assert [message["role"] for message in start.prompt] == ["user"]
        assert isinstance(start.columns["answer"], str)


class TestTasks(TaskContract):
    @pytest.fixture(params=TASKS.values(), ids=TASKS.keys())
    def task(self, request):
        return request.param


@pytest.mark.slow
def test_draws_are_the_same_in_another_process():
    code = (
        "from covey.llm.tasks import *\n"
        "for t in (Arithmetic(), Countdown(), WordProblems()):\n"
        "    print([s.prompt[0]['content'] for s in t.draw(7, 3, 4) + t.held_out(4)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    here = [
        str([question(start) for start in task.draw(7, 3, 4) + task.held_out(4)])
        for task in (Arithmetic(), Countdown(), WordProblems())
    ]
    assert other.stdout.splitlines() == here


@pytest.mark.slow
def test_a_small_task_holds_out_what_it_has():
    small = Arithmetic(digits=(1,), operators=("+",))
    held_out = small.held_out(200)
    assert 1 <= len(held_out) < 30
    assert small.held_out(5) == held_out[:5]
    trained = {question(start) for step in range(1, 40) for start in small.draw(0, step, 8)}
    assert not trained & {question(start) for start in held_out}
    with pytest.raises(ConfigError, match="task word_problems has no problem that is held out: make the task larger"):
        WordProblems(steps=(1,), largest=2).held_out(1)


def test_script_users_and_configs_get_the_same_task():
    for config in (ArithmeticConfig(digits=(3,)), CountdownConfig(numbers=4), WordProblemsConfig(steps=(3,))):
        task = build_task(config)
        assert task.config == config
        assert task.draw(1, 1, 5) == type(task)(**vars(config)).draw(1, 1, 5)
    assert Arithmetic(digits=[2, 3]).config.digits == (2, 3)


# ---- arithmetic ----


@pytest.mark.slow
def test_arithmetic_answers_are_right():
    task = GENERATED["arithmetic_mixed"]
    for start in task.draw(0, 1, 500) + task.held_out(200):
        expression = re.fullmatch(r"What is (.+)\? Reply with the number only\.", question(start))[1]
        assert start.columns == {"answer": str(evaluate(expression))}


def test_arithmetic_covers_digits_operators_and_terms_evenly():
    task = Arithmetic(digits=(1, 3), operators=("+", "-", "*"), terms=(2, 4))
    starts = task.draw(0, 1, 3000)
    tokens = [question(start)[len("What is ") :].split("?")[0].split() for start in starts]
    terms = Counter((len(row) + 1) // 2 for row in tokens)
    digits = Counter(len(token) for row in tokens for token in row[::2])
    operators = Counter(token for row in tokens for token in row[1::2])
    for counts, values in ((terms, {2, 4}), (digits, {1, 3}), (operators, set("+-*"))):
        assert set(counts) == values
        expected = counts.total() / len(values)
        assert all(abs(count - expected) < 0.1 * expected for count in counts.values())


def test_arithmetic_draws_every_operand():
    pairs = [question(start)[len("What is ") :].split("?")[0].split() for start in Arithmetic().draw(1, 1, 4000)]
    for place in (0, 2):
        assert {int(pair[place]) for pair in pairs} == set(range(10, 100))


def test_swapped_terms_stay_on_one_side():
    """38 + 47 in training would give 47 + 38 away."""
    task = Arithmetic(operators=("+", "*"))
    held_out = {evaluate_key(question(start)) for start in task.held_out(300)}
    trained = {evaluate_key(question(start)) for start in task.draw(0, 1, 5000)}
    assert not held_out & trained


def evaluate_key(text):
    left, operator, right = text[len("What is ") :].split("?")[0].split()
    return operator, *sorted((int(left), int(right)))


def test_instruction_follows_the_question():
    assert question(Arithmetic(instruction="Think first.").draw(0, 1, 1)[0]).endswith("? Think first.")
    assert question(Arithmetic(instruction="").draw(0, 1, 1)[0]).endswith("?")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"digits": (0,)}, "digits"),
        ({"operators": ("%",)}, "operators"),
        ({"terms": (1,)}, "terms"),
        ({"digits": ()}, "empty"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Arithmetic(**fields)


# ---- countdown ----


@pytest.mark.parametrize("operators", [("+", "-", "*"), ("+", "-", "*", "/"), ("-",), ("/", "*")])
def test_countdown_is_solvable_by_its_own_answer(operators):
    task = Countdown(numbers=3, largest=25, operators=operators)
    for start in task.draw(0, 1, 100) + task.held_out(40):
        columns = start.columns
        assert evaluate(columns["answer"]) == columns["target"]
        assert Counter(map(int, re.findall(r"\d+", columns["answer"]))) == Counter(columns["numbers"])
        assert set(re.findall(r"[+\-*/]", columns["answer"])) <= set(operators)
        assert solves_countdown(columns["answer"], columns["numbers"], columns["target"], columns["operators"])
        assert columns["target"] not in columns["numbers"]
        assert 1 <= columns["target"] <= 250
        assert str(columns["target"]) in question(start)
        assert ", ".join(map(str, columns["numbers"])) in question(start)


# ---- word problems ----


def test_word_problems_calculate_right_with_numbers_from_the_text():
    task = GENERATED["word_problems"]
    lengths = Counter()
    for start in task.draw(0, 1, 600) + task.held_out(100):
        steps = start.columns["solution"].split("; ")
        lengths[len(steps)] += 1
        previous = None
        in_text = Counter(map(int, re.findall(r"\d+", question(start))))
        used = Counter()
        for step in steps:
            left, _, right, _, result = step.split()
            assert evaluate(step.split(" = ")[0]) == int(result) >= 0  # whole at every step
            assert previous is None or left == previous
            used[int(right)] += 1
            if previous is None:
                used[int(left)] += 1
            previous = result
        assert start.columns["answer"] == previous
        assert used == in_text  # the story tells every number, and no other
        assert max(in_text) <= task.config.largest
        assert "{" not in question(start)
    assert set(lengths) == {1, 2, 3, 4}
    assert min(lengths.values()) > 0.2 * 700


def test_stories_of_several_people_ask_for_the_one_that_was_calculated():
    """Solves them from the words alone, so that a name in the wrong place gives another answer."""
    solved = 0
    for start in GENERATED["word_problems"].draw(2, 1, 600):
        if not (asked := re.search(r"does (\w+) own\?", question(start))):
            continue
        owned = {}
        for sentence in question(start).split(". "):
            if match := re.match(r"(\w+) owns (\d+) shelves with (\d+)", sentence):
                owned[match[1]] = int(match[2]) * int(match[3])
            elif match := re.match(r"(\w+) owns (\d+) (more|fewer|times as many) \w+ (?:than|as) (\w+)", sentence):
                who, number, how, whom = match[1], int(match[2]), match[3], match[4]
                if how == "times as many" and who in owned:
                    owned[whom] = owned[who] // number
                else:
                    change = {"more": 1, "fewer": -1}
                    owned[who] = owned[whom] * number if how not in change else owned[whom] + change[how] * number
            elif match := re.match(r"(\w+) owns (\d+)", sentence):
                owned[match[1]] = int(match[2])
        assert str(owned[asked[1]]) == start.columns["answer"]
        solved += 1
    assert solved > 50


def test_same_calculation_in_other_words_stays_on_one_side():
    task = WordProblems(steps=(1,), largest=10)
    held_out = {start.columns["solution"] for start in task.held_out(100)}
    trained = {start.columns["solution"] for start in task.draw(0, 1, 2000)}
    assert not held_out & trained


def test_word_problems_vary():
    starts = WordProblems().draw(0, 1, 400)
    assert len({question(start).split()[0] for start in starts}) > 20
    shapes = {re.sub(r"\d+", "#", question(start)) for start in starts}
    assert len(shapes) > 300


# ---- JSONL ----


@pytest.fixture
def numbered(tmp_path):
    return write_rows(tmp_path / "data.jsonl", [{"prompt": f"p{i}", "answer": i, "topic": "t"} for i in range(40)])


def test_jsonl_passes_every_column_on(numbered):
    start = PromptDataset(path=numbered).draw(0, 1, 1)[0]
    assert start.columns == {"answer": int(start.prompt[1:]), "topic": "t"}


def test_jsonl_keeps_equal_prompts_on_one_side(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": f"p{i % 10}", "answer": i} for i in range(40)])
    task = PromptDataset(path=path, held_out_fraction=0.3)
    held_out = [start.prompt for start in task.held_out(3)]
    assert len(set(held_out)) == 3
    assert not set(held_out) & {start.prompt for start in task.draw(0, 1, 200)}


def test_jsonl_draws_without_replacement_in_an_order_of_its_own_each_pass(numbered):
    task = PromptDataset(path=numbered, held_out_fraction=0.1)  # 36 lines for training
    passes = [[start.prompt for step in range(6 * p + 1, 6 * p + 7) for start in task.draw(5, step, 6)] for p in (0, 1)]
    assert all(len(set(one)) == 36 for one in passes)
    assert passes[0] != passes[1]
    again = PromptDataset(path=numbered, held_out_fraction=0.1)  # a resumed run
    assert [start.prompt for start in again.draw(5, 9, 6)] == passes[1][12:18]
    assert [start.prompt for start in again.draw(6, 9, 6)] != passes[1][12:18]


def test_jsonl_goes_on_after_what_was_drawn_before(numbered):
    """Steps that draw again take the next rows of the pass, so that each row comes once before any comes twice."""
    task = PromptDataset(path=numbered, held_out_fraction=0.1)
    drawn, before = [], 0
    for step, counts in enumerate([(8, 3, 1), (8,), (8, 8)], start=1):
        first = 0
        for count in counts:
            starts = task.draw(5, step, count, first=first, before=before)
            assert [start.index for start in starts] == list(range(first, first + count))
            drawn += [start.prompt for start in starts]
            first, before = first + count, before + count
    assert drawn == [start.prompt for start in task.draw(5, 1, 36)]
    assert len(set(drawn)) == 36


def test_jsonl_pass_ends_in_the_middle_of_a_step(numbered):
    task = PromptDataset(path=numbered, held_out_fraction=0.1)
    drawn = [start.prompt for step in range(1, 37) for start in task.draw(0, step, 7)]
    assert set(Counter(drawn).values()) == {7}


def test_jsonl_held_out_file(tmp_path, numbered):
    other = write_rows(tmp_path / "held.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    task = PromptDataset(path=numbered, held_out_path=other)
    assert {start.prompt for start in task.held_out(2)} == {"x", "y"}
    assert len({start.prompt for start in task.draw(0, 1, 40)}) == 40
    overlap = write_rows(tmp_path / "overlap.jsonl", [{"prompt": "x"}, {"prompt": "p3"}])
    with pytest.raises(
        ConfigError, match=r"data\.jsonl line 4: this prompt is also in .*overlap\.jsonl line 2.*overlap"
    ):
        PromptDataset(path=numbered, held_out_path=overlap)
    task = PromptDataset(path=numbered, held_out_path=overlap, overlap="drop")
    assert {start.prompt for start in task.held_out(2)} == {"x", "p3"}
    assert {start.prompt for start in task.draw(0, 1, 39)} == {f"p{i}" for i in range(40)} - {"p3"}
    assert "39 different prompts to train on, 2 held out" in task.describe()
    assert "; 1 line dropped that" in task.describe()
    with pytest.raises(ConfigError, match=r"every prompt of .* so none is left for training"):
        PromptDataset(path=numbered, held_out_path=numbered, overlap="drop")


@pytest.mark.parametrize(("prompts", "held_out"), [(2, 1), (3, 1), (12, 1), (15, 2), (40, 4)])
def test_jsonl_files_of_any_size_hold_out_a_tenth_and_at_least_one(tmp_path, prompts, held_out):
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": f"p{i}"} for i in range(prompts)] * 2)
    task = PromptDataset(path=path)
    assert len(task.held_out(256)) == held_out
    assert f"{prompts - held_out} different" in task.describe()
    assert f"{held_out} held out" in task.describe()
    trained = {start.prompt for start in task.draw(0, 1, 4 * prompts)}
    assert len(trained) == prompts - held_out
    assert not trained & {start.prompt for start in task.held_out(256)}


def test_jsonl_with_one_prompt_says_what_to_do(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": "p"}, {"prompt": "p"}])
    with pytest.raises(ConfigError, match=r"only one prompt, so none is left for evaluation: .*task.held_out_path"):
        PromptDataset(path=path)
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "q"}])
    assert [start.prompt for start in PromptDataset(path=path, held_out_path=other).held_out(256)] == ["q"]


def test_jsonl_takes_rows_of_verl_and_of_reasoning_gym(tmp_path):
    chat = [{"role": "user", "content": "2 + 2?"}]
    path = write_rows(
        tmp_path / "d.jsonl",
        [
            {"data_source": "s", "prompt": chat, "reward_model": {"style": "rule", "ground_truth": "4"}},
            {"question": "3 + 3?", "answer": "6", "metadata": {"x": 1}},
            {"prompt": "4 + 4?", "answer": "8"},
        ],
    )
    task = PromptDataset(path=path, held_out_fraction=0.34)
    starts = [*task.draw(0, 1, 2), *task.held_out(1)]
    rows = {start.columns["answer"]: start for start in starts}
    assert set(rows) == {"4", "6", "8"}
    assert rows["4"].prompt == chat
    assert rows["4"].columns["data_source"] == "s"
    assert rows["6"].prompt == [{"role": "user", "content": "3 + 3?"}]
    assert rows["6"].columns["metadata"] == {"x": 1}
    assert rows["8"].prompt == "4 + 4?"


def test_which_roles_there_are_is_left_to_the_chat_template(tmp_path):
    chats = [[{"role": role, "content": "p"}] for role in ("wizard", "Küchenchef", "tool result", "r" * 64)]
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": chat} for chat in chats])
    task = PromptDataset(path=path, held_out_fraction=0.25)
    found = [start.prompt for start in (*task.draw(0, 1, 3), *task.held_out(1))]
    assert sorted(found, key=str) == sorted(chats, key=str)


GOOD = '{"prompt": "p", "answer": "1"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p"', "not valid JSON"),
        ('["p"]', "a JSON object is needed, this is a list"),
        ('{"text": "p"}', "there is no 'prompt' and no 'question' (columns: 'text'); rename the column"),
        ('{"question": null}', "'question' must be a string, this is null"),
        ("{}", "there is no 'prompt' and no 'question' (columns: none); rename the column"),
        ('[{"prompt": "p"}]', "this is a list; write each of its objects on a line of its own"),
        ('[\n {"prompt": "p"}\n]', "the line ends within a JSON value; write each object on a line"),
        ('{\n "prompt": "p"\n}', "the line ends within a JSON value; write each object on a line"),
        ('{"prompt": 5}', "'prompt' must be a string or a list of chat messages, this is a number"),
        ('{"prompt": {"role": "user"}}', "this is an object"),
        ('{"prompt": "  "}', "'prompt' is empty"),
        ('{"prompt": []}', "'prompt' is empty"),
        ('{"prompt": [{"content": "p"}]}', "message 1 of 'prompt' needs a 'role'"),
        ('{"prompt": [{"role": "user", "content": "p"}, {"role": "user"}]}', "message 2 of 'prompt' needs a 'content'"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "message 1 of 'prompt' needs a 'content'"),
        ('{"prompt": ["p"]}', "message 1 of 'prompt' needs a 'role'"),
        ('{"prompt": [{"role": "", "content": "p"}]}', "message 1 of 'prompt' has the role '': a role is a printable"),
        ('{"prompt": [{"role": "a\\nb", "content": "p"}]}', "has the role 'a\\nb': a role is a printable name"),
        ('{"prompt": [{"role": "' + "r" * 65 + '", "content": "p"}]}', "printable name of at most 64 characters"),
        ('{"prompt": "p", "completions": 1}', "'completions' is reserved"),
        ('{"prompt": "p", "completion_ids": 1}', "'completion_ids' is reserved"),
        ('{"prompt": "p", "prompts": 1}', "'prompts' is reserved"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_jsonl_names_the_bad_line(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n\n{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(ConfigError, match=rf"data\.jsonl line 4: .*{re.escape(message)}") as caught:
        PromptDataset(path=str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["data.csv", "data.TSV", "my data.xlsx"])
def test_files_of_other_formats_are_told_how_to_be_converted(tmp_path, name):
    path = tmp_path / name
    path.write_text("prompt,answer\n1 + 1,2\n")
    with pytest.raises(
        ConfigError, match=r"is not a JSONL file; convert it: pandas\.read_\w+\(.*\)\.to_json"
    ) as caught:
        PromptDataset(path=str(path))
    ast.parse(str(caught.value).partition("convert it: ")[2])


def test_jsonl_bad_bytes_empty_missing_and_unnamed_files(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl line 2: not valid UTF-8"):
        PromptDataset(path=str(path))
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"data\.jsonl is empty"):
        PromptDataset(path=str(path))
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match="only one prompt"):
        PromptDataset(path=str(path))
    with pytest.raises(ConfigError, match=r"no file .*missing\.jsonl"):
        PromptDataset(path=str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="needs a file"):
        build_task(DatasetConfig())


def test_every_task_names_a_reward_of_its_own(numbered):
    for task in (*GENERATED.values(), PromptDataset(path=numbered)):
        assert all(isinstance(reward, RewardConfig) for reward in task.default_rewards)
        assert task.default_rewards


def answers(task, count=400):
    return [int(start.columns["answer"]) for start in task.draw(0, 1, count)]


def test_arithmetic_has_negative_answers_only_where_asked():
    assert min(answers(Arithmetic())) >= 0
    assert min(answers(Arithmetic(terms=(3,), operators=("-", "*")), 100)) >= 0
    shares = [answer < 0 for answer in answers(Arithmetic(negative=True))]
    assert 0.15 < sum(shares) / len(shares) < 0.35  # half are differences, half of those below 0


@pytest.mark.slow
def test_an_expression_that_is_always_negative_is_an_error():
    with pytest.raises(ConfigError, match="negative = true"):
        Arithmetic(digits=(1,), operators=("-",), terms=(30,)).draw(0, 1, 1)


@pytest.mark.parametrize(
    ("numbers", "operator", "kind"),
    [
        ([12, 7], "+", "2-digit + 1-digit"),
        ([15, 5], "+", "2-digit + 1-digit, carry"),
        ([84, 14], "+", "2-digit + 2-digit"),
        ([55, 45], "+", "2-digit + 2-digit, carry"),
        ([62, 51], "+", "2-digit + 2-digit, carry"),
        ([132, 51], "-", "3-digit - 2-digit, borrow"),
        ([58, 23], "-", "2-digit - 2-digit"),
        ([53, 28], "-", "2-digit - 2-digit, borrow"),
        ([100, 1], "-", "3-digit - 1-digit, borrow"),
        ([50, 50], "-", "2-digit - 2-digit"),
        ([7, 12], "-", "1-digit - 2-digit, negative"),
        ([7, 12], "*", "1-digit * 2-digit"),
    ],
)
def test_kinds_of_arithmetic(numbers, operator, kind):
    assert problem_kind(numbers, [operator]) == kind
    assert problem_kind([*numbers, 3], [operator, "+"]) == kind.partition(",")[0] + " + 1-digit"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "task", [Arithmetic(negative=False), WordProblems(), RunningTotal(), Countdown()], ids=lambda task: task.name
)
def test_held_out_problems_have_the_kinds_of_the_draws(task):
    def shares(starts):
        counts = Counter(start.kind for start in starts)
        assert "" not in counts
        return {kind: number / counts.total() for kind, number in counts.items()}

    held_out, drawn = shares(task.held_out(120)), shares(task.draw(0, 1, 2500))
    common = [kind for kind, share in drawn.items() if share > 0.02 and "1-digit - 1-digit" not in kind]
    for kind in common:
        assert held_out.get(kind, 0.0) == pytest.approx(drawn[kind], abs=0.05), kind


ROWS = [{"prompt": f"p{number}", "number": number} for number in range(20)]


def test_seeds_of_training_are_different_and_never_held_out() -> None:
    task = EnvironmentSeeds(instruction="Go")
    seeds = [start.columns["seed"] for step in range(50) for start in task.draw(0, step, 10)]
    assert len(set(seeds)) == 500
    assert all(0 <= seed < TRAINING_SEEDS for seed in seeds)
    assert [start.columns["seed"] for start in task.held_out(3)] == [TRAINING_SEEDS + number for number in range(3)]
    assert task.draw(3, 5, 1)[0].prompt == [{"role": "user", "content": "Go"}]
    assert task.default_rewards == ()


def test_a_part_of_the_prompts_is_held_out_if_the_environment_has_none() -> None:
    task = EnvironmentRows({"training": ROWS, "held_out": []}, EnvironmentTaskConfig(held_out_fraction=0.2), "it")
    held_out = {start.columns["number"] for start in task.held_out(100)}
    assert len(held_out) == 4
    assert {start.columns["number"] for start in task.draw(0, 1, 16)} == set(range(20)) - held_out
    assert task.describe() == "it: 16 different prompts to train on, 4 held out (task.held_out_fraction = 0.2)"


def test_rows_of_one_prompt_are_told_by_their_columns() -> None:
    rows = [row | {"prompt": "Guess the word."} for row in ROWS]
    task = EnvironmentRows({"training": rows, "held_out": []}, EnvironmentTaskConfig(held_out_fraction=0.2), "it")
    held_out = {start.columns["number"] for start in task.held_out(100)}
    assert len(held_out) == 4
    assert {start.columns["number"] for start in task.draw(0, 1, 16)} == set(range(20)) - held_out
    own = EnvironmentRows({"training": rows[:12], "held_out": rows[12:]}, EnvironmentTaskConfig(), "it")
    assert {start.columns["number"] for start in own.held_out(100)} == set(range(12, 20))


def test_prompts_that_cannot_be_used_are_refused() -> None:
    config = EnvironmentTaskConfig()
    with pytest.raises(ConfigError, match="it, held-out row 1: there is no 'prompt'"):
        EnvironmentRows({"training": ROWS, "held_out": [ROWS[0], {"number": 3}]}, config, "it")
    with pytest.raises(ConfigError, match="so none is left for training"):
        EnvironmentRows({"training": ROWS[:2], "held_out": ROWS}, config, "it")
    with pytest.raises(ConfigError, match="it has only one prompt"):
        EnvironmentRows({"training": ROWS[:1], "held_out": []}, config, "it")


@pytest.mark.slow
def test_a_maze_that_cannot_be_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set task\.moves to twice the size"):
        MazeTask(size=8, moves=5)
    with pytest.raises(ConfigError, match="make the task larger"):
        GuessNumberTask(highest=28).held_out(1)
