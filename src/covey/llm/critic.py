"""Critic of PPO for language models: a value head on a decoder, which estimates the return from each state.

Shapes: B rollouts, T actions, N distinct decisions, W hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from covey.config import ConfigError
from covey.config.files import path_error
from covey.data import Batch
from covey.llm.model.files import build, read_part, read_weight_files, save_weights, trunk_class
from covey.llm.model.logprobs import ActionHiddenStates, hidden_states_for_actions
from covey.llm.model.lora import Adapter, save_adapter
from covey.llm.policy import LanguagePolicy
from covey.runtime.distributed import WHOLE, Weights

HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """value_N = W h + b, in fp32 (in fp64 for an fp64 decoder), initialized to 0."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, dtype=torch.promote_types(dtype, torch.float32))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NW: Tensor) -> Tensor:
        """value_N."""
        value_N: Tensor = self.linear(hidden_NW.to(self.linear.weight.dtype))[:, 0]
        return value_N


def head_parameters(width: int) -> int:
    """Number of weights of a `ValueHead`."""
    return width + 1


def head_input_bytes(decisions: int, width: int, itemsize: int) -> int:
    """Bytes of the fp32 copy [N, W] that `ValueHead` reads; 0 if hidden states (`itemsize` bytes) are fp32."""
    return 0 if itemsize == torch.float32.itemsize else decisions * width * torch.float32.itemsize


class LanguageCritic:
    """A decoder (trunk) with a value head; implements `covey.data.Critic`. Its optimizer trains `module`.

    With `own_trunk`, the trunk is a copy of the policy's current decoder without the output layer, and `module` is
    trunk and head. Otherwise the head is on the policy's trunk and `module` is the head alone: the trained policy has
    the values in its output (`SharedTrunkValues`), and one backward pass computes the gradient of both losses. Epochs
    that train only the critic then train only the head.
    """

    def __init__(self, policy: LanguagePolicy, *, own_trunk: bool = True) -> None:
        decoder = policy.module.base_model
        assert isinstance(decoder, PreTrainedModel)
        # The input width of the output layer: some models project their hidden states to another width before it.
        width = policy.module.get_output_embeddings().weight.shape[1]
        self.trunk: PreTrainedModel = copy.deepcopy(decoder) if own_trunk else decoder
        self.own_trunk = own_trunk
        self.trains_trunk = own_trunk
        self.packed = policy.shares_prompts
        self.weights: Weights = WHOLE  # of a shared trunk; one of its own is the module that FSDP2 calls
        self.head = ValueHead(width, decoder.dtype).to(policy.device)
        self.module: nn.Module = nn.ModuleDict({"trunk": self.trunk, "head": self.head}) if own_trunk else self.head

    def with_trunk_of(self, policy: LanguagePolicy) -> LanguageCritic:
        """The critic after the weights of the policy, whose trunk it shares, were divided among the ranks."""
        critic = copy.copy(self)
        critic.weights = policy.weights
        return critic

    def values(self, batch: Batch) -> Tensor:
        """values_BT of the state before every decision (the prompt and all tokens so far); 0 at undecided columns."""
        batch = batch.to(self.head.linear.weight.device)
        with torch.set_grad_enabled(self.trains_trunk and torch.is_grad_enabled()):
            decided = self.weights.run(lambda: hidden_states_for_actions(self.trunk, batch, packed=self.packed))
        return decided.scatter_to_batch(self.head(decided.hidden_NW))

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """bootstrap_value_B = 0, also after a completion that the token limit truncated.

        The token limit is part of a language task: a truncated completion is final, and its reward is that of the
        truncated text. A bootstrap value would add that reward a second time, the critic would be trained on the sum,
        and values would grow without bound. In control, a time limit only ends the observation of an episode, so its
        further return has to be bootstrapped.
        """
        return torch.zeros(len(batch))

    def save(self, folder: Path) -> None:
        """Write the head, and with `own_trunk` the trunk in the format of `transformers.AutoModel`."""
        self.collect(WHOLE)(folder)

    def collect(self, weights: Weights) -> Callable[[Path], None]:
        """Collect the trunk, whose weights the ranks divide, on rank 0; returns a function that writes the critic."""
        trunk = weights.state_dict(self.trunk) if self.own_trunk else {}
        return lambda folder: self._save(folder, trunk)

    def _save(self, folder: Path, trunk: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.own_trunk:
            save_weights(self.trunk, trunk, folder)
        safetensors.torch.save_file(self.head.linear.state_dict(), folder / HEAD_FILE)

    def load(self, folder: Path) -> None:
        """Load a critic that `save` wrote.

        Raises:
            ConfigError: if it is damaged, belongs to another model, or has the other kind of trunk.
            MachineError: if it cannot be read.
        """
        if (folder / "config.json").is_file() != self.own_trunk:
            has, other = ("a", "own") if not self.own_trunk else ("no", "policy")
            raise ConfigError(
                f"the critic in {folder} has {has} trunk of its own: set critic.trunk = '{other}', or take the folder "
                "away to begin with a new critic"
            )
        try:
            head = safetensors.torch.load_file(folder / HEAD_FILE)
            self.head.linear.load_state_dict(head)
            if self.own_trunk:
                self._load_trunk(folder)
        except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            raise path_error(error, f"take away the critic in {folder}, which does not fit", folder) from error

    def _load_trunk(self, folder: Path) -> None:
        config = read_part(AutoConfig, folder, str(folder))
        with read_weight_files(folder, str(folder)).open() as tensors:
            trunk = build(trunk_class(config, str(folder)), config, tensors, self.trunk.dtype, str(folder))
        self.trunk.load_state_dict(trunk.state_dict())


class AdapterCritic(LanguageCritic):
    """A critic on the policy's trunk with an adapter of its own. Its optimizer trains adapter and head."""

    def __init__(self, policy: LanguagePolicy, adapter: Adapter) -> None:
        super().__init__(policy, own_trunk=False)
        self.adapter = adapter
        self.trains_trunk = True
        self.weights = adapter.weights()
        self.module = nn.ModuleDict({"trunk": adapter.parameters, "head": self.head})

    def with_trunk_of(self, policy: LanguagePolicy) -> LanguageCritic:
        critic = copy.copy(self)
        critic.weights = self.adapter.weights(policy.weights)
        return critic

    def collect(self, weights: Weights) -> Callable[[Path], None]:
        """A function that writes head and adapter; every rank has both."""
        return self._save_both

    def _save_both(self, folder: Path) -> None:
        self._save(folder, {})
        save_adapter(self.adapter, str(self.adapter.model.name_or_path), folder)


class SharedTrunkValues:
    """The values of a critic whose head is on the policy's trunk; implements `covey.llm.policy.ExtraOutput`."""

    def __init__(self, critic: LanguageCritic) -> None:
        self.head = critic.head

    def packed(self, policy: LanguagePolicy, batch: Batch, decided: ActionHiddenStates) -> dict[str, Tensor]:
        return {"values_BT": decided.scatter_to_batch(self.head(decided.hidden_NW))}

    def by_row(
        self, policy: LanguagePolicy, logp_TV: Tensor, batch: Batch, row: int, early_T: Tensor | None
    ) -> dict[str, Tensor]:
        return {}

    def after_rows(self, policy: LanguagePolicy, batch: Batch) -> dict[str, Tensor]:
        """Values from a second forward pass, because not every model returns hidden states with its logits."""
        decided = hidden_states_for_actions(policy.module.base_model, batch, packed=False)
        return self.packed(policy, batch, decided)
