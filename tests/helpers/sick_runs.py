"""Runs made sick on purpose: for every check of the diagnosis a recipe that it must find.

Each is trained, not made up: a tiny model or CartPole with one setting or one reward that is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from covey.train.state import Components
from helpers.diagnosed_runs import (
    CARTPOLE,
    CARTPOLE_PPO,
    TINY,
    Reward,
    Tables,
    begins_with_a_digit,
    chance,
    digits,
    merged,
    short,
    texts_of,
)


@dataclass(frozen=True)
class Sick:
    """A recipe with one fault."""

    fault: str
    tables: Tables
    rewards: tuple[Reward, ...] = ()
    change: Callable[[Components], object] = field(default=lambda parts: None)


def constant(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


def of_the_prompt(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    return [chance(str(prompt)) for prompt in prompts]


def mostly_sevens(completions: Sequence[Any], **_: Any) -> list[float]:
    """At most 0.3, for completions of nothing but sevens."""
    return [0.3 * text.count("7") / max(len(text), 1) for text in texts_of(completions)]


def noise(completions: Sequence[Any], **_: Any) -> list[float]:
    return [chance(text) for text in texts_of(completions)]


def with_digits(completions: Sequence[Any]) -> Iterator[tuple[str, float]]:
    return zip(texts_of(completions), digits(completions), strict=True)


def outliers(completions: Sequence[Any], **_: Any) -> list[float]:
    """Digits pay up to 1, and one completion in 200 pays 1,000."""
    return [1000.0 if chance(text) < 1 / 200 else share for text, share in with_digits(completions)]


def fails_sometimes(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Has no grade for one completion in ten."""
    return [None if chance(text) < 0.1 else share for text, share in with_digits(completions)]


def overflowing(parts: Components) -> None:
    """Every tenth gradient of the first layer is infinite."""
    calls = count(1)
    first = next(parts.policy.module.parameters())  # type: ignore[attr-defined]
    first.register_hook(lambda gradient: gradient * (float("inf") if next(calls) % 10 == 0 else 1.0))


def hotter(parts: Components) -> None:
    """The sampler draws at another temperature than the trainer evaluates."""
    parts.sampler.temperature = 1.5  # type: ignore[attr-defined]


UNCLIPPED = {"clip_low": 1.0, "clip_high": 100.0}
HAS_A_DIGIT = {"name": "format", "pattern": ".*[0-9].*", "score": True}
WATCHED = {"kl_coefficient": 1e-9}  # the metric kl, without an effect on the gradient
SHORT = {"name": "length", "unit": "characters", "length_limit": 8}

SICK: dict[str, Sick] = {
    "constant reward": Sick("the reward never finds an answer", TINY, (constant,)),
    "reward saturation": Sick(
        "the task is learnt in a tenth of the steps",
        merged(TINY, {"steps": 200, "update": {"learning_rate": 1e-2}}),
        (begins_with_a_digit,),
    ),
    "groups without signal": Sick("the reward depends on the prompt alone", TINY, (of_the_prompt,)),
    "group too small": Sick(
        "groups of 2 with a reward of 0 or 1",
        merged(TINY, {"sampling": {"prompts_per_step": 16, "group_size": 2}, "update": {"learning_rate": 1e-4}}),
        (begins_with_a_digit,),
    ),
    "falling score": Sick(
        "the learning rate rises to 0.1, without clipping",
        merged(CARTPOLE_PPO, {"loss": UNCLIPPED, "update": {"learning_rate": 0.1, "warmup_steps": 60}}),
    ),
    "reward hacking": Sick(
        "short completions pay five times as much as the digit that counts",
        merged(TINY, {"rewards": [{**HAS_A_DIGIT, "weight": 0.2}, {**SHORT, "length_target": 0}]}),
    ),
    "failed gradings": Sick("the reward has no grade for some completions", TINY, (fails_sometimes,)),
    "resampling at its limit": Sick(
        "dapo replaces groups that never have a signal",
        merged(TINY, {"algorithm": "dapo", "sampling": {"overlong_tokens": 0}}),
        (of_the_prompt,),
    ),
    "truncation": Sick(
        "8 tokens for completions that need more", merged(TINY, {"update": {"learning_rate": 1e-5}}), (short,)
    ),
    "length drift": Sick(
        "short completions pay, and the digit that counts does not",
        merged(
            TINY, {"rewards": [{**HAS_A_DIGIT, "pattern": "[0-9].*", "weight": 0.01}, {**SHORT, "length_target": 2}]}
        ),
    ),
    "entropy collapse": Sick(
        "a reward that cannot exceed 0.3, learnt quickly",
        merged(TINY, {"update": {"learning_rate": 1e-2}}),
        (mostly_sevens,),
    ),
    "rising entropy": Sick(
        "an entropy bonus that outweighs the reward",
        merged(TINY, {"sampling": {"temperature": 0.2}, "loss": {"entropy_coefficient": 1.0}}),
        (digits,),
    ),
    "KL runaway": Sick(
        "a reward of noise, a KL of no weight, and a learning rate of 0.05",
        merged(TINY, {"sampling": {"temperature": 0.2}, "update": {"learning_rate": 0.05}, "loss": WATCHED}),
        (noise,),
    ),
    "large updates": Sick(
        "20 epochs without clipping",
        merged(CARTPOLE, {"loss": UNCLIPPED, "update": {"epochs": 20, "learning_rate": 0.02}}),
    ),
    "clip fraction": Sick(
        "a clip range of 0.005 for 40 optimizer steps",
        merged(
            CARTPOLE_PPO,
            {
                "loss": {"clip_low": 0.005, "clip_high": 0.005},
                "update": {"epochs": 10, "minibatches": 4, "learning_rate": 0.02},
            },
        ),
    ),
    "sampler mismatch": Sick("the sampler has another temperature", TINY, (digits,), hotter),
    "gradient spikes": Sick(
        "one completion in 200 pays 1,000", merged(TINY, {"steps": 60, "algorithm": "rloo"}), (outliers,)
    ),
    "skipped updates": Sick("every tenth gradient overflows", CARTPOLE, change=overflowing),
    "learning rate without effect": Sick(
        "a learning rate of 1e-9", merged(TINY, {"update": {"learning_rate": 1e-9}, "loss": WATCHED}), (digits,)
    ),
    "critic that explains nothing": Sick(
        "the critic's learning rate is next to 0",
        merged(CARTPOLE_PPO, {"update": {"critic_learning_rate": 1e-12}}),
    ),
    "updates cut short": Sick(
        "a target_kl of 1e-6", merged(CARTPOLE_PPO, {"steps": 30, "update": {"target_kl": 1e-6}})
    ),
}
