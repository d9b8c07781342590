"""Memory of a policy: a GRU whose state is a part of the observations that are stored.

The state before a decision follows the observation in its row, after the action mask. So the buffer, replayed groups
and branches carry it, and every rollout begins with the state in which its first decision was made: zeros at the
beginning of an episode, and in a fragment or a branch the state that the sampler had there (the stored state of
Kapturowski et al. (2019), 'Recurrent experience replay', section 3). A row of a batch never crosses the end of an
episode, so no mask of episode ends is needed within it.

Shape legend: B rollouts, T decisions, N observations, D numbers in an observation, H numbers in the state, O outputs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covey.control.envs.vector_env import Environments, Step
from covey.control.mlp import Network, Uninitialised


class _GRU(Uninitialised, nn.GRU):
    """A recurrent layer."""


class MemoryNetwork(Network):
    """A GRU (Cho et al. (2014), arXiv 1406.1078, as torch's), and a `Network` that reads its state.

    Its matrices are orthogonal, one for each gate, its biases zero.
    """

    def __init__(
        self,
        size: int,
        memory: int,
        hidden: Sequence[int],
        outputs: int,
        *,
        seed: int,
        **options: Any,
    ) -> None:
        """`options` as for `Network`."""
        super().__init__(memory, hidden, outputs, seed=seed, **options)
        generator = torch.Generator().manual_seed(seed + 2**32)  # another stream than that of the later layers
        self.gru = _GRU(size, memory, batch_first=True)
        of_input, of_state, *biases = self.gru.all_weights[0]
        for weight in (of_input, of_state):
            for gate in weight.detach().chunk(3):
                nn.init.orthogonal_(gate, generator=generator)
        for bias in biases:
            nn.init.zeros_(bias)

    def sequences(self, x_BTD: Tensor, state_BH: Tensor) -> Tensor:
        """output_BTO of sequences that begin in these states."""
        after_BTH, _ = self.gru(x_BTD, state_BH[None])
        return self(after_BTH.flatten(0, 1)).unflatten(0, after_BTH.shape[:2])

    @torch.no_grad()
    def advance(self, x_ND: Tensor, state_NH: Tensor) -> tuple[Tensor, Tensor]:
        """output_NO for one observation of each of N sequences, and the states after it."""
        after_NH = torch.gru_cell(x_ND, state_NH, *self.gru.all_weights[0])
        return self(after_NH), after_NH


class Remembers(Protocol):
    """A policy with a memory."""

    memory: int  # H
    state_NH: NDArray[np.float32]  # after the observations of the last call of `act` or `greedy_action`


class RememberingEnvironments(Environments):
    """Environments whose observations end with the state of the policy that acts in them: zeros after a reset."""

    def __init__(self, inner: Environments, policy: Remembers) -> None:
        self.inner, self._policy = inner, policy
        self._state_NH = np.zeros((inner.count, policy.memory), dtype=np.float32)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def reset(self, seeds: Sequence[int]) -> NDArray[np.float32]:
        return self.resume(self.inner.reset(seeds), np.zeros_like(self._state_NH))

    def reset_slots(self, slots: NDArray[np.int64], seeds: Sequence[int]) -> NDArray[np.float32]:
        self._state_NH[slots] = 0
        return np.concatenate([self.inner.reset_slots(slots, seeds), self._state_NH[slots]], axis=1)

    def step(self, actions: NDArray[Any]) -> Step:
        result = self.inner.step(actions)
        result.observation_ND = self.resume(result.observation_ND, self._policy.state_NH)
        return result

    def resume(self, observation_ND: NDArray[Any], state_NH: NDArray[np.float32]) -> NDArray[np.float32]:
        """The observations with these states, from which the episodes go on."""
        self._state_NH = state_NH.copy()
        return np.concatenate([observation_ND, self._state_NH], axis=1)

    def snapshot(self, slot: int) -> Any:
        return self.inner.snapshot(slot), self._state_NH[slot].copy()

    def restore(self, slot: int, snapshot: Any) -> NDArray[np.float32]:
        state, self._state_NH[slot] = snapshot
        return np.concatenate([self.inner.restore(slot, state), self._state_NH[slot]])
