"""The order in which the gradients of shards are added."""

import pytest
import torch

from covey.data import Team
from covey.runtime.distributed import GradientTree


def tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_gradients_are_added_in_the_order_of_a_binary_tree(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    shards = [torch.randn(1000, generator=generator) * 10.0 ** (i % 5) for i in range(count)]
    tree = GradientTree()
    for shard in shards:
        gradient = shard.clone()
        tree.add([gradient])
        gradient.fill_(float("nan"))  # an optimizer reuses the memory
    (total,) = tree.total()
    assert torch.equal(total, tree_sum(shards))
    if count >= 4:
        assert not torch.equal(total, sum(shards)), "another order gives other bits"
    tree.add([shards[0]])
    assert torch.equal(tree.total()[0], shards[0]), "the tree is empty again"


def test_one_rank_is_the_identity() -> None:
    team, tensor = Team(4), torch.ones(3)
    team.sum([tensor])
    assert tensor.tolist() == [1.0] * 3
    assert team.exchange(b"message") == [b"message"]
    assert (team.rank, team.size, team.shards) == (0, 1, 4)
