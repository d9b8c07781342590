"""CartPole-v1 and Acrobot-v1 for many slots in a few NumPy calls, bit-identical to Gymnasium's single environments.

Gymnasium's own vector classes draw all starts from one generator and reset finished slots by themselves. Here every
slot has its own seed and a finished slot does not change until it is reset, so an episode is determined by its seed.

Shape legend: N slots; the state has 4 rows.
"""

from typing import Any, ClassVar

import numpy as np
from gymnasium import Env
from gymnasium.envs.classic_control.acrobot import AcrobotEnv
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray


class BatchedEnv(VectorEnv):
    """N slots of one environment with AutoresetMode.DISABLED: finished slots do not move until they are reset.

    A subclass moves the states in place and computes observations and rewards in the order of operations of the single
    environment, whose constants it uses, so that they agree to the last bit.
    """

    single: ClassVar[type[Env]]  # Gymnasium's class
    spread: ClassVar[float]  # an episode begins with 4 numbers from -spread to spread

    def __init__(self, num_envs: int, max_episode_steps: int = 500) -> None:
        self.one: Any = self.single()
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.single_observation_space, self.single_action_space = self.one.observation_space, self.one.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {**self.one.metadata, "autoreset_mode": AutoresetMode.DISABLED}
        self._state_4N = np.zeros((4, num_envs))
        self._steps_N = np.zeros(num_envs, dtype=np.int64)
        self._running_N = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]` (bool [N]).

        `seed` is a list with one seed per slot (those of other slots are ignored); a slot begins in the state of the
        single environment after `reset(seed=...)`.

        Raises:
            ValueError: if `seed` is no such list, because a start without a seed could not be repeated.
        """
        if not isinstance(seed, list) or len(seed) != self.num_envs:
            raise ValueError(f"{type(self).__name__} needs a list of {self.num_envs} seeds (got {seed!r})")
        mask_N = (options or {}).get("reset_mask")
        slots = range(self.num_envs) if mask_N is None else np.flatnonzero(mask_N).tolist()
        for slot in slots:
            generator, _ = seeding.np_random(seed[slot])
            self._state_4N[:, slot] = self._first(generator.uniform(low=-self.spread, high=self.spread, size=(4,)))
        began = slice(None) if mask_N is None else mask_N
        self._steps_N[began] = 0
        self._running_N[began] = True
        return self._observe(), {}

    def step(self, action: NDArray[np.integer[Any]]) -> Any:
        """Act in every running slot; finished slots do not move and have the reward 0."""
        running_N = self._running_N
        self._move(action)
        terminated_N = self._fallen()
        terminated_N &= running_N
        reward_N = self._pay(terminated_N)
        self._steps_N += running_N
        truncated_N = self._steps_N >= self.max_episode_steps
        truncated_N &= running_N
        ended_N = terminated_N | truncated_N
        if ended_N.any():
            running_N[ended_N] = False
        return self._observe(), reward_N, terminated_N, truncated_N, {}

    def snapshot(self, slot: int) -> tuple[NDArray[np.float64], int, bool]:
        """The complete state of a slot."""
        return self._state_4N[:, slot].copy(), int(self._steps_N[slot]), bool(self._running_N[slot])

    def restore(self, slot: int, snapshot: tuple[NDArray[np.float64], int, bool]) -> NDArray[np.float32]:
        """Restore a snapshot in `slot`; returns its observation."""
        self._state_4N[:, slot], self._steps_N[slot], self._running_N[slot] = snapshot
        observation: NDArray[np.float32] = self._observe()[slot]
        return observation

    def _first(self, drawn_4: NDArray[np.float64]) -> NDArray[Any]:
        """The state in which an episode begins, from its random numbers."""
        return drawn_4

    def _move(self, action: NDArray[np.integer[Any]]) -> None:
        raise NotImplementedError

    def _observe(self) -> NDArray[np.float32]:
        """A new array [N, D]."""
        raise NotImplementedError

    def _fallen(self) -> NDArray[np.bool_]:
        """True in terminal states [N]."""
        raise NotImplementedError

    def _pay(self, terminated_N: NDArray[np.bool_]) -> NDArray[np.float64]:
        raise NotImplementedError


class BatchedCartPole(BatchedEnv):
    """Barto, Sutton and Anderson (1983). The state is the cart's position and velocity, then the pole's."""

    single, spread = CartPoleEnv, 0.05

    def __init__(self, num_envs: int, max_episode_steps: int = 500) -> None:
        super().__init__(num_envs, max_episode_steps)
        one = self.one
        # Views: rows (position, velocity) of cart and pole, so that one call integrates both.
        rows = self._state_4N.reshape(2, 2, num_envs)
        self._positions_2N, self._velocities_2N = rows[:, 0], rows[:, 1]
        self._accelerations_2N = np.empty((2, num_envs))
        self._limits_21 = np.array([[one.x_threshold], [one.theta_threshold_radians]])
        self._tau_N = np.zeros(num_envs)  # 0 for a finished slot
        self._work_2N, self._temp_N, self._a_N, self._b_N = np.empty((2, num_envs)), *np.empty((3, num_envs))
        self._outside_2N = np.empty((2, num_envs), dtype=np.bool_)

    def _move(self, action: NDArray[np.integer[Any]]) -> None:
        """Push every running cart to the left (0) or right (1)."""
        one = self.one
        work_2N, temp_N, a_N, b_N = self._work_2N, self._temp_N, self._a_N, self._b_N
        cart_N, pole_N = self._accelerations_2N
        theta_N, theta_dot_N = self._state_4N[2], self._state_4N[3]
        sine_N, cosine_N = work_2N
        np.cos(theta_N, out=cosine_N)
        np.sin(theta_N, out=sine_N)

        np.multiply(action, 2 * one.force_mag, out=temp_N)  # 0 or 20, then -10 or 10
        temp_N -= one.force_mag
        np.multiply(theta_dot_N, theta_dot_N, out=a_N)
        a_N *= one.polemass_length
        a_N *= sine_N
        temp_N += a_N
        temp_N /= one.total_mass

        np.multiply(cosine_N, cosine_N, out=a_N)
        a_N *= one.masspole
        a_N /= one.total_mass
        np.subtract(4.0 / 3.0, a_N, out=a_N)
        a_N *= one.length
        np.multiply(cosine_N, temp_N, out=b_N)
        np.multiply(sine_N, one.gravity, out=pole_N)
        pole_N -= b_N
        pole_N /= a_N

        np.multiply(pole_N, one.polemass_length, out=a_N)
        a_N *= cosine_N
        a_N /= one.total_mass
        np.subtract(temp_N, a_N, out=cart_N)

        np.multiply(self._running_N, one.tau, out=self._tau_N)
        np.multiply(self._velocities_2N, self._tau_N, out=work_2N)
        self._positions_2N += work_2N
        np.multiply(self._accelerations_2N, self._tau_N, out=work_2N)
        self._velocities_2N += work_2N

    def _observe(self) -> NDArray[np.float32]:
        return self._state_4N.T.astype(np.float32)

    def _fallen(self) -> NDArray[np.bool_]:
        np.abs(self._positions_2N, out=self._work_2N)
        np.greater(self._work_2N, self._limits_21, out=self._outside_2N)
        fallen_N: NDArray[np.bool_] = self._outside_2N[0] | self._outside_2N[1]
        return fallen_N

    def _pay(self, terminated_N: NDArray[np.bool_]) -> NDArray[np.float64]:
        return self._running_N.astype(np.float64)


class _Power(np.ndarray[Any, np.dtype[np.float64]]):
    """An array whose `**` is C's pow, as that of NumPy's scalars; an array's own differs in the last bit."""

    def __pow__(self, exponent: Any) -> Any:  # type: ignore[override]
        return np.float_power(self, exponent)


class BatchedAcrobot(BatchedEnv):
    """Two links, of which the second is driven: Sutton (1996), with the derivatives of Gymnasium's class.

    The state is the angles of the links, then their velocities. Before the first step of an episode its numbers are
    float32, also in the sines of the observation.
    """

    single, spread = AcrobotEnv, 0.1

    def __init__(self, num_envs: int, max_episode_steps: int = 500) -> None:
        super().__init__(num_envs, max_episode_steps)
        self._torques = np.array(self.one.AVAIL_TORQUE)
        self._limits_21 = np.array([[self.one.MAX_VEL_1], [self.one.MAX_VEL_2]])

    def _first(self, drawn_4: NDArray[np.float64]) -> NDArray[Any]:
        return drawn_4.astype(np.float32)

    def _move(self, action: NDArray[np.integer[Any]]) -> None:
        """One step of Runge and Kutta with a torque of -1 (0), 0 (1) or 1 (2)."""
        state_5N, dt = np.vstack([self._state_4N, self._torques[action]]), self.one.dt
        k1 = self._derivatives(state_5N)
        k2 = self._derivatives(state_5N + dt / 2.0 * k1)
        k3 = self._derivatives(state_5N + dt / 2.0 * k2)
        k4 = self._derivatives(state_5N + dt * k3)
        moved_4N = (state_5N + dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4))[:4]
        angles_2N, velocities_2N = moved_4N[:2], moved_4N[2:]
        while (over_2N := angles_2N > np.pi).any():
            angles_2N[over_2N] -= 2 * np.pi
        while (under_2N := angles_2N < -np.pi).any():
            angles_2N[under_2N] += 2 * np.pi
        np.clip(velocities_2N, -self._limits_21, self._limits_21, out=velocities_2N)
        np.copyto(self._state_4N, moved_4N, where=self._running_N)

    def _derivatives(self, state_5N: NDArray[np.float64]) -> NDArray[np.float64]:
        derivatives_5N = np.zeros_like(state_5N)  # the last row is the torque's, which is constant
        derivatives_5N[:4] = self.one._dsdt(state_5N.view(_Power))[:4]
        return derivatives_5N

    def _observe(self) -> NDArray[np.float32]:
        first_N, second_N, *velocities = self._state_4N
        numbers = np.cos(first_N), np.sin(first_N), np.cos(second_N), np.sin(second_N), *velocities
        observation_ND = np.stack(numbers, axis=1).astype(np.float32)
        fresh = np.flatnonzero(self._running_N & (self._steps_N == 0))
        if len(fresh):
            first_K, second_K = self._state_4N[:2, fresh].astype(np.float32)
            sines = np.cos(first_K), np.sin(first_K), np.cos(second_K), np.sin(second_K)
            observation_ND[fresh, :4] = np.stack(sines, axis=1)
        return observation_ND

    def _fallen(self) -> NDArray[np.bool_]:
        """The tip is above the line."""
        first_N, second_N = self._state_4N[:2]
        above_N: NDArray[np.bool_] = -np.cos(first_N) - np.cos(second_N + first_N) > 1.0
        return above_N

    def _pay(self, terminated_N: NDArray[np.bool_]) -> NDArray[np.float64]:
        paid_N: NDArray[np.float64] = terminated_N - self._running_N.astype(np.float64)
        return paid_N


# Entry point of the registration -> class.
BATCHED = {f"{kind.single.__module__}:{kind.single.__qualname__}": kind for kind in (BatchedCartPole, BatchedAcrobot)}
