"""Questions whose answers are in texts, for the environment `search`."""

from __future__ import annotations

import random
from typing import Any

from covey.config import LookupConfig, RewardConfig
from covey.llm.tasks.generated import GeneratedTask, Problem, checked

_BEGINNINGS = ("Bel", "Dor", "Fal", "Gar", "Hol", "Kar", "Lin", "Mor", "Nor", "Pel", "Ran", "Sel", "Tor", "Val", "Wen")
_MIDDLES = ("a", "e", "i", "o", "am", "en", "ir", "or")
_ENDS = ("bury", "dale", "ford", "gate", "ham", "mere", "stead", "ton", "wick", "worth")
_RIVERS = ("Alder", "Brock", "Colm", "Drave", "Esk", "Fenn", "Gower", "Ister")
_GOODS = ("wool", "glass", "salt", "copper", "timber", "cheese", "paper", "rope")
_QUESTIONS = {
    "founded": "In which year was the town {town} founded?",
    "people": "How many people live in the town {town}?",
    "bridges": "How many bridges has the town {town}?",
}


class Lookup(GeneratedTask):
    """Questions about towns that do not exist, so that a model must search their descriptions.

    The columns are `documents`, the name of each town -> its description, and `answer`, a number.

    >>> Lookup(documents=20)
    """

    name = "lookup"
    default_rewards = (RewardConfig(name="numeric"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of LookupConfig."""
        self.config = checked(LookupConfig, fields)

    def problem(self, rng: random.Random) -> Problem:
        towns: dict[str, dict[str, int]] = {}
        documents: dict[str, str] = {}
        while len(towns) < self.config.documents:
            town = rng.choice(_BEGINNINGS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)
            facts = {
                "founded": rng.randint(1050, 1890),
                "people": rng.randint(300, 90_000),
                "bridges": rng.randint(2, 40),
            }
            towns[town] = facts
            documents[town] = (
                f"{town} is a town on the river {rng.choice(_RIVERS)}. It was founded in {facts['founded']}. "
                f"Its market is known for {rng.choice(_GOODS)}. It has {facts['bridges']} bridges, and "
                f"{facts['people']} people live there."
            )
        town, fact = rng.choice(list(towns)), rng.choice(list(_QUESTIONS))
        question = f"{_QUESTIONS[fact].format(town=town)} {self.config.instruction}".strip()
        answer = str(towns[town][fact])
        return Problem(
            key=f"lookup {town} {fact}",
            question=question,
            columns={"answer": answer, "documents": documents},
            hidden=answer,
        )
