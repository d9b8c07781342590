"""Generated tasks of numbers: sums and products, running totals, Countdown. Training shows an effect within minutes."""

import math
import random
from dataclasses import dataclass
from typing import Any

from covey.config import (
    ArithmeticConfig,
    ConfigError,
    CountdownConfig,
    RewardConfig,
    RunningTotalConfig,
    WordProblemsConfig,
)
from covey.config.fields import plural
from covey.llm.tasks.generated import GIVE_UP_AFTER, GeneratedTask, Problem

CHOICES_OF_OPERATORS = 200  # after which a task without negative answers is refused as impossible
DRAWS_OF_NUMBERS = 100  # for one choice of operators, before the next choice

Products = list[tuple[int, list[int]]]  # sign and factors of every term


class Arithmetic(GeneratedTask[ArithmeticConfig]):
    """Questions like "What is 47 + 38?".

    Number of terms, digits of each operand and each operator are drawn evenly from their lists. A number of d digits
    is drawn evenly from 10^(d-1) to 10^d - 1. Products have precedence. Unless `negative` is set, numbers are redrawn
    until the answer is not below 0. Two expressions that differ only in the order of their terms or factors are always
    on the same side of the held-out split.

    >>> Arithmetic(digits=(1, 2), operators=("+",))

    Raises:
        ConfigError: if a field's value is invalid.
    """

    name = "arithmetic"
    config_type = ArithmeticConfig
    default_rewards = (RewardConfig(name="numeric"),)

    def problem(self, rng: random.Random) -> Problem:
        for _ in range(CHOICES_OF_OPERATORS):
            count = rng.choice(self.config.terms)
            operators = [rng.choice(self.config.operators) for _ in range(count - 1)]
            # Numbers are redrawn first, so that operators remain uniformly distributed if possible.
            for _ in range(DRAWS_OF_NUMBERS):
                numbers = [_number(rng, rng.choice(self.config.digits)) for _ in range(count)]
                products = _signed_products(numbers, operators)
                answer = sum(sign * math.prod(factors) for sign, factors in products)
                if answer >= 0 or self.config.negative:
                    return self._problem(numbers, operators, products, answer)
        raise ConfigError("task arithmetic finds no expression whose result is not negative: set task.negative = true")

    def _problem(self, numbers: list[int], operators: list[str], products: Products, answer: int) -> Problem:
        expression = str(numbers[0]) + "".join(f" {o} {n}" for o, n in zip(operators, numbers[1:], strict=True))
        return Problem(
            key=f"arithmetic {sorted((sign, sorted(factors)) for sign, factors in products)}",
            question=f"What is {expression}? {self.config.instruction}".strip(),
            columns={"answer": str(answer)},
            kind=problem_kind(numbers, operators),
        )


def _signed_products(numbers: list[int], operators: list[str]) -> Products:
    """The expression as signed products: 3 * 4 - 5 is [(1, [3, 4]), (-1, [5])]."""
    products: Products = [(1, [numbers[0]])]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            products[-1][1].append(number)
        else:
            products.append((1 if operator == "+" else -1, [number]))
    return products


def problem_kind(numbers: list[int], operators: list[str]) -> str:
    """Operators, digits and, for one sum or difference, the carry: "2-digit - 1-digit, borrow"."""
    digits = [f"{len(str(number))}-digit" for number in numbers]
    shape = digits[0] + "".join(f" {operator} {digit}" for operator, digit in zip(operators, digits[1:], strict=True))
    if len(numbers) != 2 or operators[0] == "*":
        return shape
    first, second = numbers
    if operators[0] == "+":
        return f"{shape}, carry" if _carries(first, second) else shape
    if first < second:
        return f"{shape}, negative"
    return f"{shape}, borrow" if _carries(second, first - second) else shape


def _carries(first: int, second: int) -> bool:
    """True if a column of the sum is above 9. A difference a - b borrows where the sum b + (a - b) carries."""
    while first and second:
        if first % 10 + second % 10 > 9:
            return True
        first, second = first // 10, second // 10
    return False


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


class Countdown(GeneratedTask[CountdownConfig]):
    """Solvable problems: the target is the value of a random expression over all the given numbers.

    Every intermediate result of that expression is a whole number and not negative; the target is at most ten times
    the largest number and none of the given ones. The column `answer` is this expression; any other solution that uses
    each number at most once and only the listed operators is right too.

    >>> Countdown(numbers=4, operators=("+", "-", "*", "/"))

    Raises:
        ConfigError: if a field's value is invalid, or the fields allow no problem.
    """

    name = "countdown"
    config_type = CountdownConfig
    default_rewards = (RewardConfig(name="countdown"),)

    def problem(self, rng: random.Random) -> Problem:
        for _ in range(GIVE_UP_AFTER):
            numbers = [rng.randint(1, self.config.largest) for _ in range(self.config.numbers)]
            found = self._combine(rng, numbers)
            if found is not None and 1 <= found[1] <= 10 * self.config.largest and found[1] not in numbers:
                break
        else:
            raise ConfigError("task countdown: no problem can be made; allow more operators or larger numbers")
        solution, target = found
        operators = list(dict.fromkeys(self.config.operators))
        question = (
            f"Reach {target} from the numbers {', '.join(map(str, numbers))}. Use each number at most once, "
            f"only the operators {' '.join(operators)} and parentheses. End with the expression alone on the last line."
        )
        columns = {"answer": solution, "numbers": numbers, "target": target, "operators": operators}
        used = [operator for operator in operators if operator in solution]
        return Problem(
            key=f"countdown {sorted(numbers)} {target}", question=question, columns=columns, kind=f"by {' '.join(used)}"
        )

    def _combine(self, rng: random.Random, numbers: list[int]) -> tuple[str, int] | None:
        """A random expression over all the numbers and its value; None when a result is negative or broken."""
        parts = [(str(number), number) for number in numbers]
        while len(parts) > 1:
            rng.shuffle(parts)
            (left_text, left), (right_text, right) = parts.pop(), parts.pop()
            operator = rng.choice(self.config.operators)
            if operator == "+":
                value = left + right
            elif operator == "-":
                value = left - right
            elif operator == "*":
                value = left * right
            elif right == 0 or left % right:
                return None
            else:
                value = left // right
            if value < 0:
                return None
            parts.append((f"({left_text} {operator} {right_text})", value))
        text, value = parts[0]
        return text[1:-1], value


Change = tuple[str, int]  # "+" or "-", and the number

# Earlier turns of the chat; RunningTotalConfig.examples has this number as its limit.
EXAMPLES: tuple[tuple[int, tuple[Change, ...]], ...] = (
    (2, (("+", 3), ("-", 1), ("+", 4))),
    (5, (("-", 2), ("+", 4), ("-", 1))),
    (4, (("+", 5), ("+", 3), ("-", 1))),
)


class RunningTotal(GeneratedTask[RunningTotalConfig]):
    """Questions like "7 - 4 + 9 + 5 step by step", answered with one line per step: "7 - 4 = 3", "3 + 9 = 12", ...

    Made for comparing process with outcome supervision: every line has one right total, independent of the lines before
    it. The column `answer` is the last total, `totals` the list of all. No total is below 0. Worked examples are
    earlier turns of the chat, and are never asked.

    >>> RunningTotal(steps=(3, 4), largest=20)

    Raises:
        ConfigError: if a field's value is invalid.
    """

    name = "running_total"
    config_type = RunningTotalConfig
    default_rewards = (RewardConfig(name="numeric"),)

    def __init__(self, **fields: Any) -> None:
        """Takes the fields of RunningTotalConfig."""
        super().__init__(**fields)
        self._examples = tuple(
            (_question(start, changes), "\n".join(_lines(start, changes)))
            for start, changes in EXAMPLES[: self.config.examples]
        )

    def problem(self, rng: random.Random) -> Problem:
        while True:
            count = rng.choice(self.config.steps)
            start = total = rng.randint(1, self.config.largest)
            changes: list[Change] = []
            for _ in range(count):
                sign = rng.choice("+-") if total else "+"
                number = rng.randint(1, self.config.largest if sign == "+" else min(total, self.config.largest))
                changes.append((sign, number))
                total += number if sign == "+" else -number
            question = _question(start, changes)
            if all(question != shown for shown, _ in self._examples):
                break
        totals = _totals(start, changes)
        return Problem(
            key=f"running total {question}",
            question=question,
            columns={"answer": str(totals[-1]), "totals": totals},
            examples=self._examples,
            kind=plural(count, "step"),
        )


def _question(start: int, changes: list[Change] | tuple[Change, ...]) -> str:
    return f"{start} {' '.join(f'{sign} {number}' for sign, number in changes)} step by step"


def _totals(start: int, changes: list[Change] | tuple[Change, ...]) -> list[int]:
    totals = [start]
    for sign, number in changes:
        totals.append(totals[-1] + (number if sign == "+" else -number))
    return totals[1:]


def _lines(start: int, changes: list[Change] | tuple[Change, ...]) -> list[str]:
    """The right answer, line by line."""
    totals = _totals(start, changes)
    before = [start, *totals]
    return [
        f"{left} {sign} {number} = {right}"
        for left, (sign, number), right in zip(before, changes, totals, strict=False)
    ]


# ---- word problems ----

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
