"""Exponential moving average (EMA) of a module's weights, for the reference policy of a run."""

from typing import Any

import torch
from torch import Tensor, nn

from covey.config import ConfigError
from covey.data import ReferenceUpdater
from covey.runtime.sharding import WHOLE, Weights, local, own_rows


class EMAWeights(ReferenceUpdater):
    """A copy of a module's weights, or their exponential moving average.

        weight += fraction * (leader's weight - weight)

    A moving average is stored in fp32, which takes 4 bytes per weight beside a module of lower precision. In bf16, with
    its 8 significant bits, a small fraction of a small difference would be rounded to 0 and the reference would not
    change. A copy (`fraction` = 1) needs no memory beside the module.
    """

    def __init__(
        self, module: nn.Module, leader: nn.Module, fraction: float, *, every: int = 1, division: Weights = WHOLE
    ) -> None:
        """
        Args:
            module: the reference; its parameters require no gradient.
            leader: the policy, a module with the same parameters.
            fraction: above 0; 1 copies the weights.
            every: number of steps between updates.
            division: of the module's weights among the ranks; the leader's are divided in the same way.
        """
        self.fraction, self.every, self.division = fraction, every, division
        self.parameters = dict(module.named_parameters())
        self.leader = dict(leader.named_parameters())
        assert self.parameters.keys() == self.leader.keys()
        self.weights: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            exact = parameter.dtype if fraction == 1 else torch.promote_types(parameter.dtype, torch.float32)
            self.weights[name] = parameter.detach().to(exact)  # the parameter itself, if it is precise enough

    def after(self, step: int) -> None:
        """Update the weights if `step` is a multiple of `every`."""
        if step % self.every == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Interpolate between the weights and the leader's."""
        for name, weight in self.weights.items():
            # The leader's master weights, if they are sharded, are rounded as the weights are that it computes with.
            leader = self.leader[name].detach().to(self.parameters[name].dtype).to(weight.dtype)
            weight.copy_(leader) if self.fraction == 1 else weight.lerp_(leader, self.fraction)
        self._copy_to_module()

    def state_dict(self) -> dict[str, Any]:
        """The weights by parameter name, not copied."""
        return dict(self.weights)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved weights, bit for bit.

        Raises:
            ConfigError: if their names or shapes are not those of the module.
        """
        shapes = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        if shapes != {name: tuple(weight.shape) for name, weight in state.items()}:
            raise ConfigError(
                "the saved reference belongs to another model: resume with the model that the run began with"
            )
        for name, weight in self.weights.items():
            local(weight).copy_(own_rows(state[name], weight))
        self._copy_to_module()

    def _copy_to_module(self) -> None:
        for name, parameter in self.parameters.items():
            if local(parameter).data_ptr() != local(self.weights[name]).data_ptr():
                parameter.copy_(self.weights[name])
        self.division.reshard()
