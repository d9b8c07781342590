"""The data types: Start, Rollout, Group, Batch, PolicyOutput, and the record of a finished step, which observers get;
the Protocols of the components that the training loop uses.

Shapes: B rollouts (rows), T actions (columns), V possible actions, A components of an action vector, R rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor


class EndReason(StrEnum):
    """Reason for the end of a rollout. The episode itself is over only with STOP and TERMINATED."""

    STOP = "stop"  # the policy sampled an end token
    TERMINATED = "terminated"  # the environment reached a terminal state
    LENGTH = "length"  # the token limit truncated a completion
    TRUNCATED = "truncated"  # a time limit truncated an episode
    CUT = "cut"  # the rollout is a fragment: the episode continues in the next one

    @property
    def is_final(self) -> bool:
        """True if the episode is over, so that no value may be bootstrapped."""
        return self in (EndReason.STOP, EndReason.TERMINATED)

    @property
    def is_limit(self) -> bool:
        """True if a token limit or a time limit stopped the rollout."""
        return self in (EndReason.LENGTH, EndReason.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Start:
    """The initial state of the rollouts of one group: a prompt, or a reset seed of an environment.

    >>> Start(index=3, prompt=[{"role": "user", "content": "What is 2 + 2?"}], columns={"answer": "4"})
    """

    index: int  # position of the start within its step; step and index identify the group
    prompt: Any  # a string or chat messages; in control, a reset seed
    columns: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the reward functions
    kind: str = ""  # kind of problem, such as "- with borrow"; empty: the task names no kinds
    weight: float = 1.0  # of the group in the loss
    place: str = field(default="", compare=False)  # of its row, for messages, such as "data.jsonl line 7"


@dataclass(slots=True)
class Rollout:
    """A completion or an episode: the actions from a start, their log-probabilities and their rewards.

    `decided` marks the actions that the policy decided. Other actions, such as the tokens of a tool's output, are
    context of later decisions and have no loss.

    >>> Rollout(context=(5, 9), actions=[7, 3, 4, 8], behavior_logprobs=[-0.2, 0.0, 0.0, -1.1], end=EndReason.STOP,
    ...         decided=[True, False, False, True])
    """

    context: Any  # input of the decisions: the prompt's token ids; in control the T + 1 observations of the episode
    actions: Any  # a sequence of token ids (with the end token), action indices or action vectors
    behavior_logprobs: Any  # a sequence: log-probability of each action when it was sampled; unused if undecided
    end: EndReason
    text: str = ""  # the completion as text, for the rewards
    decided: Sequence[bool] | None = None  # for each action, whether the policy decided it; None: all of them
    messages: Sequence[Mapping[str, Any]] | None = None  # of a conversation: the chat after the prompt
    observation: str = ""  # of a conversation: the environment's first one, which follows the prompt
    turn_rewards: Sequence[float] | None = None  # of a conversation: the environment's reward for each turn
    environment: Mapping[str, Any] | None = None  # of a conversation: public attributes of its environment at the end
    failure: str = ""  # of a conversation: why its environment failed, so that it cannot be graded
    step_rewards: Any = None  # a sequence: reward of each action, 0 if undecided; None: one reward for the rollout
    step_texts: Sequence[str] | None = None  # the texts of the reasoning steps, or of a conversation's turns
    step_ends: Sequence[int] | None = None  # last decision of each such step, ascending; None: one step
    reward: float | None = None  # None: grading failed, and the rollout is excluded from its group
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)  # reward -> column -> value, by `log_extra`
    score: float | None = None  # averaged in evaluations: 1 or 0 for an accuracy; in control the return
    version: int = 0  # of the weights that generated it
    teacher_context: Any = None  # the teacher's prompt; None: `context`, empty: the rollout has no teacher

    @property
    def decisions(self) -> int:
        """The number of actions that the policy decided."""
        return len(self.actions) if self.decided is None else sum(map(bool, self.decided))


@dataclass(slots=True)
class Group:
    """Rollouts from one start, which are compared with each other."""

    start: Start
    rollouts: list[Rollout]
    dropped: bool = False  # replaced by another group (dynamic sampling), and not part of the update
    # Values that reward functions logged, by "reward/metric". One call may grade several groups: the first has them.
    logged: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """Padded rollouts of one training step, the input of all losses and advantages.

    A row is one rollout and never crosses the end of an episode. A column is one action: a decision where `mask_BT` is
    True. Undecided columns (padding, a tool's output) are excluded from every loss, ratio, KL, return and denominator;
    those before a decision are still input tokens of a language model.
    """

    context: tuple[Any, ...]  # one per row, read by the policy alone
    actions_BT: Tensor  # int64, undecided actions included; float32 [B, T, A] if an action is a vector
    mask_BT: Tensor  # bool, True at decisions
    behavior_logprobs_BT: Tensor  # float32, of the sampler's policy, in nats; 0 at undecided columns
    reward_B: Tensor  # float32; 0 if `valid_B` is False
    rewards_BT: Tensor  # float32, reward of each decision; without step rewards, `reward_B` at the last decision
    valid_B: Tensor  # bool, False if grading failed: the row is excluded from its group
    truncated_B: Tensor  # bool, True if the rollout stopped before its episode was over
    group_B: Tensor  # int64, index of the row's group
    step_end_BT: Tensor  # bool, True at the end of a reasoning step; without steps, at the last decision
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None  # targets of the critic
    values_BT: Tensor | None = None  # of the critic before the update
    bootstrap_value_B: Tensor | None = None  # value of the state after the last decision; 0 if the episode is over
    reference_logprobs_BT: Tensor | None = None  # in nats; NaN on rows that the reference did not evaluate
    proximal_logprobs_BT: Tensor | None = None  # of the old policy, computed by the trainer, in nats
    reference_all_logprobs_BTV: Tensor | None = None  # log-probabilities of every action, if V is small
    proximal_all_logprobs_BTV: Tensor | None = None
    penalised_BT: Tensor | None = None  # bool, True at decisions with the penalty of KL-Cov; None: there is none
    group_weight_B: Tensor | None = None  # weight of the row's group in the loss; None: all are 1
    replayed_B: Tensor | None = None  # bool, True if an earlier step sampled the row; None: none of them
    loss_weights_BT: Tensor | None = None  # weight of each decision in the loss
    teacher_context: tuple[Any, ...] | None = None  # one per row, in place of `context`; empty: the row has no teacher
    reward_names: tuple[str, ...] = ()  # of the rewards of which `reward_B` is the weighted sum
    reward_parts_BR: Tensor | None = None  # float32, each reward without its weight; NaN if it has no value

    @classmethod
    def blank(cls, mask_BT: Tensor, **known: Any) -> Batch:
        """A batch with this mask and the `known` fields; the other fields are zeros, and every row is valid."""
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

    @property
    def has_replayed(self) -> bool:
        """Whether an earlier step sampled a row."""
        return self.replayed_B is not None

    @property
    def fresh_B(self) -> Tensor:
        """Bool, True if this step sampled the row."""
        return torch.ones_like(self.valid_B) if self.replayed_B is None else ~self.replayed_B

    @property
    def has_teacher_B(self) -> Tensor:
        """Bool, True if the row has a teacher, in a run with one."""
        if self.teacher_context is None:
            return torch.ones_like(self.valid_B)
        return torch.tensor([len(context) > 0 for context in self.teacher_context], device=self.valid_B.device)

    def select(self, rows: Tensor) -> Batch:
        """Some rows, by an int64 index, without the trailing columns that have no decision in any of them.

        Removing these columns changes no result, because nothing depends on an action after the last decision of its
        row.
        """
        mask_BT = self.mask_BT[rows]
        decided_T = mask_BT.any(dim=0).nonzero()
        width = int(decided_T[-1]) + 1 if len(decided_T) else 1
        picked: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if "context" in item.name and value is not None:
                picked[item.name] = tuple(value[i] for i in rows.tolist())
            if isinstance(value, Tensor):
                value = value[rows]
                has_decisions = "T" in item.name.rpartition("_")[2]  # the shape, by the suffix of the name
                picked[item.name] = value[:, :width] if has_decisions else value
        return replace(self, **picked)

    def restrict(self, decisions: Tensor) -> Batch:
        """The same rows with only these decisions in the loss; `decisions` are indices into the flattened mask."""
        mask_BT = torch.zeros_like(self.mask_BT)
        mask_BT.view(-1)[decisions] = True
        assert self.loss_weights_BT is not None
        return replace(self, mask_BT=mask_BT, loss_weights_BT=torch.where(mask_BT, self.loss_weights_BT, 0.0))

    def scale_loss(self, factor: float) -> Batch:
        """The same rows with the loss weights multiplied by a factor."""
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
    all_logprobs_BTV: Tensor | None = None  # log-probabilities of every action; only if V is small
    values_BT: Tensor | None = None  # of a critic whose value head is on the policy's trunk
    kl_BT: Tensor | None = None  # exact KL to the reference, of policies that compute it, if gradients are enabled
    teacher_BT: Tensor | None = None  # divergence to the teacher, likewise; 0 at rows without a teacher

    def scores(self) -> dict[str, Tensor]:
        """The log-probabilities that are not None, by field name."""
        given = {"logprobs_BT": self.logprobs_BT, "all_logprobs_BTV": self.all_logprobs_BTV}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a completion, as lists of equal length. None at tokens that the policy did not decide.

    Numbers are rounded to six decimals.
    """

    ids: list[int]
    texts: list[str]  # joined, they are the completion with its special tokens
    logprobs: list[float | None]  # of the policy that sampled, in nats
    reference_logprobs: list[float | None] | None  # None: the reference did not evaluate this rollout
    advantages: list[float | None]
    updated_logprobs: list[float | None] | None  # of the policy after the update of the step; None: not evaluated


@dataclass(frozen=True)
class PromptTable:
    """The prompt as the model read it."""

    text: str  # with the special tokens
    ids: list[int]


@dataclass(frozen=True)
class RolloutCredit:
    """What a step computed from the reward of a rollout, and what is recorded with it.

    >>> RolloutCredit(advantage=1.73, baseline=0.25)  # reward 1 in a group of four with the mean 0.25
    """

    advantage: float | None  # mean over the decisions; None: grading failed, or the group was dropped
    baseline: float | None  # mean reward of the group's graded rollouts, of a critic its mean value; None: unknown
    tokens: TokenTable | None = None
    prompt: PromptTable | None = None  # None: that of the rollout before it in the group, or no language model


@dataclass(frozen=True)
class StepRecord:
    """A finished step. Observers read it and change nothing."""

    step: int  # counts from 1
    metrics: dict[str, float]
    groups: Sequence[Group]  # all that were drawn, also dropped ones
    credits: Sequence[Sequence[RolloutCredit]]  # of the rollouts of each group

    def rollouts(self) -> Iterator[tuple[Group, Rollout, RolloutCredit]]:
        """Every rollout with its group and its credit."""
        for group, credits in zip(self.groups, self.credits, strict=True):
            for rollout, credit in zip(group.rollouts, credits, strict=True):
                yield group, rollout, credit


# ---- Protocols ----


class Team:
    """The ranks (processes) that train one policy together; this class is one process, for which all is the identity.

    The rows of a step are divided into `shards` logical shards, of which each rank has equally many neighbours. Results
    depend on their number and not on that of the ranks.
    """

    rank, size = 0, 1  # this process, and the number of ranks

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order. Every rank must call it."""
        return [message]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of all ranks in place, in the order of a binary tree. Every rank must call it."""

    def passes(self, own: int) -> int:
        """The number of passes over microbatches that this rank must make if it has `own`. Sharded weights are gathered
        in every pass, so all ranks make as many as the one with the most. Every rank must call it.
        """
        return own


class TrainingExample(Protocol):
    """An example of a supervised training."""

    @property
    def tokens(self) -> int:
        """The number of tokens of its longest sequence."""

    @property
    def content(self) -> Hashable:
        """Key that is equal for examples with the same prompt, which is computed once."""


class SamplerWeights(Protocol):
    """The weights that a sampler in this process reads."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context in which they can be read. Every rank enters it."""


class Task(Protocol):
    """Source of starts. A draw depends on its arguments alone, so a resumed run repeats it."""

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """Training starts of one step.

        Args:
            seed: of the run.
            step: counts from 1.
            count: number of starts to draw.
            first: index of the first start in the step. A step that needs more starts draws again, with `first` equal
                to the number that it has drawn.
            before: number of starts that the run has drawn before these. None: (step - 1) * count + first, which holds
                if every step draws once. A finite data set continues from there, so each of its rows is drawn once
                before any row is drawn twice.
        """

    def held_out(self, count: int) -> list[Start]:
        """`count` starts that are never drawn for training; all of them if there are fewer."""


class Stateful(Protocol):
    """A component whose state is a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What persists between steps, beside the weights of the policy; often empty."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class Stateless:
    """Base class of components without state; meets `Stateful`."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ExampleTrainer(Stateful, Protocol):
    """A model with its optimizer, trained on minibatches of examples."""

    step: int  # optimizer steps so far

    def train_step(self, examples: Sequence[Any]) -> dict[str, float]:
        """One optimizer step on a minibatch; returns its metrics."""


class Sampler(Stateful, Protocol):
    """Samples rollouts from the policy."""

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        """`group_size` rollouts from each start. Randomness depends on (seed, step, start, rollout, position).

        Rollouts are numbered from `first_rollout`: one call for 8 rollouts gives the same rollouts as a call for 4 and
        a call for 4 more with `first_rollout` = 4.
        """

    def refresh(self, version: int) -> None:
        """Sample later rollouts with the policy's current weights, whose version is `version`."""


class Grader(Protocol):
    """Sets `reward`, `reward_parts` and `score` of every rollout."""

    def grade(self, groups: list[Group]) -> list[Group]:
        """The same groups, graded. The reward of a rollout whose grading failed stays None."""


class Policy(Protocol):
    """A trainable policy."""

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Log-probability and entropy of every decision, with gradients if they are enabled.

        The batch is on the CPU; the output may be on the policy's device.
        """

    def microbatches(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices of each microbatch, small enough for one backward pass; every row is in exactly one."""


class Critic(Protocol):
    """Estimates the return from each state."""

    def values(self, batch: Batch) -> Tensor:
        """values_BT: value of the state before every decision, with gradients if they are enabled."""

    def bootstrap_values(self, batch: Batch) -> Tensor:
        """bootstrap_value_B: value of the state after the last decision of every row, even if the episode is over."""


class ReferenceUpdater(Stateless):
    """Moves the weights of the reference towards those of the policy; this class leaves them."""

    def after(self, step: int) -> None:
        """Update the reference if an update is due after this step: a copy, or a moving average (EMA)."""


class RewardModelUpdater(Stateless):
    """Trains the reward model of an iterative run; this class has none."""

    iterations = 0  # after which the reward model has been trained

    def update(self, should_stop: Callable[[], bool]) -> None:
        """Train the reward model after an iteration, from where an interrupted call has stopped. `iterations` grows by
        one, unless `should_stop()` ended the training.
        """


class Observer(Protocol):
    """Records each step before the next one begins, such as the run store and the live display."""

    def record(self, step: StepRecord) -> None:
        """Record a finished step."""


class Checkpoints:
    """Stores the state from which a run resumes exactly; this class stores nothing."""

    def save(self, step: int, state: dict[str, Any], best: int = 0) -> None:
        """Write a checkpoint after `step` complete steps, atomically.

        `best` is the step with the best held-out score so far, 0 without an evaluation. Its checkpoint is kept if the
        run keeps the best one.
        """

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return None

    def load(self, step: int) -> dict[str, Any]:
        """The state that was saved after `step` steps."""
        raise NotImplementedError
