"""Actor and critic of an environment: small networks over flat observations.

Shape legend: B rollouts, T decisions, N environments or decided columns, D numbers in an observation, V actions to
choose from (all choices together for MultiDiscrete), A numbers in an action, W columns of a stored observation: D, and
V for the action mask if there is one, and H for the state of the memory if there is one.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covey.config import ConfigError
from covey.control.envs.spaces import ActionSpace, Continuous, Discrete, MultiDiscrete
from covey.control.envs.vector_env import Environments
from covey.control.memory import MemoryNetwork, RememberingEnvironments
from covey.control.mlp import MaskedObservations, Network, RunningMeanStd, scatter
from covey.control.pictures import MLP, Picture, acting, build_network
from covey.data import Batch, PolicyOutput

_TENSORS, _SHAPE = "policy.safetensors", "policy.json"
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_SMALLEST = 2.0**-54  # replaces a uniform number of 0, whose normal quantile is infinite
# Logit of an action that the mask forbids: its probability is 0 in float32, and its product with the log-probability is
# not NaN. Huang and Ontanon (arXiv 2006.14171), section 3.
_FORBIDDEN = -1e8
MOST_PICTURES = 2048  # in a microbatch: 0.5 GB in float32 for NatureCNN's four pictures of 84 x 84 with their layers


class Actor(nn.Module):
    """The trainable parameters of a policy."""

    def __init__(self, network: Network, log_std_A: Tensor | None) -> None:
        super().__init__()
        self.network = network
        self.log_std_A = None if log_std_A is None else nn.Parameter(log_std_A)


class ControlPolicy:
    """A softmax policy over V actions, or a Gaussian policy over A numbers; implements `covey.data.Policy`.

    The choices of `MultiDiscrete` are independent given the observation: log-probabilities, entropies and KLs are sums
    over the choices. The Gaussian is diagonal, with the network's output as its mean and A state-independent standard
    deviations as parameters. Log-probabilities are those of the drawn vector, before clipping to the environment's
    bounds.

    With `masked`, the observations end with a mask of V numbers, 1 for an action that is allowed and 0 for another. A
    masked action has the probability 0, and its logit has no gradient.

    Args:
        observation_size: D.
        actions: the action space.
        masked: whether the observations have action masks.
        picture: the picture that the observations are, stored in bytes; None: they are numbers.
        network: "mlp", or of a picture one of `pictures.CONVOLUTIONS`, which the hidden layers follow.
        memory: H, the size of a GRU before the hidden layers, which excludes convolutions; 0: there is none. The
            observations end with its state, zeros at the beginning of an episode and then `state_NH`.
        hidden: widths of the hidden layers.
        activation: "tanh" or "relu".
        initial_std: initial standard deviation of the Gaussian, in the environment's units.
        normaliser: scales the observations; None: they are not scaled.
        seed: seed of the initial weights.
    """

    def __init__(
        self,
        observation_size: int,
        actions: ActionSpace,
        *,
        masked: bool = False,
        picture: Picture | None = None,
        network: str = MLP,
        memory: int = 0,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        initial_std: float = 1.0,
        normaliser: RunningMeanStd | None,
        seed: int,
    ) -> None:
        self.observation_size = observation_size
        self.actions = actions
        self.masked = masked
        self.hidden = tuple(hidden)
        self.normaliser = normaliser
        outputs = actions.outputs
        log_std_A = torch.full((outputs,), math.log(initial_std)) if isinstance(actions, Continuous) else None
        self.picture, self.network, self.memory = picture, network, memory
        self.state_NH: NDArray[np.float32] = np.zeros((0, memory), dtype=np.float32)  # after the last call of `act`
        # A critic with the same seed draws from another stream.
        options: dict[str, Any] = {"activation": activation, "head_gain": 0.01, "seed": 2 * seed}
        made = (
            MemoryNetwork(observation_size, memory, hidden, outputs, **options)
            if memory
            else build_network(observation_size, hidden, outputs, picture=picture, network=network, **options)
        )
        self.module = Actor(made, log_std_A)
        self._forward: Callable[[NDArray[Any]], NDArray[np.float32]] = (
            self._advance if memory else acting(made, observation_size, normaliser)
        )
        self._allowed = slice(observation_size, observation_size + outputs)  # columns of the mask
        self._observations = MaskedObservations(observation_size, normaliser, keeps_bytes=network != MLP)
        self._counts = [outputs] if isinstance(actions, Continuous) else list(actions.counts)
        self._offset_A = np.cumsum([0, *self._counts[:-1]])  # offset of each choice's logits

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probability and entropy of every decision, in nats; 0 in masked columns.

        `all_logprobs_BTV` has the log-probabilities of all actions of a discrete policy.
        """
        row_NW, place_N = self._observations(batch)
        output = self._of_sequences(batch) if self.memory else self.module.network(row_NW[:, : self.observation_size])
        if self.masked:
            output = torch.where(row_NW[:, self._allowed] > 0, output, _FORBIDDEN)
        mask_BT = batch.mask_BT
        action = batch.actions_BT.flatten(0, 1).index_select(0, place_N)
        log_std_A = self.module.log_std_A
        if log_std_A is None:
            logp_NV, logprob_N = self._logprobs(output, action)
            entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=1)
            return PolicyOutput(
                scatter(logprob_N, place_N, mask_BT),
                scatter(entropy_N, place_N, mask_BT),
                scatter(logp_NV, place_N, mask_BT),
            )
        z_NA = (action - output) * (-log_std_A).exp()
        logprob_N = -(0.5 * z_NA**2).sum(dim=1) - (log_std_A + _HALF_LOG_2PI).sum()
        entropy = (log_std_A + (_HALF_LOG_2PI + 0.5)).sum()
        return PolicyOutput(scatter(logprob_N, place_N, mask_BT), entropy * mask_BT)

    def _logprobs(self, logits_NV: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """logp_NV of all actions, and logprob_N of the chosen ones."""
        if isinstance(self.actions, Discrete):
            logp_NV = logits_NV.log_softmax(dim=1)
            return logp_NV, logp_NV.gather(1, action[:, None])[:, 0]
        logp_NV = torch.cat([part.log_softmax(dim=1) for part in logits_NV.split(self._counts, dim=1)], dim=1)
        return logp_NV, logp_NV.gather(1, action + torch.from_numpy(self._offset_A)).sum(dim=1)

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """All rows in one microbatch, because the networks are small; with convolutions, a few."""
        rows = len(batch) if self.network == MLP else max(1, MOST_PICTURES // batch.mask_BT.shape[1])
        yield from torch.arange(len(batch)).split(rows)

    def act(self, row_NW: NDArray[np.float32], uniform_NA: NDArray[np.float64]) -> tuple[Any, Any]:
        """Sample an action for each of N environments by inverting the cumulative distribution.

        Args:
            row_NW: raw observations, float32, or bytes of pictures.
            uniform_NA: in [0, 1); for Discrete also [N].

        Returns:
            actions (int64 [N] for Discrete, int64 [N, A] for MultiDiscrete, float32 [N, A] for Continuous, not yet
            clipped to the bounds) and logprobs_N, float32, in nats.
        """
        output = self._output(row_NW)
        if isinstance(self.actions, Continuous):
            return self._draw(output, uniform_NA)
        if isinstance(self.actions, MultiDiscrete):
            drawn = [_choose(part, uniform_NA[:, i]) for i, part in enumerate(self._by_choice(output))]
            return np.stack([action_N for action_N, _ in drawn], axis=1), sum(logprob_N for _, logprob_N in drawn)
        uniform_N = uniform_NA.reshape(-1)
        return _choose_of_two(output, uniform_N) if self.actions.count == 2 else _choose(output, uniform_N)

    def greedy_action(self, row_NW: NDArray[np.float32]) -> Any:
        """The most probable action of each of N environments: int64 [N] or [N, A], or the mean, float32 [N, A]."""
        output = self._output(row_NW)
        if isinstance(self.actions, MultiDiscrete):
            return np.stack([part.argmax(axis=1) for part in self._by_choice(output)], axis=1)
        return output.copy() if isinstance(self.actions, Continuous) else output.argmax(axis=1)

    def _output(self, row_NW: NDArray[np.float32]) -> NDArray[np.float32]:
        output = self._forward(row_NW)
        if not self.masked:
            return output
        return np.where(row_NW[:, self._allowed] > 0, output, np.float32(_FORBIDDEN))

    def _advance(self, row_NW: NDArray[np.float32]) -> NDArray[np.float32]:
        output_NO, after_NH = self._remembering.advance(
            torch.from_numpy(self._observations.features(row_NW)), torch.from_numpy(row_NW[:, -self.memory :])
        )
        self.state_NH = after_NH.numpy()
        answer: NDArray[np.float32] = output_NO.numpy()
        return answer

    def _of_sequences(self, batch: Batch) -> Tensor:
        """The network's output at the decisions, [N, O]: each row is one sequence, from its first observation on."""
        rows = [torch.from_numpy(np.asarray(row[: batch.mask_BT.shape[1]])) for row in batch.context]
        row_BTW = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        x_MD = torch.from_numpy(self._observations.features(row_BTW.flatten(0, 1).numpy()))
        x_BTD = x_MD.unflatten(0, row_BTW.shape[:2])
        return self._remembering.sequences(x_BTD, row_BTW[:, 0, -self.memory :], batch.mask_BT)

    @property
    def _remembering(self) -> MemoryNetwork:
        assert isinstance(self.module.network, MemoryNetwork)
        return self.module.network

    def remembering(self, environments: Environments) -> Environments:
        """The environments in which this policy acts: with a memory, their observations end with its state."""
        return RememberingEnvironments(environments, self) if self.memory else environments

    def _by_choice(self, logits_NV: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return np.split(logits_NV, self._offset_A[1:], axis=1)

    def metrics(self) -> dict[str, float]:
        """`policy/std`: the mean standard deviation of continuous actions."""
        return {"policy/std": float(np.exp(self._log_std_A).mean())} if isinstance(self.actions, Continuous) else {}

    def save(self, folder: Path) -> None:
        """Write weights, normaliser and architecture; `load_policy` reads them bit for bit."""
        tensors = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        if self.normaliser is not None:
            tensors |= {f"normaliser.{name}": value for name, value in self.normaliser.state_dict().items()}
        if isinstance(self.actions, Continuous):
            tensors["low_A"] = torch.tensor(self.actions.low_A)
            tensors["high_A"] = torch.tensor(self.actions.high_A)
        shape = {
            "format": 1,
            "observation_size": self.observation_size,
            "actions": _saved(self.actions),
            "masked": self.masked,
            "memory": self.memory,
            "network": self.network,
            "picture": None if self.picture is None else vars(self.picture),
            "hidden": self.hidden,
            "activation": self.module.network.activation,
            "normalised": self.normaliser is not None,
        }
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, folder / _TENSORS)
        (folder / _SHAPE).write_text(json.dumps(shape, indent=1) + "\n")

    def _draw(self, mean_NA: NDArray[np.float32], uniform_NA: NDArray[np.float64]) -> tuple[Any, Any]:
        """Sample a Gaussian by its quantile function; returns actions and log-probabilities."""
        log_std_A = self._log_std_A
        normal_NA = torch.special.ndtri(torch.from_numpy(np.maximum(uniform_NA, _SMALLEST))).numpy()
        action_NA = (mean_NA + np.exp(log_std_A) * normal_NA).astype(np.float32)
        # Log-probability of the action in float32, as the trainer computes it.
        z_NA = (action_NA - mean_NA) * np.exp(-log_std_A)
        logprob_N = -0.5 * np.einsum("na,na->n", z_NA, z_NA) - np.float32(np.sum(log_std_A + _HALF_LOG_2PI))
        return action_NA, logprob_N

    @property
    def _log_std_A(self) -> NDArray[np.float32]:
        assert self.module.log_std_A is not None
        return self.module.log_std_A.detach().numpy()


def _choose_of_two(logits_N2: NDArray[np.float32], uniform_N: NDArray[np.float64]) -> tuple[Any, Any]:
    """`_choose` for two actions in fewer calls: -log p(0) = log(1 + exp(gap)), and symmetrically for p(1)."""
    gap_N = logits_N2[:, 1] - logits_N2[:, 0]
    first_N = np.exp(-np.logaddexp(np.float32(0), gap_N))
    action_N = uniform_N >= first_N
    return action_N.astype(np.int64), -np.logaddexp(np.float32(0), np.where(action_N, -gap_N, gap_N))


def _choose(logits_NV: NDArray[np.float32], uniform_N: NDArray[np.float64]) -> tuple[Any, Any]:
    """Inverse-CDF sampling: the action whose interval contains the uniform number, and its log-probability."""
    logits_NV = logits_NV - logits_NV.max(axis=1, keepdims=True)
    cumulative_NV = np.exp(logits_NV).cumsum(axis=1)
    total_N = cumulative_NV[:, -1]
    # Without the last edge, so that rounding cannot give an index past the last action.
    action_N = (cumulative_NV[:, :-1] <= (uniform_N * total_N)[:, None]).sum(axis=1)
    return action_N, logits_NV[np.arange(len(action_N)), action_N] - np.log(total_N)


def _saved(actions: ActionSpace) -> int | tuple[int, ...] | None:
    """An action space as JSON: the number of actions, the numbers of each choice, or null for continuous actions."""
    if isinstance(actions, Discrete):
        return actions.count
    return actions.counts if isinstance(actions, MultiDiscrete) else None


def load_policy(folder: Path) -> ControlPolicy:
    """Load a policy that `ControlPolicy.save` wrote.

    Raises:
        ConfigError: if the folder has none, or a damaged one.
    """
    for name in (_SHAPE, _TENSORS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} holds no policy ({name} is missing)")
    try:
        shape = json.loads((folder / _SHAPE).read_text())
        tensors = safetensors.torch.load_file(folder / _TENSORS)
        actions: ActionSpace
        if shape["actions"] is None:
            actions = Continuous(tensors["low_A"].numpy(), tensors["high_A"].numpy())
        elif isinstance(shape["actions"], list):
            actions = MultiDiscrete(tuple(shape["actions"]))
        else:
            actions = Discrete(shape["actions"])
        size, seen = shape["observation_size"], shape.get("picture")
        policy = ControlPolicy(
            size, actions, masked=shape.get("masked", False), hidden=shape["hidden"], activation=shape["activation"],
            picture=None if seen is None else Picture(tuple(seen["shape"]), seen["scale"]),
            network=shape.get("network", MLP), memory=shape.get("memory", 0),
            normaliser=RunningMeanStd(size) if shape["normalised"] else None, seed=0,
        )  # fmt: skip
        policy.module.load_state_dict(_below("module.", tensors))
        if policy.normaliser is not None:
            policy.normaliser.load_state_dict(_below("normaliser.", tensors))
    except (KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the policy in {folder} is damaged ({reason}): save it again") from error
    return policy


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class ControlCritic:
    """A value function with a network of its own; implements `covey.data.Critic`.

    Arguments as for `ControlPolicy`, whose normaliser it uses. With `memory` it reads the observation and the state of
    the policy's memory, as it was when the rollout was sampled; only the policy's loss trains the memory.
    """

    def __init__(
        self,
        observation_size: int,
        *,
        picture: Picture | None = None,
        network: str = MLP,
        memory: int = 0,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        normaliser: RunningMeanStd | None,
        seed: int,
    ) -> None:
        self.normaliser, self.memory = normaliser, memory
        self.module = build_network(
            observation_size + memory, hidden, 1, picture=picture, network=network, activation=activation,
            head_gain=1.0, seed=2 * seed + 1,
        )  # fmt: skip
        self._forward: Callable[[NDArray[Any]], NDArray[np.float32]] = (
            self._with_memory if memory else acting(self.module, observation_size, normaliser)
        )
        self._observations = MaskedObservations(observation_size, normaliser, keeps_bytes=network != MLP)

    def values(self, batch: Batch) -> Tensor:
        """values_BT of the state before every decision; 0 in masked columns."""
        row_NW, place_N = self._observations(batch)
        observation_ND = row_NW[:, : self._observations.size]
        if self.memory:
            observation_ND = torch.cat([observation_ND, row_NW[:, -self.memory :]], dim=1)
        return scatter(self.module(observation_ND)[:, 0], place_N, batch.mask_BT)

    def _with_memory(self, row_NW: NDArray[np.float32]) -> NDArray[np.float32]:
        seen = np.concatenate([self._observations.features(row_NW), row_NW[:, -self.memory :]], axis=1)
        with torch.no_grad():
            value_N1: NDArray[np.float32] = self.module(torch.from_numpy(seen)).numpy()
        return value_N1

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """bootstrap_value_B of the state after the last decision of every row, without gradients."""
        width = batch.mask_BT.shape[1]
        after_B = width - batch.mask_BT.flip(1).int().argmax(dim=1)
        # A row without a decision has no value after it; its last observation keeps the index in range.
        rows = [row[min(after, len(row) - 1)] for row, after in zip(batch.context, after_B.tolist(), strict=True)]
        return torch.from_numpy(self.values_of(np.stack(rows)))

    def values_of(self, row_NW: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values of raw observations, float32 [N]."""
        return self._forward(row_NW)[:, 0].copy()
