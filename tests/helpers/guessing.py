"""Environments of tests, in the style `step`."""

from __future__ import annotations

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


class Unrepeatable(Guess):
    """Draws its secret from the system."""

    def reset(self, seed=0):
        self.secret = int.from_bytes(os.urandom(4), "big")
        self.guesses = 0
        return f"Guess {self.secret}"


class Stubborn(Guess):
    """Cannot be reset."""

    def reset(self, seed=0):
        raise RuntimeError("never")
