"""Finds the answer that a completion states, in a time bounded by the length of the completion.

It is the first of these that the completion has, each at its last occurrence: `\\boxed{5}`, `<answer>5</answer>`,
`#### 5`, "the answer is 5". Without a mark it is the last expression with a digit in the last sentence that is neither
a question nor a check of the answer. An expression includes all around its number that could change it, so "42 or 43",
"x > 42" and "(1, 42)" are expressions. Text before `</think>` is not read.

This file and those of the built-in rewards load neither torch nor transformers, because some of them run in a worker
process.
"""

import re
import unicodedata
from typing import Any

_NO_COLUMNS = ("prompts", "completion_ids", "trainer_state", "log_metric", "log_extra")
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?P<box>\{|[^\s{}$\\]+)|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$*]*(?:[,;]\s*(?:and\b|or\b)?|and\b|or\b|和|或)[\s$*]*")
_MOST_BOXES = 100  # that are one answer


def completion_text(completion: Any) -> str:
    """The text of a completion: the string itself, or the content of its chat messages; of a conversation the last turn
    of the model.
    """
    if isinstance(completion, str):
        return completion
    if len(completion) > 1:
        turns = [message for message in completion if message.get("role") == "assistant"]
        completion = turns[-1:] or completion
    return "".join(message["content"] for message in completion)


def column_of(columns: dict[str, Any], name: str) -> Any:
    """The column of the data that a reward reads.

    Raises:
        ValueError: if the data does not have it.
    """
    if name not in columns:
        there = ", ".join(name for name in columns if name not in _NO_COLUMNS) or "no column"
        raise ValueError(f"the data has no column {name!r}, it has {there}; set answer_column")
    return columns[name]


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` that has one, with balanced braces; if it is not closed, the rest of its line.

    Boxes with only a comma, a semicolon, "and" or "or" between them are one answer, such as "3, 5".
    """
    boxes = [box for box in _boxes(text) if box[2].strip(" \n.?_")]
    if not boxes:
        return None
    begin, _, last = boxes.pop()
    contents = [last]
    for earlier, end, content in reversed(boxes[-_MOST_BOXES:]):
        if end > begin or not _BETWEEN_BOXES.fullmatch(text, end, begin):
            break
        begin, contents = earlier, [content, *contents]
    return ", ".join(dict.fromkeys(contents))


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Begin, end and content of each box, in the order in which they begin."""
    boxes = []
    opened: list[tuple[int, int]] = []  # begin of the box, or -1 for another brace, and of what is in it
    for match in _BRACE.finditer(text) if "box" in text else ():
        if match[0] == "}" and opened:
            begin, inside = opened.pop()
            boxes.append((begin, match.end(), text[inside : match.start()]))
        elif match[0] == "{" or match["box"] == "{":
            opened.append((-1 if match[0] == "{" else match.start(), match.end()))
        elif match["box"]:
            boxes.append((match.start(), match.end(), match["box"]))
    if opened:
        begin, inside = opened[-1]
        boxes.append((begin, len(text), text[inside:].lstrip().partition("\n")[0]))
    return sorted(box for box in boxes if box[0] >= 0)


def last_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`; if it is not closed, the rest of the text."""
    found = _ANSWER_TAG.findall(text)
    return found[-1] if found else None


LONGEST_ANSWER = 300  # characters
_TAIL = 4_000  # characters at the end of a completion that are searched for an unmarked answer

_HASHES = re.compile(r"####[ \t]*\n?([^\n]*)")
_HEADING = re.compile(r"[\s*_#]*[^\W\d_]{2}")
_OPENING = r"(?:[\s*_:]|\.{2,}|\\\[|\$\$?(?=\s))*"  # of the text or the formula after a mark
_SAID = re.compile(
    r"(?<![^\W_])answers?(?![^\W_])[\s*_\"'`]*(?:(?:to|of|for)\s[^.\n:=?]{1,60}?\s)?"
    r"(?:,?\s*(?:then|therefore|thus|so|hence)\b,?\s*)?"
    r"(?:\b(?:is|are|was|equals|becomes|(?:would|should|must|will)\s+be)\b|[:=])(?:\s*(?:then|therefore|thus)\b)?"
    rf"{_OPENING}|^[ \t#*_]*(?:(?:the|final)\s)*answer[\s*_]*\n{_OPENING}|\banswer\s[-–—]\s"
    rf"|答案\s*(?:[是为為:]|等于){_OPENING}",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"\n|[.!?;](?=[*_$\"')`\\\]]*(?:\s(?!or\b)|\Z))|[。;]", re.IGNORECASE)
# What follows an answer in its sentence and explains it.
_EXPLANATION = re.compile(
    r",\s*(?!(?:and|or)\b)(?=[^\W\d_]{2}|i\.e|e\.g)|\s-\s(?=[^\W\d_]{2})|\s(?:—|--)|(?<=[\d$*]):\s"
    r"|\s\((?=[^()]*[^\W\d_]{2}|[\d\s.+*/×=-]+\))"
    r"|\s(?:because|since|as|so|which|that|if|when|where|while|given|but|rather|instead|not|for|from|of|in|after|by|on|at"
    r"|during|within|among)\b",
    re.IGNORECASE,
)
_STATES = re.compile(r"[\d$\\]")
_CORRECTION = re.compile(r"\b(?:wait|no[,.]|wrong|incorrect|mistake|sorry|oops|actually|correction)", re.IGNORECASE)
_SENTENCES = re.compile(
    r"\n+|(?<=[.!?;])\s+(?!or\b)|(?<=[。？！])|,?\s(?=check\s*:)"
    r"|\\(?:therefore|implies|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])|[∴⇒→]|=>|\\\\\s*&",
    re.IGNORECASE,
)
_CHECK = re.compile(
    r"\W*(?:(?:ok|okay|now|wait|and|we|to|can|let\s(?:me|us)|let's|just|quick(?:ly)?|double|cross|sanity|i)\b\W*)*"
    r"(?:check|verif|confirm|proof\b|explanation|indeed\b|(?:substituting|plugging)\s(?:it\s)?back|(?:this|that|it)\s(?:is|looks|seems)\s(?:correct|right))",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(
    r"\W*(?:so|therefore|thus|hence|no|wrong|actually|finally|(?:the |my |final )*(?:answer|result|total|output))\b",
    re.IGNORECASE,
)
# Words that belong to an expression, because they change the number beside them.
_PARTS = (
    "or|and|to|between|either|neither|not|than|least|most|under|over|above|below|negative|minus|plus|percent"
    "|percentage|pct|hundred|thousand|million|billion|trillion|squared|cubed|sqrt|root|sin|cos|tan|log|ln|exp|pi|mod"
)
_EXPRESSION = re.compile(
    r"(?:\\(?:text\w*|mathrm|mbox)\s?\{[^{}]*\}|\\[^\W\d_]+\d*|\\.|(?<![A-Za-z0-9])\d[\d.,_'eE+-]*[A-Za-z0-9]*"
    rf"|(?<![^\W_])(?:{_PARTS})(?![^\W_])|(?<![A-Za-z0-9_'])[A-Za-z](?![A-Za-z'])|(?<=[\d)}}\]])[A-Za-z]\w*"
    r"|(?<=[\d$%])\s(?:[^\W\d_]+\s){1,3}(?=(?:and|or|to)\s\W*\d)|(?<=\d)\s[^\W\d_]{2,}\s(?=\d+\s?[^\W\d_])"
    r"|[或和到至约π°√∛∜∞²³]|[-+*/^=<>≤≥≠≈±×÷·~!:,.()\[\]{}%$€£¥₹₩₽₪฿₫₴₦&`_ \t])+",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"(?<!, right)(?<!, correct)\?\Z")  # "25, right?" states 25
_MARKUP = re.compile(
    r"</?[A-Za-z_]{1,20}\s?/?>|\[/?[A-Za-z_]{2,20}\]|\\(?:boxed|fbox)\s*\{\s*\}"
    r"|\\(?:begin|end)\{(?:align|equation|gather|split|multline)\w*\*?\}"
)
_POWER_OF_A_UNIT = re.compile(r"(\d\s?[A-Za-z]{2,10}+)\s?\^\s?\{?-?\d\}?")
_LABEL = re.compile(r"\A\W*(?:(?:step|part|problem|question)\s*)?\(?\d{1,2}[).:]\s+(?=.*\d)", re.IGNORECASE)
_STRUCK = re.compile(r"~~[^~\n]*~~")
_DENIED_BEFORE = re.compile(
    r"\b(?:any|all|every)\w*\s(?:\w+\s)?(?:but|except)\s?\Z"
    r"|(?:\bnot|n't|\bnever|\bcannot)\b[\w ]{0,30}\Z|(?<!add )(?<!adds )(?<!sums )\bup\Z",
    re.IGNORECASE,
)
# Words that make another number of the one after them: "half of 42".
_CHANGED_BEFORE = re.compile(
    r"\b(?:half|twice|thrice|double|triple|times|third|quarter|root|cube|logarithm|reciprocal|factorial|multiples?|factors?"
    r"|divisors?)(?:\sof)?(?:\sthe)?\s?\Z",
    re.IGNORECASE,
)
_NOT_BUT = re.compile(r"\bnot\s[^.,;:\n]{1,40}?,?\sbut\s(?:rather\s)?", re.IGNORECASE)  # "not 6 but 5"
_OTHERWISE = re.compile(r"\b(?:if|when|for)\b.*\b(?:otherwise|else)\b", re.IGNORECASE)
_DENIED_AFTER = re.compile(
    r"\W{0,3}(?:(?:is|was|are|does|do|would|will|can|could)(?:n't| not)|cannot|fails|(?:and )?up\b"
    r"|(?:is|was) (?:wrong|incorrect))\b",
    re.IGNORECASE,
)
# What explains the number before it in a sentence, unless a result follows.
_REASON = re.compile(
    r"(?:,?\s(?:because|since|rather than|instead of)"
    r"|,\s(?:not|which|when|where|attained|achieved|reached|obtained|with|i\.e))\b"
    r"(?!.*\b(?:so|thus|hence|therefore|total|gives?|makes?|leaves?)\b)",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"\d")
_DASH = re.compile(r"\A[-+]\s+")  # of a list
_ARTICLE = re.compile(r"(?<=[\d%])\s(?:a|an|and|to)\s*\Z", re.IGNORECASE)
_ASIDE = re.compile(r"(\d[^()]{0,40}?)\s\((?:[^()]*[^\W\d_]{2}[^()]*|[\d\s.+*/×=-]+|[\d.,]+\s?[A-Za-z]{1,3})\)")

_SIGNS = str.maketrans("−–‐‑﹣－٫٬‘’“”", "------.,''\"\"", "\u200b\u200e\u200f\ufeff")
_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴-⁹]+")
_PICTURE = re.compile("\\s?[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]")
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_VULGAR = re.compile(r"(?<=\d)[¼-¾⅐-⅞]")


def final_answer(text: str, *, unmarked: bool = True) -> str | None:
    """The text of the answer that a completion states; None if it has no mark and no digit.

    Args:
        unmarked: False to look for a mark only.
    """
    text = _NOT_BUT.sub("", _STRUCK.sub("", plain_unicode(text.rpartition("</think>")[2])))
    marked = last_boxed(text)
    if marked is None:
        marked = last_answer_tag(text)
    if marked is None:
        lines = [line for line in _HASHES.findall(text) if not _HEADING.match(line)]
        marked = _clause(lines[-1]) if lines else _said(text[-_TAIL:])
    return _last_expression(text[-_TAIL:]) if marked is None and unmarked else marked


def plain_unicode(text: str) -> str:
    """The text with digits, signs, spaces and punctuation of ASCII, powers as ^2 and ½ as 1/2."""
    if text.isascii():
        return text
    text = _PICTURE.sub("", text.translate(_SIGNS))
    text = _SUPERSCRIPT.sub(lambda match: f"^{unicodedata.normalize('NFKC', match[0])} ", text)
    text = _VULGAR.sub(r" \g<0>", text)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS).replace("\u2044", "/")
    return _OTHER_DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)


def _said(text: str) -> str | None:
    """The answer of the last "the answer is ...", unless it is corrected after it."""
    for match in reversed(list(_SAID.finditer(text))):
        rest = text[match.end() :]
        end = _SENTENCE_END.search(rest)
        sentence = rest if end is None else rest[: end.start()]
        if (end is not None and end[0] == "?") or not (_STATES.search(sentence) or len(sentence.split()) in (1, 2)):
            continue
        correction = _CORRECTION.search(rest, len(sentence))
        corrected = _last_expression(rest[correction.start() :]) if correction else None
        return _clause(sentence) if corrected is None else corrected
    return None


def _clause(sentence: str) -> str:
    """The answer at the beginning of a sentence, without what explains it."""
    if _OTHERWISE.search(sentence):
        return sentence
    for match in _EXPLANATION.finditer(sentence[: 2 * LONGEST_ANSWER]):
        if _STATES.search(sentence, 0, match.start()):
            return sentence[: match.start()]
    return sentence


def _last_expression(text: str) -> str | None:
    """The last expression with a digit; empty if no sentence states one, None if the text has no digit."""
    if not _DIGIT.search(text):
        return None
    stated = _last_statement(_MARKUP.sub("\n", text))
    for reason in _REASON.finditer(stated):
        if _DIGIT.search(stated, 0, reason.start()):
            stated = stated[: reason.start()]
            break
    stated = _POWER_OF_A_UNIT.sub(r"\1", _ASIDE.sub(r"\1", _LABEL.sub("", stated))).rstrip("! ")
    found = [match for match in _EXPRESSION.finditer(stated) if _DIGIT.search(match[0])]
    if not found or _DENIED_BEFORE.search(stated, 0, found[-1].start()) or _DENIED_AFTER.match(stated, found[-1].end()):
        return ""
    if "=" not in found[-1][0] and _CHANGED_BEFORE.search(stated[: found[-1].start()]):
        return ""
    return _ARTICLE.sub("", _DASH.sub("", found[-1][0].strip(" ,;:"))).rstrip(".")


def _last_statement(text: str) -> str:
    """The last sentence with a digit that is neither a question nor a check of the answer."""
    stated, checking = "", False
    for sentence in _SENTENCES.split(text):
        if _CHECK.match(sentence):
            checking = bool(stated)
        elif _CONCLUSION.match(sentence):
            checking = False
        if not checking and not _QUESTION.search(sentence) and _DIGIT.search(sentence):
            stated = sentence
    return stated
