"""Config of a run on a language model."""

from collections.abc import Iterator, Sequence
from typing import Any

from covey.config.common import (
    BY_GROUP,
    CheckpointConfig,
    ClusterConfig,
    ConfigError,
    Fault,
    LossBase,
    ReplayConfig,
    RunBase,
    Table,
    UpdateBase,
    config_field,
    table,
)
from covey.config.conversation import ConversationConfig
from covey.config.fields import did_you_mean, toml_repr
from covey.config.files import read_assignments
from covey.config.machine import DEVICES
from covey.config.model_sources import LoRAConfig, locate_model
from covey.config.named_modules import check_function_name
from covey.config.rewards import PROCESS_MIB, RewardConfig
from covey.config.servers import SamplerConfig
from covey.config.sft import SFTConfig
from covey.config.tasks import TASK_CONFIGS

STEP_RULES = ("line", "paragraph", "sentence")  # built-in rules of process.boundary
DAPO_RESAMPLES = 3
PPO_KL_COEFFICIENT = 0.05  # TRL's; InstructGPT (arXiv 2203.02155) has 0.02
DAPO_OVERLONG_FRACTION = 0.2  # of the token limit; arXiv 2503.14476, section 4.1: 4,096 of 20,480


OF_TEMPLATE = (
    "messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask", "bos_token", "eos_token", "pad_token", "unk_token",
)  # fmt: skip


def check_stop(stop: Sequence[str]) -> None:
    """Refuse stop strings that end every completion, or that no text contains.

    Raises:
        ConfigError: naming the remedy.
    """
    for text in stop:
        if not text:
            raise ConfigError("sampling.stop has an empty string, which every text contains: remove it")
        if "\N{REPLACEMENT CHARACTER}" in text:
            raise ConfigError("sampling.stop has U+FFFD, which stands for bytes that are not a character: remove it")
    if len(set(stop)) != len(stop):
        raise ConfigError("sampling.stop has a string twice: remove one")


def largest_divisor(count: int, most: int) -> int:
    """The largest number up to `most` that divides `count`."""
    return next(n for n in range(min(most, count), 0, -1) if count % n == 0)


@table(frozen=True)
class ChatConfig(Table):
    system_prompt: str = config_field(
        "", "system message before every prompt that is chat messages and has none of its own; empty: none"
    )
    examples: tuple[str, ...] = config_field(
        (), "few-shot examples before every prompt: a user message, its answer, the next user message, its answer, ..."
    )
    template_options: tuple[str, ...] = config_field(
        (),
        'switches of the model\'s chat template, each as in a TOML file: ["enable_thinking = false"]',
        advanced=True,
    )

    def added_to(self, prompt: Sequence[Any]) -> list[Any]:
        """The prompt's messages after the system message and the examples; its own system message comes first."""
        own = 1 if prompt and prompt[0].get("role") == "system" else 0
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt and not own else []
        roles = ("user", "assistant") * (len(self.examples) // 2)
        examples = [{"role": role, "content": text} for role, text in zip(roles, self.examples, strict=True)]
        return [*system, *prompt[:own], *examples, *prompt[own:]]

    @property
    def assigned_options(self) -> dict[str, Any]:
        """Name -> value of `template_options`. Raises ConfigError for an entry that is not a TOML assignment."""
        example = '"enable_thinking = false" or \'reasoning_effort = "low"\''
        return read_assignments(self.template_options, "chat.template_options", example=example, taken=OF_TEMPLATE)

    def faults(self) -> Iterator[Fault]:
        if len(self.examples) % 2:
            yield Fault(
                f"chat.examples has {len(self.examples)} texts: it needs an answer after every user message, so an "
                "even number"
            )
        if not all(text.strip() for text in self.examples):
            yield Fault("chat.examples has an empty text: a user message and an answer have some text each")

    def check(self) -> None:
        _ = self.assigned_options


@table(frozen=True)
class SelectionConfig(Table):
    SWITCH = ("candidates",)

    candidates: int = config_field(
        1,
        "prompts drawn for each one of a step; those are kept whose rewards are expected to differ most within a "
        "group; 1: prompts are drawn evenly",
        min=1,
        max=1000,
    )
    floor: float = config_field(
        0.1,
        "weight of a prompt whose rewards are expected to be all equal, beside 1 for the largest expected difference; "
        "1: prompts are drawn evenly",
        above=0,
        max=1,
    )
    half_life: float = config_field(
        10.0, "steps after which a reward has half of its weight in what is expected", above=0, advanced=True
    )
    back_to_data: bool = config_field(
        False,
        "weight groups in the loss so that the objective is the mean over all prompts, and not over those that are "
        "drawn; the gradient has a larger variance",
        advanced=True,
    )


@table(frozen=True)
class SamplingConfig(Table):
    prompts_per_step: int = config_field(16, "prompts per training step", min=1)
    group_size: int = config_field(
        16, "rollouts from each prompt, which are compared with each other; at least 2, except for ppo", min=1
    )
    max_new_tokens: int = config_field(64, "longest completion in tokens, with the end token", min=1, max=1_000_000)
    temperature: float = config_field(
        1.0,
        "temperature of sampling and of the log-probabilities",
        min=1e-4,
        max=1e4,
        because="greedy rollouts of one prompt are all the same, so a group has no advantages; 1.0 is usual",
    )
    stop: tuple[str, ...] = config_field(
        (), "strings that end a completion as an end token does; the text that is graded contains them"
    )
    min_new_tokens: int = config_field(
        0,
        "tokens of a completion, in a conversation of each of the model's turns, before its first possible end token",
        min=0,
        max=1_000_000,
        advanced=True,
    )
    long_prompts: str = config_field(
        "refuse",
        "a prompt that leaves no room for max_new_tokens in the model's positions: refuse the run before it trains, or "
        "drop the prompt",
        choices=("refuse", "drop"),
        advanced=True,
    )
    rows_at_once: int = config_field(0, "rollouts that are decoded together; 0: chosen by memory", min=0, advanced=True)
    final_group_size: int | None = config_field(
        None,
        "group size of the last step; it changes evenly from group_size; unset: fixed",
        min=2,
        advanced=True,
    )
    adaptive: bool = config_field(
        False,
        "adaptive groups: initial_group_size rollouts for every prompt, the rest of prompts_per_step x group_size for "
        "prompts whose rewards vary",
        advanced=True,
        used_by=BY_GROUP,
    )
    initial_group_size: int = config_field(
        4, "adaptive: rollouts of every prompt in the first round", min=2, advanced=True, needs="adaptive"
    )
    max_group_size: int | None = config_field(
        None, "adaptive: largest group; unset: 4 x group_size", min=2, advanced=True, needs="adaptive"
    )
    max_resamples: int | None = config_field(
        None,
        "rounds in which a step may replace groups whose rewards are all the same by further prompts (DAPO's dynamic "
        f"sampling); unset is {DAPO_RESAMPLES} for dapo, else 0",
        min=0,
        advanced=True,
    )
    overlong_tokens: int | None = config_field(
        None,
        "tokens before the limit over which the reward falls by up to 1 (DAPO's overlong shaping); unset is a fifth "
        "of max_new_tokens for dapo, else 0",
        min=0,
        advanced=True,
    )

    def faults(self) -> Iterator[Fault]:
        if self.min_new_tokens >= self.max_new_tokens:
            yield Fault(
                f"sampling.min_new_tokens is {self.min_new_tokens} and sampling.max_new_tokens {self.max_new_tokens}: "
                "no completion could end before the limit; lower the first or raise the second"
            )
        if not self.adaptive:
            return
        sizes = [self.group_size, self.final_group_size or self.group_size]
        if self.initial_group_size > min(sizes):
            yield Fault(
                f"sampling.initial_group_size ({self.initial_group_size}) spends more than the budget of group_size "
                f"({min(sizes)}) rollouts a prompt: set it to at most {min(sizes)} (4 is usual)",
                {"sampling.initial_group_size": min(sizes)},
            )
        if self.max_group_size is not None and self.max_group_size < max(sizes):
            yield Fault(
                f"sampling.max_group_size ({self.max_group_size}) is below group_size ({max(sizes)}), so part of the "
                f"budget could never be spent: set it to {max(sizes)} or more",
                {"sampling.max_group_size": max(sizes)},
            )

    def check(self) -> None:
        check_stop(self.stop)


@table(frozen=True)
class LossConfig(LossBase):
    mask_truncated: bool = config_field(
        False, "leave completions that the token limit cut out of the loss", advanced=True
    )
    credit: str = config_field(
        "outcome",
        "what is compared within a group: whole rollouts (outcome), or reasoning steps, in a conversation the turns of "
        "the model: each with all steps of the group (process), with the same step of the siblings (process_by_step), "
        "or its rewards to go with theirs (process_return_to_go); steps need a reward with per_step = true, turns that "
        "or the reward of an environment with step(message)",
        choices=("outcome", "process", "process_by_step", "process_return_to_go"),
        used_by=BY_GROUP,
    )
    normalize_rewards: str = config_field(
        "sum",
        "what is normalised within a group: the weighted sum of the rewards, or each reward before the sum, which is "
        "then whitened over the step (GDPO)",
        choices=("sum", "each"),
    )
    gamma: float = config_field(
        1.0, "ppo and reinforce_pp: discount per token", min=0, max=1, used_by=("ppo", "reinforce_pp")
    )


@table(frozen=True)
class UpdateConfig(UpdateBase):
    microbatch_tokens: int = config_field(
        4096, "tokens in one backward pass; a smaller number takes less memory, with the same gradient", min=1
    )
    recompute: bool = config_field(
        False,
        "compute each layer again in the backward pass instead of keeping its activations: less memory, more time and "
        "the same gradient (gradient checkpointing)",
    )


@table(frozen=True)
class EvaluationConfig(Table):
    problems: int = config_field(
        256,
        "held-out problems, answered greedily before and after training; all if there are fewer",
        min=1,
        max=1_000_000,
    )
    every: int = config_field(0, "steps between evaluations; 0: only before and after training", min=0)
    patience: int = config_field(
        0, "evaluations without a better score after which training ends; 0: it never ends early", min=0, needs="every"
    )
    token_limits: tuple[int, ...] = config_field(
        (), "token limits of evaluations; empty: max_new_tokens", min=1, advanced=True
    )

    def faults(self) -> Iterator[Fault]:
        if len(set(self.token_limits)) != len(self.token_limits):
            yield Fault(f"evaluation.token_limits names a limit twice: {toml_repr(self.token_limits)}")


@table(frozen=True)
class RecordConfig(Table):
    tokens: bool = config_field(
        False,
        "record every token of a rollout with its advantage and its log-probability under the policy that sampled, the "
        "reference and the updated policy; takes a forward pass per step",
    )


@table(frozen=True)
class CriticConfig(Table):
    trunk: str = config_field(
        "own",
        "ppo: the critic's decoder: a copy of the policy's (own), the policy's itself with a value head (policy), or, "
        "with LoRA, the policy's with an adapter of its own (adapter)",
        choices=("own", "policy", "adapter"),
        advanced=True,
        used_by=("ppo",),
    )


@table(frozen=True)
class ReferenceConfig(Table):
    refresh_every: int = config_field(
        0, "steps after which the reference of the KL is refreshed from the policy; 0: never", min=0, advanced=True
    )
    refresh_fraction: float = config_field(
        1.0,
        "weight of the policy in the refreshed reference: 1 copies it, less is a moving average (EMA)",
        above=0,
        max=1,
        advanced=True,
        needs="refresh_every",
    )


TEACHERS = ("policy", "reference")  # of the run's own; another one is a model of its own
BETAS = {"forward": 0.0, "reverse": 1.0}


@table(frozen=True)
class TeacherConfig(Table):
    SWITCH = ("model",)

    model: str = config_field(
        "",
        "teacher of on-policy distillation: policy (the weights as they are), reference (as they were, or as "
        "reference.refresh_every says), or a model with the same tokens, named as model is; unset: none",
    )
    weight: float = config_field(1.0, "weight of the divergence to the teacher in the loss", above=0)
    divergence: str = config_field(
        "reverse",
        "divergence at every token of a completion, over the vocabulary: KL of the policy to the teacher (reverse), of "
        "the teacher to the policy (forward), or generalized Jensen-Shannon",
        choices=("reverse", "forward", "jensen_shannon"),
    )
    mixture_weight: float = config_field(
        0.5, "jensen_shannon: weight of the teacher in the mixture", above=0, below=1, advanced=True, needs="divergence"
    )
    prompt: str = config_field(
        "",
        "text before the teacher's prompt, or in its place with {prompt} in it; with any column of the data, such as "
        "{answer}, with {best_sibling} (the completion of the group with the highest reward, if that is higher) and "
        "{feedback} (that a reward has logged), without which a completion has no teacher; empty: the policy's prompt",
    )

    @property
    def is_own_model(self) -> bool:
        """True if the teacher is another model than policy and reference."""
        return self.model not in ("", *TEACHERS)

    @property
    def mixture(self) -> float:
        """beta of `covey.core.kl.jensen_shannon`."""
        return BETAS.get(self.divergence, self.mixture_weight)

    def faults(self) -> Iterator[Fault]:
        if self.model == "policy" and not self.prompt:
            yield Fault(
                'teacher.model is "policy", which differs from the policy only by what its prompt says: set '
                "teacher.prompt, or name another model"
            )
        if "://" in self.model:
            yield Fault(
                f"teacher.model is an address ({self.model}), but servers return log-probabilities of the tokens that "
                "they sample, not of given ones: name a model of this machine or of a hub"
            )

    def check(self) -> None:
        if self.is_own_model:
            try:
                locate_model(self.model)
            except ConfigError as error:
                raise ConfigError(f"teacher.{error}") from None


@table(frozen=True)
class IterationConfig(Table):
    SWITCH = ("steps",)

    steps: int | None = config_field(
        None,
        "iterative GRPO: training steps of an iteration, after which the reward model is trained on its completions; "
        "unset: the reward model is never trained",
        min=1,
        advanced=True,
    )
    reward_model_epochs: int = config_field(
        1,
        "passes of the reward model over an iteration's examples; 0: it stays frozen, and is only measured",
        min=0,
        max=1000,
        advanced=True,
    )
    reward_model_learning_rate: float = config_field(
        2e-5, "learning rate of the reward model, constant", above=0, advanced=True
    )
    reward_model_batch_size: int = config_field(
        32, "examples of an optimizer step of the reward model", min=1, advanced=True
    )
    data: str = config_field(
        "pairs",
        "examples for an outcome reward model: pairs of a right and a wrong completion of a prompt, or the grades of "
        "single completions; a process model has step labels by continuation",
        choices=("pairs", "grades"),
        advanced=True,
    )
    examples_per_group: int = config_field(
        8, "most examples from the completions of one prompt in one step", min=1, advanced=True
    )
    continuations: int = config_field(
        8, "process reward model: continuations from the end of each step", min=1, max=256, advanced=True
    )
    estimate: str = config_field(
        "hard",
        "process reward model: label of a step: whether any continuation is right, or the share of right ones",
        choices=("hard", "soft"),
        advanced=True,
    )
    replay_fraction: float = config_field(
        0.1, "fraction of a training's examples that is drawn from earlier iterations", min=0, below=1, advanced=True
    )
    restart_reward_model: bool = config_field(
        False,
        "begin each training with the reward model of the recipe instead of the one of the iteration before",
        advanced=True,
    )
    evaluation_problems: int = config_field(
        32,
        "held-out problems on whose sampled completions the reward model is measured before and after each training",
        min=1,
        advanced=True,
    )


@table(frozen=True)
class ProcessConfig(Table):
    boundary: str = config_field(
        "",
        "end of a reasoning step: line, paragraph or sentence, or your own file.py:function from a text to the "
        "positions (in characters) after its steps; unset: line",
        advanced=True,
    )

    @property
    def rule(self) -> str:
        """The boundary, or the default one."""
        return self.boundary or "line"

    @property
    def process_bytes(self) -> int:
        """Measured memory of the process that calls a function of the user's; 0 for a rule."""
        return PROCESS_MIB << 20 if ":" in self.boundary else 0

    def check(self) -> None:
        if not self.boundary or self.boundary in STEP_RULES:
            return
        if ":" not in self.boundary:
            raise ConfigError(
                f"process.boundary must be {', '.join(STEP_RULES)} or file.py:function"
                f"{did_you_mean(self.boundary, list(STEP_RULES))} (is {self.boundary!r})"
            )
        check_function_name(self.boundary, "process.boundary")


@table(frozen=True)
class RunConfig(RunBase):
    """One training run on a language model."""

    task: Any = config_field(None, f"[task] table; its name is one of {', '.join(TASK_CONFIGS)}")
    model: str = config_field(
        "smollm2-135m",
        "smollm2-135m (embedded), a Hugging Face folder, a hub name, a .gguf file, or the folder of a run or of one of "
        "its checkpoints",
    )
    device: str = config_field("auto", "device", choices=DEVICES)
    precision: str = config_field(
        "auto", "precision of matrix products; bf16 keeps fp32 master weights", choices=("auto", "bf16", "fp32")
    )
    rewards: tuple[RewardConfig, ...] = config_field((), "[[rewards]] tables; empty is the task's own reward")
    token_budget: int = config_field(
        0, "sampled tokens after which the run ends; 0: no limit", min=0, max=2**53, advanced=True
    )
    sampling: SamplingConfig = config_field(SamplingConfig(), "[sampling] table")
    selection: SelectionConfig = config_field(SelectionConfig(), "[selection] table")
    replay: ReplayConfig = config_field(ReplayConfig(), "[replay] table")
    conversation: ConversationConfig = config_field(ConversationConfig(), "[conversation] table")
    chat: ChatConfig = config_field(ChatConfig(), "[chat] table")
    loss: LossConfig = config_field(LossConfig(), "[loss] table")
    update: UpdateConfig = config_field(UpdateConfig(), "[update] table")
    lora: LoRAConfig = config_field(LoRAConfig(), "[lora] table")
    critic: CriticConfig = config_field(CriticConfig(), "[critic] table")
    reference: ReferenceConfig = config_field(ReferenceConfig(), "[reference] table")
    teacher: TeacherConfig = config_field(TeacherConfig(), "[teacher] table")
    iteration: IterationConfig = config_field(IterationConfig(), "[iteration] table")
    process: ProcessConfig = config_field(ProcessConfig(), "[process] table")
    evaluation: EvaluationConfig = config_field(EvaluationConfig(), "[evaluation] table")
    sampler: SamplerConfig = config_field(SamplerConfig(), "[sampler] table")
    cluster: ClusterConfig = config_field(ClusterConfig(), "[cluster] table")
    checkpoint: CheckpointConfig = config_field(CheckpointConfig(), "[checkpoint] table")
    record: RecordConfig = config_field(RecordConfig(), "[record] table")
    sft: SFTConfig = config_field(SFTConfig(), "[sft] table")

    @property
    def has_conversations(self) -> bool:
        """True if rollouts are conversations with an environment."""
        return bool(self.conversation.environment)

    @property
    def copies_reference_adapter(self) -> bool:
        """True if the reference is not the model without its adapter (LoRA), but has a copy of the adapter: the run
        begins with an adapter, or refreshes its reference.
        """
        return bool(self.lora.adapter or self.reference.refresh_every or self.iteration.steps)

    @property
    def rollout_limit(self) -> int:
        """The most tokens of a rollout after its prompt."""
        return self.conversation.total_tokens if self.has_conversations else self.sampling.max_new_tokens

    @property
    def max_resamples(self) -> int:
        """sampling.max_resamples, or the algorithm's default if it is unset."""
        default = DAPO_RESAMPLES if self.algorithm == "dapo" else 0
        return default if self.sampling.max_resamples is None else self.sampling.max_resamples

    @property
    def kl_coefficient(self) -> float | None:
        """loss.kl_coefficient, or ppo's default if it is unset; None means the default of another algorithm."""
        default = PPO_KL_COEFFICIENT if self.algorithm == "ppo" else None
        return default if self.loss.kl_coefficient is None else self.loss.kl_coefficient

    @property
    def overlong_tokens(self) -> int:
        """sampling.overlong_tokens, or the algorithm's default if it is unset."""
        fraction = DAPO_OVERLONG_FRACTION if self.algorithm == "dapo" else 0.0
        default = round(fraction * self.rollout_limit)
        return default if self.sampling.overlong_tokens is None else self.sampling.overlong_tokens
