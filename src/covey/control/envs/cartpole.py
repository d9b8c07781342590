"""CartPole-v1 for many slots in a few NumPy calls, bit-identical to `gym.make("CartPole-v1")`.

Gymnasium's own CartPoleVectorEnv draws all starts from one generator and resets finished slots by itself. Here every
slot has its own seed and a finished slot does not change until it is reset, so an episode is determined by its seed.

Shape legend: N slots; the state has 4 rows: cart position, cart velocity, pole angle, pole velocity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray


class BatchedCartPole(CartPoleVectorEnv):
    """CartPole over N slots with AutoresetMode.DISABLED: finished slots do not move until they are reset.

    The dynamics are those of Barto, Sutton and Anderson (1983) in the order of operations of Gymnasium's CartPoleEnv,
    so that observations agree to the last bit.
    """

    def __init__(self, num_envs: int, max_episode_steps: int = 500) -> None:
        super().__init__(num_envs=num_envs, max_episode_steps=max_episode_steps)
        self.metadata = {**self.metadata, "autoreset_mode": AutoresetMode.DISABLED}
        self._state_4N = np.zeros((4, num_envs))
        # Views: rows (position, velocity) of cart and pole, so that one call integrates both.
        rows = self._state_4N.reshape(2, 2, num_envs)
        self._positions_2N, self._velocities_2N = rows[:, 0], rows[:, 1]
        self._accelerations_2N = np.empty((2, num_envs))
        self._limits_21 = np.array([[self.x_threshold], [self.theta_threshold_radians]])
        self._steps_N = np.zeros(num_envs, dtype=np.int64)
        self._running_N = np.zeros(num_envs, dtype=np.bool_)
        self._tau_N = np.zeros(num_envs)  # 0 for a finished slot
        self._work_2N, self._temp_N, self._a_N, self._b_N = np.empty((2, num_envs)), *np.empty((3, num_envs))
        self._outside_2N = np.empty((2, num_envs), dtype=np.bool_)

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
            raise ValueError(f"BatchedCartPole needs a list of {self.num_envs} seeds (got {seed!r})")
        mask_N = (options or {}).get("reset_mask")
        slots = range(self.num_envs) if mask_N is None else np.flatnonzero(mask_N).tolist()
        for slot in slots:
            generator, _ = seeding.np_random(seed[slot])
            self._state_4N[:, slot] = generator.uniform(low=-0.05, high=0.05, size=(4,))
        began = slice(None) if mask_N is None else mask_N
        self._steps_N[began] = 0
        self._running_N[began] = True
        self._tau_N[began] = self.tau
        return self._state_4N.T.astype(np.float32), {}

    def step(self, action: NDArray[np.integer[Any]]) -> Any:
        """Push every running cart to the left (0) or right (1); finished slots do not move and have the reward 0."""
        work_2N, temp_N, a_N, b_N = self._work_2N, self._temp_N, self._a_N, self._b_N
        cart_N, pole_N = self._accelerations_2N
        theta_N, theta_dot_N = self._state_4N[2], self._state_4N[3]
        sine_N, cosine_N = work_2N
        np.cos(theta_N, out=cosine_N)
        np.sin(theta_N, out=sine_N)

        np.multiply(action, 2 * self.force_mag, out=temp_N)  # 0 or 20, then -10 or 10
        temp_N -= self.force_mag
        np.multiply(theta_dot_N, theta_dot_N, out=a_N)
        a_N *= self.polemass_length
        a_N *= sine_N
        temp_N += a_N
        temp_N /= self.total_mass

        np.multiply(cosine_N, cosine_N, out=a_N)
        a_N *= self.masspole
        a_N /= self.total_mass
        np.subtract(4.0 / 3.0, a_N, out=a_N)
        a_N *= self.length
        np.multiply(cosine_N, temp_N, out=b_N)
        np.multiply(sine_N, self.gravity, out=pole_N)
        pole_N -= b_N
        pole_N /= a_N

        np.multiply(pole_N, self.polemass_length, out=a_N)
        a_N *= cosine_N
        a_N /= self.total_mass
        np.subtract(temp_N, a_N, out=cart_N)

        np.multiply(self._velocities_2N, self._tau_N, out=work_2N)
        self._positions_2N += work_2N
        np.multiply(self._accelerations_2N, self._tau_N, out=work_2N)
        self._velocities_2N += work_2N
        return self._after_move()

    def _after_move(self) -> Any:
        """Observations, rewards and episode ends after the step."""
        running_N = self._running_N
        np.abs(self._positions_2N, out=self._work_2N)
        np.greater(self._work_2N, self._limits_21, out=self._outside_2N)
        terminated_N = self._outside_2N[0] | self._outside_2N[1]
        terminated_N &= running_N
        reward_N = running_N.astype(np.float64)
        self._steps_N += running_N
        truncated_N = self._steps_N >= self.max_episode_steps
        truncated_N &= running_N
        ended_N = terminated_N | truncated_N
        if ended_N.any():
            running_N[ended_N] = False
            self._tau_N[ended_N] = 0.0
        return self._state_4N.T.astype(np.float32), reward_N, terminated_N, truncated_N, {}

    def snapshot(self, slot: int) -> tuple[NDArray[np.float64], int, bool]:
        """The complete state of a slot."""
        return self._state_4N[:, slot].copy(), int(self._steps_N[slot]), bool(self._running_N[slot])

    def restore(self, slot: int, snapshot: tuple[NDArray[np.float64], int, bool]) -> NDArray[np.float32]:
        """Restore a snapshot in `slot`; returns its observation."""
        state_4, steps, running = snapshot
        self._state_4N[:, slot] = state_4
        self._steps_N[slot] = steps
        self._running_N[slot] = running
        self._tau_N[slot] = self.tau if running else 0.0
        return state_4.astype(np.float32)
