"""Copies of an environment: what is a transition, what is not, and that states can be copied."""

from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector.utils import batch_space

from covey.config import ConfigError, EnvironmentConfig
from covey.control.envs.spaces import Continuous, Discrete
from covey.control.envs.vector_env import Environments, check_environment, make_environments
from helpers import counting_environment
from helpers.counting_environment import COUNTING, PUSHED


def counting(kind: str, count: int = 3, **more: int) -> Environments:
    return make_environments(EnvironmentConfig(id=COUNTING, vectorization=kind, **more), count)


@pytest.fixture(params=["auto", "sync", "async"])
def environments(request: pytest.FixtureRequest) -> Iterator[Environments]:
    made = counting(request.param)
    yield made
    made.close()


def test_every_transition_lies_within_one_episode(environments: Environments) -> None:
    """A slot advances one step at a time, is paid for it, ends where its episode ends, and rests until its reset."""
    current_ND = environments.reset([3, 4, 5])
    over_N = np.zeros(3, dtype=bool)
    ends = idle = 0
    for time in range(40):
        step = environments.step(np.zeros(3, dtype=np.int64))
        for slot in range(3):
            name, length, made = current_ND[slot]
            if not over_N[slot]:
                assert step.observation_ND[slot].tolist() == [name, length, made + 1]
                assert step.reward_N[slot] == made + 1
                assert step.terminated_N[slot] == (made + 1 == length)
                assert step.steps_N[slot] == 1
            else:
                idle += 1
                assert step.observation_ND[slot].tolist() == [name, length, length]
                assert step.reward_N[slot] == step.steps_N[slot] == 0
                assert not step.terminated_N[slot]
            ends += bool(step.terminated_N[slot])
            over_N[slot] |= step.terminated_N[slot]
        current_ND = step.observation_ND.copy()
        if time % 3 == 2 and over_N.any():  # some rest for a while
            slots = np.flatnonzero(over_N)
            current_ND[slots] = environments.reset_slots(slots, [100 * time + int(slot) for slot in slots])
            over_N[slots] = False
    assert not step.truncated_N.any()
    assert ends > 15
    assert idle > 5


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_finished_slots_rest_until_they_are_reset(kind: str) -> None:
    environments = counting(kind)
    first_ND = environments.reset([3, 4, 5])
    for _ in range(10):
        step = environments.step(np.zeros(3, dtype=np.int64))
    assert not step.steps_N.any()
    begun_KD = environments.reset_slots(np.array([2, 0]), [4, 4])
    assert begun_KD.tolist() == [first_ND[1].tolist()] * 2
    step = environments.step(np.zeros(3, dtype=np.int64))
    assert step.steps_N.tolist() == [1, 0, 1]
    environments.reset_slots(np.array([0]), [5])  # in the middle of an episode too
    step = environments.step(np.zeros(3, dtype=np.int64))
    assert step.observation_ND[0].tolist() == [*first_ND[2][:2], 1]
    assert step.observation_ND[2].tolist() == [*first_ND[1][:2], 2]
    environments.close()


def test_a_time_limit_truncates() -> None:
    environments = counting("sync", max_episode_steps=2)
    environments.reset([3, 4, 5])
    ends = environments.step(np.zeros(3, dtype=np.int64)).truncated_N.tolist()
    assert ends == [False] * 3
    step = environments.step(np.zeros(3, dtype=np.int64))
    assert step.truncated_N.tolist() == [True] * 3
    assert step.observation_ND[:, 2].tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_held_action_counts_raw_steps_and_stays_in_its_episode(kind: str) -> None:
    environments = counting(kind, count=3, action_repeat=4)
    lengths_N = environments.reset([0, 1, 2])[:, 1]
    assert min(lengths_N) < 4 < max(lengths_N)  # ends early, goes on
    step = environments.step(np.zeros(3, dtype=np.int64))
    made_N = np.minimum(lengths_N, 4)
    assert step.steps_N.tolist() == made_N.tolist()
    assert step.reward_N.tolist() == (made_N * (made_N + 1) / 2).tolist()
    assert step.observation_ND[:, 2].tolist() == made_N.tolist()
    assert step.terminated_N.tolist() == (lengths_N <= 4).tolist()
    step = environments.step(np.zeros(3, dtype=np.int64))
    assert (step.steps_N > 0).tolist() == (lengths_N > 4).tolist()
    environments.close()


def test_seeds_reproduce() -> None:
    def collect_episodes(seeds: list[int]) -> list[list[float]]:
        environments = counting("sync")
        seen = [environments.reset(seeds).tolist()]
        seen += [environments.step(np.zeros(3, dtype=np.int64)).observation_ND.tolist() for _ in range(20)]
        return seen

    assert collect_episodes([1, 2, 3]) == collect_episodes([1, 2, 3])
    assert collect_episodes([1, 2, 3]) != collect_episodes([1, 2, 4])


def test_actions_are_numbered_from_zero() -> None:
    environments = counting("sync", count=2)
    environments.reset([3, 4])
    assert environments.actions == Discrete(3)
    assert environments.step(np.array([1, 2])).reward_N.tolist() == [1.0, 101.0]


def test_action_vectors_are_clipped_and_observations_flattened() -> None:
    environments = make_environments(EnvironmentConfig(id=PUSHED), 2)
    assert isinstance(environments.actions, Continuous)
    assert environments.actions.low_A.tolist() == [-1, -1, -2, -2]
    assert environments.observation_size == 7
    first_ND = environments.reset([0, 0])
    assert first_ND.dtype == np.float32
    assert sorted(first_ND[0].tolist()) == [0, 0, 0, 1, 1, 2, 3]  # one-hot gear and the positions
    step = environments.step(np.array([[0.5, 0.25, 0, 0], [-9, 9, 9, 9]], dtype=np.float32))
    assert step.reward_N.tolist() == [0.75, 4.0]
    assert step.observation_ND[1, :4].tolist() == [-1, 1, 2, 2]


def test_discrete_observations_become_one_hot() -> None:
    environments = make_environments(EnvironmentConfig(id="FrozenLake-v1"), 2)
    assert environments.reset([0, 1]).tolist() == [[1.0] + [0.0] * 15] * 2


@pytest.mark.parametrize("name", [COUNTING, "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_a_snapshot_goes_on_exactly_any_number_of_times(name: str) -> None:
    environments = make_environments(EnvironmentConfig(id=name), 3, copies_states=True)
    rng = np.random.default_rng(0)
    environments.reset([5, 6, 7])

    def act() -> np.ndarray:
        if isinstance(environments.actions, Discrete):
            return rng.integers(0, environments.actions.count, 3)
        return rng.normal(size=(3, environments.actions.size)).astype(np.float32)

    before = environments.step(act())
    assert environments.snapshots
    snapshot = environments.snapshot(1)
    plan = [act() for _ in range(8)]
    environments.step(act())  # the original goes on meanwhile
    futures = []
    for slot in (1, 1, 0):  # twice where it was taken, once elsewhere
        assert environments.restore(slot, snapshot).tobytes() == before.observation_ND[1].tobytes()
        future = []
        for actions in plan:
            step = environments.step(actions[[1, 1, 1]])
            future.append((step.observation_ND[slot].tobytes(), step.reward_N[slot], step.steps_N[slot]))
        futures.append(future)
    assert futures[0] == futures[1] == futures[2]
    assert any(acted for _, _, acted in futures[0])


@pytest.mark.parametrize("name", [COUNTING, "CartPole-v1"])
def test_a_snapshot_of_a_finished_slot_rests(name: str) -> None:
    environments = make_environments(EnvironmentConfig(id=name, max_episode_steps=3), 2, copies_states=True)
    environments.reset([5, 6])
    fresh, _ = environments.snapshot(0), environments.step(np.zeros(2, dtype=np.int64))
    for _ in range(5):
        environments.step(np.zeros(2, dtype=np.int64))
    over = environments.snapshot(0)
    environments.restore(0, fresh)
    environments.restore(1, over)
    steps = [environments.step(np.zeros(2, dtype=np.int64)) for _ in range(4)]
    assert [step.steps_N.tolist() for step in steps] == [[1, 0]] * 3 + [[0, 0]]
    assert steps[2].truncated_N.tolist() == [True, False]


class Shared(counting_environment.Counting):
    """Keeps its count outside of itself, as simulators written in C do."""

    total = [0]  # noqa: RUF012

    def step(self, action: int):
        self.total[0] += 1
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(self.total[0]), terminated, truncated, info


class Uncopyable(counting_environment.Counting):
    def __reduce__(self) -> str:
        raise TypeError("cannot be copied")


class Forgetful(counting_environment.Counting):
    """Its copies draw other episodes."""

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_np_random": np.random.default_rng(1)}


class Patient(Forgetful):
    """Only its reset, long after the copy was made, shows that its generator was not copied."""

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        observation, info = super().reset(seed=seed)
        self.length = 1000
        return observation, info


@pytest.mark.parametrize("entry", [Shared, Uncopyable, Forgetful, Patient])
def test_environments_that_cannot_be_copied_exactly_are_found_out(entry: type) -> None:
    gym.registry.pop("covey-tests/Odd-v0", None)
    gym.register("covey-tests/Odd-v0", entry_point=entry)
    assert not make_environments(EnvironmentConfig(id="covey-tests/Odd-v0"), 1, copies_states=True).snapshots


@pytest.mark.parametrize("name", ["LunarLander-v3", "BipedalWalker-v3"])
def test_box2d_worlds_cannot_be_copied(name: str) -> None:
    pytest.importorskip("Box2D")
    assert not make_environments(EnvironmentConfig(id=name), 1, copies_states=True).snapshots


def test_async_copies_cannot_be_copied() -> None:
    environments = counting("async", count=1)
    assert not environments.snapshots
    environments.close()


def gym_registered_odd(space: gym.Space, observed: gym.Space | None = None) -> str:
    class Odd(counting_environment.Counting):
        action_space = space
        observation_space = observed or counting_environment.Counting.observation_space

    gym.registry.pop("covey-tests/Odd-v0", None)
    gym.register("covey-tests/Odd-v0", entry_point=Odd)
    return "covey-tests/Odd-v0"


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(0, 9, (2,), np.int64),
        gym.spaces.Dict(a=gym.spaces.Discrete(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_other_action_spaces_are_refused(space: gym.Space) -> None:
    with pytest.raises(
        ConfigError,
        match=r"one choice \(Discrete\), several \(MultiDiscrete, MultiBinary\) or gives a vector of floats",
    ):
        check_environment(EnvironmentConfig(id=gym_registered_odd(space)))


def test_observations_without_a_fixed_size_are_refused() -> None:
    name = gym_registered_odd(gym.spaces.Discrete(2), gym.spaces.Sequence(gym.spaces.Discrete(2)))
    with pytest.raises(ConfigError, match="a policy here takes Box, Discrete"):
        check_environment(EnvironmentConfig(id=name))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvironmentConfig(id="CartPol-v1"), r"no environment 'CartPol-v1' .*did you mean 'CartPole-v1'\?"),
        (EnvironmentConfig(id="CartPole"), r"did you mean 'CartPole-v[01]'\?"),
        (EnvironmentConfig(id="world.py:X-v0"), "'world.py:X-v0' names a file: write its module, world:X-v0"),
        (EnvironmentConfig(id="no_such_module:X-v0"), "cannot import the module of 'no_such_module:X-v0'"),
        (EnvironmentConfig(id="math:CartPole-v1"), "environment.id: 'math' is a module of Python's standard library"),
        (EnvironmentConfig(id="covey-tests/NoVector-v0"), "'covey-tests/NoVector-v0' could not be made"),
    ],
)
def test_mistakes_are_refused_in_one_line(config: EnvironmentConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_environment(config)
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(ConfigError, match=r"pip install 'covey\[box2d\]'"):
        check_environment(EnvironmentConfig(id="LunarLander-v3"))


def test_a_broken_environment_is_named() -> None:
    def entry() -> None:
        raise OSError("no licence\nsecond line")

    gym.registry.pop("covey-tests/Odd-v0", None)
    gym.register("covey-tests/Odd-v0", entry_point=entry)
    with pytest.raises(ConfigError, match=r"could not be made: OSError: no licence \(test_vector_env\.py line \d+\)$"):
        check_environment(EnvironmentConfig(id="covey-tests/Odd-v0"))


def test_an_environment_that_needs_an_argument_says_where_to_give_it() -> None:
    class Maze(counting_environment.Counting):
        def __init__(self, size: int) -> None:
            self.size = size

    gym.registry.pop("covey-tests/Odd-v0", None)
    gym.register("covey-tests/Odd-v0", entry_point=Maze)
    with pytest.raises(ConfigError, match=r"missing 1 .* argument: 'size': give it where .* kwargs=\{\.\.\.\}\)$"):
        check_environment(EnvironmentConfig(id="covey-tests/Odd-v0"))


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "my_own_world.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('MyOwn-v0', entry_point='gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=7)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    environments = make_environments(EnvironmentConfig(id="my_own_world:MyOwn-v0"), 1)
    assert environments.observation_size == 3
    gym.registry.pop("MyOwn-v0")


class SameStep(gym.vector.VectorEnv):
    """Counts from 10 times its seed, ends after three steps, and resets itself in the same step."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Dict(count=gym.spaces.Box(0, 1000, (1,), np.float32))
        self.single_action_space = gym.spaces.MultiDiscrete([2, 3])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.first = 10 * (seed or 0)
        self.made = 0
        return self._show(), {"action_mask": np.ones((self.num_envs, 5), np.int8)}

    def step(self, actions: Any) -> Any:
        assert actions.shape == (self.num_envs, 2)
        self.made += 1
        over = np.full(self.num_envs, self.made == 3)
        seen, infos = self._show(), {"action_mask": np.ones((self.num_envs, 5), np.int8)}
        if self.made == 3:
            infos["final_obs"] = np.array([{"count": seen["count"][0]}], dtype=object)
            seen = self.reset()[0]
        return seen, actions.sum(axis=1).astype(float), over, ~over & False, infos

    def _show(self) -> Any:
        return {"count": np.full((self.num_envs, 1), self.first + self.made, np.float32)}


def test_an_environment_with_only_a_vector_class_is_played_by_vectors_of_one():
    gym.register("covey-tests/SameStep-v0", vector_entry_point=SameStep)
    try:
        environments = make_environments(EnvironmentConfig("covey-tests/SameStep-v0", vectorization="sync"), 2)
    finally:
        gym.registry.pop("covey-tests/SameStep-v0")
    assert environments.masked
    assert environments.reset([1, 2])[:, 0].tolist() == [10, 20]
    steps = [environments.step(np.array([[1, 2], [0, 1]])) for _ in range(4)]
    assert [step.observation_ND[:, 0].tolist() for step in steps] == [[11, 21], [12, 22], [13, 23], [13, 23]]
    assert [step.reward_N.tolist() for step in steps] == [[3, 1], [3, 1], [3, 1], [0, 0]]
    assert [step.terminated_N.tolist() for step in steps] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert environments.reset_slots(np.array([1]), [5])[0, 0] == 50


@pytest.mark.parametrize(("limit", "ends"), [(0, 2), (1, 1), (3, 3)])
@pytest.mark.parametrize("obeys", [False, True])
def test_the_time_limit_of_a_vector_class_is_the_registered_one_or_that_of_the_config(
    obeys: bool, limit: int, ends: int
) -> None:
    class Limited(SameStep):
        def __init__(self, num_envs: int, max_episode_steps: int) -> None:
            super().__init__(num_envs)
            self.limit = max_episode_steps

        def step(self, actions: Any) -> Any:
            seen, rewards, over, cut, infos = super().step(actions)
            return seen, rewards, over & False, cut | (obeys and self.made >= self.limit), infos

    gym.register("covey-tests/Limited-v0", vector_entry_point=Limited, max_episode_steps=2)
    try:
        config = EnvironmentConfig("covey-tests/Limited-v0", vectorization="sync", max_episode_steps=limit)
        environments = make_environments(config, 1)
    finally:
        gym.registry.pop("covey-tests/Limited-v0")
    environments.reset([1])
    cut = [bool(environments.step(np.array([[1, 2]])).truncated_N[0]) for _ in range(ends)]
    assert cut == [False] * (ends - 1) + [True]


def test_gymnasiums_own_vector_class_is_stepped_as_it_is():
    environments = make_environments(EnvironmentConfig("covey-tests/OnlyVector-v0", max_episode_steps=9), 2)
    theirs = gym.make_vec("covey-tests/OnlyVector-v0", 1, "vector_entry_point")
    np.testing.assert_array_equal(environments.reset([4, 5])[1], theirs.reset(seed=5)[0][0])
    for t in range(9):
        step = environments.step(np.array([0, t % 2]))
        seen, reward, *_ = theirs.step(np.array([t % 2]))
        np.testing.assert_array_equal(step.observation_ND[1], seen[0])
        assert step.reward_N[1] == reward[0]
    assert step.truncated_N[1], "the limit of the config"
    environments.close()
