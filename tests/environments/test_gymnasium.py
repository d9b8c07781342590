"""The environment `gymnasium`, with environments of Gymnasium itself and of `helpers.text_envs`."""

import random

import pytest

from covey.llm.conversation.adapter import Response, WrongEnvironment
from covey.llm.conversation.processes import EnvironmentProcesses
from covey_environments.gymnasium import Gymnasium, colors_as_brackets

WORDS, DOORS = "helpers.text_envs:Words-v0", "helpers.text_envs:Doors-v0"
LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "is_slippery": False}
CLASS = "covey_environments.gymnasium:Gymnasium"


def test_an_episode_of_text() -> None:
    game = Gymnasium(WORDS)
    word = game.reset(seed=3)
    assert word == Gymnasium(WORDS).reset(seed=3) != Gymnasium(WORDS).reset(seed=4)
    assert game.respond(" wrong\n", []) == Response(text="wrong?")
    assert game.respond(word[::-1], []) == Response(text="yes", reward=1.0, done=True)
    assert game.reset(seed=3, options={"word": "abc"}, other=1) == "abc"


def test_an_episode_that_is_truncated_is_over() -> None:
    game = Gymnasium(WORDS, most=2)
    game.reset(seed=1)
    assert [game.respond("no", []).done for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("abcdefg", "The reply has 7 characters. Reply with at most 6."),
        ("a", "The reply is too short. Reply with at least 2 characters."),
        ("", "The reply is too short. Reply with at least 2 characters."),
        ("aB1", "The reply may not have the characters 1 B"),
    ],
)
def test_a_text_that_is_no_action_is_answered_without_a_step(message: str, fault: str) -> None:
    game = Gymnasium(WORDS, most=1)
    game.reset(seed=1)
    assert game.respond(message, []) == Response(text=fault)
    assert game.respond("abcdef", []).done, "the only step that counts"


def test_siblings_without_a_seed_begin_alike() -> None:
    found = []
    for seed in (1, 1, 2):
        random.seed(seed)
        found.append(Gymnasium(WORDS).reset())
    assert found[0] == found[1] != found[2]


def test_frozen_lake_is_played_by_the_names_of_its_actions() -> None:
    lake = Gymnasium(**LAKE)
    assert lake.reset(seed=0) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert lake.respond("I go right.", []).text == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert lake.respond("up? No, LEFT", []).text == "  (Left)\n[S]FFF\nFHFH\nFFFH\nHFFG", "the last name counts"
    assert lake.respond("jump", []) == Response(text="Reply with one of: left, down, right, up.")
    assert lake.respond("upright", []) == Response(text="Reply with one of: left, down, right, up.")
    last = [lake.respond(move, []) for move in ("down", "down", "right", "right", "down", "right")][-1]
    assert (last.reward, last.done) == (1.0, True)
    lake.close()


def test_numbers_are_shown_as_json_and_name_the_actions_of_their_space() -> None:
    doors = Gymnasium(DOORS)
    assert doors.reset(seed=0) == '{"door": 0, "grid": [0, 1], "hint": "é"}'
    assert doors.respond("I take door 6", []).text == '{"door": 6, "grid": [0, 1], "hint": "é"}'
    assert doors.respond("4 or 56 or -7", []).text == "Reply with one of: 5, 6, 7."
    assert doors.respond("7", []).reward == 1.0
    assert Gymnasium("Blackjack-v1", ["stick", "hit"]).reset(seed=1).startswith("[")


def test_the_longest_of_the_names_that_end_together_is_taken() -> None:
    doors = Gymnasium(DOORS, actions=["door", "red door", "blue"])
    doors.reset(seed=0)
    assert '"door": 6' in str(doors.respond("the Red Door", []).text)
    assert '"door": 5' in str(doors.respond("the old door", []).text)


def test_colors_become_brackets() -> None:
    taxi = Gymnasium("Taxi-v4", ["south", "north", "east", "west", "pickup", "dropoff"])
    picture = taxi.reset(seed=3)
    assert "\x1b" not in picture
    assert "[ ]" in picture, "the taxi"
    assert "[R blue]" in picture, "the passenger"
    assert colors_as_brackets("\x1b[43m\x1b[34;1mR\x1b[0m\x1b[0m \x1b[1mx\x1b[0m\x1b[2K") == "[R] x"
    assert colors_as_brackets("\x1b[101mA\x1b[0m\x1b[91mB\x1b[m") == "[A][B red]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Nothing-v0"}, "gymnasium cannot make 'Nothing-v0': NameNotFound"),
        ({"id": "no_module:Words-v0"}, "gymnasium cannot make 'no_module:Words-v0': ModuleNotFoundError"),
        ({"id": "FrozenLake-v1", "slipery": True}, "unexpected keyword argument 'slipery'"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, "FrozenLake-v1 has 4 actions, so the option actions needs 4"),
        ({"id": DOORS, "actions": ["a", "A", "b"]}, "needs 3 different names"),
        ({"id": WORDS, "actions": ["a"]}, "take the option actions out"),
        ({"id": "Pendulum-v1"}, "the actions of Pendulum-v1 are a Box"),
        ({"id": "CartPole-v1"}, "the observations of CartPole-v1 are a Box, which is not text"),
        ({"id": "helpers.text_envs:Pictures-v0"}, "which is not text"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(WrongEnvironment) as refused:
        Gymnasium.prepare(**options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_conversations_have_their_own_episodes_in_processes() -> None:
    processes = EnvironmentProcesses(CLASS, 30.0, 1000, LAKE)
    one, other = processes.open(0), processes.open(0)
    for session in (one, other):
        assert session.ask({"do": "describe"}).result(60)["tools"] == []
        assert session.ask({"do": "reset", "columns": {"seed": 1}}).result(60)["text"].startswith("[S]")
    assert one.ask({"do": "respond", "message": "right", "calls": []}).result(60)["text"].startswith("  (Right)\nS[F]")
    reply = other.ask({"do": "respond", "message": "down", "calls": []}).result(60)
    assert reply["text"].startswith("  (Down)\nSFFF\n[F]")
    assert (reply["texts"], reply["reward"], reply["done"]) == ([], 0.0, False)
    end = one.ask({"do": "end"}).result(60)
    assert (end["attributes"], end["reward"]) == ({}, None)
    processes.close()
