"""PPO's critic on a language model: a value head on a decoder, which says how much reward is still to come.

Shapes: B rollouts, T decisions, N decisions made, W hidden width.
"""

from __future__ import annotations

import copy
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.config import ConfigError
from covey.config.faults import path_error
from covey.data import Batch
from covey.llm.model.folder import read_weight_files
from covey.llm.model.hidden_states import ActionHiddenStates, hidden_states_for_actions
from covey.llm.model.pretrained import build, read_config, trunk_class
from covey.llm.policy import LanguagePolicy

HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """value_N = W h + b, in fp32 (fp64 on an fp64 decoder). It begins as zero, and so do all values."""

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
    """Meets `covey.data.Critic`.

    `module` is what its optimizer moves. With a trunk of its own (a copy of the policy's decoder as it is now, without
    the output layer) that is the trunk and the head. On the policy's trunk it is the head alone: the policy that is
    trained then has the values in its output (`SharedTrunkValues`), so that one backward pass gives its trunk the
    gradient of both losses. In passes that train only the critic, only the head is trained.
    """

    def __init__(self, policy: LanguagePolicy, *, own_trunk: bool = True) -> None:
        decoder = policy.module.base_model
        assert isinstance(decoder, PreTrainedModel)
        # Of what the output layer reads: some models project their hidden states to another width before it.
        width = policy.module.get_output_embeddings().weight.shape[1]
        self.trunk: PreTrainedModel = copy.deepcopy(decoder) if own_trunk else decoder
        self.own_trunk = own_trunk
        self.packed = policy.shares_prompts
        self.head = ValueHead(width, decoder.dtype).to(policy.device)
        self.module: nn.Module = nn.ModuleDict({"trunk": self.trunk, "head": self.head}) if own_trunk else self.head

    def values(self, batch: Batch) -> Tensor:
        """values_BT: of the state before every decision (the prompt and all tokens so far); 0 where undecided."""
        batch = batch.to(self.head.linear.weight.device)
        with torch.set_grad_enabled(self.own_trunk and torch.is_grad_enabled()):
            decided = hidden_states_for_actions(self.trunk, batch, packed=self.packed)
        return decided.scatter_to_batch(self.head(decided.hidden_NW))

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """bootstrap_value_B = 0, also after a completion that the token limit cut.

        The limit is part of a language task: a cut completion is over, and its reward was paid for what stands there.
        A value of the words that might have followed would count that reward a second time, the next critic would
        learn the sum, and values would grow without bound. In control a time limit only stops the watching, and what
        the episode would still have earned is owed.
        """
        return torch.zeros(len(batch))

    def save(self, folder: Path) -> None:
        """Write the head and, where it is its own, the trunk, which `transformers.AutoModel` then loads."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.own_trunk:
            self.trunk.save_pretrained(folder)
        safetensors.torch.save_file(self.head.linear.state_dict(), folder / HEAD_FILE)

    def load(self, folder: Path) -> None:
        """Take over a critic that `save` wrote.

        Raises:
            ConfigError: if it is damaged, belongs to another model, or had the other kind of trunk.
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
        config = read_config(folder, str(folder))
        with read_weight_files(folder, str(folder)).open() as tensors:
            trunk, misfits = build(trunk_class(config, str(folder)), config, tensors, self.trunk.dtype, str(folder))
        if misfits:
            raise ConfigError("; ".join(misfits))
        self.trunk.load_state_dict(trunk.state_dict())


class SharedTrunkValues:
    """The values of a critic whose head is on the policy's trunk; implements `covey.llm.policy.ExtraOutput`."""

    def __init__(self, critic: LanguageCritic) -> None:
        self.head = critic.head

    def packed(self, policy: LanguagePolicy, batch: Batch, decided: ActionHiddenStates) -> dict[str, Tensor]:
        return {"values_BT": decided.scatter_to_batch(self.head(decided.hidden_NW))}

    def by_row(self, policy: LanguagePolicy, logp_TV: Tensor, tokens_L: Tensor) -> dict[str, Tensor]:
        return {}

    def after_rows(self, policy: LanguagePolicy, batch: Batch) -> dict[str, Tensor]:
        """From a forward pass of its own, because not every model returns hidden states and logits of one."""
        decided = hidden_states_for_actions(policy.module.base_model, batch, packed=False)
        return self.packed(policy, batch, decided)
