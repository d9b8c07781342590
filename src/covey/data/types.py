"""The data types: Start, Rollout, Group, Batch and PolicyOutput.

Shape legend: B rollouts (rows), T decisions (columns), V actions to choose from, A numbers in an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class EndReason(StrEnum):
    """Why a rollout ended. Only the first two are ends of the episode itself."""

    STOP = "stop"  # the policy sampled an end token
    TERMINATED = "terminated"  # the environment reached a terminal state
    LENGTH = "length"  # the token limit cut a completion
    TRUNCATED = "truncated"  # a time limit cut an episode
    CUT = "cut"  # the rollout is a fragment: the episode goes on in the next one

    @property
    def is_final(self) -> bool:
        """True where the episode is over, so that no value may be bootstrapped."""
        return self in (EndReason.STOP, EndReason.TERMINATED)

    @property
    def is_limit(self) -> bool:
        """True where a limit of tokens or of time stopped the rollout."""
        return self in (EndReason.LENGTH, EndReason.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Start:
    """The start that the rollouts of one group share.

    >>> Start(index=3, prompt=[{"role": "user", "content": "What is 2 + 2?"}], columns={"answer": "4"})
    """

    index: int  # position of the start within its step; with the step it names the group
    prompt: Any  # a string or chat messages; an environment seed in control
    columns: Mapping[str, Any] = field(default_factory=dict)  # what the rewards may look at


@dataclass(slots=True)
class Rollout:
    """One attempt: the decisions taken from a start, how likely each was, and what they earned.

    The policy need not have decided every action. `decided` marks those that it did; the others, such as the tokens of
    a tool's output, are context of the later decisions and have no loss.

    >>> Rollout(context=(5, 9), actions=[7, 3, 4, 8], behavior_logprobs=[-0.2, 0.0, 0.0, -1.1], end=EndReason.STOP,
    ...         decided=[True, False, False, True])
    """

    context: Any  # what the decisions rest on: the prompt's token ids; the T + 1 observations of an episode
    actions: Any  # a sequence: token ids, the end token included; action numbers; action vectors
    behavior_logprobs: Any  # a sequence: the log-probability of each action when it was sampled; unread if undecided
    end: EndReason
    text: str = ""  # the completion as the rewards read it
    decided: Sequence[bool] | None = None  # of each action, whether the policy decided it; None: it decided all
    step_rewards: Any = None  # a sequence: what each action earned, 0 if undecided; None: one reward for the whole
    step_texts: Sequence[str] | None = None  # the text, cut into reasoning steps
    step_ends: Sequence[int] | None = None  # decisions that end a reasoning step, ascending; None: the whole is one
    reward: float | None = None  # None: the grader failed, the rollout leaves its group
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # reward -> column -> value, by `log_extra`
    score: float | None = (
        None  # what evaluations average: a score, 1 or 0 where it is an accuracy; in control the return
    )
    version: int = 0  # of the weights that made it

    @property
    def decisions(self) -> int:
        """The number of actions that the policy decided."""
        return len(self.actions) if self.decided is None else sum(map(bool, self.decided))


@dataclass(slots=True)
class Group:
    """Rollouts from one start; they are compared with each other and with nothing else."""

    start: Start
    rollouts: list[Rollout]
    dropped: bool = False  # sampled in vain: another group was drawn in its place, nothing learns from this one
    # Values that reward functions logged, by "reward/metric"; those of one call for several groups are in the first.
    logged: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """Padded decisions of one training step; the only thing the mathematics ever sees.

    A row is one rollout and never crosses the end of an episode, a column is one action: a decision where `mask_BT` is
    True. Undecided columns (padding, a tool's output) take part in no loss, ratio, KL, return or denominator; those
    before a decision are still part of the context that a language model is fed.
    """

    context: tuple[Any, ...]  # one per row, opaque to the mathematics
    actions_BT: Tensor  # int64, undecided actions included; where an action is a vector, float32 [B, T, A]
    mask_BT: Tensor  # bool, True where the policy decided
    behavior_logprobs_BT: Tensor  # float32, by the sampler; 0 where undecided
    reward_B: Tensor  # float32; 0 where `valid_B` is False
    rewards_BT: Tensor  # float32, what each decision earned; without step rewards `reward_B` at the last one
    valid_B: Tensor  # bool, False where grading failed: the row leaves its group
    truncated_B: Tensor  # bool, True where the rollout stopped before its episode was over
    group_B: Tensor  # int64, rows of one group share a number
    step_end_BT: Tensor  # bool, True where a reasoning step ends; without steps at the last decision
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None  # what a critic should have said
    values_BT: Tensor | None = None  # what it said before the update
    bootstrap_value_B: Tensor | None = (
        None  # what it says of the state after the last decision; 0 if the episode is over
    )
    reference_logprobs_BT: Tensor | None = None  # NaN on rows the reference did not evaluate
    proximal_logprobs_BT: Tensor | None = None  # the old policy's, by the trainer
    reference_all_logprobs_BTV: Tensor | None = None  # log-probabilities of every action, if they are few
    proximal_all_logprobs_BTV: Tensor | None = None
    loss_weights_BT: Tensor | None = None  # what each decision counts in the loss

    @classmethod
    def blank(cls, mask_BT: Tensor, **known: Any) -> Batch:
        """A batch of which only the mask and `known` fields say something: zeros, no steps, every row valid."""
        zeros_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        zeros_B = zeros_BT[:, 0]
        blank: dict[str, Any] = {
            "context": ((),) * len(mask_BT),
            "actions_BT": zeros_BT.long(),
            "mask_BT": mask_BT,
            "behavior_logprobs_BT": zeros_BT,
            "reward_B": zeros_B,
            "rewards_BT": zeros_BT,
            "valid_B": zeros_B == 0,
            "truncated_B": zeros_B != 0,
            "group_B": zeros_B.long(),
            "step_end_BT": zeros_BT != 0,
        }
        return cls(**blank | known)

    def __len__(self) -> int:
        return int(self.mask_BT.shape[0])

    def select(self, rows: Tensor) -> Batch:
        """The rows named by an int64 index, with trailing columns without a decision cut off.

        Nothing depends on an action after the last decision of its row, so the cut changes no result.
        """
        mask_BT = self.mask_BT[rows]
        decided_T = mask_BT.any(dim=0).nonzero()
        width = int(decided_T[-1]) + 1 if len(decided_T) else 1
        picked: dict[str, Any] = {"context": tuple(self.context[i] for i in rows.tolist())}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value[rows]
                picked[item.name] = value[:, :width] if value.dim() > 1 else value
        return replace(self, **picked)

    def restrict(self, decisions: Tensor) -> Batch:
        """The same rows with only these decisions (indices into the flattened mask) in the loss."""
        mask_BT = torch.zeros_like(self.mask_BT)
        mask_BT.view(-1)[decisions] = True
        assert self.loss_weights_BT is not None
        return replace(self, mask_BT=mask_BT, loss_weights_BT=torch.where(mask_BT, self.loss_weights_BT, 0.0))

    def scale_loss(self, factor: float) -> Batch:
        """The same rows with the loss weights times a factor."""
        assert self.loss_weights_BT is not None
        return replace(self, loss_weights_BT=self.loss_weights_BT * factor)

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in tensors.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(slots=True)
class PolicyOutput:
    """Output of a policy for a batch: log-probabilities and entropies of its decisions, in nats."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    all_logprobs_BTV: Tensor | None = None  # log-probabilities of every action; only if they are few
    values_BT: Tensor | None = None  # by a critic whose value head is on the policy's trunk
    kl_BT: Tensor | None = None  # exact KL to the reference, by policies that compute it, if gradients are enabled

    def scores(self) -> dict[str, Tensor]:
        """The log-probabilities, by the name of the field."""
        given = {"logprobs_BT": self.logprobs_BT, "all_logprobs_BTV": self.all_logprobs_BTV}
        return {name: value for name, value in given.items() if value is not None}
