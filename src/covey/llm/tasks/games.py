"""Problems of the environments `guess_number` and `maze`, which are solved in several turns."""

from __future__ import annotations

import random
from typing import Any

from covey.config import ConfigError, GuessNumberConfig, MazeConfig, RewardConfig
from covey.llm.conversation.environments import guess_number, maze
from covey.llm.tasks.generated import GIVE_UP_AFTER, GeneratedTask, Problem, checked


class GuessNumberTask(GeneratedTask):
    """Numbers to guess, for the environment `guess_number`, which pays the reward.

    The columns are those of the environment: `secret`, `highest`, `guesses`.

    >>> GuessNumberTask(highest=20, guesses=5)
    """

    name = "guess_number"
    default_rewards: tuple[RewardConfig, ...] = ()

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of GuessNumberConfig."""
        self.config = checked(GuessNumberConfig, fields)

    def problem(self, rng: random.Random) -> Problem:
        highest, guesses = self.config.highest, self.config.guesses
        secret = rng.randint(1, highest)
        return Problem(
            key=f"guess_number {secret} of {highest}",
            question=guess_number.question(highest, guesses),
            columns={"secret": secret, "highest": highest, "guesses": guesses},
            hidden=str(secret),
        )


class MazeTask(GeneratedTask):
    """Random mazes with a way to the exit, for the environment `maze`, which pays the reward.

    A maze has `size` x `size` places; about a quarter of them are walls. The shortest way from the start to the exit
    has at least `size` steps, and at most as many as the moves that are allowed. The columns are those of the
    environment: `maze`, `moves`.

    >>> MazeTask(size=5, moves=15)
    """

    name = "maze"
    default_rewards: tuple[RewardConfig, ...] = ()

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of MazeConfig."""
        self.config = checked(MazeConfig, fields)
        if self.config.moves < self.config.size:
            raise ConfigError(
                f"task.moves is {self.config.moves}, but the way to the exit has at least {self.config.size} steps "
                "(task.size): set task.moves to twice the size or more"
            )

    def problem(self, rng: random.Random) -> Problem:
        size, moves = self.config.size, self.config.moves
        for _ in range(GIVE_UP_AFTER):
            places = [(row, column) for row in range(size) for column in range(size)]
            start, goal = rng.sample(places, 2)
            marks = {place: maze.WALL for place in places if rng.random() < 0.25} | {start: maze.START, goal: maze.EXIT}
            lines = ["".join(marks.get((row, column), " ") for column in range(size)) for row in range(size)]
            if size <= maze.distances(lines, goal).get(start, 0) <= moves:
                return Problem(
                    key=f"maze {lines}",
                    question=maze.question(lines, moves),
                    columns={"maze": lines, "moves": moves},
                    hidden=str(lines),
                )
        raise ConfigError("task maze: no maze can be made; allow more moves")
