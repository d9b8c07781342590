"""The environment `guess_number`: the model guesses a number, and is told whether it is higher or lower."""

import math
import re
from typing import Any

HIGHEST, GUESSES = 100, 7  # of rows without these columns


def question(highest: int, guesses: int) -> str:
    """The rules, as the prompt of a row."""
    return (
        f"I think of a whole number from 1 to {highest}. Find it with at most {guesses} guesses. After each guess I "
        "say if my number is higher or lower. Reply with one number only."
    )


class GuessNumber:
    """A number from 1 to `highest` must be found in `guesses` guesses.

    The columns are `secret`, `highest` and `guesses`. The guess is the last number of a message. Half of the reward is
    for narrowing the range, half for finding the number:

        0.5 (1 - log(numbers that are left) / log(highest)) + 0.5 [found]

    Each turn is paid the increase. A message without a number, or a guess that earlier replies exclude, uses up a guess
    and earns nothing.

    >>> game = GuessNumber()
    >>> game.reset(secret=30, highest=100, guesses=7)
    >>> game.step("60")[0]
    'Lower.'
    """

    def reset(self, secret: int, highest: int = HIGHEST, guesses: int = GUESSES, **columns: Any) -> None:
        """Begin a game; the rules are in the prompt.

        Raises:
            ValueError: if the secret is not from 1 to highest.
        """
        self.secret, self.highest, self.left = int(secret), int(highest), int(guesses)
        if not 1 <= self.secret <= self.highest or self.left < 1:
            raise ValueError(
                f"guess_number needs 1 <= secret <= highest and guesses >= 1, not {secret}, {highest}, {guesses}"
            )
        self.low, self.high = 1, self.highest

    def step(self, message: str) -> tuple[str, float, bool]:
        """Answer a guess."""
        self.left -= 1
        before = self._known()
        guess = _last_number(message)
        if guess == self.secret:
            self.low = self.high = self.secret
            return "Right!", self._known() - before + 0.5, True
        if guess is None:
            reply = "Reply with a number."
        elif guess < self.secret:
            reply, self.low = "Higher.", max(self.low, guess + 1)
        else:
            reply, self.high = "Lower.", min(self.high, guess - 1)
        if self.left == 0:
            reply += f" That was the last guess. The number is {self.secret}."
        return reply, self._known() - before, self.left == 0

    def _known(self) -> float:
        """Reward for the numbers that are excluded: 0 at the beginning, 0.5 if one is left."""
        if self.highest == 1:
            return 0.5
        return 0.5 * (1 - math.log(self.high - self.low + 1) / math.log(self.highest))


def _last_number(message: str) -> int | None:
    found = re.findall(r"(?<![\w.])-?[0-9]{1,12}(?![\w]|\.[0-9])", message)
    return int(found[-1]) if found else None
