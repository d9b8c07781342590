"""Reads the prompts of scripts: lists of texts or chats, rows of a data set, or a data loader's columns.

All other columns, such as answers, are passed to the reward functions under their own names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from covey.config import ConfigError
from covey.config.fields import did_you_mean
from covey.data import Start, Task
from covey.llm.data.arrow import rows_as_written
from covey.llm.data.rows import row_of
from covey.llm.tasks.dataset import order_of_pass

PROMPT_COLUMNS = ("prompts", "prompt")

Prompts = Tensor | Iterable[Any] | Mapping[str, Sequence[Any]]


def read_prompts(prompts: Prompts) -> list[Start]:
    """Read prompts in any of these forms:

    >>> read_prompts(["2+2=", "3+4="])
    >>> read_prompts([[{"role": "user", "content": "What is 2 + 2?"}]])
    >>> read_prompts([{"prompt": "2+2=", "answer": "4"}])
    >>> read_prompts({"prompts": ["2+2="], "answer": ["4"]})
    >>> read_prompts(torch.tensor([[17, 4, 23], [17, 9, 23]]))
    >>> read_prompts(tokenizer(["2+2=", "13+4="], padding=True, return_tensors="pt"))

    A prompt of token ids becomes a tuple of them, without padding if there is an "attention_mask".

    Raises:
        ConfigError: for the first prompt in another form.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is a single text: give a list of them, [text]")
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise ConfigError(f"prompts has shape {list(prompts.shape)}: token ids have [batch, length]")
    if isinstance(prompts, Mapping):
        prompts = _rows_of(prompts)
    starts = []
    for index, given in enumerate(rows_as_written(prompts)):
        record = dict(given) if isinstance(given, Mapping) else {"prompt": given}
        ids = _token_ids(record.get("prompt"))
        row = row_of(f"prompts[{index}]", record if ids is None else record | {"prompt": "token ids"})
        starts.append(Start(index, row.prompt if ids is None else ids, row.columns))
    if not starts:
        raise ConfigError("prompts is empty: give at least one")
    return starts


def as_columns(starts: Sequence[Start]) -> dict[str, list[Any]]:
    """Starts as columns, for `read_prompts`; the value of a missing column is None."""
    names = dict.fromkeys(name for start in starts for name in start.columns)
    columns = {name: [start.columns.get(name) for start in starts] for name in names}
    return {PROMPT_COLUMNS[0]: [start.prompt for start in starts], **columns}


class PromptDeck:
    """Draws prompts without replacement, in a new order for every pass."""

    def __init__(self, prompts: Prompts | Task) -> None:
        """Raises ConfigError for prompts that cannot be read. A task of covey is used for drawing."""
        self._task: Any = prompts if hasattr(prompts, "draw") else None
        self._starts = [] if self._task else read_prompts(prompts)  # type: ignore[arg-type]

    def draw(self, seed: int, step: int, count: int) -> dict[str, list[Any]]:
        """Draw the `count` prompts of a step (counted from 1), with their columns."""
        if self._task:
            return as_columns(self._task.draw(seed, step, count))
        size = len(self._starts)
        places = [(step - 1) * count + index for index in range(count)]
        return as_columns([self._starts[order_of_pass(seed, place // size, size)[place % size]] for place in places])


def _token_ids(prompt: Any) -> tuple[int, ...] | None:
    """Token ids, if the prompt is a vector or a list of whole numbers."""
    if isinstance(prompt, Tensor) and prompt.dim() == 1 and not prompt.is_floating_point():
        return tuple(map(int, prompt.tolist()))
    if isinstance(prompt, (list, tuple)) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    return None


def _rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Convert columns of equal length to rows."""
    if "input_ids" in columns:
        columns = _without_padding(columns)
    name = next((name for name in PROMPT_COLUMNS if name in columns), None)
    if name is None:
        raise ConfigError(f"the batch has no 'prompts': its columns are {', '.join(columns) or 'none'}")
    renamed = {"prompt" if key == name else key: values for key, values in columns.items()}
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"the columns of the batch differ in length: {lengths}")
    return [dict(zip(renamed, row, strict=True)) for row in zip(*renamed.values(), strict=True)]


def _without_padding(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tokenizer's output to prompts of token ids, without masked tokens."""
    rest = {name: values for name, values in columns.items() if name not in ("input_ids", "attention_mask")}
    kept = columns.get("attention_mask")
    rows = columns["input_ids"]
    if kept is not None:
        rows = [
            [int(token) for token, keep in zip(row, mask, strict=True) if keep]
            for row, mask in zip(rows, kept, strict=True)
        ]
    return {PROMPT_COLUMNS[0]: list(rows)} | rest


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
