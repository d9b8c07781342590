"""README, the pages of docs/ and the examples, taken apart: the commands, programs and files that they print."""

import ast
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.config.recipe import read_tables

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]

SUFFIXES = {"python": ".py", "toml": ".toml", "jsonl": ".jsonl"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n(?:\n(?= {4}))?)+", re.M)
_COMMAND = re.compile(r"(\.venv/bin/)?(covey|python|make|pip|git|\.ci/run)( |$)")
_NAME = r"[\w/.-]+\.(?:py|toml|jsonl|json)"
_FILE_ABOVE = re.compile(rf"`({_NAME})`[^`\n]*:\n+\Z")  # the line before a block may name its file ...
_FILE_INSIDE = re.compile(rf"# ({_NAME})\b")  # ... or its first line, in a comment
_INLINE = re.compile(r"`(covey [^`]+)`")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str  # relative to the repository
    line: int  # of the page, from 1
    kind: str  # "commands", "python", "toml", "jsonl", "text" (output or an excerpt: not run) or "unmarked"
    text: str
    file: str = ""  # the file that it is, where the page says so

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of every line, without what stands beside it as an explanation."""
        lines = self.text.replace("\\\n", " \0").splitlines()
        words = [shlex.split(re.split(r"\s{2,}(?!\0)|\s\s+#", re.sub(r" +\0 +", " ", line))[0]) for line in lines]
        return [one for one in words if one]


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page in their order; of a Python file those of its docstring."""
    page = str(path.relative_to(ROOT))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "") + "\n"
    found = [(match.start(), match[1], match[2]) for match in _FENCE.finditer(text)]
    outside = _FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)  # at the same places
    found += [(match.start(), "", re.sub(r"^ {4}", "", match[0], flags=re.M)) for match in _INDENTED.finditer(outside)]
    blocks = []
    for start, language, content in sorted(found):
        kind = language or ("commands" if _COMMAND.match(content) else "unmarked")
        named = _FILE_INSIDE.match(content) or _FILE_ABOVE.search(text[:start])
        file = named[1] if named and Path(named[1]).suffix == SUFFIXES.get(kind) else ""
        blocks.append(Block(page, text[:start].count("\n") + 1, kind, content, file))
    return blocks


def inline_commands(path: Path) -> list[list[str]]:
    """Words of the commands within the sentences of a page; those with dots in place of words are left out."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [shlex.split(found) for found in _INLINE.findall(text) if "..." not in found]


def shown_alone(words: list[str]) -> bool:
    """Whether a command in a sentence is only its name, or has a placeholder: `covey plan`, `covey train NAME`."""
    last = ("--help", "--help-all", "--resume", "--render")
    is_name = len(words) == 2 or (words[1] == "reward-model" and len(words) == 3)
    return is_name or any(word.isupper() for word in words) or words[-1] in last


TINY_CONFIG = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
               "num_attention_heads": 4, "intermediate_size": 64}  # fmt: skip
# What a page leaves to its reader.
OWN_FILES = {
    "README.md": {
        "prompts.jsonl": "".join(
            json.dumps({"prompt": [{"role": "user", "content": thing}]}) + "\n" for thing in "abcdefghijkl"
        ),
    },
    "docs/iterative.md": {
        "sentences.jsonl": "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"Write a sentence about this: {thing}."}]}) + "\n"
            for thing in ("apple", "bridge", "camera")
        ),
    },
    "docs/memory.md": {
        "path/to/config.json": json.dumps(TINY_CONFIG),
        "my_recipe.toml": '[task]\nname = "arithmetic"\n',
    },
    "docs/planning.md": {
        "path/to/config.json": json.dumps(TINY_CONFIG),
        "runs/my_recipe-001/rollouts/step_000001.jsonl": "".join(
            json.dumps({"decisions": decisions}) + "\n" for decisions in (14, 33, 58)
        ),
    },
}


def whole_recipe(block: Block) -> dict[str, Any]:
    """The tables of a recipe; one without a task and an environment is a part, laid over a packaged recipe."""
    tables = tomllib.loads(block.text)
    return tables if {"task", "environment"} & set(tables) else read_tables("process_grpo") | tables


def write_files(page: Path, folder: Path) -> None:
    """The files that a page prints, and those that it leaves to its reader."""
    own = OWN_FILES.get(str(page.relative_to(ROOT)), {})
    for name, text in (own | {block.file: block.text for block in blocks_of(page) if block.file}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
