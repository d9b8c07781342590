"""Environments of tests, in the style `step`."""

import builtins
import os
import random
import subprocess
import sys
import time


class Guess:
    """Guess a digit; the reply says where the secret is."""

    def reset(self, seed=0):
        self.secret = random.randint(0, 9)
        self.guesses = 0
        return "Guess"

    def step(self, message):
        self.guesses += 1
        digits = [character for character in message if character.isdigit()]
        if not digits:
            return "a digit", 0.0, False
        guess = int(digits[0])
        done = guess == self.secret
        return ("yes" if done else "higher" if guess < self.secret else "lower"), float(done), done


class Adder:
    """A tool that adds up numbers to a total, which begins at random."""

    def reset(self, **columns):
        self.total = random.randint(0, 9)
        self.reward = 0.0

    def add(self, number: int) -> str:
        """Add a number to the total.

        Args:
            number: a whole number
        """
        self.total += number
        self.reward = float(self.total % 10 == 0)
        return f"the total is {self.total}"


class Faulty:
    """Does what the message or the column `fault` says."""

    def __init__(self):
        self.log = []
        self._hidden = object()

    def reset(self, fault="", columns=None):
        return self.commit(fault) if fault else None

    def step(self, message):
        self.log.append(message)
        found = self.commit(message)
        return found if isinstance(found, tuple) else (found, 0.5, False)

    def commit(self, fault):
        name, _, argument = fault.partition(" ")
        return getattr(self, f"do_{name}", lambda _: f"got {fault}")(argument)

    def do_raise(self, text):
        raise RuntimeError(text)

    def do_hang(self, seconds):
        time.sleep(1000)

    def do_die(self, code):
        os._exit(int(code))

    def do_kill(self, _):
        os.kill(os.getpid(), 9)

    def do_exit(self, _):
        sys.exit(3)

    def do_huge(self, count):
        return "x" * int(count)

    def do_number(self, _):
        return 42

    def do_surrogate(self, _):
        return "a\ud800b"

    def do_reward(self, value):
        return "", {"nan": float("nan"), "text": "high", "none": None}[value], False

    def do_two(self, _):
        return "reply", 1.0

    def do_done(self, _):
        return "reply", 1.0, "no"

    def do_fork(self, _):
        if os.fork() == 0:
            return "of the child"
        return "of the parent"

    def do_child(self, _):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return str(child.pid)

    def do_print(self, text):
        print(text, flush=True)
        return "printed"

    def do_random(self, _):
        return str(random.random())

    def do_shared(self, _):
        Faulty.count = getattr(Faulty, "count", 0) + 1
        return str(Faulty.count)


class Nothing:
    """No environment."""


class Sized(Guess):
    """Needs an argument."""

    def __init__(self, size):
        self.size = size


class Unrepeatable(Guess):
    """Draws its secret from the system."""

    def reset(self, seed=0):
        self.secret = int.from_bytes(os.urandom(4), "big")
        self.guesses = 0
        return f"Guess {self.secret}"


class Clock(Guess):
    """Tells the time."""

    def step(self, message):
        return str(time.time_ns()), 0.0, False


class Unseeded(Guess):
    """Draws its rewards from a generator of its own."""

    def step(self, message):
        return "ok", random.Random().random(), False


class Late(Guess):
    """Is not repeatable from its second turn on."""

    def step(self, message):
        self.guesses += 1
        number = int.from_bytes(os.urandom(2), "big") if self.guesses > 1 else 0
        return f"number {number}", number / 2**16, False


class Stubborn(Guess):
    """Cannot be reset."""

    def reset(self, seed=0):
        raise RuntimeError("never")


def by_turn(completions, steps, **columns):
    """A reward for each turn: the share of digits in it."""
    return [[sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts] for texts in steps]


def last(completions, **columns):
    """The last digit of the model in a conversation."""
    turns = [[message["content"] for message in messages if message["role"] == "assistant"] for messages in completions]
    return [float(texts[-1][-1]) for texts in turns]


class Steady:
    """Answers every turn alike; the reward depends on the message."""

    def reset(self, **columns):
        return "Go"

    def step(self, message):
        return "ok", float(sum(map(ord, message)) % 7), False


class Breaking(Steady):
    """Does what the column `fault` says: method, moment (of a turn, from 1; 0: reset) and argument."""

    def reset(self, fault, **columns):
        self.turns = 0
        self._fault = fault
        return self._at(0) or "Go"

    def step(self, message):
        self.turns += 1
        found = self._at(self.turns)
        reply, reward, done = super().step(message)
        return found if isinstance(found, tuple) else (reply if found is None else found, reward, done)

    def _at(self, turn):
        name, moment, argument = self._fault
        return getattr(self, f"do_{name}")(argument) if turn == moment else None

    def do_raise(self, error):
        raise getattr(builtins, error)("broken\nin two lines")

    def do_recursion(self, _):
        return self.do_recursion(_)

    def do_hang(self, _):
        time.sleep(1000)

    def do_busy(self, _):
        while True:
            pass

    def do_exit(self, code):
        os._exit(code)

    def do_kill(self, number):
        os.kill(os.getpid(), number)

    def do_close(self, _):
        os.closerange(3, 100)
        return "closed"

    def do_return(self, value):
        return value if not isinstance(value, list) else tuple(value)

    def do_reply(self, reply):
        return reply * 2**20 if reply == "x" else reply

    def do_number(self, value):
        return ("ok", float(value), False)

    def do_bytes(self, _):
        return (b"ok", 0.0, False)

    def do_attribute(self, _):
        type(self).reward = property(lambda self: 1 / 0)

    def do_print(self, _):
        print("printed " * 10_000)


class Greeting(Steady):
    """The first observation has the length of the column."""

    def reset(self, length):
        return "o" * length


class Dice:
    """Tools without an observation."""

    def roll(self, sides: int) -> int:
        """Roll.

        Args:
            sides: number
        """
        return sides
