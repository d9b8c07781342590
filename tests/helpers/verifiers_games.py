"""Environments of the package verifiers, by its documented classes, for `make environments`."""

import verifiers as vf
from datasets import Dataset


def rows(first, count):
    return Dataset.from_list(
        [
            {"question": f"What is {n} + {n}?", "answer": str(2 * n), "info": {"n": n}}
            for n in range(first, first + count)
        ]
    )


def right(completion, answer):
    """1 if the last message has the answer."""
    return float(answer in completion[-1].content)


async def messages(completion, info):
    """Number of messages; `info` must be that of the row."""
    return float(len(completion)) + 0 * info["n"]


def broken(completion):
    raise KeyError("missing")


def of_the_group(completions):
    return [0.0 for _ in completions]


class Hints(vf.MultiTurnEnv):
    """Says how far a guess is away; the right one ends the conversation with a last message."""

    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["guesses"] += 1
        said = messages[-1].content
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
            return state["final_env_response"]
        if said == "rewrite":
            messages[0].content = "Something else."
        return [vf.UserMessage(content=f"Not {said}. That was guess {state['guesses']}.")]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    if a > 100:
        raise ValueError("a is too large")
    return a + b


def load_environment(kind: str = "single", evaluation: bool = False):
    rubric = vf.Rubric(funcs=[right, messages], weights=[1.0, 0.125])
    extra = {"broken": broken, "group": of_the_group}.get(kind)
    if extra is not None:
        rubric.add_reward_func(extra)
    shared = {"dataset": rows(0, 12), "rubric": rubric, "system_prompt": "Be brief."}
    if evaluation:
        shared["eval_dataset"] = rows(100, 4)
    if kind == "hints":
        return Hints(max_turns=3, **shared)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, **shared)
    return vf.SingleTurnEnv(**shared)
