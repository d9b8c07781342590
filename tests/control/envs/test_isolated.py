"""Environments in a process of their own, which is the default: they hang, die and crash the interpreter there."""

import ctypes
import faulthandler
import gc
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from covey.config import ConfigError, EnvironmentConfig
from covey.config.recipe import config_from_dict
from covey.control.envs.checked import EnvironmentFault
from covey.control.envs.manual_reset import ManualResetVectorEnv
from covey.control.envs.vector_env import check_environment, make_environments
from covey.experiment.run import run
from covey.tracking.run_store import read_metrics
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
        (lambda: (faulthandler.disable(), ctypes.string_at(0)), "its process was killed by SIGSEGV"),
        (lambda: os.closerange(3, 200), "its process "),  # ends while it is killed
    ],
    ids=["sleep", "exit", "sys.exit", "crash", "closed files"],
)
def test_an_environment_that_hangs_or_dies_ends_its_own_episode(does, said, register):
    """It is tried twice in the step of one copy; the other copy goes on, and a reset begins again."""
    name = register(lambda: Faulty(does)).id
    environments = make_environments(EnvironmentConfig(id=name, timeout_seconds=1.0), 2)
    environments.reset([3, 7])
    assert environments.step(np.zeros(2, dtype=np.int64)).failed_N is None
    with pytest.warns(UserWarning, match="It was started again") as caught:
        step = environments.step(np.zeros(2, dtype=np.int64))
    first, second = (str(warning.message) for warning in caught)
    place = f"environment '{NAME}', step 2 of the episode that began with reset(seed=7): {said}"
    assert first.startswith(place)
    assert first.endswith("its episodes were played again")
    assert second.startswith(place)
    assert second.endswith("that episode is left out")
    assert (step.failed_N.tolist(), step.truncated_N.tolist()) == ([False, True], [False, True])
    assert step.reward_N.tolist() == [1.0, 0.0]
    environments.reset_slots(np.array([1]), [8])
    steps = [environments.step(np.zeros(2, dtype=np.int64)) for _ in range(5)]
    assert [step.truncated_N.tolist() for step in steps] == [[number == 2, number == 4] for number in range(5)]
    assert all(step.failed_N is None for step in steps)


def test_a_reset_that_dies_is_an_episode_of_one_step_that_failed(register):
    environments = make_environments(register(lambda: Faulty(lambda: os._exit(3), fails_at=0)), 2)
    environments.reset([3, 4])
    environments.step(np.zeros(2, dtype=np.int64))
    with pytest.warns(UserWarning, match=r"the reset of .*reset\(seed=7\).* It was started again"):
        environments.reset_slots(np.array([1]), [7])
    step = environments.step(np.zeros(2, dtype=np.int64))
    assert (step.failed_N.tolist(), step.truncated_N.tolist()) == ([False, True], [False, True])
    assert (step.steps_N[0], step.reward_N.tolist()) == (1, [1.0, 0.0])


def test_a_first_reset_that_dies_is_one_line(register):
    environments = make_environments(register(lambda: Faulty(lambda: os._exit(3), fails_at=0)), 2)
    with pytest.raises(EnvironmentFault, match=r"the reset of the episode .* reset\(seed=7\): its process"):
        collect_episodes(environments)


class Mortal(Faulty):
    """Dies in step 2 of the episodes of every `rare`th seed; longer episodes are paid more."""

    rare = 16

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = super().reset(seed=seed)
        self.dies = seed % self.rare == 0
        return answer

    def step(self, action: int) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        if self.dies and self.made == 2:
            os._exit(3)
        return observation, float(action), terminated, truncated, info


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*It was started again:UserWarning")
@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": "grpo", "steps": 4, "rollouts": {"starts_per_step": 12, "group_size": 2}},
        {"algorithm": "ppo", "steps": 2, "rollouts": {"kind": "fragments", "environments": 6, "fragment_steps": 20}},
    ],
    ids=["grpo", "ppo"],
)
def test_a_run_goes_on_without_the_episodes_whose_environment_died(tables, register, tmp_path):
    register(Mortal)
    run_dir = tmp_path / "run"
    config = config_from_dict(
        {**tables, "run_dir": str(run_dir), "environment": {"id": NAME}, "evaluation": {"episodes": 60}}
    )
    summary = run(config)
    assert summary["steps"] == tables["steps"]
    records = read_metrics(run_dir)
    assert sum(record["groups/failed_rollouts"] for record in records) > 0
    assert all(np.isfinite(value) for record in records for value in record.values() if isinstance(value, float))
    assert summary["evaluations"][0]["after"]["count"] < 60


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*It was started again:UserWarning")
def test_a_run_stops_if_more_than_a_fifth_of_its_episodes_fail(register, tmp_path):
    register(type("Frail", (Mortal,), {"rare": 2}))
    config = config_from_dict({"steps": 4, "run_dir": str(tmp_path / "run"), "environment": {"id": NAME}})
    with pytest.raises(
        EnvironmentFault, match=r"^the environment died, or did not answer, in \d+ of \d+ episodes, more"
    ):
        run(config)


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


def test_branches_of_a_state_go_on_after_their_process_died(register):
    """The state was packed in another process; in the second round the process dies in the middle of the branches."""

    class Walk(Faulty):
        def step(self, action: int) -> Any:
            _, *rest = super().step(action)
            return np.clip(self.np_random.normal(size=2).astype(np.float32) * (1 + action), -1, 1), *rest

    config = register(Walk)
    trunks, branches = (make_environments(config, count, copies_states=True) for count in (1, 2))
    assert trunks.snapshots
    trunks.reset([3])
    observed = trunks.step(np.zeros(1, dtype=np.int64)).observation_ND[0]
    state = trunks.snapshot(0)

    def branch(*, dies: bool) -> list[bytes]:
        found = [branches.restore(slot, state) for slot in (0, 1)]
        assert all(np.array_equal(one, observed) for one in found)
        for made in range(3):
            if dies and made == 2:
                os.kill(branches._vector._process._number, signal.SIGKILL)
            step = branches.step(np.array([made % 2, 0]))
            found += [step.observation_ND, step.reward_N, step.truncated_N]
        return [array.tobytes() for array in found]

    whole = branch(dies=False)
    with pytest.warns(UserWarning, match="It was started again"):
        assert branch(dies=True) == whole
    for environments in (trunks, branches):
        environments.close()


def test_an_environment_that_dies_while_it_is_made_is_refused(register):
    class Crash(Faulty):
        def __init__(self) -> None:
            os._exit(5)

    with pytest.raises(ConfigError, match="while it was made: its process ended by itself with exit code 5"):
        check_environment(register(Crash))


@pytest.mark.slow
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
