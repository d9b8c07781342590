"""Word problems: short stories with a calculation of 1 to 4 steps, each on the previous result."""

import random
from dataclasses import dataclass

from covey.config import RewardConfig, WordProblemsConfig
from covey.config.fields import plural
from covey.llm.tasks.generated import GeneratedTask, Problem

NAMES = (
    "Amara", "Ben", "Chen", "Dina", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jomo", "Kira", "Liam", "Mei", "Nadia",
    "Omar", "Priya", "Quinn", "Rosa", "Samir", "Tala", "Ugo", "Vera", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip


@dataclass(frozen=True)
class Story:
    """The sentences of one kind of story.

    `{n}` is the number of a step, `{who}` the person of the story, `{other}` another person, `{things}` the counted
    objects. In a `chain` each step continues with the other person, and the question asks for the last one's number.
    """

    things: tuple[str, ...]
    start: str  # states the first number {a}
    start_product: str  # states the first result as {n} times {a}
    gain: tuple[str, ...]
    lose: tuple[str, ...]
    multiply: tuple[str, ...]
    divide: tuple[str, ...]
    question: str
    chain: bool = False


STORIES = (
    Story(
        things=("marbles", "stickers", "shells", "coins", "cards", "beads"),
        start="{who} has {a} {things}.",
        start_product="{who} buys {n} bags with {a} {things} in each bag.",
        gain=("{other} gives {who} {n} more {things}.", "Then {who} finds {n} more {things}."),
        lose=("{who} gives {n} {things} to {other}.", "Then {who} loses {n} {things}."),
        multiply=("Then {who} collects until there are {n} times as many {things}.",),
        divide=("{who} splits the {things} into {n} equal piles and keeps one pile.",),
        question="How many {things} does {who} have now?",
    ),
    Story(
        things=("passengers", "people", "visitors"),
        start="A train leaves with {a} {things} on board.",
        start_product="A train has {n} cars with {a} {things} in each car.",
        gain=("At the next stop {n} {things} get on.",),
        lose=("At the next stop {n} {things} get off.",),
        multiply=("At the main station the number of {things} grows to {n} times what it was.",),
        divide=("At the border the {things} are split evenly over {n} trains, and we follow one of them.",),
        question="How many {things} are on the train now?",
    ),
    Story(
        things=("dollars", "euros", "pesos", "francs"),
        start="{who} has saved {a} {things}.",
        start_product="{who} works for {n} days and earns {a} {things} a day.",
        gain=("{who} sells an old bike for {n} {things}.", "{other} pays back {n} {things} to {who}."),
        lose=("{who} buys a book for {n} {things}.", "{who} pays {n} {things} for lunch."),
        multiply=("A year later the savings are worth {n} times as much.",),
        divide=("{who} shares the money equally among {n} people, {who} included.",),
        question="How many {things} does {who} have now?",
    ),
    Story(
        things=("apples", "eggs", "pears", "melons", "onions"),
        start="A farm stand has {a} {things}.",
        start_product="{who} brings {n} crates of {a} {things} each to the empty farm stand.",
        gain=("{who} puts {n} more {things} on the stand.",),
        lose=("{other} buys {n} {things}.", "{who} throws away {n} bad {things}."),
        multiply=("A delivery raises the stock to {n} times what it was.",),
        divide=("The {things} are packed into {n} equal boxes, and all boxes but one are sold.",),
        question="How many {things} are left on the stand?",
    ),
    Story(
        things=("books", "stamps", "puzzles", "photos", "postcards"),
        start="{who} owns {a} {things}.",
        start_product="{who} owns {n} shelves with {a} {things} on each shelf.",
        gain=("{other} owns {n} more {things} than {who}.",),
        lose=("{other} owns {n} fewer {things} than {who}.",),
        multiply=("{other} owns {n} times as many {things} as {who}.",),
        divide=("{who} owns {n} times as many {things} as {other}.",),
        question="How many {things} does {who} own?",
        chain=True,
    ),
)


class WordProblems(GeneratedTask[WordProblemsConfig]):
    """Stories whose every intermediate result is a whole number and not negative.

    The numbers in the text are between 2 and `largest`; results may be larger. The column `solution` has the steps
    ("12 + 5 = 17; 17 * 2 = 34"), which also decide the side of the held-out split: the same calculation in different
    words is never on both sides.

    >>> WordProblems(steps=(1, 2), largest=50)

    Raises:
        ConfigError: if a field's value is invalid.
    """

    name = "word_problems"
    config_type = WordProblemsConfig
    default_rewards = (RewardConfig(name="numeric"),)

    def problem(self, rng: random.Random) -> Problem:
        story = rng.choice(STORIES)
        count = rng.choice(self.config.steps)
        who, *others = rng.sample(NAMES, 1 + count)
        names = {"who": who, "things": rng.choice(story.things)}
        value = rng.randint(2, self.config.largest)
        steps: list[str] = []
        if rng.random() < 0.5:
            text = [story.start.format(a=value, **names)]
        else:
            number = rng.randint(2, self.config.largest)
            text = [story.start_product.format(a=value, n=number, **names)]
            steps.append(f"{number} * {value} = {number * value}")
            value *= number
        while len(steps) < count:
            operator, number, result = self._step(rng, value)
            phrases = {"+": story.gain, "-": story.lose, "*": story.multiply, "/": story.divide}[operator]
            other = others.pop()
            text.append(rng.choice(phrases).format(n=number, other=other, **names))
            steps.append(f"{value} {operator} {number} = {result}")
            value = result
            if story.chain:
                names["who"] = other
        text += [story.question.format(**names), "Give the final answer as a number."]
        columns = {"answer": str(value), "solution": "; ".join(steps)}
        return Problem(
            key=f"word problem {columns['solution']}",
            question=" ".join(text),
            columns=columns,
            kind=plural(len(steps), "step"),
        )

    def _step(self, rng: random.Random, value: int) -> tuple[str, int, int]:
        """A random valid operation on `value`: its sign, its number and its result."""
        largest = self.config.largest
        divisors = [number for number in range(2, min(largest, 10) + 1) if value and value % number == 0]
        possible = ["+"]
        possible += ["-"] if value >= 2 else []
        possible += ["*"] if 1 <= value <= 5 * largest else []
        possible += ["/"] if divisors else []
        operator = rng.choice(possible)
        if operator == "+":
            number = rng.randint(2, largest)
            return operator, number, value + number
        if operator == "-":
            number = rng.randint(2, min(value, largest))
            return operator, number, value - number
        if operator == "*":
            number = rng.randint(2, min(5, largest))
            return operator, number, value * number
        number = rng.choice(divisors)
        return operator, number, value // number
