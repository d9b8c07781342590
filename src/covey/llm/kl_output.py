"""The exact KL of a language model to its reference, as a further output of its forward pass.

Shapes: B rollouts, T decisions, V vocabulary, L tokens of a rollout with its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from covey.core import kl
from covey.data import Batch
from covey.llm.model.exact_kl import exact_kl
from covey.llm.model.hidden_states import ActionHiddenStates, hidden_states_for_actions
from covey.llm.policy import LanguagePolicy


class KLToReference:
    """KL(pi || pi_ref) over the vocabulary at every decision, if gradients are enabled: it is part of the loss only.

    Each evaluation then costs a forward pass of the reference too. Implements `covey.llm.policy.ExtraOutput`.
    """

    def __init__(self, reference: LanguagePolicy) -> None:
        self.reference = reference

    def packed(self, policy: LanguagePolicy, batch: Batch, decided: ActionHiddenStates) -> dict[str, Tensor]:
        if not torch.is_grad_enabled():
            return {}
        reference = self.reference.module
        with torch.no_grad():
            other_NW = hidden_states_for_actions(reference.base_model, batch, packed=True).hidden_NW
        head, other_head = policy.module.get_output_embeddings(), reference.get_output_embeddings()
        return {"kl_BT": decided.spread(exact_kl(decided.hidden_NW, head, other_NW, other_head, policy.temperature))}

    def by_row(self, policy: LanguagePolicy, logp_TV: Tensor, tokens_L: Tensor) -> dict[str, Tensor]:
        if not torch.is_grad_enabled():
            return {}
        with torch.no_grad():
            other_TV = self.reference.log_distribution(tokens_L, len(logp_TV))
        return {"kl_BT": kl.exact(logp_TV, other_TV)}

    def after_rows(self, policy: LanguagePolicy, batch: Batch) -> dict[str, Tensor]:
        return {}
