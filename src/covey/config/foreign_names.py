"""Table of other libraries' option names with covey's own, for the error message of an unknown field.

From TRL's GRPOConfig, RLOOConfig and PPOConfig, the options of verl and OpenRLHF, stable-baselines3's PPO, cleanrl's
ppo.py, vLLM and Unsloth.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignName:
    """covey's counterpart of another library's name.

    Attributes:
        libraries: the libraries that have the name.
        fields: dotted names of covey's fields for it; a message lists those that the kind of recipe has.
        note: the difference from covey's field, or the reason why there is none.
    """

    libraries: str
    fields: tuple[str, ...] = ()
    note: str = ""


def _same(libraries: str, fields: str, note: str = "") -> ForeignName:
    return ForeignName(libraries, tuple(fields.split()), note)


def _none(libraries: str, why: str) -> ForeignName:
    return ForeignName(libraries, (), why)


_GROUP = "sampling.group_size rollouts.group_size"
_PROMPTS = "sampling.prompts_per_step rollouts.starts_per_step"
_CLIP = "loss.clip_low loss.clip_high"
_MEMORY = "update.microbatch_tokens"
_EVERY_STEP = "every step is recorded in metrics.jsonl"
_WHOLE = (
    "the update needs log-probabilities of the whole distribution, so its tail is never cut; try sampling.temperature. "
    "covey eval and covey sample have it as an option"
)
_ALONE = "covey samples and trains in one process"

FOREIGN_NAMES: dict[str, ForeignName] = {
    # ---- counts and lengths ----
    "top_p": _none("TRL, verl, OpenRLHF, vLLM", _WHOLE),
    "top_k": _none("TRL, verl, vLLM", _WHOLE),
    "min_p": _none("TRL, vLLM", _WHOLE),
    "min_tokens": _same("vLLM", "sampling.min_new_tokens"),
    "stop_strings": _same("transformers", "sampling.stop"),
    "stop_words": _same("the articles", "sampling.stop"),
    "few_shot": _same("the articles", "chat.examples"),
    "system_message": _same("the articles", "chat.system_prompt"),
    "chat_template_kwargs": _same("TRL, vLLM", "chat.template_options", 'as in ["enable_thinking = false"]'),
    "apply_chat_template_kwargs": _same("verl", "chat.template_options", 'as in ["enable_thinking = false"]'),
    "num_generations": _same("TRL", _GROUP),
    "num_generations_eval": _none("TRL", "held-out problems are answered once, greedily; covey eval has --samples"),
    "rloo_k": _same("TRL", _GROUP),
    "n_samples_per_prompt": _same("OpenRLHF", _GROUP),
    "n": _same("verl", _GROUP),
    "max_completion_length": _same("TRL", "sampling.max_new_tokens"),
    "response_length": _same("TRL", "sampling.max_new_tokens"),
    "max_response_length": _same("verl", "sampling.max_new_tokens"),
    "generate_max_len": _same("OpenRLHF", "sampling.max_new_tokens"),
    "max_tokens": _same("vLLM", "sampling.max_new_tokens"),
    "max_prompt_length": _same("TRL, verl", "sampling.long_prompts", "prompts are never cut"),
    "prompt_max_len": _same("OpenRLHF", "sampling.long_prompts", "prompts are never cut"),
    "max_seq_length": _none("Unsloth", "the model's positions are the limit; sampling.max_new_tokens limits answers"),
    "per_device_train_batch_size": _same("TRL", _PROMPTS, "memory is limited by update.microbatch_tokens"),
    "generation_batch_size": _same("TRL", _PROMPTS, "it counts prompts, not completions"),
    "train_batch_size": _same("verl, OpenRLHF", _PROMPTS),
    "rollout_batch_size": _same("OpenRLHF", _PROMPTS),
    "batch_size": _same("stable-baselines3, TRL", "update.minibatches", "it counts optimizer steps per pass"),
    "minibatch_size": _same("cleanrl", "update.minibatches", "it counts optimizer steps per pass"),
    "gradient_accumulation_steps": _same("TRL", _MEMORY, "the gradient is the same for every size"),
    "per_device_eval_batch_size": _same("TRL", "sampling.rows_at_once"),
    "ppo_mini_batch_size": _same("verl", "update.minibatches", "it counts optimizer steps per pass"),
    "num_mini_batches": _same("TRL", "update.minibatches"),
    "num_minibatches": _same("cleanrl", "update.minibatches"),
    "steps_per_generation": _same("TRL", "update.minibatches"),
    "ppo_micro_batch_size_per_gpu": _same("verl", _MEMORY),
    "ppo_max_token_len_per_gpu": _same("verl", _MEMORY),
    "micro_train_batch_size": _same("OpenRLHF", _MEMORY),
    "micro_rollout_batch_size": _same("OpenRLHF", "sampling.rows_at_once"),
    "num_iterations": _same("TRL", "update.epochs"),
    "num_ppo_epochs": _same("TRL", "update.epochs"),
    "ppo_epochs": _same("verl, TRL", "update.epochs"),
    "max_epochs": _same("OpenRLHF", "update.epochs"),
    "n_epochs": _same("stable-baselines3", "update.epochs"),
    "update_epochs": _same("cleanrl", "update.epochs"),
    "max_steps": _same("TRL", "steps"),
    "num_train_epochs": _same("TRL", "steps", "it counts training steps, not passes over the data"),
    "total_epochs": _same("verl", "steps", "it counts training steps, not passes over the data"),
    "total_training_steps": _same("verl", "steps"),
    "num_episodes": _same("OpenRLHF", "steps", "it counts training steps"),
    "total_timesteps": _same("stable-baselines3, cleanrl", "steps", "it counts training steps, not environment steps"),
    "total_episodes": _same("TRL", "steps", "it counts training steps, not rollouts"),
    "n_steps": _same("stable-baselines3", "rollouts.fragment_steps", 'it goes with rollouts.kind = "fragments"'),
    "num_steps": _same("cleanrl", "rollouts.fragment_steps", 'it goes with rollouts.kind = "fragments"'),
    "n_envs": _same("stable-baselines3", "rollouts.environments"),
    "num_envs": _same("cleanrl", "rollouts.environments"),
    # ---- the loss ----
    "beta": _same("TRL", "loss.kl_coefficient"),
    "kl_beta": _same("the articles", "loss.kl_coefficient"),
    "kl_coef": _same("TRL, verl", "loss.kl_coefficient"),
    "init_kl_coef": _same("OpenRLHF, TRL", "loss.kl_coefficient"),
    "kl_loss_coef": _same("verl", "loss.kl_coefficient"),
    "use_kl_loss": _same("verl", "loss.kl_estimator", "k1 goes into the reward, the others into the loss"),
    "kl_loss_type": _same("verl", "loss.kl_estimator", "low_var_kl is k3, kl is k1, mse is k2"),
    "kl_penalty": _same("verl", "loss.kl_estimator", "low_var_kl is k3, kl is k1, mse is k2"),
    "kl_ctrl": _same("verl", "loss.adaptive_kl_target loss.adaptive_kl_horizon"),
    "epsilon": _same("TRL", _CLIP),
    "epsilon_high": _same("TRL", "loss.clip_high"),
    "epsilon_low": _same("TRL", "loss.clip_low"),
    "clip_epsilon": _same("the articles", _CLIP),
    "cliprange": _same("TRL", _CLIP),
    "clip_range": _same("stable-baselines3", _CLIP),
    "clip_ratio": _same("verl", _CLIP),
    "clip_coef": _same("cleanrl", _CLIP),
    "eps_clip": _same("OpenRLHF", _CLIP),
    "clip_ratio_low": _same("verl", "loss.clip_low"),
    "clip_ratio_high": _same("verl", "loss.clip_high"),
    "eps_clip_low_high": _same("OpenRLHF", _CLIP),
    "delta": _same("TRL", "loss.dual_clip"),
    "clip_ratio_c": _same("verl", "loss.dual_clip"),
    "cliprange_value": _same("TRL, verl", "loss.value_clip"),
    "clip_range_vf": _same("stable-baselines3", "loss.value_clip"),
    "clip_vloss": _same("cleanrl", "loss.value_clip", "it is the distance; unset is off"),
    "vf_coef": _same("TRL, stable-baselines3, cleanrl", "loss.value_coefficient"),
    "ent_coef": _same("stable-baselines3, cleanrl", "loss.entropy_coefficient"),
    "entropy_coeff": _same("verl", "loss.entropy_coefficient"),
    "entropy_coef": _same("OpenRLHF, articles", "loss.entropy_coefficient"),
    "target_entropy": _same("Skywork-OR1", "loss.entropy_target"),
    "clip_cov_ratio": _same("verl", "loss.clip_cov_fraction", "clip_cov_lb and clip_cov_ub are loss.clip_cov_bounds"),
    "clip_cov_lb": _same("verl", "loss.clip_cov_bounds", "both bounds, as in [1.0, 5.0]"),
    "clip_cov_ub": _same("verl", "loss.clip_cov_bounds", "both bounds, as in [1.0, 5.0]"),
    "kl_cov_ratio": _same("verl", "loss.kl_cov_fraction"),
    "kl_cov_frac": _same("SkyRL", "loss.kl_cov_fraction"),
    "ppo_kl_coef": _same("verl", "loss.kl_cov_coefficient"),
    "lam": _same("TRL, verl", "loss.gae_lambda"),
    "lambd": _same("OpenRLHF", "loss.gae_lambda"),
    "normalize_advantage": _same("stable-baselines3", "loss.whiten"),
    "norm_adv": _same("cleanrl", "loss.whiten"),
    "loss_type": _same("TRL", "algorithm"),
    "loss_agg_mode": _same("verl", "algorithm", "grpo, dr_grpo and dapo average tokens differently"),
    "adv_estimator": _same("verl", "algorithm"),
    "advantage_estimator": _same("OpenRLHF", "algorithm"),
    "importance_sampling_level": _same("TRL", "algorithm", "gspo takes one ratio for a whole completion"),
    "scale_rewards": _same("TRL", "algorithm", "dr_grpo does not divide by the deviation"),
    "norm_adv_by_std_in_grpo": _same("verl", "algorithm", "dr_grpo does not divide by the deviation"),
    "mask_truncated_completions": _same("TRL", "loss.mask_truncated"),
    "vllm_importance_sampling_cap": _same("TRL", "loss.importance_cap"),
    "vllm_importance_sampling_clip_max": _same(
        "TRL", "loss.importance_cap", "or the upper bound of loss.importance_mask"
    ),
    "vllm_importance_sampling_mode": _same("TRL", "loss.importance_level", "with importance_cap or importance_mask"),
    "top_entropy_quantile": _none("TRL", "every token counts"),
    "missing_eos_penalty": _same("TRL", "sampling.overlong_tokens", "the reward falls before the token limit"),
    "overlong_buffer": _same("verl", "sampling.overlong_tokens"),
    "replay_buffer_size": _same("TRL", "replay.groups replay.max_age", "at most groups x max_age groups are kept"),
    "buffer_size": _same(
        "stable-baselines3, cleanrl", "replay.groups replay.max_age", "at most groups x max_age groups are kept"
    ),
    "replay_buffer_class": _same("stable-baselines3", "replay.groups", "groups that had a gradient, the newest first"),
    "filter_groups": _same("verl", "sampling.max_resamples"),
    "dynamic_filtering": _same("OpenRLHF", "sampling.max_resamples"),
    # ---- the optimizer and the reference ----
    "lr": _same("verl", "update.learning_rate"),
    "actor_learning_rate": _same("OpenRLHF", "update.learning_rate"),
    "lr_scheduler_type": _same("TRL", "update.schedule"),
    "lr_scheduler": _same("OpenRLHF", "update.schedule"),
    "anneal_lr": _same("cleanrl", "update.schedule", "linear falls to 0"),
    "warmup_ratio": _same("TRL", "update.warmup_steps", "it counts steps"),
    "lr_warmup_ratio": _same("OpenRLHF", "update.warmup_steps", "it counts steps"),
    "lr_warmup_steps": _same("verl", "update.warmup_steps"),
    "adam_beta1": _same("TRL", "update.beta1"),
    "adam_beta2": _same("TRL", "update.beta2"),
    "adam_epsilon": _none("TRL", "AdamW's epsilon is that of torch, 1e-8"),
    "optim": _none("TRL", "the optimizer is AdamW; 8-bit moments: update.eight_bit_moments"),
    "grad_clip": _same("verl", "update.max_grad_norm"),
    "max_norm": _same("OpenRLHF", "update.max_grad_norm"),
    "critic_warmup": _same("verl", "update.critic_warmup_steps"),
    "freezing_actor_steps": _same("OpenRLHF", "update.critic_warmup_steps"),
    "sync_ref_model": _same("TRL", "reference.refresh_every"),
    "ref_model_sync_steps": _same("TRL", "reference.refresh_every"),
    "ref_model_mixup_alpha": _same("TRL", "reference.refresh_fraction"),
    # ---- model, data and rewards ----
    "model_name": _same("Unsloth", "model"),
    "model_name_or_path": _same("TRL", "model"),
    "pretrain": _same("OpenRLHF", "model"),
    "train_dataset": _same("TRL", "task.path", 'with task.name = "dataset"'),
    "dataset_name": _same("TRL", "task.path", 'a JSONL or Parquet file, with task.name = "dataset"'),
    "dataset": _same("TRL", "task.path", 'a JSONL or Parquet file, with task.name = "dataset"'),
    "train_files": _same("verl", "task.path", 'a JSONL or Parquet file, with task.name = "dataset"'),
    "prompt_data": _same("OpenRLHF", "task.path", 'a JSONL or Parquet file, with task.name = "dataset"'),
    "eval_dataset": _same("TRL", "task.held_out_path"),
    "val_files": _same("verl", "task.held_out_path"),
    "input_key": _none("OpenRLHF", "the column of the prompts is called prompt"),
    "prompt_key": _none("verl", "the column of the prompts is called prompt"),
    "reward_funcs": _none("TRL", 'write [[rewards]] with function = "file.py:function" below it'),
    "reward_weights": _none("TRL", "each [[rewards]] table has its weight"),
    "multi_objective_aggregation": _same("TRL", "loss.normalize_rewards", 'its normalize_then_sum is "each"'),
    "reward_model": _none("verl", 'for a language model: [[rewards]] with model = "FOLDER"'),
    "reward_pretrain": _none("OpenRLHF", 'for a language model: [[rewards]] with model = "FOLDER"'),
    "remote_rm_url": _none("OpenRLHF", 'for a language model: [[rewards]] with judge = "http://..."'),
    "env": _same("stable-baselines3", "environment.id"),
    "env_id": _same("cleanrl", "environment.id"),
    "net_arch": _same("stable-baselines3", "policy.hidden"),
    "policy_kwargs": _same("stable-baselines3", "policy.hidden policy.activation"),
    "log_std_init": _same("stable-baselines3", "policy.initial_std", "it is the deviation, not its logarithm"),
    "use_sde": _none("stable-baselines3", "the noise of every action is drawn anew"),
    "norm_obs": _same("stable-baselines3", "policy.normalise_observations"),
    "norm_reward": _same("stable-baselines3", "rollouts.reward_scaling"),
    # ---- the run ----
    "output_dir": _same("TRL", "run_dir"),
    "save_path": _same("OpenRLHF", "run_dir"),
    "save_steps": _same("TRL, OpenRLHF", "checkpoint.every"),
    "save_freq": _same("verl", "checkpoint.every"),
    "save_total_limit": _same("TRL", "checkpoint.keep"),
    "max_ckpt_num": _same("OpenRLHF", "checkpoint.keep"),
    "eval_steps": _same("TRL, OpenRLHF", "evaluation.every"),
    "eval_freq": _same("stable-baselines3", "evaluation.every"),
    "test_freq": _same("verl", "evaluation.every"),
    "eval_strategy": _same("TRL", "evaluation.every"),
    "n_eval_episodes": _same("stable-baselines3", "evaluation.episodes"),
    "logging_steps": _none("TRL, OpenRLHF", _EVERY_STEP),
    "report_to": _same("TRL", "trackers"),
    "tensorboard_log": _same("stable-baselines3", "trackers", 'trackers = ["tensorboard"]'),
    "use_wandb": _same("OpenRLHF", "trackers", 'trackers = ["wandb"]'),
    "track": _same("cleanrl", "trackers", 'trackers = ["wandb"]'),
    "log_completions": _none("TRL", "every completion is in the folder rollouts of the run"),
    "num_completions_to_print": _same("TRL", "show_rollouts_every"),
    "capture_video": _none("cleanrl", "covey eval RUN --render draws an episode"),
    "resume_from_checkpoint": _none("TRL", "covey train --resume RUN goes on with a run"),
    "torch_deterministic": _none("cleanrl", "a seed gives the same run on the same machine"),
    "bf16": _same("TRL", "precision"),
    "fp16": _same("TRL", "precision", "bf16 or fp32"),
    "cuda": _same("cleanrl", "device"),
    "no_cuda": _same("TRL", "device"),
    "gradient_checkpointing": _same("TRL, OpenRLHF", "update.recompute"),
    "use_vllm": _none("TRL", _ALONE),
    "vllm_mode": _none("TRL", _ALONE),
    "vllm_num_engines": _none("OpenRLHF", _ALONE),
    "tensor_model_parallel_size": _none("verl", _ALONE),
    "gpu_memory_utilization": _none("vLLM", _ALONE),
    "fast_inference": _none("Unsloth", _ALONE),
    "deepspeed": _none("TRL", _ALONE),
    "fsdp": _none("TRL", _ALONE),
    "zero_stage": _none("OpenRLHF", _ALONE),
    "nnodes": _none("verl", _ALONE),
    "n_gpus_per_node": _none("verl", _ALONE),
    "use_liger_kernel": _none("TRL", "covey has its own kernels"),
    "flash_attn": _none("OpenRLHF", "covey has its own kernels on a CPU, torch's attention on a GPU"),
    # ---- adapters ----
    "use_peft": _same("TRL", "lora.rank", "an adapter is trained if it is above 0"),
    "peft_config": _same("TRL", "lora.rank lora.alpha lora.targets", "the [lora] table is the adapter's config"),
    "lora_rank": _same("verl, OpenRLHF", "lora.rank"),
    "lora_r": _same("TRL", "lora.rank"),
    "lora_alpha": _same("TRL, verl, OpenRLHF", "lora.alpha"),
    "lora_dropout": _same("TRL, OpenRLHF, Unsloth", "lora.dropout", "it must be 0, because it would change the ratios"),
    "lora_target_modules": _same("TRL", "lora.targets"),
    "target_modules": _same("verl, OpenRLHF, Unsloth", "lora.targets"),
    "lora_adapter_path": _same("verl", "lora.adapter"),
    "lora_task_type": _none("TRL", "a policy is a causal language model"),
    "lora_modules_to_save": _none("TRL", "an adapter has low-rank matrices alone; lora.rank = 0 trains all weights"),
    "use_rslora": _same("TRL, Unsloth", "lora.alpha", "it is alpha times the root of the rank then"),
    "use_dora": _none("TRL", "adapters are plain LoRA"),
    "load_in_4bit": _none("TRL, Unsloth, OpenRLHF", "frozen weights keep their precision; quantized ones are not read"),
    "load_in_8bit": _none("TRL, Unsloth", "frozen weights keep their precision; quantized ones are not read"),
}  # fmt: skip


def answer(name: str, known: Collection[str], elsewhere: str) -> str:
    """covey's name for `name`, or the reason why there is none, in one line; '' if no other library has the name.

    Args:
        name: the unknown name, with dots and either - or _, such as "actor_rollout_ref.rollout.n".
        known: dotted names of the fields that this kind of recipe has.
        elsewhere: in words, the kind of recipe that has the field if this kind does not.
    """
    last = name.replace("-", "_").lower().rpartition(".")[2]
    found = FOREIGN_NAMES.get(last)
    if found is None:
        return ""
    whose = f"{found.libraries}: {last}"
    if not found.fields:
        return f"{whose} has no counterpart; {found.note}"
    here = [field for field in found.fields if field in known]
    fields = " and ".join(here or found.fields)
    where = "" if here else f", in recipes for {elsewhere}"
    return f"{whose} is covey's {fields}{where}" + (f"; {found.note}" if found.note else "")
