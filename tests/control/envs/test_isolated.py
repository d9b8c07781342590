"""Environments in a process of their own, which is the default: they hang, die and crash the interpreter there."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from typing import Any

import numpy as np
import pytest

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs.checked import EnvironmentFault
from covey.control.envs.manual_reset import ManualResetVectorEnv
from covey.control.envs.vector_env import check_environment, make_environments
from helpers.faulty_environments import NAME, Faulty, answers, collect_episodes, raises, registering


@pytest.fixture
def register():
    with registering() as do:
        yield do


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            lambda: time.sleep(600),
            "it did not answer within 1 s: if it is only slow, raise environment.timeout_seconds",
        ),
        (lambda: os._exit(3), "its process ended by itself with exit code 3"),
        (lambda: raises(SystemExit(4)), "its process ended by itself with exit code 4"),
        (lambda: ctypes.string_at(0), "its process was killed by SIGSEGV"),
        (lambda: os.closerange(3, 200), "its process "),  # ends while it is killed
    ],
    ids=["sleep", "exit", "sys.exit", "crash", "closed files"],
)
@pytest.mark.filterwarnings("ignore:.*It was started again:UserWarning")
@pytest.mark.parametrize("fails_at", [0, 2])
def test_by_default_an_environment_that_hangs_or_dies_ends_its_own_process(does, said, fails_at, register):
    """Also the second time, after its episodes were played again."""
    environment = register(lambda: Faulty(does, fails_at=fails_at))
    environments = make_environments(EnvironmentConfig(id=environment.id, timeout_seconds=1.0), 2)
    where = ("the reset of", "", "step 2 of")[fails_at]
    with pytest.raises(EnvironmentFault) as caught:
        collect_episodes(environments)
    line = str(caught.value)
    assert line.startswith(f"environment '{NAME}', {where} the episode that began with reset(seed=7): {said}")
    assert "\n" not in line


@pytest.mark.parametrize("does", [lambda: os._exit(3), lambda: time.sleep(600)], ids=["exit", "sleep"])
def test_a_process_that_fails_once_is_started_again_and_the_numbers_are_the_same(does, register, tmp_path):
    """The episodes in both copies go on where they were, one of them after its second reset."""

    class Once(Faulty):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            answer = super().reset(seed=seed)
            self.walked = np.zeros(2, dtype=np.float32)
            return self.walked, answer[1]

        def step(self, action: int) -> Any:
            self.walked = self.walked + self.np_random.normal(size=2).astype(np.float32) * (1 + action)
            _, *rest = super().step(action)
            return self.walked, *rest

    mark = tmp_path / "failed"

    def fault() -> Any:
        if not mark.exists():
            mark.touch()
            does()
        return answers()

    def collected(**fields: Any) -> list[bytes]:
        environments = make_environments(EnvironmentConfig(id=NAME, timeout_seconds=1.0, **fields), 2)
        seen = [environments.reset([3, 4])]
        for action in (1, 0, 1):
            seen.append(environments.step(np.array([action, 1 - action])).observation_ND)
        seen.append(environments.reset_slots(np.array([1]), [7]))
        for action in (1, 0, 1, 0):
            step = environments.step(np.array([action, action]))
            seen += [step.observation_ND, step.reward_N, step.truncated_N, step.steps_N]
        environments.close()
        return [array.tobytes() for array in seen]

    register(lambda: Once(fault))
    with pytest.warns(
        UserWarning, match=r"step 2 of the episode that began with reset\(seed=7\).* It was started again"
    ):
        found = collected()
    assert found == collected(vectorization="sync")


def test_an_environment_that_dies_while_it_is_made_is_refused(register):
    class Crash(Faulty):
        def __init__(self) -> None:
            os._exit(5)

    with pytest.raises(ConfigError, match="while it was made: its process ended by itself with exit code 5"):
        check_environment(register(Crash))


def test_the_process_of_an_environment_ends_with_it(register):
    environments = make_environments(register(Faulty), 2)
    process = environments._vector._process._number
    environments.reset([3, 4])
    del environments
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_the_environments_of_gymnasium_are_in_this_process():
    assert isinstance(make_environments(EnvironmentConfig(id="Pendulum-v1"), 1)._vector, ManualResetVectorEnv)
