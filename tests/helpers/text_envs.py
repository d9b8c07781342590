"""Gymnasium environments of tests, whose spaces are text or nearly; importing this file registers them."""

import string
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Words(gymnasium.Env):
    """The action must be the observation backwards. `most` mistakes truncate."""

    metadata: ClassVar = {"render_modes": ["ansi"]}

    def __init__(self, render_mode=None, most=3):
        self.render_mode, self.most = render_mode, most
        self.observation_space = spaces.Text(20, charset=string.printable)
        self.action_space = spaces.Text(6, min_length=2, charset=string.ascii_lowercase)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or "".join(self.np_random.choice(list("abcdef"), size=4))
        self.mistakes = 0
        return self.word, {}

    def step(self, action):
        right = action == self.word[::-1]
        self.mistakes += not right
        return f"{action}?" if not right else "yes", float(right), right, self.mistakes >= self.most, {}

    def render(self):
        raise AssertionError("text needs no rendering")

    def close(self):
        self.word = ""


class Doors(gymnasium.Env):
    """Doors with the numbers 5, 6 and 7; the observation is a dict of whole numbers and a text."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {"door": spaces.Discrete(9), "grid": spaces.MultiBinary(2), "hint": spaces.Text(9, charset="é")}
        )
        self.action_space = spaces.Discrete(3, start=5)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(np.int64(0)), {}

    def step(self, action):
        return self.seen(action), np.float32(action == 7), bool(action == 7), False, {}

    def seen(self, door):
        return {"door": door, "grid": np.array([0, 1], dtype=np.int8), "hint": "é"}


class Pictures(Doors):
    """Observations that are not text."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (2, 2))


gymnasium.register("Words-v0", Words)
gymnasium.register("Doors-v0", Doors)
gymnasium.register("Pictures-v0", Pictures)
