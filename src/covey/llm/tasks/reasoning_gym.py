"""The problems of the package reasoning_gym: about a hundred kinds, generated from seeds and scored by the package."""

import weakref
from typing import Any

from covey.config import ConfigError, ReasoningGymConfig, RewardConfig
from covey.data import Start
from covey.llm.data.rows import stable_hash
from covey.llm.rewards.runner import RewardPool
from covey.llm.tasks.generated import checked
from covey.runtime.worker.process import CallError

PROCESS = "covey.llm.rewards.reasoning_gym_process"
SECONDS_PER_CALL = 300.0  # to generate problems
HELD_OUT_ROUNDS = 20  # in which held-out problems that are not new are generated again
GIVE_UP_AFTER = 1000  # draws of a problem that are all held out
LARGEST_SEED = 2**31


class ReasoningGym:
    """Problems of one data set of reasoning_gym; implements `covey.data.Task`.

    A problem is a function of its seed. The held-out problems are a fixed list with seeds of their own, and no question
    of this list is drawn for training. The reward `reasoning_gym` generates a problem again from the column
    `reasoning_gym`, because the package's scorers need objects that JSON does not have.

    Problems are generated in a process with fixed hashes: some data sets depend on the order of sets of strings.

    >>> ReasoningGym(source_dataset="leg_counting", options=("max_animals = 4",))

    Raises:
        ConfigError: if the package is missing, or has no such data set or option.
    """

    name = "reasoning_gym"
    config_type = ReasoningGymConfig
    default_rewards = (RewardConfig(name="reasoning_gym"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of ReasoningGymConfig."""
        self.config = checked(ReasoningGymConfig, fields)
        self.config.check()
        self._options = self.config.assigned_options
        self._process = RewardPool(f"{PROCESS}:generate", load_seconds=SECONDS_PER_CALL)
        weakref.finalize(self, self._process.close)
        self._held_out = self._find_held_out()

    def draw(self, seed: int, step: int, count: int, *, first: int = 0, before: int | None = None) -> list[Start]:
        """`count` training starts; each is a function of (seed, step, its index) alone; `before` is ignored.

        Raises:
            ConfigError: if the data set has no problem that is not held out.
        """
        taken = {start.prompt[0]["content"] for start in self._held_out}
        found: dict[int, Start] = {}
        for attempt in range(GIVE_UP_AFTER):
            missing = [index for index in range(first, first + count) if index not in found]
            if not missing:
                break
            keys = [stable_hash("reasoning_gym", seed, step, index, attempt) % LARGEST_SEED for index in missing]
            for index, start in zip(missing, self._generate(missing, keys), strict=True):
                if start.prompt[0]["content"] not in taken:
                    found[index] = start
        if len(found) < count:
            raise ConfigError(
                f"data set {self.config.source_dataset} has hardly a problem that is not held out: lower "
                "task.held_out_problems, or choose options with more problems"
            )
        return [found[index] for index in sorted(found)]

    def held_out(self, count: int) -> list[Start]:
        """The first `count` of the held-out problems, or all if there are fewer."""
        return self._held_out[:count]

    def _find_held_out(self) -> list[Start]:
        """Different problems, `held_out_problems` of them if the data set has so many."""
        count = self.config.held_out_problems
        found: dict[str, Start] = {}
        for attempt in range(HELD_OUT_ROUNDS):
            missing = count - len(found)
            if not missing:
                break
            keys = [
                stable_hash("reasoning_gym held out", attempt, number) % LARGEST_SEED + LARGEST_SEED
                for number in range(missing)
            ]
            before = len(found)
            for start in self._generate([0] * missing, keys):
                found.setdefault(start.prompt[0]["content"], start)
            if len(found) == before:
                break
        return [Start(index, start.prompt, start.columns) for index, start in enumerate(found.values())]

    def _generate(self, indices: list[int], seeds: list[int]) -> list[Start]:
        """A start for each seed."""
        arguments = {"completions": seeds, "source_dataset": self.config.source_dataset, "options": self._options}
        try:
            made = self._process.call(arguments, 0, SECONDS_PER_CALL).extras
        except CallError as error:
            raise ConfigError(f"task reasoning_gym, data set {self.config.source_dataset}: {error}") from None
        if made["error"][0]:
            raise ConfigError(f"task reasoning_gym: {made['error'][0]}")
        starts = []
        for index, seed, question, answer in zip(indices, seeds, made["question"], made["answer"], strict=True):
            text = f"{question.strip()}\n\n{self.config.instruction}".strip()
            row = {"source_dataset": self.config.source_dataset, "options": self._options, "seed": seed}
            prompt = [{"role": "user", "content": text}]
            starts.append(Start(index=index, prompt=prompt, columns={"answer": answer, "reasoning_gym": row}))
        return starts
