"""A causal language model as a policy: a prompt is where it starts, every sampled token is a decision.

Shapes: B rollouts, T decisions, S prompts, N tokens of a packed forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from covey.data import Batch, Evaluation
from covey.llm.attention import IMPLEMENTATION, NO_MASK, PackedLayout
from covey.llm.decoding import CacheDecoder, Decoder, SharedPrefixDecoder
from covey.llm.head import token_logprobs


class LanguagePolicy:
    """A transformers decoder with a causal head.

    Models whose attention takes a layout share the prompt of a group in every forward pass (`shares_prompts`); the
    others are evaluated rollout by rollout, slower, with the same numbers. Which it is is found out by trying: both
    ways must agree on random tokens.
    """

    def __init__(self, module: PreTrainedModel, *, temperature: float = 1.0, microbatch_tokens: int = 4096) -> None:
        self.module: PreTrainedModel = module.eval()  # no dropout: the ratio compares policies, not noise
        self.temperature = temperature
        self.microbatch_tokens = microbatch_tokens
        self.shares_prompts = self._can_share_prompts()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def evaluate(self, batch: Batch) -> Evaluation:
        """Log-probability and entropy of every decision of `batch`, at the sampling temperature, in nats."""
        batch = batch.to(self.device)
        return self._evaluate_packed(batch) if self.shares_prompts else self._evaluate_rows(batch)

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Rows in pieces of at most `microbatch_tokens` tokens, a shared prompt counted once per piece.

        Rows of similar length go together, so that little of a padded attention rectangle is wasted.
        """
        lengths_B = batch.mask_BT.sum(dim=1)
        longest = torch.zeros(int(batch.group_B.max()) + 1 if len(batch) else 1, dtype=torch.int64)
        longest = longest.scatter_reduce(0, batch.group_B, lengths_B, "amax")
        order = sorted(range(len(batch)), key=lambda i: (int(longest[batch.group_B[i]]), int(batch.group_B[i]), i))
        piece: list[int] = []
        tokens, group = 0, -1
        for row in order:
            same = int(batch.group_B[row]) == group
            cost = int(lengths_B[row]) + (0 if same else len(batch.context[row]))
            if piece and tokens + cost > self.microbatch_tokens:
                yield torch.tensor(piece)
                piece, tokens = [], 0
                cost = int(lengths_B[row]) + len(batch.context[row])
            piece.append(row)
            tokens, group = tokens + cost, int(batch.group_B[row])
        if piece:
            yield torch.tensor(piece)

    def decoder(self, prompts: list[list[int]], prompt_of_row: Tensor, max_new_tokens: int) -> Decoder:
        """A decoder on this policy's own weights."""
        kind = SharedPrefixDecoder if self.shares_prompts else CacheDecoder
        return kind(self.module, prompts, prompt_of_row.to(self.device), max_new_tokens)

    def save(self, folder: Path) -> None:
        """Write the weights and the config so that transformers loads them unchanged."""
        self.module.save_pretrained(folder)

    def _evaluate_packed(self, batch: Batch) -> Evaluation:
        """All rows in one row of tokens; the last decision of a rollout is predicted but never fed."""
        lengths = [int(n) for n in batch.mask_BT.shape[1] - batch.mask_BT.flip(1).int().argmax(dim=1)]
        prompts: list[Any] = []
        prompt_of_row: list[int] = []
        previous = -1
        for row, group in enumerate(batch.group_B.tolist()):
            if group != previous:
                prompts.append(batch.context[row])
                previous = group
            prompt_of_row.append(len(prompts) - 1)
        layout = PackedLayout([len(p) for p in prompts], [n - 1 for n in lengths], prompt_of_row, self.device)
        fed = [torch.tensor(p, device=self.device) for p in prompts]
        fed += [batch.actions_BT[row, : n - 1] for row, n in enumerate(lengths)]
        hidden = self.module.base_model(
            input_ids=torch.cat(fed)[None],
            position_ids=layout.positions[None],
            attention_mask=NO_MASK.to(self.device),
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]

        # The token that predicts decision t of a rollout: the prompt's last for t = 0, decision t - 1 afterwards.
        prompt_ends = torch.tensor(layout.prompt_lengths).cumsum(0) - 1
        width = batch.mask_BT.shape[1]
        begins = torch.tensor([0, *[n - 1 for n in lengths[:-1]]]).cumsum(0) + layout.prompts.tokens
        source_BT = begins[:, None] + torch.arange(width) - 1
        source_BT[:, 0] = prompt_ends[layout.prompt_of_row.cpu()]
        chosen = batch.mask_BT.flatten().nonzero()[:, 0]
        source_N = source_BT.flatten().to(self.device)[chosen]
        head = self.module.get_output_embeddings()
        logprobs_N, entropy_N = token_logprobs(
            hidden[source_N], head.weight, head.bias, batch.actions_BT.flatten()[chosen], self.temperature
        )
        blank = torch.zeros(batch.mask_BT.numel(), dtype=logprobs_N.dtype, device=self.device)
        return Evaluation(
            blank.index_copy(0, chosen, logprobs_N).view_as(batch.mask_BT),
            blank.index_copy(0, chosen, entropy_N).view_as(batch.mask_BT),
        )

    def _evaluate_rows(self, batch: Batch) -> Evaluation:
        """One rollout at a time through the model's own forward, recomputed for the gradient to bound memory."""
        width = batch.mask_BT.shape[1]
        logprobs, entropies = [], []
        for row in range(len(batch)):
            length = width - int(batch.mask_BT[row].flip(0).int().argmax())
            actions = batch.actions_BT[row, :length]
            tokens = torch.cat([torch.tensor(batch.context[row], device=self.device), actions])
            logp_T, entropy_T = checkpoint(self._row_logprobs, tokens, length, use_reentrant=False)
            pad = (0, width - length)
            logprobs.append(nn.functional.pad(logp_T, pad))
            entropies.append(nn.functional.pad(entropy_T, pad))
        mask_BT = batch.mask_BT
        return Evaluation(
            torch.where(mask_BT, torch.stack(logprobs), 0.0), torch.where(mask_BT, torch.stack(entropies), 0.0)
        )

    def _row_logprobs(self, tokens_L: Tensor, decisions: int) -> tuple[Tensor, Tensor]:
        logits = self.module(input_ids=tokens_L[None, :-1], use_cache=False, logits_to_keep=decisions).logits[0]
        exact = torch.promote_types(logits.dtype, torch.float32)
        logp_TV = (logits[-decisions:].to(exact) / self.temperature).log_softmax(dim=1)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(dim=1)
        return logp_TV.gather(1, tokens_L[-decisions:, None])[:, 0], entropy_T

    @torch.no_grad()
    def _can_share_prompts(self) -> bool:
        """Whether the packed way gives the model's own numbers on two short groups."""
        try:
            self.module.set_attn_implementation(IMPLEMENTATION)
            batch = _probe_batch(self.module.config.get_text_config().vocab_size)
            packed, plain = self._evaluate_packed(batch.to(self.device)), self._evaluate_rows(batch.to(self.device))
        except (NotImplementedError, ValueError, TypeError, AttributeError, AssertionError, RuntimeError):
            self.module.set_attn_implementation("sdpa")
            return False
        tolerance = 0.25 if next(self.module.parameters()).dtype == torch.bfloat16 else 1e-3
        gap = (packed.logprobs_BT - plain.logprobs_BT).abs().max()
        return bool(gap < tolerance)


def _probe_batch(vocabulary: int) -> Batch:
    """Two groups of two short rollouts over a few spread-out token ids."""
    ids = [(7 * i * i + 11 * i + 5) % vocabulary for i in range(24)]
    contexts = (tuple(ids[:7]), tuple(ids[:7]), tuple(ids[3:8]), tuple(ids[3:8]))
    actions_BT = torch.tensor(ids[8:24]).view(4, 4)
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    zeros_B = torch.zeros(4)
    return Batch(
        context=contexts,
        actions_BT=actions_BT,
        mask_BT=mask_BT,
        behavior_logprobs_BT=torch.zeros(4, 4),
        reward_B=zeros_B,
        rewards_BT=torch.zeros(4, 4),
        valid_B=zeros_B == 0,
        truncated_B=zeros_B != 0,
        group_B=torch.tensor([0, 0, 1, 1]),
    )
