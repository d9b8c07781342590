"""An episode as an animated picture."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs import render
from covey.control.envs.render import render_episode
from covey.control.envs.vector_env import make_environments
from helpers import counting_environment


def left(observation_1D: np.ndarray) -> np.ndarray:
    assert observation_1D.shape == (1, 4)
    return np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize("repeat", [1, 3])
def test_the_picture_shows_the_episode_and_the_return_is_its_own(tmp_path: Path, repeat: int) -> None:
    path = tmp_path / "pictures" / "episode.gif"
    config = EnvironmentConfig(id="CartPole-v1", action_repeat=repeat)
    score = render_episode(config, left, 3, path)
    environments = make_environments(config, 1)
    environments.reset([3])
    steps = 0
    while (step := environments.step(np.zeros(1, dtype=np.int64))).steps_N[0]:
        steps += int(step.steps_N[0])
    assert score == steps
    with Image.open(path) as picture:
        assert max(picture.size) <= render.MOST_PIXELS
        shown = 0.0
        for frame in range(picture.n_frames):
            picture.seek(frame)
            shown += picture.info["duration"]
    assert shown == pytest.approx(1000 * steps / 50 + render.LAST_FRAME_MILLISECONDS, abs=85)  # 50 steps a second


def test_long_episodes_are_thinned_and_keep_their_speed() -> None:
    film = render._Film(frames_per_second=50)
    for number in range(1500):
        film.add(np.full((4, 4, 3), number % 256, dtype=np.uint8))
    assert render.MOST_FRAMES // 2 <= len(film._frames) <= render.MOST_FRAMES
    assert len(film._frames) * film._every == pytest.approx(1500, abs=film._every)
    values = [frame.convert("RGB").getpixel((0, 0))[0] for frame in film._frames]
    assert values == [(film._every * place) % 256 for place in range(len(values))]


def test_an_environment_without_a_picture_is_refused(tmp_path: Path) -> None:
    counting_environment.register()
    with pytest.raises(ConfigError, match="offers no render mode 'rgb_array'"):
        render_episode(EnvironmentConfig(id=counting_environment.COUNTING), left, 0, tmp_path / "x.gif")


def test_an_episode_without_an_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MOST_DECISIONS", 5)
    gym.registry.pop("covey-tests/Endless-v0", None)
    gym.register("covey-tests/Endless-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv")
    path = tmp_path / "x.gif"
    config = EnvironmentConfig(id="covey-tests/Endless-v0")
    assert render_episode(config, lambda _: np.zeros((1, 1), dtype=np.float32), 0, path) < 0
    assert path.exists()
