"""Reads the one number that an answer is, exactly and in a time bounded by the length of the text.

The rewards `numeric`, `digits` and `step_numbers`, what `math` can decide without math-verify, and the checks of right
answers before a run (`BuiltInReward.check`), which raise ValueError if no completion can be compared with the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from covey.llm.rewards.final_answer import LONGEST_ANSWER, column_of, completion_text, final_answer, plain_unicode

_LARGEST_EXPONENT = 99  # of ten


class Number(NamedTuple):
    """The number that an answer is."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """True if both are the same number. 50% is 50 and 0.5, because a question may ask for either."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


# ---- LaTeX and Markdown as plain text, in this order ----

_ABOVE = r"\s*(?:\{\s*([-+]?\s?[0-9.,]+)\s*\}|([0-9]))"
_PLAIN = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (
            r"\\(?:left|right|[bB]igg?[lr]?|(?:display|text)style|(?:[Ll]arg|[Hh]ug)e|LARGE|textdollar|bf|rm|bm|boldsymbol|underline|!)(?![A-Za-z])",
            "",
        ),
        (r"\\\\|[~&]|\\(?:therefore|Omega)(?![A-Za-z])", " "),
        (r"\\(?:[,;:> ]|q?quad(?![A-Za-z]))", " "),
        (r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<=[0-9])\{,\}", "."),
        (r"\\(?:(?:text|math)(?:bf|it|rm|normal|sf|tt)?|mbox|operatorname)\s?\{([^{}]*)\}", r" \1 "),
        (rf"\\[dtc]?frac{_ABOVE}{_ABOVE}", r" \1\2/\3\4 "),
        (r"\^\s?\{\s?([-+]?[0-9]+)\s?\}", r"^\1"),
        (r"\\[dtc]?frac\s?\{([^{}0-9]*(?:\^[0-9]\s?)?)\}\s?\{([^{}0-9]*(?:\^[0-9]\s?)?)\}", r"\1/\2"),  # of units
        (r"\s?\^\s?(?:\{\s?\\circ\s?\}|\\circ)|\\(?:text)?degrees?(?![A-Za-z])", "°"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])|[×·⋅∙]|(?<=[0-9])\s?x\s?(?=10\s?(?:\^|\*\*))", "*"),
        (r"\\(?:approx|simeq)(?![A-Za-z])|≃", "≈"),
        (r"\\(?:pounds|euro)(?![A-Za-z])", "€"),
        (r"(?<=[0-9])\*\*(?=[-+]?[0-9])", "^"),
        (r"\\(?=[%_#&])", ""),
        (r"\*\*|\\?\$|[`\"]|\\[()\[\]]|(?<![^\W_])_(?=[-0-9])|(?<=[0-9])_(?=\W*\Z)", " "),
        (r"(?<![\w^_}\])\\])\{([^{}]*)\}", r"\1"),  # a group of its own
        (r"\A\s*\\\{([^,;{}]*)\\\}\s*\Z", r"\1"),  # a set of one number
        (r"\A\s*\(?[A-Ha-h]\)\s*(?=.*[0-9])", ""),  # the letter of a choice
        (r"\b([ap])\.m\.", r"\1m"),
        (r"(?<=[0-9])\s?\^\s?\{?\s?(?=(?:st|nd|rd|th)\b)|(?<=th)\s?\}", ""),
        (r"(?<=[0-9)%])\s[xX]\s(?=\W?[0-9(])", " * "),
        (":=", "="),
        (r"\bup to\b", "at most"),
        (r"\s(?:equals|is equal to)\s", " = "),
        (
            r"(?<=[\w$])\san?\s(?=(?:day|week|month|year|hour|minute|second|piece|person|night|dozen|pound|mile)s?\b)",
            " per ",
        ),
        (r"\s+", " "),
    )
)

# ---- the number, and what may stand around it ----

_GROUPED = (
    r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.])"
    r"|[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]{1,2}(?![0-9])|(?P<comma>[0-9]++,[0-9]{1,2}(?![0-9]))"
    r"|[0-9]{1,3}(?P<gap>[ _'])[0-9]{3}(?:(?P=gap)[0-9]{3})*(?![0-9])"
)
_CURRENCY = r"(?:[£€¥₹₩₽₪฿₫₴₦]|(?:US|USD|EUR|GBP|JPY|CNY|INR|CHF|CAD|AUD|Rs\.?)(?![A-Za-z]))"
_LETTERS = r"[^\W\d_]++"
_ANSWER = re.compile(
    rf"(?P<before>(?:(?!negative\b|minus\b|{_CURRENCY}){_LETTERS}(?:'{_LETTERS})?[.,:]*+(?:\s|(?<=[^\x00-\x7f])))*+)"
    rf"(?P<sign>[-+]|negative\b|minus\b|)\s?{_CURRENCY}?\s?(?P<second_sign>[-+]?)\s?"
    r"(?:(?P<whole>[0-9]++)\s(?:and\s)?(?P<above>[0-9]++)\s?/\s?(?P<below>[0-9]++)"
    r"|10\s?\^\s?(?P<power>[-+]?[0-9]++)"
    rf"|(?P<digits>(?:{_GROUPED}|[0-9]++)(?:\.[0-9]*+)?|\.[0-9]++)"
    r"(?:\s?/\s?(?P<divisor>[-+]?[0-9]++(?:\.[0-9]++)?)"
    r"|\s?e\s?(?P<e>[-+]?[0-9]++)|\s?\*\s?10\s?\^\s?(?P<ten>[-+]?[0-9]++))?)"
    r"(?:\s?(?P<scale>thousand|million|billion|trillion)\b)?\s?(?P<percent>%|per\s?cent(?:age)?\b|pct\b|)"
    rf"(?P<after>(?:\s?(?:{_LETTERS}\.?(?:\s?\^\s?-?[0-9])?|[°%¢£€¥₹₩₽₪฿₫₴₦',()]|[-/*](?=\s?[^\W\d_])))*+)",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
# Words that make another number, or no single number, of the one beside them.
_FUNCTIONS = "sqrt|root|sin|cos|tan|log|ln|exp|pi"
_NOT_ONE = (
    "or|not|between|either|neither|than|least|most|under|over|above|below|half|double|twice|hundred|infinity|plus|squared"
    "|cubed|factorial|mod|或"
)
_CHANGING = re.compile(rf"(?:{_FUNCTIONS}|{_NOT_ONE})\Z", re.IGNORECASE)
# ASCII words of one or two letters that are not a product of variables: units, and words of a sentence.
_SHORT = re.compile(
    r"(?:an|is|am|it|at|in|by|of|to|we|he|so|as|on|pm|AM|PM|[mgshlLNJWVKCF]|[kcmn]m|[km]g|m[lLs]|[dc]l|lb|oz|ft|yd|mi|hr"
    r"|Hz|pt|qt|ha|ns|k[WJ]|Pa|th|st|nd|rd|cc|sq|cu)\Z"
)
_OR = re.compile(r"(?<=[0-9%}$]),?\s(?:or|i\.e\.,?|that is,?)\s(?=[^\W_$\\])")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_PARTS = {"half": Fraction(1, 2), "third": Fraction(1, 3), "quarter": Fraction(1, 4)}
_SPELLED = {word: number for number, word in enumerate(_UNITS.split())} | {
    word: 10 * number for number, word in enumerate(_TENS.split(), 2)
}
# The left side of "x = 5", "f(3) = 5" or "2 + 3 = 5"; of "2x = 5" and "x + 1 = 5" the number is not the answer.
_NAME = re.compile(r"\s?(?:m?\\angle\s?)?\\?[A-Za-z]+'?(?:_(?:\w|\{\w*\}))?\s?(?:\([^()]*\))?\s?")
_SEVERAL = re.compile(r"(?<![0-9]),|,(?![0-9]{3})|[;<>±≠≤≥]|!\s?\Z|\b(?:or|and)\b")
_UNKNOWN = re.compile(
    rf"{_SEVERAL.pattern}|[0-9][A-Za-z\\]|(?<![A-Za-z\\])(?!(?<=[0-9]\s)[mghsL])[A-Za-z](?![A-Za-z])"
    r"|\\(?!angle|sqrt|[dt]?frac|[dt]?binom|[lr](?:floor|ceil|vert)|log|ln|sin|cos|tan|gcd)"
)
_RELATION = re.compile(
    r"(?<![0-9]),|,(?![0-9])|[;<>±≠≤≥\[\]?]|[0-9]\s?[:_]|\\(?:[lg]eq?|[lg]t|n?eq?|pm|mp|in|to|cup|cap|langle|begin|[{}])(?![A-Za-z])"
    rf"|\b(?:{_NOT_ONE}|and|to)\b|(?<![A-Za-z\\])[a-df-hj-zA-DF-Z](?![A-Za-z])"
    rf"|[0-9]\s?(?:(?!(?:{_FUNCTIONS})\b)[^\W\d_]{{2,}}\s)+[0-9]",
    re.IGNORECASE,
)


def read_number(text: str) -> Number | None:
    """Read the number that a text states as its answer (`final_answer`); None if its answer is not one number."""
    answer = final_answer(text)
    return whole_number(text if answer is None else answer)


def right_number(answer: str) -> Number:
    """The number that a right answer is.

    Raises:
        ValueError: if it is not one number, with what to do.
    """
    marked = final_answer(answer, unmarked=False)
    text = answer if marked is None else marked
    number = None if "=" in text else whole_number(text, words_before=False)
    if number is None:
        raise ValueError(f"the answer {answer!r:.60} is not a number: use the reward math, or exact for texts")
    return number


def whole_number(text: str, *, words_before: bool = True) -> Number | None:
    """The number that a text is as a whole; None if it is anything else, such as two numbers or an expression.

    Accepts LaTeX and Markdown, separators of thousands, decimals, signs, currencies, fractions such as 7/2,
    \\frac{7}{2} and 3 1/2, exponents such as 1.5e3 and 1.5 \\times 10^3, percent, degrees, units and words beside the
    number, and numbers in English words. Of an equation it reads one side if the others are names or calculations. It
    computes nothing: 2^5 and 2 \\cdot 3 are not numbers.

    Args:
        words_before: False to refuse words before the number, as in "Room 7", numbers in words, and decimal commas.
    """
    alternatives = [_stated(part, words_before) for part in _OR.split(text, 3)]
    first = alternatives[0]
    return first if first and all(other and other.equals(first) for other in alternatives) else None


def _stated(text: str, words_before: bool) -> Number | None:
    sides = _sides(text)
    rounded = [part for part in sides if part[1] == "≈"]
    for side, _ in (*rounded[-1:], *sides[-1:], *sides[:1]):
        number = _number(side, words_before=words_before)
        if number is not None and _are_known([other for other, _ in sides if other is not side]):
            return number
    return None


def _number(text: str, *, words_before: bool) -> Number | None:
    text = text.strip(" ,;:'*").rstrip(" .")
    if text[:1] + text[-1:] in ("()", "[]") and not re.search(r"[()\[\]]", text[1:-1]):
        text = text[1:-1].strip()
    elif text[-1:] in tuple(")]}") and not re.search(r"[(\[{]", text):
        text = text[:-1].strip()
    match = _ANSWER.fullmatch(text)
    if match is None:
        return _spelled(re.sub(r" \([-0-9,.]+\)\Z", "", text)) if words_before else None
    before, after = _WORD.findall(match["before"]), _WORD.findall(match["after"])
    if (before or match["comma"]) and not words_before:
        return None
    variables = [word for word in before if len(word) == 1 and word.isascii() and word not in "aAI"]
    variables += [word for word in after if word.isascii() and len(word) < 3 and not _SHORT.match(word)]
    variables += [word for word in after if len(word) == 1 and "Ͱ" <= word <= "Ͽ"]  # Greek
    return None if variables or any(map(_CHANGING.match, before + after)) else _value(match)


def is_relation(text: str) -> bool:
    """True if an answer is not one value but a list, a relation or an alternative, or has an unknown."""
    *left, right = _sides(text) or [(";", "")]
    return _RELATION.search(right[0]) is not None or not _are_known([side for side, _ in left])


def _sides(text: str) -> list[tuple[str, str]]:
    """The sides of an equation, or an answer that is none, as plain text, with the sign that follows each."""
    if len(text) > LONGEST_ANSWER:
        return []
    text = plain_unicode(text)
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    parts = re.split("([=≈])", text.lstrip(" ,;:"))
    return list(zip(parts[::2], (*parts[1::2], ""), strict=True))


def _are_known(sides: Sequence[str]) -> bool:
    """True if the other sides of an equation are names or calculations, so that this side is the answer."""
    named = sides and _NAME.fullmatch(sides[0])  # P = 4s = 36
    return all(_NAME.fullmatch(side) or not (_SEVERAL if named else _UNKNOWN).search(side) for side in sides)


def _value(match: re.Match[str]) -> Number | None:
    digits = match["digits"] or match["whole"] or "1"
    if match["comma"] or re.search(r"\..*,", digits):  # a decimal comma
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.count(".") > 1:
        digits = digits.replace(".", "")
    exponent = int(match["e"] or match["ten"] or match["power"] or 0)
    above, below = int(match["above"] or 0), Fraction(match["below"] or match["divisor"] or 1)
    if abs(exponent) > _LARGEST_EXPONENT or not below or (above and above >= below):
        return None
    value = Fraction(re.sub("[ ,_']", "", digits)) * Fraction(10) ** exponent
    value = value + above / below if match["above"] else value / below
    negative = [sign.lower() in ("-", "negative", "minus") for sign in (match["sign"], match["second_sign"])]
    value *= _SCALES.get((match["scale"] or "").lower(), 1) * (-1) ** sum(negative)
    return Number(value, bool(match["percent"]))


def _spelled(text: str) -> Number | None:
    """The number of English words such as "negative twenty-one", "two hundred and five" or "three and a half"."""
    text, percent = re.subn(r"\s?(?:%|percent|per cent)\Z", "", text.lower())
    text = re.sub(r"\Aa\s(?=hundred|thousand|million|billion|trillion)", "one ", text)
    part = re.search(r"(?:\A|\sand )(?:a|one)[\s-](half|third|quarter)\Z", text)
    sign, *words = re.split(r"[\s-]+", (text[: part.start()] or "zero") if part else text)
    negative = sign in ("negative", "minus")
    total = group = 0
    room = 1000  # the next word of a number is smaller than the one before
    for word in words if negative else (sign, *words):
        if word in _SPELLED and _SPELLED[word] < room and (room > 10 or _SPELLED[word]):
            group += _SPELLED[word]
            room = 10 if _SPELLED[word] >= 20 else 0
        elif word == "hundred" and 0 < group < 10:
            group, room = 100 * group, 100
        elif word in _SCALES and group:
            total, group, room = total + group * _SCALES[word], 0, 1000
        elif word != "and" or not total + group:
            return None
    return Number((total + group + (_PARTS[part[1]] if part else 0)) * (-1) ** negative, bool(percent))


def number_pairs(
    completions: Sequence[Any], answer_column: str, columns: dict[str, Any]
) -> list[tuple[Number | None, Number]]:
    """Pairs of the number in each completion and the right one.

    Raises:
        ValueError: if the column is missing or an answer is not one number.
    """
    answers = list(map(str, column_of(columns, answer_column)))
    known = {answer: right_number(answer) for answer in dict.fromkeys(answers)}  # a group has one right answer
    return [
        (read_number(completion_text(completion)), known[answer])
        for completion, answer in zip(completions, answers, strict=True)
    ]


def numeric(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """1 if the number in the completion (`read_number`) is exactly the one in the answer column, else 0.

    Raises:
        ValueError: if the column is missing or an answer is not one number.
    """
    pairs = number_pairs(completions, answer_column, columns)
    return [float(given is not None and given.equals(right)) for given, right in pairs]


def digits(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float]:
    """Fraction of the places of the right number, with its sign, that the given number has right.

    Partial credit: 157 for 156 gives 3/4 (sign and two digits), 31 for -31 gives 2/3. With `numeric` a group of wrong
    answers has no gradient; with this reward, answers with a right digit or sign have a higher advantage. Digits are
    aligned at the right and counted over the longer number, so that more digits give no more reward. Use it together
    with `numeric`, which remains the score.

    Raises:
        ValueError: if the column is missing or an answer is not one number.
    """
    return [_right_places(given, right) for given, right in number_pairs(completions, answer_column, columns)]


def _right_places(given: Number | None, right: Number) -> float:
    if given is None:
        return 0.0
    ours, theirs = str(abs(given.value))[::-1], str(abs(right.value))[::-1]
    same = sum(a == b for a, b in zip(ours, theirs, strict=False)) + ((given.value < 0) == (right.value < 0))
    return same / (1 + max(len(ours), len(theirs)))


def step_numbers(
    completions: Sequence[Any], steps: Sequence[Sequence[str]], *, answer_column: str = "answer", **columns: Any
) -> list[list[float]]:
    """For each step 1 if its number (`read_number`) equals the one at its position in the answer column, else 0.

    The column has a list of the right intermediate results. A step beyond the list gets 0.

    Raises:
        ValueError: if the column is missing, or has a value that is not a list of numbers (`right_number`).
    """
    return [
        [float(number < len(right) and _is_right(text, right[number])) for number, text in enumerate(texts)]
        for texts, right in zip(steps, map(right_steps, column_of(columns, answer_column)), strict=True)
    ]


def _is_right(text: str, right: Number) -> bool:
    given = read_number(text)
    return given is not None and given.equals(right)


def right_steps(answers: Any) -> list[Number]:
    """The right number of each step. Raises ValueError for an answer that is not a list of numbers."""
    if not isinstance(answers, (list, tuple)):
        raise ValueError(
            f"the answer {str(answers)!r:.60} is not a list: set answer_column to a column with a number for each step"
        )
    return [right_number(str(answer)) for answer in answers]


_EMPTY_BOX = re.compile(r"\\boxed\{\s*\}")


def check_number(answer: Any) -> None:
    """Refuse an answer of `numeric` that is not one number."""
    right_number(_text(answer))


def check_expression(answer: Any) -> None:
    """Refuse an answer of `math` that math-verify cannot parse: an empty one, or one that closes a brace too many."""
    text = _text(answer)
    marked = final_answer(text, unmarked=False)
    inner, depth = _EMPTY_BOX.sub("", text if marked is None else marked).strip(" \t\n$"), 0
    for character in inner if "}" in inner else "":
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            break
    if not inner or depth < 0:
        raise ValueError(f"the right answer {text!r:.60} is not mathematics; use the exact reward for texts")


def check_text(answer: Any) -> None:
    """Refuse an answer of `exact` that is neither a text nor a number."""
    _text(answer)


def _text(answer: Any) -> str:
    if answer is None or isinstance(answer, (bool, list, tuple, dict)):
        raise ValueError(f"the right answer must be a text or a number, this is {str(answer)!r:.60}")
    return str(answer)


# math-verify rounds decimals to 6 places before it compares them. Numbers that differ by more are different for it too.
ROUNDING = Fraction(1, 10**5)


def plain_verdicts(completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any) -> list[float | None]:
    """1 or 0 if both the answer of a completion and the right one are numbers, else None: ask math-verify.

    Raises:
        ValueError: if the column is missing.
    """
    return [
        _verdict(completion_text(completion), str(answer))
        for completion, answer in zip(completions, column_of(columns, answer_column), strict=True)
    ]


def _verdict(text: str, answer: str) -> float | None:
    try:
        right = right_number(answer)
    except ValueError:
        return None
    stated = final_answer(text)
    given = whole_number(text if stated is None else stated)
    if given is None:
        return 0.0 if stated is not None and is_relation(stated) else None
    if given.equals(right):
        return 1.0
    whole = right.value.denominator == given.value.denominator == 1
    return 0.0 if whole or abs(given.value - right.value) > ROUNDING else None
