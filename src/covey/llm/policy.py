"""A causal language model as a policy: a prompt is an initial state, a sampled token is a decision. Tokens that were
not sampled, such as a tool's output, are context of later decisions.

Shapes: B rollouts, T actions, D decisions of the batch, N distinct decisions, L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from covey.core import kl
from covey.data import Batch, PolicyOutput
from covey.llm.generation.backend import Backend, Sampling, choose_backend
from covey.llm.model.architecture import logit_scale
from covey.llm.model.files import save_weights
from covey.llm.model.fused_layers import fuse
from covey.llm.model.logprobs import (
    EVERY,
    NO_MINIMUM,
    ActionHiddenStates,
    MinimumLength,
    exact_divergence,
    hidden_states_for_actions,
    row_lengths,
    row_tokens,
    scatter_to_batch,
    token_logprobs,
)
from covey.llm.model.lora import merged_tensors, with_present_adapter
from covey.llm.model.plain_forward import exact_logprobs, next_token_logits
from covey.llm.model.prefix_attention import order_rows, split_rows
from covey.runtime.distributed import WHOLE, Weights


class ExtraOutput(Protocol):
    """An additional output of a policy's forward pass for every decision, such as values.

    Each method returns tensors by the name of their field in `PolicyOutput`, for one way of evaluation.
    """

    def packed(self, policy: LanguagePolicy, batch: Batch, decided: ActionHiddenStates) -> dict[str, Tensor]:
        """[B, T], from the hidden states of a packed forward pass."""

    def by_row(
        self, policy: LanguagePolicy, logp_TV: Tensor, batch: Batch, row: int, early_T: Tensor | None
    ) -> dict[str, Tensor]:
        """[T], from the log-probabilities of one rollout; `early_T` is True where they exclude end tokens."""

    def after_rows(self, policy: LanguagePolicy, batch: Batch) -> dict[str, Tensor]:
        """[B, T], from an additional forward pass after the rollouts were evaluated one by one."""


class LanguagePolicy:
    """A causal language model of transformers; implements `covey.data.Policy`.

    If the model's attention takes a layout, the prompt of a group is computed once per forward pass (`shares_prompts`).
    Otherwise rollouts are evaluated one by one, which is slower and gives the same results. `backend` has the choice.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        temperature: float = 1.0,
        microbatch_tokens: int = 4096,
        backend: Backend | None = None,
        extra: Sequence[ExtraOutput] = (),
        weights: Weights = WHOLE,
        trained: nn.Module | None = None,
        minimum: MinimumLength = NO_MINIMUM,
    ) -> None:
        """
        Args:
            module: the model.
            temperature: divides the logits.
            microbatch_tokens: maximal number of tokens in one forward and backward pass.
            backend: that of another policy of the same model; None: chosen by trial (see `choose_backend`).
            extra: additional outputs of every evaluation, such as a critic's values.
            weights: their division among the ranks, or their adapter (`AdapterWeights`).
            trained: the module with the parameters that are trained, such as an adapter's; None: the model.
            minimum: decisions at which end tokens have probability 0, as they have in the sampler.

        Raises:
            ConfigError: if the model cannot be trained, in one line that names its architecture.
        """
        self.module: PreTrainedModel = module.eval()  # no dropout, because its noise would change the ratios
        self.temperature = temperature
        self.microbatch_tokens = microbatch_tokens
        self.extra = tuple(extra)
        self.weights, self.minimum = weights, minimum
        self.trained: nn.Module = module if trained is None else trained
        self.backend = choose_backend(module) if backend is None else backend
        if self.backend.sampling is Sampling.NATIVE:
            fuse(module, self.backend.kernels)

    def with_outputs(
        self, *extra: ExtraOutput, weights: Weights | None = None, trained: nn.Module | None = None
    ) -> LanguagePolicy:
        """A policy on the same model with additional outputs, other `weights` or other `trained` parameters."""
        return LanguagePolicy(
            self.module,
            temperature=self.temperature,
            microbatch_tokens=self.microbatch_tokens,
            backend=self.backend,
            extra=(*self.extra, *extra),
            weights=weights or self.weights,
            trained=self.trained if trained is None else trained,
            minimum=self.minimum,
        )

    @property
    def shares_prompts(self) -> bool:
        """True if the prompt of a group is computed once."""
        return self.backend.shares_prompts

    @property
    def divisor(self) -> float:
        """What the results of the output layer are divided by, if prompts are shared."""
        return self.temperature * (logit_scale(self.module) if self.backend.sampling is Sampling.NATIVE else 1.0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return self.weights.dtype_of(self.module)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probability and entropy of every decision, at the sampling temperature, in nats; 0 if undecided."""
        batch = batch.to(self.device)
        evaluate = self._evaluate_packed if self.shares_prompts else self._evaluate_rows
        names = [field.name for field in fields(PolicyOutput)]

        def outputs() -> dict[str, Any]:  # FSDP2 finds no tensors in a dataclass
            output = evaluate(batch)
            return {name: getattr(output, name) for name in names}

        return PolicyOutput(**self.weights.run(outputs))

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices of each microbatch, of at most `microbatch_tokens` tokens; shared tokens count once."""
        lengths = row_lengths(batch) if len(batch) else []
        completions = [actions[:length] for actions, length in zip(batch.actions_BT.tolist(), lengths, strict=True)]
        rows = order_rows(batch.group_B.tolist(), [len(context) for context in batch.context], completions)
        for microbatch in split_rows(rows, self.microbatch_tokens):
            yield torch.tensor([row.number for row in microbatch])

    def save(self, folder: Path) -> None:
        """Write the weights and the config in the format of transformers."""
        self.collect()(folder)

    def collect(self) -> Callable[[Path], None]:
        """Collect the weights of all ranks on rank 0; returns a function that writes them there, as `save` does. An
        adapter is merged into them.
        """
        state = self.weights.state_dict(self.module)
        return partial(save_weights, self.module, dict(merged_tensors(self.module, state.items())))

    def log_distribution(
        self, tokens_L: Tensor, decisions: int, early_T: Tensor | None = None, prompt: Sequence[int] = ()
    ) -> Tensor:
        """logp_TV over the vocabulary at the last `decisions` tokens, by the model's own forward pass, in nats. Where
        `early_T` is True, end tokens are excluded. The `prompt` of the tokens may have images.
        """
        logits_TV = next_token_logits(self.module, tokens_L, decisions, prompt)
        if (excluded := self.minimum.excluded(early_T)) is not None:
            logits_TV = excluded.exclude(logits_TV.clone(), EVERY, EVERY)
        return exact_logprobs(logits_TV, self.temperature)

    def _evaluate_packed(self, batch: Batch) -> PolicyOutput:
        """One forward pass over all rollouts, packed into one row of tokens."""
        early_BT = self.minimum.early(batch.mask_BT)
        decided = hidden_states_for_actions(self.module.base_model, batch, packed=True, early_BT=early_BT)
        head = self.module.get_output_embeddings()
        logprobs_N, entropy_N = token_logprobs(
            decided.hidden_NW, head.weight, head.bias, decided.actions_N, self.divisor, self.backend.kernels,
            self.minimum.excluded(decided.early_N),
        )  # fmt: skip
        extra: dict[str, Tensor] = {}
        for output in self.extra:
            extra |= output.packed(self, batch, decided)
        return PolicyOutput(decided.scatter_to_batch(logprobs_N), decided.scatter_to_batch(entropy_N), **extra)

    def _evaluate_rows(self, batch: Batch) -> PolicyOutput:
        """One forward pass of the model per rollout, recomputed in the backward pass to bound memory."""
        position_N = batch.mask_BT.flatten().nonzero()[:, 0]
        rows: list[dict[str, Tensor]] = []
        evaluate = with_present_adapter(self.module, self._evaluate_row)
        early_BT = self.minimum.early(batch.mask_BT)
        for row, length in enumerate(row_lengths(batch)):
            early_T = None if early_BT is None else early_BT[row, :length]
            output_T = checkpoint(evaluate, batch, row, length, early_T, use_reentrant=False)
            rows.append({name: value_T[batch.mask_BT[row, :length]] for name, value_T in output_T.items()})
        output_BT = {
            name: scatter_to_batch(torch.cat([row[name] for row in rows]), position_N, batch) for name in rows[0]
        }
        for output in self.extra:
            output_BT |= output.after_rows(self, batch)
        return PolicyOutput(**output_BT)

    def _evaluate_row(self, batch: Batch, row: int, decisions: int, early_T: Tensor | None) -> dict[str, Tensor]:
        """The fields of `PolicyOutput` for one rollout, [T] each."""
        tokens_L = row_tokens(batch, row, decisions)
        logp_TV = self.log_distribution(tokens_L, decisions, early_T, batch.context[row])
        output_T = {
            "logprobs_BT": logp_TV.gather(1, tokens_L[-decisions:, None])[:, 0],
            "entropy_BT": -(logp_TV.exp() * logp_TV).sum(dim=1),
        }
        for output in self.extra:
            output_T |= output.by_row(self, logp_TV, batch, row, early_T)
        return output_T


class KLToReference:
    """Exact KL(pi || pi_ref) over the vocabulary at every decision; implements `ExtraOutput`.

    Computed only if gradients are enabled, because only the loss needs it. Each such evaluation has a forward pass of
    the reference too.
    """

    name = "kl_BT"  # in `PolicyOutput`
    beta = kl.REVERSE  # of the divergence

    def __init__(self, reference: LanguagePolicy) -> None:
        self.reference = reference

    def read(self, batch: Batch) -> Batch:
        """The rows as the other policy reads them."""
        return batch

    def packed(self, policy: LanguagePolicy, batch: Batch, decided: ActionHiddenStates) -> dict[str, Tensor]:
        if not torch.is_grad_enabled():
            return {}
        other, read = self.reference.module, self.read(batch)

        def compute() -> tuple[Tensor, Tensor]:
            early_BT = policy.minimum.early(batch.mask_BT)
            theirs = hidden_states_for_actions(other.base_model, read, packed=True, early_BT=early_BT)
            return theirs.hidden_NW, theirs.index_D

        with torch.no_grad():
            other_NW, index_D = self.reference.weights.run(compute)
        if not torch.equal(index_D, decided.index_D):  # with other prompts, other decisions share an entry
            decided, other_NW = decided.of_decisions(), other_NW[index_D]
        head, other_head = policy.module.get_output_embeddings(), other.get_output_embeddings()
        divergence_N = exact_divergence(
            decided.hidden_NW, head, other_NW, other_head, policy.divisor, policy.backend.kernels,
            policy.minimum.excluded(decided.early_N), self.beta,
        )  # fmt: skip
        return {self.name: decided.scatter_to_batch(divergence_N)}

    def by_row(
        self, policy: LanguagePolicy, logp_TV: Tensor, batch: Batch, row: int, early_T: Tensor | None
    ) -> dict[str, Tensor]:
        if not torch.is_grad_enabled():
            return {}
        read = self.read(batch)
        tokens_L = row_tokens(read, row, len(logp_TV))
        with torch.no_grad():
            other_TV = self.reference.weights.run(
                lambda: self.reference.log_distribution(tokens_L, len(logp_TV), early_T, read.context[row])
            )
        return {self.name: kl.jensen_shannon(*over_common_tokens(logp_TV, other_TV), self.beta)}

    def after_rows(self, policy: LanguagePolicy, batch: Batch) -> dict[str, Tensor]:
        return {}


class DivergenceToTeacher(KLToReference):
    """Divergence to a teacher, which reads its own prompt before the policy's completion; implements `ExtraOutput`.

    On-policy distillation, GKD (arXiv 2306.13649), algorithm 1: the divergence has a gradient at the decisions of the
    policy's own completions, and their sampling has none. It is 0 at rows without a teacher.
    """

    name = "teacher_BT"

    def __init__(self, teacher: LanguagePolicy, beta: float) -> None:
        super().__init__(teacher)
        self.beta = beta

    def read(self, batch: Batch) -> Batch:
        """Equal prompts of neighbours are a group, because the prompt of a group is computed once. A row without a
        teacher keeps its prompt, so that all ranks make as many passes.
        """
        embedding: Any = self.reference.module.get_input_embeddings()
        known = len(embedding.weight)
        batch = replace(batch, actions_BT=batch.actions_BT.clamp(max=known - 1))  # a policy may be padded with more
        if batch.teacher_context is None:
            return batch
        contexts = [theirs or own for theirs, own in zip(batch.teacher_context, batch.context, strict=True)]
        keys = list(zip(batch.group_B.tolist(), contexts, strict=True))
        begins = torch.tensor([False, *(before != now for before, now in pairwise(keys))], device=batch.group_B.device)
        return replace(batch, context=tuple(contexts), group_B=begins.cumsum(0))

    def packed(self, policy: LanguagePolicy, batch: Batch, decided: ActionHiddenStates) -> dict[str, Tensor]:
        has_teacher_B = batch.has_teacher_B[:, None]
        found = super().packed(policy, batch, decided)
        return {name: torch.where(has_teacher_B, value_BT, 0.0) for name, value_BT in found.items()}

    def by_row(
        self, policy: LanguagePolicy, logp_TV: Tensor, batch: Batch, row: int, early_T: Tensor | None
    ) -> dict[str, Tensor]:
        found = super().by_row(policy, logp_TV, batch, row, early_T)
        return {name: torch.where(batch.has_teacher_B[row], value_T, 0.0) for name, value_T in found.items()}


def over_common_tokens(logp_TV: Tensor, other_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions over the tokens of the smaller vocabulary, beyond which a model is padded."""
    common = min(logp_TV.shape[1], other_TV.shape[1])
    first, second = (
        one if one.shape[1] == common else one[:, :common].log_softmax(dim=1) for one in (logp_TV, other_TV)
    )
    return first, second
