"""A causal language model as a policy: a prompt is where it starts, every sampled token is a decision.

Shapes: B rollouts, T decisions, S prompts, N tokens of a packed forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from covey.core import kl
from covey.data import Batch, PolicyOutput
from covey.llm.generation.backend import Backend, Sampling, choose_backend
from covey.llm.model.exact_kl import exact_kl
from covey.llm.model.fused_layers import fuse
from covey.llm.model.hidden_states import hidden_states_for_actions, row_lengths, row_tokens, spread
from covey.llm.model.logprobs import token_logprobs
from covey.llm.model.microbatches import cut, in_order
from covey.llm.model.plain_forward import exact_logprobs, next_token_logits


class LanguagePolicy:
    """A transformers decoder with a causal head.

    Models whose attention takes a layout share the prompt of a group in every forward pass (`shares_prompts`); the
    others are evaluated rollout by rollout, slower, with the same numbers. `backend` says which.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        temperature: float = 1.0,
        microbatch_tokens: int = 4096,
        backend: Backend | None = None,
    ) -> None:
        """`backend`: that of another policy of the same model; None chooses one by trying (see `choose_backend`).

        Raises:
            ConfigError: if the model cannot be trained, in one line that names its architecture.
        """
        self.module: PreTrainedModel = module.eval()  # no dropout: the ratio compares policies, not noise
        self.temperature = temperature
        self.microbatch_tokens = microbatch_tokens
        self.value_head: Callable[[Tensor], Tensor] | None = None  # of a critic on this trunk
        # Weights of another time. With an anchor, an evaluation that has a gradient also tells the exact KL to it, at
        # the price of the anchor's forward pass.
        self.anchor: LanguagePolicy | None = None
        self.backend = choose_backend(module) if backend is None else backend
        if self.backend.sampling is Sampling.NATIVE:
            fuse(module, self.backend.kernels)

    @property
    def shares_prompts(self) -> bool:
        """Whether the prompt of a group is computed once."""
        return self.backend.shares_prompts

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probability and entropy of every decision of `batch`, at the sampling temperature, in nats; with an
        anchor and gradients enabled, the exact KL to it too.
        """
        batch = batch.to(self.device)
        return self._evaluate_packed(batch) if self.shares_prompts else self._evaluate_rows(batch)

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Rows in pieces of at most `microbatch_tokens` tokens, what is fed once for several of them counted once."""
        lengths = row_lengths(batch) if len(batch) else []
        written = [actions[:length] for actions, length in zip(batch.actions_BT.tolist(), lengths, strict=True)]
        rows = in_order(batch.group_B.tolist(), [len(context) for context in batch.context], written)
        for piece in cut(rows, self.microbatch_tokens):
            yield torch.tensor([row.number for row in piece])

    def save(self, folder: Path) -> None:
        """Write the weights and the config so that transformers loads them unchanged."""
        self.module.save_pretrained(folder)

    def _evaluate_packed(self, batch: Batch) -> PolicyOutput:
        """All rows in one row of tokens."""
        decided = hidden_states_for_actions(self.module.base_model, batch, packed=True)
        head = self.module.get_output_embeddings()
        logprobs_N, entropy_N = token_logprobs(
            decided.hidden_NW, head.weight, head.bias, decided.actions_N, self.temperature, self.backend.kernels
        )
        kl_BT = None
        if self.anchor is not None and torch.is_grad_enabled():
            with torch.no_grad():
                other_NW = hidden_states_for_actions(self.anchor.module.base_model, batch, packed=True).hidden_NW
            other_head = self.anchor.module.get_output_embeddings()
            kl_N = exact_kl(decided.hidden_NW, head, other_NW, other_head, self.temperature, self.backend.kernels)
            kl_BT = decided.spread(kl_N)
        return PolicyOutput(
            decided.spread(logprobs_N),
            decided.spread(entropy_N),
            values_BT=None if self.value_head is None else decided.spread(self.value_head(decided.hidden_NW)),
            kl_BT=kl_BT,
        )

    def _evaluate_rows(self, batch: Batch) -> PolicyOutput:
        """One rollout at a time through the model's own forward, recomputed for the gradient to bound memory."""
        chosen_N = batch.mask_BT.flatten().nonzero()[:, 0]
        anchor = self.anchor if torch.is_grad_enabled() else None
        told: list[list[Tensor]] = []
        for row, length in enumerate(row_lengths(batch)):
            tokens_L = row_tokens(batch, row, length)
            row_told = checkpoint(self._evaluate_row, tokens_L, length, anchor, use_reentrant=False)
            told.append([value_T[batch.mask_BT[row, :length]] for value_T in row_told])
        logprobs_BT, entropy_BT, *kl_BT = (
            spread(torch.cat(parts), chosen_N, batch) for parts in zip(*told, strict=True)
        )
        values_BT = None
        if self.value_head is not None:  # from a pass of its own, for not every model gives both from one
            decided = hidden_states_for_actions(self.module.base_model, batch, packed=False)
            values_BT = decided.spread(self.value_head(decided.hidden_NW))
        return PolicyOutput(logprobs_BT, entropy_BT, values_BT=values_BT, kl_BT=kl_BT[0] if kl_BT else None)

    def _evaluate_row(self, tokens_L: Tensor, decisions: int, anchor: LanguagePolicy | None) -> tuple[Tensor, ...]:
        """logprobs_T and entropy_T of one rollout, and kl_T where there is an anchor."""
        logp_TV = self._distribution(tokens_L, decisions)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(dim=1)
        told = logp_TV.gather(1, tokens_L[-decisions:, None])[:, 0], entropy_T
        if anchor is None:
            return told
        with torch.no_grad():
            other_TV = anchor._distribution(tokens_L, decisions)
        return *told, kl.exact(logp_TV, other_TV)

    def _distribution(self, tokens_L: Tensor, decisions: int) -> Tensor:
        """logp_TV over every token at the last `decisions` places, by the model's own forward."""
        return exact_logprobs(next_token_logits(self.module, tokens_L, decisions), self.temperature)
