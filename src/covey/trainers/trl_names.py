"""Table of the arguments of TRL's trainers with covey's own, for the error message of an unknown argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from covey.config import ConfigError
from covey.config.fields import did_you_mean

_OF_RUN = "is the argument conversation of covey.run, because a trainer samples single answers: conversation="
_TOOLS = f"{_OF_RUN}covey.Conversation([your, functions])"
_ENVIRONMENT = f"{_OF_RUN}covey.Conversation(YourEnvironment)"
_ALL_WEIGHTS = "has no counterpart: every weight is trained, as it is stored"
_REWARD_MODEL = "has no counterpart: call the reward model in your reward_function"

# Arguments of GRPOTrainer in TRL 1.16, then of PPOTrainer in older versions of TRL.
TRL_NAMES: Mapping[str, str] = {
    "model": "is actor_model",
    "reward_funcs": "is reward_function",
    "args": "has no counterpart: give its fields by keyword, such as group_size (num_generations), kl_beta (beta), "
    "clip_epsilon (epsilon), steps (max_steps), prompts_per_step, learning_rate, max_new_tokens "
    "(max_completion_length), recompute (gradient_checkpointing), temperature and seed",
    "train_dataset": "is prompts",
    "eval_dataset": "has no counterpart: covey.run evaluates on held-out prompts",
    "processing_class": "is tokenizer",
    "reward_processing_classes": _REWARD_MODEL,
    "callbacks": "is the argument on_step of train()",
    "optimizers": "has no counterpart: AdamW is used, with learning_rate and max_grad_norm",
    "quantization_config": _ALL_WEIGHTS,
    "peft_config": "is lora: covey.LoRAConfig(rank=r, alpha=lora_alpha, targets=target_modules)",
    "tools": _TOOLS,
    "rollout_func": _ENVIRONMENT,
    "environment_factory": _ENVIRONMENT,
    "config": "has no counterpart: give its fields by keyword, such as clip_epsilon (cliprange), kl_beta (kl_coef), "
    "gamma, lam, value_loss_coef (vf_coef), learning_rate and seed",
    "policy": "is actor_model",
    "ref_policy": "is ref_model",
    "value_model": "is critic_model",
    "reward_model": _REWARD_MODEL,
    "dataset": "is prompts",
    "data_collator": "has no counterpart: prompts may have any length",
    "optimizer": "has no counterpart: AdamW is used, with learning_rate and max_grad_norm",
    "lr_scheduler": "has no counterpart: covey.run has schedules",
    "num_shared_layers": "is critic_model: the actor_model itself shares all layers",
}


def check_names(trainer: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keyword arguments that a trainer does not have.

    Raises:
        ConfigError: in one line, with covey's names for all arguments of TRL.
    """
    unknown = [name for name in given if name not in known]
    of_trl = [f"{name} {TRL_NAMES[name]}" for name in unknown if name in TRL_NAMES]
    if of_trl:
        raise ConfigError(f"{trainer} has other names than TRL's: {'; '.join(of_trl)}; docs/articles.md has examples")
    if unknown:
        near = did_you_mean(unknown[0], sorted(known))
        raise ConfigError(f"{trainer} has no argument {unknown[0]!r}{near}; it has {', '.join(sorted(known))}")
