"""Groups of given texts, for tests of rewards and of the grader."""

from typing import Any

from covey.data import EndReason, Group, Rollout, Start


def start(index: int = 0, prompt: Any = "2 + 2?", **columns: Any) -> Start:
    return Start(index=index, prompt=prompt, columns=columns)


def group(of: Start, *texts: str) -> Group:
    """One rollout for each text; the first has one token, the second two, and so on."""
    rollouts = [
        Rollout(context=(1,), actions=[7] * (i + 1), behavior_logprobs=[0.0] * (i + 1), end=EndReason.STOP, text=text)
        for i, text in enumerate(texts)
    ]
    return Group(of, rollouts)


def asked(*texts: str, index: int = 0, prompt: Any = "p", **columns: Any) -> Group:
    """One rollout for each text, of a start with these columns."""
    return group(start(index, prompt, **columns), *texts)


def rewards_of(groups: list[Group]) -> list[list[float | None]]:
    return [[rollout.reward for rollout in one.rollouts] for one in groups]


def all_rewards(groups: list[Group]) -> list[float | None]:
    return [reward for rewards in rewards_of(groups) for reward in rewards]
