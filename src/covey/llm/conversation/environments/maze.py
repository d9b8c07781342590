"""The environment `maze`: the model walks to the exit of a maze, one direction in a message."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

DIRECTIONS = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
WALL, START, EXIT = "#", "S", "E"
Place = tuple[int, int]


class Maze:
    """A maze of text: `#` is a wall, `S` the start, `E` the exit. The model sees no map, only where it can go.

    The columns are `maze`, a list of lines of equal length, and `moves`, after which the walk ends. The direction is
    the last of north, south, west and east in a message. Half of the reward is for coming nearer, half for the exit:

        0.5 (1 - steps to the exit / steps from the start to the exit) + 0.5 [at the exit]

    Each turn is paid the increase, which is negative for a step away. A message without a direction, and one into a
    wall, use up a move and earn nothing.

    >>> maze = Maze()
    >>> maze.reset(maze=["#####", "#S E#", "#####"], moves=4)
    >>> maze.step("east")
    ('The exit is 1 east. You can go west or east.', 0.25, False)
    """

    def reset(self, maze: Sequence[str], moves: int = 20, **columns: Any) -> None:
        """Begin a walk; the rules are in the prompt.

        Raises:
            ValueError: if the maze has no start, no exit or no way between them.
        """
        self.lines, self.left = list(maze), int(moves)
        self.place = _find(self.lines, START)
        self.distances = distances(self.lines, _find(self.lines, EXIT))
        if self.place not in self.distances or self.left < 1:
            raise ValueError("the environment maze needs a way from S to E, and at least one move")
        self.first_distance = self.distances[self.place]

    def step(self, message: str) -> tuple[str, float, bool]:
        """Go in a direction."""
        self.left -= 1
        found = re.findall(r"\b(north|south|west|east)\b", message.lower())
        before = self.distances[self.place]
        if not found:
            reply = "Reply with north, south, west or east."
        elif (there := _next(self.place, found[-1])) not in self.distances:
            reply = f"There is a wall. {describe(self.lines, self.place)}"
        else:
            self.place = there
            reply = describe(self.lines, there)
        distance = self.distances[self.place]
        reward = 0.5 * (before - distance) / self.first_distance
        if distance == 0:
            return "You are at the exit.", reward + 0.5, True
        if self.left == 0:
            reply += " That was the last move."
        return reply, reward, self.left == 0


def question(lines: Sequence[str], moves: int) -> str:
    """The rules and the first view, as the prompt of a row."""
    return (
        f"You are in a maze. Walk to the exit in at most {moves} moves. Reply with one direction only. "
        f"{describe(lines, _find(lines, START))}"
    )


def describe(lines: Sequence[str], place: Place) -> str:
    """What is seen at a place: where the exit is, and the directions without a wall."""
    row, column = _find(lines, EXIT)
    down, right = row - place[0], column - place[1]
    parts = [f"{abs(down)} {'south' if down > 0 else 'north'}"] * (down != 0)
    parts += [f"{abs(right)} {'east' if right > 0 else 'west'}"] * (right != 0)
    open_ = [name for name in DIRECTIONS if _at(lines, _next(place, name)) != WALL]
    return f"The exit is {' and '.join(parts)}. You can go {' or '.join(open_) or 'nowhere'}."


def _next(place: Place, direction: str) -> Place:
    down, right = DIRECTIONS[direction]
    return place[0] + down, place[1] + right


def _at(lines: Sequence[str], place: Place) -> str:
    row, column = place
    return lines[row][column] if 0 <= row < len(lines) and 0 <= column < len(lines[row]) else WALL


def _find(lines: Sequence[str], mark: str) -> Place:
    for row, line in enumerate(lines):
        if mark in line:
            return row, line.index(mark)
    raise ValueError(f"the environment maze finds no {mark} in the maze")


def distances(lines: Sequence[str], goal: Place) -> dict[Place, int]:
    """Steps to a place from every place that has a way to it."""
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        place = waiting.popleft()
        for direction in DIRECTIONS:
            there = _next(place, direction)
            if there not in found and _at(lines, there) != WALL:
                found[there] = found[place] + 1
                waiting.append(there)
    return found
