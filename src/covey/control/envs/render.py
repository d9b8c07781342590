"""One episode as an animated picture."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs.registration import refuse_broken
from covey.control.envs.vector_env import Environments, make_environments

MOST_FRAMES = 300  # more make files that mail and web pages refuse
MOST_PIXELS = 480  # of the longer side
MOST_FPS = 25.0  # browsers slow faster GIFs down
MOST_DECISIONS = 10_000  # an environment without an end stops here
COLOURS = 64
LAST_FRAME_MILLISECONDS = 1000  # before the episode begins anew
USUAL_FPS = 30.0  # of an environment that names none


def render_episode(
    config: EnvironmentConfig, act: Callable[[NDArray[np.float32]], NDArray[Any]], seed: int, path: Path
) -> float:
    """Play one episode from the start that `seed` names and write it to `path` as an animated GIF.

    `act` gets one raw observation [1, D] and returns one action, as `Environments.step` takes it. The picture runs at
    the environment's own speed; long episodes show fewer frames of each second. No display is needed.

    Returns:
        The undiscounted return of the episode.

    Raises:
        ConfigError: an environment that cannot be drawn.
    """
    single = replace(config, vectorization="sync")
    speed = _decisions_per_second(single)
    environments = _make_drawn(single)
    film = _Film(speed)
    total = 0.0
    try:
        with refuse_broken(config.id):
            observation_1D = environments.reset([seed])
            film.add(environments.render())
        for _ in range(MOST_DECISIONS):
            step = environments.step(act(observation_1D))
            film.add(environments.render())
            total += float(step.reward_N[0])
            observation_1D = step.observation_ND
            if step.terminated_N[0] or step.truncated_N[0]:
                break
    finally:
        environments.close()
    film.write(path)
    return total


def can_draw(config: EnvironmentConfig) -> bool:
    """Whether `render_episode` works here: the environment offers pixels, and what draws them is installed."""
    single = replace(config, vectorization="sync")
    try:
        _decisions_per_second(single)
        environments = _make_drawn(single)
        try:
            with refuse_broken(config.id):
                environments.reset([0])
                Image.fromarray(environments.render())
        finally:
            environments.close()
    except ConfigError:
        return False
    return True


def _make_drawn(config: EnvironmentConfig) -> Environments:
    """One copy that draws to memory."""
    # Without these, pygame looks for a screen and loudspeakers and greets on stdout.
    for name, value in (
        ("SDL_VIDEODRIVER", "dummy"),
        ("SDL_AUDIODRIVER", "dummy"),
        ("PYGAME_HIDE_SUPPORT_PROMPT", "1"),
    ):
        os.environ.setdefault(name, value)
    return make_environments(config, 1, render_mode="rgb_array")


def _decisions_per_second(config: EnvironmentConfig) -> float:
    """Decisions per second, as the environment's metadata says."""
    environments = make_environments(config, 1)
    environments.close()
    if "rgb_array" not in environments.metadata.get("render_modes", ()):
        raise ConfigError(f"environment.id: {config.id!r} cannot be drawn: it offers no render mode 'rgb_array'")
    return float(environments.metadata.get("render_fps") or USUAL_FPS) / config.action_repeat


class _Film:
    """The frames of an episode of unknown length: when there are too many, every second one goes."""

    def __init__(self, frames_per_second: float) -> None:
        self._every = max(1, math.ceil(frames_per_second / MOST_FPS))
        self._seconds = 1 / frames_per_second
        self._seen = 0
        self._frames: list[Image.Image] = []
        self._last: Image.Image | None = None  # shown at the end, whatever was left out

    def add(self, pixels: NDArray[np.uint8]) -> None:
        self._last = Image.fromarray(pixels)
        self._last.thumbnail((MOST_PIXELS, MOST_PIXELS))
        if self._seen % self._every == 0:
            self._frames.append(self._last.quantize(COLOURS))
            if len(self._frames) > MOST_FRAMES:
                self._frames = self._frames[::2]
                self._every *= 2
        self._seen += 1

    def write(self, path: Path) -> None:
        assert self._last is not None
        frames = [*self._frames, self._last.quantize(COLOURS)]
        milliseconds = round(1000 * self._seconds * self._every)
        durations = [milliseconds] * len(self._frames) + [LAST_FRAME_MILLISECONDS]
        path.parent.mkdir(parents=True, exist_ok=True)
        frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
