"""Renders one episode as an animated GIF."""

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

MOST_FRAMES = 300  # larger files are refused by mail and web pages
MOST_PIXELS = 480  # length of the longer side
MOST_FPS = 25.0  # browsers show faster GIFs more slowly
MOST_DECISIONS = 10_000  # limit for an environment whose episodes do not end
COLOURS = 64
LAST_FRAME_MILLISECONDS = 1000  # before the animation repeats
USUAL_FPS = 30.0  # default for an environment without render_fps


def render_episode(
    config: EnvironmentConfig,
    act: Callable[[NDArray[np.float32]], NDArray[Any]],
    seed: int,
    path: Path,
    observing: Callable[[Environments], Environments] = lambda environments: environments,
) -> float:
    """Play one episode from the reset seed `seed` and write it to `path` as an animated GIF.

    `act` maps one raw observation [1, D] of `observing(environments)` to one action for `Environments.step`. The
    animation has the environment's own speed; long episodes have fewer frames per second. No display is needed.

    Returns:
        The undiscounted return of the episode.

    Raises:
        ConfigError: for an environment that cannot be rendered.
    """
    single = replace(config, vectorization="auto")
    speed = _decisions_per_second(single)
    environments = observing(_make_drawn(single))
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
    """True if `render_episode` works here: the environment has the mode rgb_array, and its packages are installed."""
    single = replace(config, vectorization="auto")
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
    """Create one copy that renders to memory."""
    # Without these, pygame opens a display and an audio device, and prints to stdout.
    for name, value in (
        ("SDL_VIDEODRIVER", "dummy"),
        ("SDL_AUDIODRIVER", "dummy"),
        ("PYGAME_HIDE_SUPPORT_PROMPT", "1"),
    ):
        os.environ.setdefault(name, value)
    return make_environments(config, 1, render_mode="rgb_array")


def _decisions_per_second(config: EnvironmentConfig) -> float:
    """Decisions per second, from the environment's metadata."""
    environments = make_environments(config, 1)
    environments.close()
    if "rgb_array" not in environments.metadata.get("render_modes", ()):
        raise ConfigError(f"environment.id: {config.id!r} cannot be drawn: it offers no render mode 'rgb_array'")
    return float(environments.metadata.get("render_fps") or USUAL_FPS) / config.action_repeat


class _Film:
    """The frames of an episode of unknown length: if there are too many, every second one is dropped."""

    def __init__(self, frames_per_second: float) -> None:
        self._every = max(1, math.ceil(frames_per_second / MOST_FPS))
        self._seconds = 1 / frames_per_second
        self._seen = 0
        self._frames: list[Image.Image] = []
        self._last: Image.Image | None = None  # always the last frame, also if it was dropped

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
