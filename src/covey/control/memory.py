"""Memory of a policy: a GRU whose state is a part of the observations that are stored.

The state before a decision follows the observation in its row, after the action mask. So the buffer, replayed groups
and branches carry it, and every rollout begins with the state in which its first decision was made: zeros at the
beginning of an episode, and in a fragment or a branch the state that the sampler had there (the stored state of
Kapturowski et al. (2019), 'Recurrent experience replay', section 3). A row of a batch never crosses the end of an
episode, so no mask of episode ends is needed within it.

Shape legend: B rollouts, T decisions, N observations, D numbers in an observation, H numbers in the state, O outputs,
M entries of packed sequences: the first observations of all, the longest first, then the second ones of those that have
one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pack_padded_sequence

from covey.control.envs.vector_env import Environments, Step
from covey.control.mlp import Network, Uninitialised


class _GRU(Uninitialised, nn.GRU):
    """A recurrent layer."""


class _GRUFunction(torch.autograd.Function):
    """The states of packed sequences after each of their observations, as one autograd function.

    It takes about half the time of torch's GRU, which records a dozen nodes for each step. The products are torch's, so
    that they use its number of threads; the rest is NumPy's, in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, rows_T: list[int], state_BH: Tensor, of_input: Tensor, of_state: Tensor, *biases: Tensor
    ) -> Tensor:
        size = state_BH.shape[1]
        gates_MG = torch.addmm(biases[0], x_MD, of_input.t())
        before_MH, candidate_MH, after_MH = gates_MG.new_empty(3, len(x_MD), size)
        recurrent_BG = gates_MG.new_empty(len(state_BH), 3 * size)  # the state's part of the gates
        gates, before, candidate, after, recurrent = (
            tensor.numpy() for tensor in (gates_MG, before_MH, candidate_MH, after_MH, recurrent_BG)
        )
        state, weight, begin = state_BH.numpy(), of_state.t(), 0
        for rows, before_KH in zip(rows_T, before_MH.split(rows_T), strict=True):
            here = slice(begin, begin := begin + rows)
            before[here] = state = state[:rows]
            torch.addmm(biases[1], before_KH, weight, out=recurrent_BG[:rows])
            both, new = gates[here, : 2 * size], gates[here, 2 * size :]
            both += recurrent[:rows, : 2 * size]
            _sigmoid(both)
            candidate[here] = recurrent[:rows, 2 * size :]
            new += both[:, :size] * candidate[here]
            np.tanh(new, out=new)
            state = np.subtract(state, new, out=after[here])
            state *= both[:, size:]
            state += new
        ctx.rows_T = rows_T
        ctx.save_for_backward(x_MD, of_state, gates_MG, candidate_MH, before_MH)
        return after_MH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, of_state, gates_MG, candidate_MH, before_MH = ctx.saved_tensors
        size = before_MH.shape[1]
        reset_MH, update_MH, new_MH = (gate.contiguous() for gate in gates_MG.split(size, dim=1))
        to_update = ((before_MH - new_MH) * update_MH * (1 - update_MH)).numpy()
        to_new = ((1 - update_MH) * (1 - new_MH * new_MH)).numpy()
        to_reset = (candidate_MH * reset_MH * (1 - reset_MH)).numpy()
        recurrent_MG, new_part_MH = torch.empty_like(gates_MG), torch.empty_like(before_MH)
        state_BH = torch.zeros(ctx.rows_T[0], size)
        reset, update, recurrent, new_part, of_after, state = (
            tensor.numpy() for tensor in (reset_MH, update_MH, recurrent_MG, new_part_MH, grads[0], state_BH)
        )
        end = len(before_MH)
        for rows, recurrent_KG in zip(reversed(ctx.rows_T), reversed(recurrent_MG.split(ctx.rows_T)), strict=True):
            here, end = slice(end - rows, end), end - rows
            grad, out = state[:rows], recurrent[here]
            grad += of_after[here]
            part = np.multiply(grad, to_new[here], out=new_part[here])
            np.multiply(part, to_reset[here], out=out[:, :size])
            np.multiply(grad, to_update[here], out=out[:, size : 2 * size])
            np.multiply(part, reset[here], out=out[:, 2 * size :])
            grad *= update[here]
            state_BH[:rows].addmm_(recurrent_KG, of_state)
        gates_MG = torch.cat([recurrent_MG[:, : 2 * size], new_part_MH], dim=1)
        of_weights = gates_MG.t() @ x_MD, recurrent_MG.t() @ before_MH
        return None, None, None, *of_weights, gates_MG.sum(dim=0), recurrent_MG.sum(dim=0)


def _sigmoid(x: NDArray[np.float32]) -> None:
    """In place, by the tanh, which does not overflow."""
    x *= np.float32(0.5)
    np.tanh(x, out=x)
    x *= np.float32(0.5)
    x += np.float32(0.5)


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

    def sequences(self, x_BTD: Tensor, state_BH: Tensor, mask_BT: Tensor) -> Tensor:
        """output_NO at the decisions of the mask, row by row, of sequences that begin in these states."""
        row_N, column_N = mask_BT.nonzero(as_tuple=True)
        length_B = torch.ones(len(mask_BT), dtype=torch.int64)  # 1 also of a row without decisions
        length_B.scatter_reduce_(0, row_N, column_N + 1, "amax")
        packed = pack_padded_sequence(x_BTD, length_B, batch_first=True, enforce_sorted=False)
        assert packed.sorted_indices is not None
        assert packed.unsorted_indices is not None
        rows_T = packed.batch_sizes
        states_MH = _GRUFunction.apply(
            packed.data, rows_T.tolist(), state_BH[packed.sorted_indices], *self.gru.all_weights[0]
        )
        begin_T = rows_T.cumsum(0) - rows_T
        return self(states_MH[begin_T[column_N] + packed.unsorted_indices[row_N]])

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
