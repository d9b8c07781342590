"""PPO trainer: collect experiences, compute advantages, update policy and critic.

Shapes: B prompts, each with one answer; T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import KLInReward, KLPenalty
from covey.algorithms.advantages import gae_advantage
from covey.config import ConfigError
from covey.config.model_sources import CRITIC_FOLDER
from covey.core import schedules
from covey.core.baselines import group_zscore
from covey.data import Batch, collate
from covey.functional import PPOLoss, check_limits, compute_gae, with_loss_weights
from covey.llm.critic import LanguageCritic, SharedTrunkValues
from covey.train.learners import Coefficient, CriticLearner, Learner, PolicyLearner, UpdatePlan, actor_critic
from covey.train.metrics import describe
from covey.train.prepare import prepare_batch
from covey.train.update import update
from covey.trainers.base import (
    LanguageTrainer,
    Model,
    Prompts,
    TrainerOptions,
    check_names,
    open_model,
    option_names,
    policy_of,
    with_rewards,
)

# Experiences always have the log-probabilities of the old policy; `prepare_batch` computes them from 2 steps on.
SEVERAL_STEPS = 2

Experiences = dict[str, Any]


class PPOTrainer(LanguageTrainer):
    """PPO trainer for language models, with the interface of tutorials; `covey.run` adds a run folder.

    >>> trainer = PPOTrainer("smollm2-135m", reward_function=brevity, prompts=["Name a fruit.", "Name a tree."])
    >>> trainer.train(on_step=lambda step, metrics: print(step, metrics["reward/mean"]))

    Prompts have the same forms as for `GRPOTrainer`. Each has one answer.
    """

    def __init__(
        self,
        actor_model: Model | None = None,
        critic_model: Model | None = None,
        ref_model: Model | None = None,
        clip_epsilon: float = 0.2,
        gamma: float = 0.99,
        lam: float = 0.95,
        *,
        kl_beta: float = 0.02,
        value_loss_coef: float = 0.5,
        entropy_coef: float = 0.0,
        critic_learning_rate: float | None = None,
        **options: Any,
    ) -> None:
        """Check the arguments, then load the models that are given by name.

        Args:
            actor_model: a causal language model of transformers, trained in place, or a name or folder.
            critic_model: initial weights of the critic: its trunk is a copy of this model's decoder, and its value head
                is initialized to 0. None: the actor's decoder. If it is the actor_model itself, the value head is on
                the actor's own trunk, which is then trained by both losses.
            ref_model: reference model of the KL. None: a frozen copy of the current actor; with kl_beta = 0 there is no
                reference, and no memory for one.
            clip_epsilon: the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon.
            gamma: discount per token. 0.99 is usual in control and in tutorials; 1 is usual for answers with a reward
                at their end.
            lam: of GAE: 0 gives the one-step TD error, 1 the return minus the value.
            kl_beta: weight of the KL to the reference, subtracted from the reward of every token (DeepSeekMath, arXiv
                2402.03300, eq. 2); 0.02 is InstructGPT's (arXiv 2203.02155, appendix C.4).
            value_loss_coef: weight of the critic's squared error.
            entropy_coef: weight of the entropy bonus.
            critic_learning_rate: of the critic; None: `learning_rate`.
            options: the fields of `TrainerOptions`, as for `GRPOTrainer`.

        Raises:
            ConfigError: for an invalid value, an argument of TRL's trainer, or a model that cannot be loaded.
        """
        check_names("PPOTrainer", options, option_names())
        if actor_model is None:
            raise ConfigError("there is no actor_model: give a model of transformers, or a name or folder of one")
        check_limits("gamma", gamma, 0.0, 1.0)
        check_limits("lam", lam, 0.0, 1.0)
        check_limits("kl_beta", kl_beta, 0.0, math.inf)
        if critic_learning_rate is not None and not critic_learning_rate > 0:
            raise ConfigError(f"critic_learning_rate must be above 0 (is {critic_learning_rate})")
        if getattr(options.get("lora"), "is_used", False):
            raise ConfigError(
                "PPOTrainer trains all weights of actor and critic: leave lora out, or call "
                'covey.run(RunConfig(algorithm="ppo", lora=..., critic=CriticConfig(trunk="adapter")))'
            )
        self.gamma, self.lam = gamma, lam
        penalty = KLPenalty(schedules.constant(kl_beta), KLInReward())
        loss = PPOLoss(clip_epsilon, value_loss_coef, entropy_coef)
        self.algorithm = replace(loss.algorithm, advantage=gae_advantage(gamma=gamma, lam=lam), kl=penalty)
        super().__init__(actor_model, ref_model, kl_beta, TrainerOptions(**options))
        self.critic = self._critic_of(critic_model)
        if not self.critic.own_trunk:
            self.policy = self.policy.with_outputs(SharedTrunkValues(self.critic))
        self.critic_learning_rate = critic_learning_rate or self.options.learning_rate
        self.critic_optimizer = self._optimizer_of(self.critic.module, self.critic_learning_rate)
        self.metrics: dict[str, float] = {}  # of the last call of `update_policy`

    def collect_experiences(self, prompts: Prompts, max_new_tokens: int | None = None) -> Experiences:
        """Sample one answer to every prompt, and compute the inputs of the update.

        Args:
            prompts: in any of the forms of `GRPOTrainer`.
            max_new_tokens: longest answer, in tokens; None: the trainer's setting.

        Returns:
            a dict. An answer that could not be graded is only in "metrics".

            | key                 | shape            | meaning                                                      |
            |---------------------|------------------|--------------------------------------------------------------|
            | "outputs"           | [batch, seq_len] | token ids of the answers, then the tokenizer's padding       |
            | "mask"              | [batch, seq_len] | bool, True at sampled tokens                                 |
            | "old_logprobs"      | [batch, seq_len] | of the current policy, in nats; 0 at padding                 |
            | "sampler_logprobs"  | [batch, seq_len] | the same, as the sampler computed them                       |
            | "values"            | [batch, seq_len] | of the critic; 0 at padding                                  |
            | "rewards"           | [batch, seq_len] | the reward at the last token, minus kl_beta * KL of each one |
            | "scores"            | [batch]          | the reward                                                   |
            | "sequence_logprobs" | [batch]          | sum of "old_logprobs"                                        |
            | "prompt_ids"        | list             | a tuple of token ids for each prompt                         |
            | "metrics"           | dict             | metrics by name                                              |
        """
        outputs, logprobs = (tensor[:, 0] for tensor in self._sample(prompts, 1, max_new_tokens))
        scores = self.compute_rewards(prompts, outputs)
        groups = self._groups(self._starts(prompts), outputs[:, None], logprobs[:, None])
        groups = with_rewards(groups, scores[..., None])
        batch, found = prepare_batch(
            collate(groups),
            self.policy,
            self.algorithm,
            reference=self.reference,
            critics=(self.critic,),
            kl_coefficient=self.kl_beta,
            optimizer_steps=SEVERAL_STEPS,
        )
        assert batch.proximal_logprobs_BT is not None
        old_logprobs = torch.where(batch.mask_BT, batch.proximal_logprobs_BT, 0.0)
        return {
            "prompt_ids": list(batch.context),
            "outputs": batch.actions_BT.masked_fill(~batch.mask_BT, self._padding()),
            "mask": batch.mask_BT,
            "old_logprobs": old_logprobs,
            "sequence_logprobs": old_logprobs.sum(-1),
            "sampler_logprobs": batch.behavior_logprobs_BT,
            "values": batch.values_BT,
            "rewards": batch.rewards_BT,
            "scores": scores[~scores.isnan()],
            "metrics": describe(groups) | found,
        }

    def compute_rewards(self, prompts: Prompts, outputs: Tensor) -> Tensor:
        """Rewards of the answers, [batch]; override it, or give `reward_function`.

        Args:
            prompts: the prompts of the answers.
            outputs: [batch, seq_len], token ids including the end token, then padding.

        Returns:
            float32; NaN for an answer that could not be graded.

        Raises:
            ConfigError: if there is no reward function.
            RunError: if more than a fifth of the answers could not be graded.
        """
        return self._rewards(prompts, outputs[:, None])[:, 0]

    def compute_advantages(self, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns, [batch, seq_len], by `compute_gae` with the trainer's gamma and lam.

        The value after an answer's last token is 0, even if the token limit truncated the answer, because its reward is
        that of the truncated text. `update_policy` calls this method and whitens the advantages.
        """
        return compute_gae(rewards, values, self.gamma, self.lam)

    def update_policy(self, experiences: Experiences, num_epochs: int = 4) -> float:
        """Train on experiences: `num_epochs` epochs, each with `minibatches` optimizer steps of policy and critic.

        Args:
            experiences: the dict that `collect_experiences` returned, whose tensors may be modified.
            num_epochs: number of epochs, at least 1.

        Returns:
            the sum of the policy's and the critic's loss, averaged over the epochs. `metrics` has the metrics.

        Raises:
            ConfigError: if num_epochs is below 1.
        """
        if num_epochs < 1:
            raise ConfigError(f"num_epochs must be at least 1 (is {num_epochs})")
        mask_BT = experiences["mask"]
        advantages_BT, returns_BT = self.compute_advantages(experiences["rewards"], experiences["values"])
        one_group = torch.zeros(int(mask_BT.sum()), dtype=torch.int64)
        whitened_BT = torch.zeros_like(advantages_BT)
        whitened_BT[mask_BT] = group_zscore(advantages_BT[mask_BT], one_group, one_group == 0)
        batch = Batch.blank(
            mask_BT,
            context=tuple(experiences["prompt_ids"]),
            actions_BT=experiences["outputs"],
            behavior_logprobs_BT=experiences["sampler_logprobs"],
            group_B=torch.arange(len(mask_BT)),
            advantages_BT=whitened_BT,
            returns_BT=returns_BT,
            values_BT=experiences["values"],
            proximal_logprobs_BT=experiences["old_logprobs"],
        )
        learners = self._learners(UpdatePlan(num_epochs, self.options.minibatches))
        batch = with_loss_weights(self.algorithm, batch)
        self.metrics = update(learners, batch, seed=self.options.seed, step=self.step + 1)
        self.progress.step += 1
        self.sampler.refresh(self.step)
        return self.metrics["loss"] + self.metrics["loss/value"]

    def training_step(self, batch: Prompts) -> dict[str, float]:
        """One step: collect experiences, update the policy. Returns its metrics (docs/reference/metrics.md)."""
        experiences = self.collect_experiences(batch)
        self.update_policy(experiences)
        return experiences["metrics"] | self.metrics

    def save(self, folder: str | Path) -> None:
        """Write actor and tokenizer in the format of transformers, and the critic into the subfolder critic/."""
        super().save(folder)
        self.critic.save(Path(folder) / CRITIC_FOLDER)

    def _learners(self, plan: UpdatePlan) -> Sequence[Learner]:
        """The learners of actor and critic."""
        rate, critic_rate = (
            schedules.constant(self.options.learning_rate),
            schedules.constant(self.critic_learning_rate),
        )
        kl_coefficient = Coefficient(self.algorithm.kl.coefficient)
        actor = PolicyLearner(self.policy, self.optimizer, self.algorithm, plan, rate, kl_coefficient)
        split = self.policy.microbatches
        critic = CriticLearner(self.critic, self.critic_optimizer, self.algorithm, plan, critic_rate, split)
        return (actor, critic) if self.critic.own_trunk else actor_critic(actor, critic)

    def _critic_of(self, critic_model: Model | None) -> LanguageCritic:
        if critic_model is None or critic_model is self.model:
            return LanguageCritic(self.policy, own_trunk=critic_model is None)
        loaded = open_model(critic_model, replace(self.options, tokenizer=self.tokenizer))
        self.check_vocabulary("critic_model", loaded.module)
        return LanguageCritic(policy_of(loaded.module, self.options))
