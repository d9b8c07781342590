"""Weights that FSDP2 (`fully_shard`) has divided among the ranks.

What keeps the bits of a sharded update equal to those of whole weights is in `shard` and `TreeReduceScatter`.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from covey.data import Team
from covey.runtime.distributed import GradientTree, Weights, add_in_tree, part_of

T = TypeVar("T")
_METHOD = "covey_run"  # the method of a root module that FSDP2 treats as its forward pass


class ShardedWeights(Weights):
    """Weights that FSDP2 has divided among the ranks along their first dimension."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, team: Team, *, exact: bool) -> None:
        """`module` is the root, to which `shard` has been applied."""
        self.module: Any = module
        self.dtype, self.team, self.exact = dtype, team, exact
        self.units: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._is_running = False

    def dtype_of(self, module: nn.Module) -> torch.dtype:
        return self.dtype

    def run(self, compute: Callable[[], T]) -> T:
        if (
            self._is_running
        ):  # a further pass, such as that of a reference with the same frozen weights, is a part of it
            return compute()
        self._is_running = True
        try:
            result: T = getattr(self.module, _METHOD)(compute)
        finally:
            self._is_running = False
        return result

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._set_reshard_after_forward(False)  # a decoder calls the layers, on each rank another number of times
        for unit in self.units:
            unit.unshard()
        try:
            yield
        finally:
            self._set_reshard_after_forward(True)
            self.reshard()

    def _set_reshard_after_forward(self, wanted: bool) -> None:
        for unit in self.units:
            if unit is not self.module:
                unit.set_reshard_after_forward(wanted, recurse=False)

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        parameters = dict(module.named_parameters())  # a shared parameter once
        shared = dict(module.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
        state: dict[str, Tensor] = {}
        for name, tensor in module.state_dict().items():
            if name not in shared:
                whole = tensor.full_tensor().to(self.dtype) if isinstance(tensor, DTensor) else tensor
                if self.team.rank == 0:
                    state[name] = whole.cpu()
        return state

    def before_last_pass(self) -> None:
        if self.exact:
            self.module.set_requires_gradient_sync(True)

    def end_shard(self) -> None:
        if self.exact:  # gradients are accumulated without a message from now on
            self.module.set_requires_gradient_sync(False)

    def whole_rows(self, local: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        own = torch.cat(list(local)).cpu().numpy()
        received = self.team.exchange(own.tobytes())
        of_rank = [
            np.split(np.frombuffer(message, dtype=own.dtype), np.cumsum(self._rows_of(rank, rows))[:-1])
            for rank, message in enumerate(received)
        ]
        joined = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*of_rank, strict=True))
        return [rows.to(local[0].device) for rows in joined]

    def _rows_of(self, rank: int, rows: Sequence[int]) -> list[int]:
        return [len(range(*part_of(count, rank, self.team.size).indices(count))) for count in rows]


def shard(
    module: nn.Module,
    dtype: torch.dtype,
    team: Team,
    *,
    exact: bool = True,
    whole: Collection[nn.Parameter] = (),
) -> ShardedWeights:
    """Divide the weights of a decoder among the ranks: its layers one by one, and the rest as the root.

    Trainable weights are stored in fp32, so they are the optimizer's masters, and gathered in `dtype`. Others keep
    their dtype. Gradients are summed and not averaged, because loss weights have global denominators.

    Args:
        module: a model or a trunk of transformers. Copy it before, because FSDP2 refuses copies.
        dtype: in which the model computes.
        team: the ranks; all call it.
        exact: gradients are added in the order of a binary tree over the logical shards, once in an optimizer step,
            which takes an fp32 gradient of all weights on each rank. False: FSDP2 adds them after every backward pass.
        whole: parameters that every rank keeps whole, such as those of adapters. The optimizer adds their gradients.
    """
    # Hidden states are views, and nothing writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    kept = set(whole)
    trained = any(parameter.requires_grad for parameter in module.parameters() if parameter not in kept)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if trained and dtype != torch.float32 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream between fused layers is in fp32
    )
    mesh = init_device_mesh(next(module.parameters()).device.type, (team.size,))
    units = [*layers_of(module), module]
    for unit in units:
        for parameter in unit.parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32 and parameter not in kept:
                parameter.data = parameter.data.to(torch.float32)
        fully_shard(unit, mesh=mesh, mp_policy=precision, ignored_params=kept)
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # else the factor is a ReduceOp that gloo does not have
        if exact:
            unit.set_custom_reduce_scatter(TreeReduceScatter(team))  # type: ignore[arg-type]  # its class is private
    setattr(module, _METHOD, lambda compute: compute())
    register_fsdp_forward_method(module, _METHOD)
    weights = ShardedWeights(module, dtype, team, exact=exact)
    weights.end_shard()
    weights.run(tuple)  # FSDP2 takes the first module that runs as the root
    weights.reshard()
    return weights


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a decoder: the entries of the outermost `nn.ModuleList` with the most parameters."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return list(max(lists, key=lambda found: sum(one.numel() for one in found.parameters()), default=[]))


class TreeReduceScatter:
    """Adds the gradients of all logical shards in the order of a binary tree; implements FSDP2's `ReduceScatter`.

    FSDP2 calls it after the last backward pass of each shard of this rank. The shards of a rank are consecutive, so the
    tree over ranks continues that over the shards of each: `TorchTeam.sum` adds the same gradients in the same order.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.shards = team.shards // team.size  # of this rank
        self.tree = GradientTree()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum of this rank's part, or 0 if further shards of this rank follow."""
        self.tree.add([input_tensor])
        if self.tree.added < self.shards:
            output_tensor.zero_()
            return
        (total,) = self.tree.total()
        parts = torch.empty_like(total)
        dist.all_to_all_single(parts, total, group=group)
        output_tensor.copy_(add_in_tree(list(parts.view(self.team.size, -1))))
