"""Base class of both trainers: policy, chat template, sampler and rewards; and the prompts of scripts.

Shapes: N prompts, G answers to each, T tokens of the longest answer.
"""
# ruff: noqa: RUF009 -- `config_field` returns a dataclasses.field, made once per field on purpose

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covey.config import ConfigError, LoRAConfig, config_field
from covey.config.common import refuse
from covey.config.fields import check_fields, did_you_mean
from covey.config.machine import DEVICES
from covey.config.model_sources import ADAPTER_FOLDER, check_four_bit
from covey.data import EndReason, Group, Policy, Rollout, Start, Task
from covey.llm.data.arrow import rows_as_written
from covey.llm.data.images import ImagePrompt
from covey.llm.data.rows import row_of
from covey.llm.generation.local_generator import LocalGenerator
from covey.llm.grader import build_grader
from covey.llm.model.chat import Chat, TokenPrompt
from covey.llm.model.loading import LoadedModel, check_tokenizer, load_model, wrap_model
from covey.llm.model.lora import Adapter, AdapterWeights, add_adapter, quantize, save_adapter
from covey.llm.model.recompute import recompute_layers
from covey.llm.policy import LanguagePolicy
from covey.llm.sampler import LanguageSampler
from covey.llm.tasks.dataset import order_of_pass
from covey.runtime.device import choose_device, choose_precision
from covey.runtime.optimizer import MasterAdamW
from covey.tracking.run_folder import give_usual_permissions
from covey.train.prepare import NO_REFERENCE
from covey.train.state import Progress

Model = nn.Module | str | Path
OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainerOptions:
    """Keyword arguments of both trainers, beside the models and the settings of the algorithm."""

    tokenizer: Any = config_field(None, "the model's own; unset: the one in the folder or repository of the model")
    reward_function: Any = config_field(
        None, "f(prompts, completions, completion_ids, **columns) -> list of float; or several"
    )
    prompts: Any = config_field(None, "the prompts of train(), in any form, or a task of covey")
    prompts_per_step: int = config_field(4, "prompts in each step of train()", min=1)
    steps: int = config_field(100, "steps of train()", min=1)
    learning_rate: float = config_field(1e-5, "of AdamW", above=0)
    max_grad_norm: float = config_field(1.0, "gradients are clipped to this norm", above=0)
    max_new_tokens: int = config_field(64, "longest answer, in tokens, the end token included", min=1)
    temperature: float = config_field(1.0, "divides the logits while sampling and in the log-probabilities", above=0)
    minibatches: int = config_field(1, "optimizer steps per pass over the answers", min=1)
    microbatch_tokens: int = config_field(4096, "tokens in one backward pass; fewer need less memory", min=1)
    lora: LoRAConfig = config_field(
        LoRAConfig(), "covey.LoRAConfig(rank=16): train a low-rank adapter instead of the weights; GRPOTrainer only"
    )
    recompute: bool = config_field(
        False, "compute each layer again in the backward pass: less memory, more time (gradient checkpointing)"
    )
    seed: int = config_field(0, "seed of all random numbers", min=0, max=2**32 - 1)
    device: str = config_field("auto", "of models given by name", choices=DEVICES)
    precision: str = config_field("auto", "of models given by name", choices=("auto", "bf16", "fp32"))


def option_names() -> list[str]:
    return [item.name for item in fields(TrainerOptions)]


class LanguageTrainer:
    """Base class of `GRPOTrainer` and `PPOTrainer`. The model is trained in place."""

    def __init__(self, model: Model, ref_model: Model | None, kl_beta: float, options: TrainerOptions) -> None:
        if not isinstance(options.lora, LoRAConfig):
            raise ConfigError(f"lora must be covey.LoRAConfig(rank=...) (is of type {type(options.lora).__name__})")
        check_fields(options)
        for name, given in (("the model", model), ("ref_model", ref_model)):
            if given is not None and not isinstance(given, (nn.Module, str, Path)):
                raise ConfigError(
                    f"{name} must be a model, or a name or folder of one (is {type(given).__name__}); rewards go to "
                    "reward_function=..., prompts to prompts=..."
                )
        if ref_model is not None and ref_model is model and not isinstance(model, (str, Path)):
            raise ConfigError(
                "ref_model is the model that is trained, so their KL would stay 0: leave it out for a frozen copy"
            )
        rewards = options.reward_function
        listed = [rewards] if callable(rewards) else list(rewards or ())
        self.options, self.kl_beta = options, kl_beta
        self.grader = build_grader(listed, ()) if listed else None
        self.deck = None if options.prompts is None else PromptDeck(options.prompts)
        check_lora(options.lora)
        loaded = open_model(model, options, in_4bit=options.lora.load_in_4bit)
        self.policy, self.chat = policy_of(loaded.module, options), loaded.chat
        if options.recompute:
            recompute_layers(self.policy.module)
        self.policy, self.adapter = _with_adapter(self.policy, options)
        self.reference = self._frozen(ref_model)
        self.optimizer = self._optimizer_of(self.policy.trained)
        self.sampler = LanguageSampler(
            LocalGenerator(self.policy), self.chat, options.seed, options.max_new_tokens, options.temperature
        )
        self.progress = Progress()
        self._samplings = 0  # number of calls of `_sample`; each has its own random numbers

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.policy.module

    @property
    def step(self) -> int:
        """Number of updates made."""
        return self.progress.step

    @property
    def tokenizer(self) -> Any:
        return self.chat.tokenizer

    def training_step(self, batch: Prompts) -> dict[str, float]:
        """One step on some prompts; returns its metrics."""
        raise NotImplementedError

    def train(self, on_step: OnStep | None = None) -> list[dict[str, float]]:
        """Train for `steps` steps on the trainer's prompts; returns the metrics of each step.

        Args:
            on_step: called with (step, metrics) after every step.
        """
        history = []
        for _ in range(self.options.steps):
            history.append(self.training_step(self._draw()))
            if on_step is not None:
                on_step(self.step, history[-1])
        return history

    def save(self, folder: str | Path) -> None:
        """Write model and tokenizer so that transformers loads them unchanged. With LoRA the adapter is merged into the
        weights, and the subfolder adapter/ has it in peft's format.
        """
        self.policy.save(Path(folder))
        if self.adapter is not None:
            base = str(getattr(self.model.config, "_name_or_path", ""))
            save_adapter(self.adapter, base, Path(folder) / ADAPTER_FOLDER)
        self.tokenizer.save_pretrained(folder)
        give_usual_permissions(Path(folder))

    def _sample(self, prompts: Prompts, group_size: int, max_new_tokens: int | None) -> tuple[Tensor, Tensor]:
        """Sample from the current model: outputs_NGT, padded after each answer, and logprobs_NGT in nats."""
        limit = self.options.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_fields(replace(self.options, max_new_tokens=limit))
        self._samplings += 1
        sampler = replace(self.sampler, max_new_tokens=limit)
        groups = sampler.sample(self._starts(prompts), group_size, self._samplings)
        rows = [rollout for group in groups for rollout in group.rollouts]
        width = max(len(row.actions) for row in rows)
        outputs = torch.full((len(rows), width), self._padding())
        logprobs = torch.zeros(len(rows), width)
        for index, row in enumerate(rows):
            outputs[index, : len(row.actions)] = torch.tensor(row.actions)
            logprobs[index, : len(row.actions)] = torch.tensor(row.behavior_logprobs)
        shape = (len(groups), group_size, width)
        return outputs.view(shape), logprobs.view(shape)

    def _starts(self, prompts: Prompts) -> list[Start]:
        """Prompts in any form; token ids lose the padding at both ends."""
        starts = read_prompts(prompts)
        return [replace(s, prompt=self._token_prompt(s.prompt)) if isinstance(s.prompt, tuple) else s for s in starts]

    def _token_prompt(self, ids: tuple[int, ...]) -> TokenPrompt:
        pad, vocabulary = self.tokenizer.pad_token_id, self.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        positions = [position for position, token in enumerate(ids) if token != pad]
        kept = ids[positions[0] : positions[-1] + 1] if positions else ()
        invalid = [token for token in kept if not 0 <= token < vocabulary]
        if invalid:
            raise ConfigError(f"a prompt has the token id {invalid[0]}, the model has 0 to {vocabulary - 1}")
        return TokenPrompt(self.chat.decode(kept), kept)

    def _answer_mask(self, outputs_NGT: Tensor) -> Tensor:
        """mask_NGT, True up to and including the first end token of an answer; the rest is padding."""
        ends = torch.isin(outputs_NGT, torch.tensor(sorted(self.chat.end_ids), dtype=outputs_NGT.dtype))
        return (ends.cumsum(-1) - ends.long()) == 0

    def _groups(self, starts: Sequence[Start], outputs_NGT: Tensor, logprobs_NGT: Tensor | None) -> list[Group]:
        """The answers as groups of rollouts; log-probabilities are 0 if `logprobs_NGT` is None.

        Raises:
            ConfigError: if the shape of `outputs_NGT` does not match `starts`.
        """
        if outputs_NGT.dim() != 3 or len(outputs_NGT) != len(starts):
            raise ConfigError(
                f"outputs has shape {list(outputs_NGT.shape)}: [batch, group_size, seq_len] with batch = {len(starts)} "
                "is needed, one group for every prompt"
            )
        outputs_NGT = outputs_NGT.cpu()
        lengths_NG = self._answer_mask(outputs_NGT).sum(-1)
        groups = []
        for n, start in enumerate(starts):
            context = self.chat.encode(start.prompt)
            rollouts = []
            for g, length in enumerate(lengths_NG[n].tolist()):
                tokens = outputs_NGT[n, g, :length].tolist()
                logprobs = [0.0] * length if logprobs_NGT is None else logprobs_NGT[n, g, :length].tolist()
                ended = tokens[-1] in self.chat.end_ids
                end = EndReason.STOP if ended else EndReason.LENGTH
                text = self.chat.decode(tokens[:-1] if ended else tokens)
                rollouts.append(Rollout(context, tokens, logprobs, end, text=text, version=self.step))
            groups.append(Group(start, rollouts))
        return groups

    def _rewards(self, prompts: Prompts, outputs_NGT: Tensor) -> Tensor:
        """reward_NG of the reward functions; NaN for answers that could not be graded.

        Raises:
            ConfigError: if there is no reward function.
        """
        if self.grader is None:
            raise ConfigError("there is no reward: give reward_function=..., or override compute_rewards")
        groups = self.grader.grade(self._groups(self._starts(prompts), outputs_NGT, None))
        rows = [[float("nan") if r.reward is None else r.reward for r in group.rollouts] for group in groups]
        return torch.tensor(rows)

    def _draw(self) -> Prompts:
        """The prompts of the next step of train()."""
        if self.deck is None:
            raise ConfigError("there are no prompts to train on: give prompts=[...]")
        return self.deck.draw(self.options.seed, self.step + 1, self.options.prompts_per_step)

    def _frozen(self, ref_model: Model | None) -> Policy:
        """The reference policy: `ref_model`; None: a frozen copy of the current model if kl_beta is not 0.

        With LoRA the copy is the model without its adapter.
        """
        if ref_model is None:
            if not self.kl_beta:
                return NO_REFERENCE
            if self.adapter is not None:
                return self.policy.with_outputs(weights=AdapterWeights(self.policy.module, None))
            return policy_of(copy.deepcopy(self.policy.module).requires_grad_(False), self.options)
        loaded = open_model(ref_model, replace(self.options, tokenizer=self.tokenizer))
        self.check_vocabulary("ref_model", loaded.module)
        return policy_of(loaded.module, self.options)

    def check_vocabulary(self, name: str, module: nn.Module) -> None:
        """Check that another model has a vocabulary of the same size.

        Raises:
            ConfigError: if it has not; `name` is the argument that gave the model.
        """
        models: tuple[Any, Any] = (self.policy.module, module)
        expected, size = (model.get_input_embeddings().weight.shape[0] for model in models)
        if expected != size:
            raise ConfigError(f"{name} has {size} tokens, the model {expected}: they must share a vocabulary")

    def _optimizer_of(self, module: nn.Module, learning_rate: float | None = None) -> MasterAdamW:
        rate = self.options.learning_rate if learning_rate is None else learning_rate
        return MasterAdamW(module, lr=rate, max_grad_norm=self.options.max_grad_norm)

    def _padding(self) -> int:
        """The token id of padding: the tokenizer's, else an end token."""
        pad: int | None = self.tokenizer.pad_token_id
        return pad if pad is not None else min(self.chat.end_ids, default=0)


def with_rewards(groups: list[Group], reward_NG: Tensor) -> list[Group]:
    """The same groups, with the reward of each answer; NaN marks an answer that could not be graded.

    Raises:
        ConfigError: if the shape of `reward_NG` does not match the groups.
    """
    expected = (len(groups), len(groups[0].rollouts))
    if reward_NG.shape != expected:
        raise ConfigError(f"compute_rewards returned shape {list(reward_NG.shape)}, {list(expected)} is needed")
    for group, rewards in zip(groups, reward_NG.tolist(), strict=True):
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            rollout.reward = rollout.score = None if reward != reward else reward
    return groups


def check_lora(lora: LoRAConfig) -> None:
    """Raises ConfigError for what a trainer cannot train."""
    if lora.load_in_4bit and not lora.is_used:
        raise ConfigError("lora.load_in_4bit is for adapters: give lora a rank")
    if lora.is_used:
        if lora.adapter:
            raise ConfigError(
                "a trainer begins with a new adapter: give lora a rank, or use covey.run for lora.adapter"
            )
        refuse(lora.faults())
        lora.check()
    if lora.load_in_4bit:
        check_four_bit()


def _with_adapter(policy: LanguagePolicy, options: TrainerOptions) -> tuple[LanguagePolicy, Adapter | None]:
    """The policy with an adapter that is trained instead of the model's weights, if `lora` is set."""
    lora = options.lora
    if not lora.is_used:
        return policy, None
    adapter = add_adapter(policy.module, lora, seed=options.seed)
    return policy.with_outputs(trained=adapter.parameters), adapter


def open_model(model: Model, options: TrainerOptions, *, in_4bit: bool = False) -> LoadedModel:
    """A model in memory, or one loaded by its name or folder; with `in_4bit` its linear layers are quantized."""
    if not isinstance(model, (str, Path)):
        wrapped = wrap_model(model, options.tokenizer)
        if in_4bit:
            quantize(wrapped.module, wrapped.module.device)
        return wrapped
    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    loaded = load_model(str(model), dtype=precision, device=device, in_4bit=in_4bit)
    if options.tokenizer is not None:
        check_tokenizer(options.tokenizer, loaded.module, str(model))
        loaded.chat = Chat(options.tokenizer, loaded.chat.end_ids, loaded.chat.embedded)
    return loaded


def policy_of(module: nn.Module, options: TrainerOptions) -> LanguagePolicy:
    return LanguagePolicy(
        module,  # type: ignore[arg-type]
        temperature=options.temperature,
        microbatch_tokens=options.microbatch_tokens,
    )


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
        if isinstance(row.prompt, ImagePrompt):
            raise ConfigError(
                f"prompts[{index}] has images, which trainers do not read: use covey.run(config, task=rows)"
            )
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
