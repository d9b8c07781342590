"""The built-in environments: replies, rewards, and what they make of any text of a model."""

import importlib
import math
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covey.config import ConfigError
from covey.config.conversation import BUILT_IN_ENVIRONMENTS
from covey.llm.conversation.environments import maze as mazes
from covey.llm.conversation.environments.calculator import Calculator, shown
from covey.llm.conversation.environments.guess_number import GuessNumber
from covey.llm.conversation.environments.maze import Maze
from covey.llm.conversation.environments.python import Python
from covey.llm.conversation.environments.search import Search
from covey.llm.conversation.tool_calls import ToolCall
from covey.llm.conversation.tools import ToolError, call_tool, describe_tools
from covey.llm.tasks import Lookup, MazeTask
from helpers.sandboxes import any_backend

TEXTS = {"a.txt": "Cats sleep all day.", "b.md": "Dogs run. Dogs bark.", "sub/c.txt": "A dog slept."}


def calculated(expression: str) -> str:
    return call_tool(Calculator(), ToolCall("calculate", {"expression": expression}), CALCULATOR_TOOLS)


CALCULATOR_TOOLS = describe_tools(Calculator)


@pytest.mark.parametrize("name", BUILT_IN_ENVIRONMENTS)
def test_every_environment_has_tools_or_steps_and_can_be_sent_to_a_process(name: str) -> None:
    module, _, kind = BUILT_IN_ENVIRONMENTS[name].partition(":")
    environment_class = getattr(importlib.import_module(module), kind)
    has_tools = bool(describe_tools(environment_class))
    assert has_tools != hasattr(environment_class, "step")
    assert pickle.loads(pickle.dumps(environment_class)) is environment_class
    assert environment_class.__doc__


# ---- calculator ----


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("123 + 456", "579"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 - 10", "-3"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("1.5 * 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2^-2", "0.25"),
        ("3 × 4 ÷ 2 − 1 =", "5"),
        ("1,234 + 1", "1235"),
        ("999999999999 * 999999999999", "999999999998000000000001"),
        ("5", "5"),
    ],
)
def test_the_calculator_computes(expression: str, result: str) -> None:
    assert calculated(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("", "the expression may only have numbers"),
        ("import os", "the expression may only have numbers"),
        ("1_0 + x", "the expression may only have numbers"),
        ("٣ + 1", "the expression may only have numbers"),
        ("1 +", "the expression is not complete"),
        ("(1)(2)", "the expression is not complete"),
        ("012 + 1", "the expression is not complete"),
        ("((1)", "the expression is not complete"),
        ("1 + 2, 3", "the expression may only have numbers"),
        ("9 ** 9 ** 9", "the result is too large"),
        ("9 ** 3000 * 9 ** 3000", "the result is too large"),
        ("2 ** 0.5", "an exponent must be a whole number"),
        ("1" * 201, "the expression has more than 200 characters"),
        ("(" * 150 + "1", "the expression is not complete"),
    ],
)
def test_the_calculator_answers_a_bad_expression(expression: str, message: str) -> None:
    assert calculated(expression).startswith(f"Error: {message}")


@pytest.mark.slow
@given(st.text(st.sampled_from("0123456789+-*/%.(), ^="), max_size=25))
@example("-" * 199 + "1")
@settings(max_examples=150)
def test_no_expression_raises_anything_else(expression: str) -> None:
    assert calculated(expression)


@given(st.fractions(max_denominator=10**6))
@settings(max_examples=50)
def test_a_result_is_shown_to_twelve_digits(value: Fraction) -> None:
    assert abs(Fraction(shown(value)) - value) <= abs(value) / 10**11


# ---- python ----


@pytest.mark.slow
def test_programs_run_in_the_sandbox() -> None:
    any_backend()
    python = Python(time_limit_seconds=20.0, most_characters=20)
    tools = describe_tools(python)

    def run(code: str) -> str:
        return call_tool(python, ToolCall("run_python", {"code": code}), tools)

    assert run("print(6 * 7)") == "42"
    assert run("x = 1") == "(the program printed nothing)"
    assert run("1 / 0") == "Error: ZeroDivisionError: division by zero"
    assert run("print(") == "Error: SyntaxError: '(' was never closed"
    assert run("print('a' * 50)") == "a" * 20 + "... (51 characters)"
    assert run("open('/etc/passwd')").endswith("'/etc/passwd'")
    assert run("print('\ud800')").startswith("?")
    assert Python(time_limit_seconds=0.5).run_python("while True: pass") == "Error: the program took longer than 0.5 s"
    assert "exit code 3" in run("raise SystemExit(3)")


# ---- search ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {**TEXTS, "d.bin": "dog"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_search_ranks_the_texts_of_a_folder(folder: Path) -> None:
    search = Search(folder=str(folder))
    search.reset()
    assert search.search("dogs") == "b.md: Dogs run. Dogs bark.\nsub/c.txt: A dog slept."
    assert search.search("sleeping CAT") == "a.txt: Cats sleep all day."
    assert search.search("birds") == "no text was found"
    assert search.read("sub/c.txt") == "A dog slept."
    assert pickle.loads(pickle.dumps(search)).search("dogs") == search.search("dogs")
    assert Search(folder=str(folder), results=1).search("dogs") == "b.md: Dogs run. Dogs bark."
    assert Search(folder=str(folder), most_characters=4).read("a.txt") == "Cats..."


def test_search_takes_the_texts_of_a_row() -> None:
    search = Search()
    search.reset(documents={"one": "red", "two": "blue", "three": None}, answer="x")
    assert search.search("blue") == "two: blue"
    search.reset(documents=["green"])
    assert search.search("blue") == "no text was found"
    assert search.read("1") == "green"
    with pytest.raises(ToolError, match="there is no text with this name"):
        search.read("two")
    with pytest.raises(ValueError, match="has no texts"):
        Search().reset(documents=None)


@given(st.text(max_size=20))
@example('dog" OR NEAR(* ^ AND')
@example("NOT")
@settings(max_examples=40)
def test_every_query_is_answered(query: str) -> None:
    search = Search()
    search.reset(documents=TEXTS)
    assert isinstance(call_tool(search, ToolCall("search", {"query": query}), SEARCH_TOOLS), str)


SEARCH_TOOLS = describe_tools(Search)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no files \.txt or \.md"):
        Search(folder=str(tmp_path))
    with pytest.raises(ConfigError, match="finds no folder"):
        Search(folder=str(tmp_path / "none"))


def test_the_answer_of_a_lookup_is_found_by_a_search() -> None:
    for start in Lookup(documents=15).draw(0, 1, 20):
        search = Search()
        search.reset(**start.columns)
        name = search.search(start.prompt[-1]["content"].partition("town ")[2]).partition(":")[0]
        assert start.columns["answer"] in search.read(name)


# ---- guess_number ----


def play(secret: int, messages: list[str], highest: int = 8, guesses: int = 4) -> list[tuple[str, float, bool]]:
    game = GuessNumber()
    game.reset(secret=secret, highest=highest, guesses=guesses, other=1)
    return [game.step(message) for message in messages]


def test_guesses_are_paid_for_what_they_exclude() -> None:
    [first, second] = play(7, ["I guess 4", "It is 7."])
    assert first == ("Higher.", pytest.approx(0.5 * (1 - math.log(4) / math.log(8))), False)  # 5 to 8 are left
    assert second == ("Right!", pytest.approx(0.5 + 0.5 * math.log(4) / math.log(8)), True)
    assert play(3, ["4"])[0] == ("Lower.", pytest.approx(0.5 * (1 - math.log(3) / math.log(8))), False)


def test_a_guess_that_excludes_nothing_earns_nothing() -> None:
    replies = play(7, ["4", "what?", "3", "2.5", ""], guesses=9)
    assert [reply for reply, _, _ in replies] == ["Higher.", "Reply with a number.", "Higher."] + [
        "Reply with a number."
    ] * 2
    assert [reward for _, reward, _ in replies[1:]] == [0, 0, 0, 0]
    assert play(3, ["5", "7"])[1] == ("Lower.", 0, False)


def test_the_last_guess_ends_the_game() -> None:
    replies = play(7, ["1", "2", "3", "4"])
    assert [done for _, _, done in replies] == [False, False, False, True]
    assert replies[-1][0] == "Higher. That was the last guess. The number is 7."


@given(st.integers(2, 60), st.data())
@settings(max_examples=40)
def test_the_rewards_of_a_game_are_at_most_one_and_one_if_it_is_won(highest: int, data: st.DataObject) -> None:
    secret = data.draw(st.integers(1, highest))
    guesses = data.draw(st.lists(st.integers(-5, highest + 5), min_size=1, max_size=8))
    game, total = GuessNumber(), 0.0
    game.reset(secret=secret, highest=highest, guesses=len(guesses))
    for guess in guesses:
        _, reward, done = game.step(str(guess))
        assert reward >= 0
        total += reward
        if done:
            break
    assert total == pytest.approx(1) if guess == secret else total <= 0.5 + 1e-9


def test_a_game_without_a_possible_number_is_refused() -> None:
    with pytest.raises(ValueError, match="1 <= secret <= highest"):
        GuessNumber().reset(secret=101)


# ---- maze ----

LINES = ["S #", "  E"]


def walk(*messages: str, moves: int = 9, lines: list[str] = LINES) -> list[tuple[str, float, bool]]:
    maze = Maze()
    maze.reset(maze=lines, moves=moves)
    return [maze.step(message) for message in messages]


def test_a_walk_to_the_exit() -> None:
    assert mazes.question(LINES, 9).endswith("The exit is 1 south and 2 east. You can go south or east.")
    replies = walk("East", "go south", "east, I think")
    assert replies == [
        ("The exit is 1 south and 1 east. You can go south or west.", pytest.approx(1 / 6), False),
        ("The exit is 1 east. You can go north or west or east.", pytest.approx(1 / 6), False),
        ("You are at the exit.", pytest.approx(1 / 6 + 0.5), True),
    ]


def test_walls_and_other_words_use_up_moves_and_steps_away_cost() -> None:
    replies = walk("east", "east", "hello", "west", "north", moves=5)
    assert replies[1] == ("There is a wall. The exit is 1 south and 1 east. You can go south or west.", 0.0, False)
    assert replies[2] == ("Reply with north, south, west or east.", 0.0, False)
    assert replies[3][1:] == (pytest.approx(-1 / 6), False)
    assert replies[4][0].startswith("There is a wall.")
    assert replies[4][0].endswith("That was the last move.")
    assert replies[4][1:] == (0.0, True)


@pytest.mark.parametrize("lines", [["S#E"], ["S "], ["E "], []])
def test_a_maze_without_a_way_is_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="the environment maze"):
        Maze().reset(maze=lines)


def test_mazes_of_the_task_can_be_solved_and_are_paid_one() -> None:
    for start in [*MazeTask(size=4, moves=8).draw(0, 1, 10), *MazeTask().held_out(10)]:
        maze = Maze()
        maze.reset(**start.columns)
        assert 4 <= maze.first_distance <= start.columns["moves"]
        assert mazes.describe(start.columns["maze"], maze.place) in start.prompt[0]["content"]
        total, done = 0.0, False
        while not done:
            best = min(mazes.DIRECTIONS, key=lambda name: maze.distances.get(mazes._next(maze.place, name), 10**6))
            _, reward, done = maze.step(best)
            total += reward
        assert total == pytest.approx(1)
