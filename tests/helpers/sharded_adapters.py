"""Policy, reference and critic with adapters on one frozen model, whole or sharded, and the bits that they compute.

As a program, `python sharded_adapters.py FOLDER KIND DTYPE` is one of several ranks, which writes what it found to
rank-N.json.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covey.config import CriticConfig, LoRAConfig, ReferenceConfig, RunConfig
from covey.data import Team
from covey.experiment.models import Models, adapt, divide
from covey.llm.model.lora import adapted_layers, all_factors, merged_weight
from covey.llm.policy import KLToReference, LanguagePolicy
from covey.llm.remote.weights import gathered
from covey.runtime.distributed import ShardedTeam, is_sharded, joined_ranks, local, own_shards
from covey.runtime.optimizer import MasterAdamW
from helpers.recomputing import batch_of
from helpers.tiny_models import tiny_model

CONFIG = RunConfig(
    model="tiny", algorithm="ppo", lora=LoRAConfig(rank=2, alpha=6.0), critic=CriticConfig(trunk="adapter")
)
REFRESHED = replace(CONFIG, reference=ReferenceConfig(refresh_every=1))  # whose reference has an adapter
SHARDS = 2


def build(team: Team, config: RunConfig, kind: str, dtype: str) -> Models:
    """Models with adapters that were trained for a while; the ranks of a `ShardedTeam` divide the frozen weights."""
    policy, adaptation = adapt(LanguagePolicy(tiny_model(kind, dtype=getattr(torch, dtype))), config)  # type: ignore[arg-type]
    critic, reference = adaptation.critic(policy, "adapter"), adaptation.reference(policy)
    nn.init.ones_(critic.head.linear.weight)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        factors = all_factors(policy.module)
        for factor in policy.module.parameters():
            if factor in factors:
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return divide(policy, reference, [critic], adaptation, config, team)


def frozen_numbers(models: Models) -> tuple[int, int]:
    """The frozen weights of this rank, and those of the model."""
    module = models.policy.module
    frozen = [one for one in module.parameters() if one not in all_factors(module)]
    assert not any(one.requires_grad for one in frozen)
    return sum(local(one).numel() for one in frozen), sum(one.numel() for one in frozen)


def found(models: Models, team: Team, folder: Path) -> dict[str, str]:
    """Hashes of outputs and gradients, and of everything again after one optimizer step of policy and critic."""
    assert not any(is_sharded(one) for one in all_factors(models.policy.module))
    before = _outputs(models, team)
    for (module, weights), shift in zip(models.trained, (0.0, 0.5), strict=True):
        optimizer = MasterAdamW(module, lr=0.01, max_grad_norm=0.1, team=team, weights=weights)
        for shard in own_shards(team):
            total = (_objective(models) if shift == 0 else _values(models)) * (1 + shard + shift)
            optimizer.before_last_pass()
            total.backward()
            optimizer.end_shard()
        before[f"norm {shift}"] = repr(optimizer.step(0.01).grad_norm)
    after = _outputs(models, team)
    written = [(folder / name, write) for name, write in models.collect()]
    if team.rank == 0:
        for path, write in written:
            write(path)
        for path in sorted(folder.rglob("*.safetensors")):
            after[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return before | {f"after: {name}": value for name, value in after.items()}


def _objective(models: Models) -> Tensor:
    """A weighted sum of log-probabilities and of the exact KL to the reference."""
    output = models.policy.with_outputs(KLToReference(models.reference)).evaluate(batch_of())
    assert output.kl_BT is not None
    return ((output.logprobs_BT + 2 * output.kl_BT) * torch.arange(output.logprobs_BT.shape[1])).sum()


def _values(models: Models) -> Tensor:
    values_BT = models.critics[0].values(batch_of())
    return (values_BT * torch.arange(values_BT.shape[1])).sum()


def _outputs(models: Models, team: Team) -> dict[str, str]:
    module, batch = models.policy.module, batch_of()
    with torch.no_grad():
        outputs = {
            "policy": models.policy.evaluate(batch).logprobs_BT,
            "reference": models.reference.evaluate(batch).logprobs_BT,
            "values": models.critics[0].values(batch),
        }
    with models.policy.weights.gathered():
        layers = adapted_layers(module)
        outputs |= {f"sampled with {path}": merged_weight(layer) for path, layer in layers.items()}
    sent = gathered(module, models.policy.dtype, keep=team.rank == 0)
    assert all(torch.equal(sent[f"{path}.weight"], outputs[f"sampled with {path}"]) for path in layers if sent)
    outputs |= {f"sent {name}": tensor for name, tensor in sent.items()}
    return _hashes(outputs)


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def main(folder: str, kind: str, dtype: str) -> None:
    said: dict[str, Any] = {}
    with joined_ranks():
        team = ShardedTeam(SHARDS)
        for name, config in (("plain", CONFIG), ("refreshed", REFRESHED)):
            models = build(team, config, kind, dtype)
            said[name] = {"frozen": frozen_numbers(models), "found": found(models, team, Path(folder) / name)}
        (Path(folder) / f"rank-{team.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
