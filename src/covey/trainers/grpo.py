"""GRPO trainer: generate, reward, compute advantages, update."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from covey.config import ConfigError
from covey.core import schedules
from covey.data import Group, Start, Stateless
from covey.functional import GRPOLoss
from covey.train.collect import fixed_size
from covey.train.learners import Coefficient, PolicyLearner, UpdatePlan
from covey.train.loop import train_step
from covey.train.state import Components, LoopConfig
from covey.trainers.base import LanguageTrainer, Model, Prompts, TrainerOptions, check_names, option_names, with_rewards


class GRPOTrainer(LanguageTrainer):
    """GRPO trainer for language models, with the interface of tutorials; `covey.run` adds a run folder.

    >>> trainer = GRPOTrainer("smollm2-135m", reward_function=brevity, prompts=["Name a fruit.", "Name a tree."])
    >>> trainer.train(on_step=lambda step, metrics: print(step, metrics["reward/mean"]))

    Arguments named `prompts` are a list of texts or of chats, a list of rows ({"prompt": ..., "answer": ...}) or
    columns ({"prompts": [...], "answer": [...]}); further columns are keyword arguments of the reward functions. A
    prompt may also be token ids: a tensor [batch, length], padded at either end, or the output of a tokenizer.
    """

    def __init__(
        self,
        model: Model | None = None,
        ref_model: Model | None = None,
        group_size: int = 4,
        clip_epsilon: float = 0.2,
        kl_beta: float = 0.1,
        *,
        scale_rewards: bool = True,
        epochs: int = 1,
        **options: Any,
    ) -> None:
        """Check the arguments, then load the models that are given by name.

        Args:
            model: a causal language model of transformers, trained in place, or a name or folder that covey loads.
            ref_model: reference model of the KL. None: a frozen copy of the current model; with kl_beta = 0 there is no
                reference, and no memory for one.
            group_size: answers to each prompt, at least 2.
            clip_epsilon: the ratio is clipped to 1 - clip_epsilon and 1 + clip_epsilon; with one epoch and one
                minibatch it is always 1.
            kl_beta: weight of the KL to the reference.
            scale_rewards: divide the advantages by the standard deviation of the group (`GRPOLoss`).
            epochs: passes over the answers of a step.
            options: the fields of `TrainerOptions`: tokenizer, reward_function, prompts, prompts_per_step, steps,
                learning_rate, max_grad_norm, max_new_tokens, temperature, minibatches, microbatch_tokens, lora,
                recompute, seed, device, precision.

        Raises:
            ConfigError: for an invalid value, an argument of TRL's trainer, or a model that cannot be loaded.
        """
        check_names("GRPOTrainer", options, option_names())
        if model is None:
            raise ConfigError("there is no model: give a model of transformers, or a name or folder of one")
        if group_size < 2:
            raise ConfigError(f"group_size must be at least 2 (is {group_size}): answers are compared with each other")
        if epochs < 1:
            raise ConfigError(f"epochs must be at least 1 (is {epochs})")
        self.group_size = group_size
        self.algorithm = GRPOLoss(clip_epsilon, kl_beta, scale_rewards=scale_rewards).algorithm
        super().__init__(model, ref_model, kl_beta, TrainerOptions(**options))
        self.plan = UpdatePlan(epochs, self.options.minibatches)

    def generate_group_outputs(
        self, prompts: Prompts, max_new_tokens: int | None = None, *, sequence_logprobs: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample `group_size` answers to every prompt.

        Args:
            prompts: in any of the forms above.
            max_new_tokens: longest answer, in tokens; None: the trainer's setting.
            sequence_logprobs: return one log-probability per answer, the sum over its tokens.

        Returns:
            outputs, int64 [batch, group_size, seq_len]: token ids of the answers without their prompts, including the
            end token, then padding; and their log-probabilities in nats, in the same shape, 0 at padding; with
            `sequence_logprobs` [batch, group_size].
        """
        outputs, logprobs = self._sample(prompts, self.group_size, max_new_tokens)
        return outputs, logprobs.sum(-1) if sequence_logprobs else logprobs

    def compute_rewards(self, prompts: Prompts, outputs: Tensor) -> Tensor:
        """Rewards of the answers, [batch, group_size]; override it, or give `reward_function`.

        Args:
            prompts: the prompts of the answers.
            outputs: [batch, group_size, seq_len], as `generate_group_outputs` returns them.

        Returns:
            float32; NaN for an answer that could not be graded and is excluded from its group.

        Raises:
            ConfigError: if there is no reward function.
            RunError: if more than a fifth of the answers could not be graded.
        """
        return self._rewards(prompts, outputs)

    def training_step(self, batch: Prompts) -> dict[str, float]:
        """One step: generate, reward, compute advantages, update. Returns its metrics (docs/reference/metrics.md).

        Groups whose rewards are all equal are excluded from the update, as in every run of covey.
        """
        answers = _Answers(self, batch)
        kl_coefficient = Coefficient(self.algorithm.kl.coefficient)
        rate = schedules.constant(self.options.learning_rate)
        run = Components(
            task=answers,
            sampler=answers,
            grader=answers,
            policy=self.policy,
            algorithm=self.algorithm,
            learners=[PolicyLearner(self.policy, self.optimizer, self.algorithm, self.plan, rate, kl_coefficient)],
            kl_coefficient=kl_coefficient,
            reference=self.reference,
        )
        config = LoopConfig(
            steps=self.options.steps,
            seed=self.options.seed,
            starts_per_step=len(answers.starts),
            group_size=fixed_size(self.group_size),
        )
        return train_step(run, config, self.progress).metrics


class _Answers(Stateless):
    """Task, sampler and grader of one step, on the trainer's methods, which a subclass may override."""

    def __init__(self, trainer: GRPOTrainer, prompts: Prompts) -> None:
        self.trainer, self.prompts, self.starts = trainer, prompts, trainer._starts(prompts)

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        return self.starts

    def held_out(self, count: int) -> list[Start]:
        return []

    def sample(self, starts: Sequence[Start], group_size: int, step: int, first_rollout: int = 0) -> list[Group]:
        self.outputs, logprobs = self.trainer.generate_group_outputs(self.prompts)
        return self.trainer._groups(starts, self.outputs, logprobs)

    def grade(self, groups: list[Group]) -> list[Group]:
        return with_rewards(groups, self.trainer.compute_rewards(self.prompts, self.outputs))

    def refresh(self, version: int) -> None:
        self.trainer.sampler.refresh(version)
