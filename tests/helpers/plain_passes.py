"""What one ordinary forward pass over each whole sequence says of a batch: the oracle of all faster evaluations."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from covey.data import Batch
from helpers.tabular_policy import Result


class Plain(NamedTuple):
    """What a plain forward pass says, [B, T], 0 where undecided."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    all_logprobs: list[Tensor]  # [decisions, V] of each row


def sequence(batch: Batch, row: int) -> tuple[Tensor, list[int], Tensor]:
    """The tokens of a row, the positions that predict its decisions, and the columns of those."""
    columns = batch.mask_BT[row].nonzero()[:, 0]
    prompt, actions = batch.context[row], batch.actions_BT[row, : int(columns[-1]) + 1]
    return (
        torch.tensor([*prompt, *actions.tolist()]),
        [len(prompt) - 1 + column for column in columns.tolist()],
        columns,
    )


def spread(values: list[Tensor], batch: Batch) -> Tensor:
    """[B, T] of the numbers of each row's decisions."""
    rows = []
    for row, value_N in enumerate(values):
        blank_T = torch.zeros(batch.mask_BT.shape[1], dtype=value_N.dtype)
        rows.append(blank_T.index_put((batch.mask_BT[row].nonzero()[:, 0],), value_N))
    return torch.stack(rows)


def plain(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Plain:
    """With gradient."""
    chosen, entropies, everything = [], [], []
    for row in range(len(batch)):
        tokens, positions, columns = sequence(batch, row)
        logits_LV = model(input_ids=tokens[None]).logits[0] / temperature
        logp_NV = logits_LV[positions].log_softmax(dim=1)
        chosen.append(logp_NV[torch.arange(len(columns)), batch.actions_BT[row, columns]])
        entropies.append(-(logp_NV.exp() * logp_NV).sum(dim=1))
        everything.append(logp_NV)
    return Plain(spread(chosen, batch), spread(entropies, batch), everything)


def plain_values(trunk: nn.Module, head: nn.Linear, batch: Batch) -> Tensor:
    """values_BT of a value head on a trunk, 0 where undecided."""
    values = []
    for row in range(len(batch)):
        tokens, positions, _ = sequence(batch, row)
        values.append(trunk(input_ids=tokens[None]).last_hidden_state[0][positions] @ head.weight[0] + head.bias)
    return spread(values, batch)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-5) -> None:
    """Norms of some models compute in fp32 whatever the precision around them."""
    assert found.keys() >= expected.keys()
    assert not any(bool(found[name].any()) for name in found.keys() - expected.keys())
    assert any(gradient.norm() > 1e-2 for gradient in expected.values()), "a gradient of zero would prove nothing"
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= rtol * gradient.norm().clamp(min=1e-2), name


class Kept:
    """An optimizer that keeps the gradient and changes nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: list[dict[str, Tensor]] = []

    def before_last_pass(self) -> None: ...

    def step(self, learning_rate: float) -> Result:
        self.found.append(gradients_of(self.module))
        self.module.zero_grad()
        return Result(1.0)
