"""Tables of malformed inputs, picked by hand: recipes, patterns, data, paths and command lines."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from helpers.malformed import CONTROL, DATASET_RECIPE, LANGUAGE, ROWS, Content, Input, jsonl

# ---- recipes ----

DEEP = 20_000
BIG = "9" * 5000


def _toml(text: str) -> dict[str, Content]:
    return {"recipe.toml": text}


def _language(line: str, table: str = "") -> str:
    """The recipe for language models with one more line, in a table or at the top."""
    if not table:
        return line + "\n" + LANGUAGE
    name = f"[{table}]\n"
    return LANGUAGE.replace(name, name + line + "\n") if name in LANGUAGE else f"{LANGUAGE}\n{name}{line}\n"


def recipes() -> Iterator[Input]:
    """Recipe files that are not what they should be."""
    texts: dict[str, bytes | str] = {
        "empty": "",
        "deep list": "steps = " + "[" * DEEP + "]" * DEEP,
        "deep table": "steps = " + "{a=" * DEEP + "1" + "}" * DEEP,
        "deep dotted key": "a" + ".a" * DEEP + " = 1",
        "deep dotted table": "[a" + ".a" * DEEP + "]\nb = 1",
        "deep in a field": _language("model = " + "[" * 300 + "]" * 300),
        "integer of 5000 digits": _language(f"steps = {BIG}"),
        "2**63": _language("steps = 9223372036854775808"),
        "NUL": "steps = 1\x00\n",
        "NUL in text": _language('model = "a\\u0000b"'),
        "escape in text": _language('model = "\\u001b[31mred\\u001b[0m"'),
        "escape in a key": '"\\u001b[2J" = 1\n' + LANGUAGE,
        "newline in a key": '"a\\nerror: b" = 1\n' + LANGUAGE,
        "C1 in text": _language('run_dir = "x\\u009b31mred"'),
        "right to left": _language('run_dir = "abc\\u202Etxt.exe/\\u0000"'),
        "control in an instruction": LANGUAGE.replace(
            "digits = [1]", 'digits = [1]\ninstruction = "\\u001b]0;x\\u0007"'
        ),
        "text of a megabyte": _language('algorithm = "' + "x" * 900_000 + '"'),
        "key of a megabyte": "x" * 900_000 + " = 1\n" + LANGUAGE,
        "over a megabyte": LANGUAGE + "# " + "x" * (30 << 20),
        "UTF-16": LANGUAGE.encode("utf-16"),
        "UTF-32": LANGUAGE.encode("utf-32"),
        "Latin-1": _language('model = "caf\xe9"').encode("latin-1"),
        "lone surrogate": _language('model = "x"').encode().replace(b'"x"', b'"\xed\xa0\x80"'),
        "surrogate escape": _language('model = "\\ud800"'),
        "key twice": _language("steps = 3") + "steps = 4\n",
        "table twice": LANGUAGE + "[sampling]\ngroup_size = 4\n",
        "task as a list": LANGUAGE.replace("[task]", "[[task]]"),
        "task is a number": "task = 3\n",
        "task's name is a list": LANGUAGE.replace('"arithmetic"', '["arithmetic"]'),
        "task's name is true": LANGUAGE.replace('"arithmetic"', "true"),
        "rewards is text": "rewards = 'numeric'\n" + LANGUAGE.replace('[[rewards]]\nname = "numeric"', ""),
        "rewards holds numbers": "rewards = [1, 2]\n" + LANGUAGE.replace('[[rewards]]\nname = "numeric"', ""),
        "reward's name is a list": LANGUAGE.replace('name = "numeric"', 'name = ["numeric"]'),
        "reward's weight is nan": LANGUAGE.replace('name = "numeric"', 'name = "numeric"\nweight = nan'),
        "model is a list": _language('model = ["a"]'),
        "model is empty": _language('model = ""'),
        "sampling is a list": LANGUAGE.replace("[sampling]", "[[sampling]]"),
        "algorithm is a list": _language('algorithm = ["grpo"]'),
        "group size is a list": LANGUAGE.replace("group_size = 2", "group_size = [2]"),
        "temperature is text": _language('temperature = "1"', "sampling"),
        "temperature is nan": _language("temperature = nan", "sampling"),
        "temperature is huge": _language("temperature = 1e308", "sampling"),
        "pattern is control characters": _language('long_prompts = "\\u001b[31m"', "sampling"),
        "learning rate is inf": _language("learning_rate = inf", "update"),
        "epochs is a list": 'algorithm = "rloo"\n' + _language("epochs = [1]", "update"),
        "digits is a date": LANGUAGE.replace("digits = [1]", "digits = [1979-05-27]"),
        "digits holds tables": LANGUAGE.replace("digits = [1]", "digits = [{a = 1}]"),
        "a million threads": _language("threads = 1_000_000").replace("threads = 1\n", ""),
        "2**40 threads": _language("threads = 1099511627776").replace("threads = 1\n", ""),
        "a hundred million prompts": LANGUAGE.replace("prompts_per_step = 2", "prompts_per_step = 100_000_000"),
        "a billion rollouts of a prompt": LANGUAGE.replace("group_size = 2", "group_size = 1_000_000_000"),
        "a billion tokens": LANGUAGE.replace("max_new_tokens = 4", "max_new_tokens = 1_000_000_000"),
        "largest group of 2**62": _language("adaptive = true\nmax_group_size = 4611686018427387904", "sampling"),
        "a final group of a billion": _language("final_group_size = 1_000_000_000", "sampling"),
        "control: billions of environments": CONTROL.replace("starts_per_step = 2", "starts_per_step = 2_000_000_000"),
        "control: a hundred million copies": CONTROL.replace("group_size = 2", "group_size = 100_000_000"),
        "control: a hundred thousand processes": CONTROL.replace(
            '"CartPole-v1"', '"CartPole-v1"\nvectorization = "async"'
        ).replace("group_size = 2", "group_size = 100_000"),
        "control: wide layer": CONTROL.replace("hidden = [4]", "hidden = [2_000_000_000]"),
        "control: many wide layers": CONTROL.replace("hidden = [4]", f"hidden = [{'100000, ' * 50}]"),
        "control: many layers": CONTROL.replace("hidden = [4]", f"hidden = [{'4, ' * 100_000}]"),
        "control: long fragments": 'algorithm = "ppo"\n'
        + CONTROL.replace('"episodes"', '"fragments"').replace(
            "starts_per_step = 2\ngroup_size = 2", "fragment_steps = 1_000_000_000"
        ),
        "control: id is a list": CONTROL.replace('"CartPole-v1"', '["CartPole-v1"]'),
        "control: id is empty": CONTROL.replace('"CartPole-v1"', '""'),
        "control: environment is text": 'environment = "CartPole-v1"\n',
        "control: id with NUL": CONTROL.replace('"CartPole-v1"', '"Cart\\u0000Pole-v1"'),
        "run_dir with NUL": _language('run_dir = "a\\u0000b"'),
        "run_dir too long": _language(f'run_dir = "{"a" * 300}"'),
        "run_dir with many parts": _language(f'run_dir = "{"a/" * 3000}"'),
        "run_dir of another user": _language('run_dir = "~nobody_at_all/x"'),
        "run_dir is a device": _language('run_dir = "/dev/null"'),
        "boundary with NUL": LANGUAGE + '[process]\nboundary = "a\\u0000.py:f"\n',
    }
    for name, text in texts.items():
        yield Input(f"recipe: {name}", ("check", "recipe.toml"), {"recipe.toml": text})
    bom = {"recipe.toml": b"\xef\xbb\xbf" + LANGUAGE.encode()}
    yield Input("recipe: byte order mark", ("check", "recipe.toml"), bom, accepted=True)
    crlf = {"recipe.toml": LANGUAGE.replace("\n", "\r\n")}
    yield Input("recipe: CRLF", ("check", "recipe.toml"), crlf, accepted=True)


PATTERNS = {
    "overflow": "a{99999999999999999999}",
    "large": "a{4294967294}",
    "deep": "(" * 5000 + ")" * 5000,
    "open": "(",
    "escape": "\\",
    "look behind": "(?<=a*)",
    "runs away": "(a+)+$",
    "lots": "(a|b|c)" * 30_000,
    "flags": "a(?i)b",
    "nested set": "[[a]",
    "unknown group": "(?P=x)",
    "name": "(?P<1>a)",
    "NUL": "a\0",
    "control": "\x1b[",
    "runs away slowly": "((" * 20 + "(x*)*" + ")*)*" * 20 + "y",
    "conditional": "(?(99)a|b)",
    "repeat of repeat": "a**",
    "possessive": "(?>" * 200 + ")" * 200,
    "range": "[z-a]",
    "unicode name": "\\N{no such}",
    "comment": "(?#",
    "huge group": "(?:a{60000}){60000}",
}


def patterns() -> Iterator[Input]:
    """Regular expressions of the format reward."""
    for name, pattern in PATTERNS.items():
        text = LANGUAGE.replace('name = "numeric"', f'name = "format"\npattern = {json.dumps(pattern)}')
        yield Input(f"pattern: {name}", ("check", "recipe.toml"), _toml(text), accepted=True)


# ---- data ----


def data() -> Iterator[Input]:
    """JSONL files with something wrong in them."""
    good = jsonl()
    lines: dict[str, bytes | str] = {
        "empty file": "",
        "blank lines only": "\n\n \n",
        "no object": "[]\n",
        "text": '"abc"\n',
        "null": "null\n",
        "number": "7\n",
        "not JSON": "{prompt: 1}\n",
        "two values in a line": '{"prompt": "a"} {"prompt": "b"}\n',
        "cut": good + '{"prompt": "abc',
        "a comma": '{"prompt": "a",}\n',
        "single quotes": "{'prompt': 'a'}\n",
        "deep list": '{"prompt": "a", "x": ' + "[" * DEEP + "]" * DEEP + "}\n",
        "deep object": '{"prompt": "a", "x": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}\n",
        "rather deep": '{"prompt": "a", "x": ' + "[" * 900 + "]" * 900 + "}\n",
        "a key twice": '{"prompt": "a", "prompt": "b"}\n',
        "a column twice": '{"prompt": "a", "answer": 1, "answer": 2}\n',
        "a nested key twice": '{"prompt": "a", "x": {"y": 1, "y": 2}}\n',
        "integer of 5000 digits": '{"prompt": "a", "answer": ' + BIG + "}\n",
        "NaN": '{"prompt": "a", "answer": NaN}\n',
        "infinity": '{"prompt": "a", "answer": -Infinity}\n',
        "1e999": '{"prompt": "a", "answer": 1e999}\n',
        "NUL in the line": b'{"prompt": "a\0b"}\n',
        "line of NULs": b"\0" * 1000 + b"\n",
        "control": b'{"prompt": "\x1b[2J"}\n',
        "escape in a key": '{"\\u001b[31mprompt": "a"}\n',
        "surrogate in a prompt": '{"prompt": "\\ud800"}\n',
        "surrogate in a message": '{"prompt": [{"role": "user", "content": "\\udfff"}]}\n',
        "surrogate in a column": '{"prompt": "a", "answer": "\\uDC00"}\n',
        "surrogate in a key": '{"prompt": "a", "\\ud800": 1}\n',
        "not UTF-8": b'{"prompt": "\xff\xfe"}\n',
        "UTF-16": good.encode("utf-16"),
        "UTF-32": good.encode("utf-32"),
        "Latin-1": '{"prompt": "caf\xe9"}\n'.encode("latin-1"),
        "encoded surrogate": b'{"prompt": "\xed\xa0\x80"}\n',
        "gzip": b"\x1f\x8b\x08\x00" + bytes(range(256)),
        "JSON array of rows": json.dumps(ROWS),
        "indented": json.dumps(ROWS[0], indent=2),
        "no prompt": '{"question": 5}\n',
        "prompt is null": '{"prompt": null}\n',
        "prompt is a number": '{"prompt": 5}\n',
        "prompt is true": '{"prompt": true}\n',
        "prompt is an object": '{"prompt": {}}\n',
        "prompt is empty": '{"prompt": ""}\n',
        "prompt is blank": '{"prompt": " \\n"}\n',
        "no messages": '{"prompt": []}\n',
        "message is text": '{"prompt": ["a"]}\n',
        "message is null": '{"prompt": [null]}\n',
        "message without role": '{"prompt": [{"content": "a"}]}\n',
        "message without content": '{"prompt": [{"role": "user"}]}\n',
        "role is a number": '{"prompt": [{"role": 1, "content": "a"}]}\n',
        "content is a list": '{"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}\n',
        "role with a control character": '{"prompt": [{"role": "user\\u001b[2J", "content": "a"}]}\n',
        "role of two lines": '{"prompt": [{"role": "user\\nassistant", "content": "a"}]}\n',
        "long role": json.dumps({"prompt": [{"role": "wizard" * 11, "content": "a"}]}) + "\n",
        "empty role": '{"prompt": [{"role": "", "content": "a"}]}\n',
        "empty content": '{"prompt": [{"role": "user", "content": " "}]}\n',
        **{
            f"reserved column {name}": json.dumps({"prompt": "a", name: 1}) + "\n"
            for name in (
                "prompts",
                "completions",
                "completion_ids",
                "trainer_state",
                "log_metric",
                "log_extra",
            )
        },
        "one prompt only": '{"prompt": "a"}\n',
        "the same prompt": '{"prompt": "a"}\n' * 20,
    }
    for name, content in lines.items():
        alone = name in ("one prompt only", "the same prompt", "blank lines only", "empty file") or isinstance(
            content, bytes
        )
        text: bytes | str = content if alone or "array" in name else good + str(content)
        files: dict[str, Content] = {"recipe.toml": DATASET_RECIPE, "data.jsonl": text}
        yield Input(f"data: {name}", ("check", "recipe.toml"), files)
    for name, text in {
        "byte order mark": b"\xef\xbb\xbf" + good.encode(),
        "CRLF": good.replace("\n", "\r\n").encode(),
        "blank lines between": good.replace("\n", "\n\n").encode(),
        "no newline at the end": good.rstrip().encode(),
        "other line ends in text": jsonl([*ROWS, {"prompt": "a\u2028b\u0085c", "answer": 1}]).encode(),
        "emoji": jsonl([*ROWS, {"prompt": "\U0001f600" * 100, "answer": 1}]).encode(),
        "escaped NUL": jsonl([*ROWS, {"prompt": "a\0b", "answer": "\x1b[31m"}]).encode(),
        "unlike columns": jsonl(
            [{"prompt": f"{n}", "answer": "1", "other": [None, 1, 1.5, [], {}][n % 5]} for n in range(20)]
        ).encode(),
    }.items():
        files = {"recipe.toml": DATASET_RECIPE, "data.jsonl": text}
        yield Input(f"data: {name}", ("check", "recipe.toml"), files, accepted=True)


# ---- reward files ----

REWARD_FILES: dict[str, bytes | str] = {
    "no Python": "def mine(:\n",
    "tabs and spaces": "def mine(completions):\n\tx = 1\n        return x\n",
    "no such function": "def other(completions):\n    return [1.0] * len(completions)\n",
    "a function within another": "def other(completions):\n    def mine():\n        pass\n",
    "a local name": "def other(completions):\n    mine = 1\n",
    "a method": "class Rewards:\n    def mine(self, completions):\n        pass\n",
    "a number": "mine = 5\n",
    "a list": "mine = []\n",
    "empty": "",
    "NUL": b"def mine(completions):\n    return '\0'\n",
    "not UTF-8": b"# caf\xe9\ndef mine(completions):\n    return 1\n",
    "unknown encoding": b"# -*- coding: nonsense -*-\ndef mine(completions):\n    return 1\n",
    "deep": "mine = " + "(" * 5000 + ")" * 5000 + "\n",
    "deep minus": "mine = " + "-" * 100_000 + "1\n",
    "binary": bytes(range(256)) * 10,
    "escape": "def \x1b[31m(:\n",
    "integer of 5000 digits": f"mine = {BIG}\n",
    "an open text": "def mine(completions):\n    return '''\n",
}
FAILING_REWARDS = {
    "raises at import": "raise RuntimeError('\\x1b[31mno')\n\ndef mine(completions):\n    pass\n",
    "exits at import": "import sys\nsys.exit(3)\n\ndef mine(completions):\n    pass\n",
    "kills itself": "import os\nos.kill(os.getpid(), 9)\n\ndef mine(completions):\n    pass\n",
    "imports what is not there": "import no_such_module\n\ndef mine(completions):\n    pass\n",
    "made of itself": "from rewards import mine\n",
    "returns nothing": "def mine(completions):\n    pass\n",
    "takes too much": "def mine(completions, no_such_column):\n    return []\n",
    "takes nothing": "def mine():\n    return []\n",
    "gives text": "def mine(completions):\n    yield '\\x1b[2J'\n",
    "raises a long text": "def mine(completions):\n    raise ValueError('\\x1b[2J\\n' * 10000)\n",
}


def reward_files() -> Iterator[Input]:
    """Files of reward functions that can be judged by their text, and names that lead to none."""
    recipe = LANGUAGE.replace('name = "numeric"', 'function = "rewards.py:mine"')
    for name, text in REWARD_FILES.items():
        yield Input(f"reward: {name}", ("check", "recipe.toml"), {"recipe.toml": recipe, "rewards.py": text})
    for function in (
        "os",
        "os:",
        ":f",
        "no_such_module:f",
        "a b:f",
        "..:f",
        "rewards.txt:f",
        "rewards.py:a-b",
        "x/y:f",
    ):
        named = recipe.replace("rewards.py:mine", function)
        yield Input(f"reward: named {function}", ("check", "recipe.toml"), {"recipe.toml": named, "rewards.py": ""})


def failing_rewards() -> Iterator[Input]:
    """Reward functions that only running them finds out."""
    recipe = LANGUAGE.replace('name = "numeric"', 'function = "rewards.py:mine"')
    for name, text in FAILING_REWARDS.items():
        yield Input(f"reward: {name}", ("check", "recipe.toml"), {"recipe.toml": recipe, "rewards.py": text})


# ---- paths ----


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _zeros(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


PATHS: dict[str, tuple[str, Content | None]] = {
    "missing": ("nowhere", None),
    "a pipe": ("thing", _fifo),
    "a socket": ("thing", _socket),
    "a folder": ("thing", _folder),
    "a loop of links": ("thing", _loop),
    "a dangling link": ("thing", _dangling),
    "empty": ("thing", b""),
    "a terabyte of nothing": ("thing", _zeros),
    "binary": ("thing", bytes(range(256)) * 8),
    "below a file": ("thing/x", None),
    "/dev/zero": ("/dev/zero", None),
    "/dev/null": ("/dev/null", None),
    "/dev/stdin": ("/dev/stdin", None),
    "/proc/self/mem": ("/proc/self/mem", None),
    "/": ("/", None),
    ".": (".", None),
    "..": ("..", None),
    "no name": ("", None),
    "NUL": ("a\0b", None),
    "a long name": ("a" * 300, None),
    "a long path": ("a/" * 3000, None),
    "other's home": ("~nobody_at_all/x", None),
    "home": ("~", None),
    "lone surrogate": ("\ud800", None),
    "undecodable": ("\udcff", None),
    "control": ("\x1b[31mred", None),
    "newline": ("a\nb", None),
    "spaces": ("  ", None),
    "a dash": ("-", None),
    "two dashes": ("--", None),
    "right to left": ("\u202eabc", None),
    "a star": ("*", None),
    "a URL": ("https://example.com/x", None),
    "a quote": ("'", None),
    "emoji": ("\U0001f600", None),
}


# Names that may be those of models on a hub, a model in the home folder, and no file of held-out prompts.
ACCEPTED = {
    *(("model", name) for name in ("missing", "a dangling link", "below a file", "a dash", "two dashes", "home")),
    ("held out", "no name"),
}


def paths() -> Iterator[Input]:
    """What is not a readable file or folder, at every place where one is named."""
    for name, (path, made) in PATHS.items():
        files: dict[str, Content] = {} if made is None else {path: made}
        if name == "below a file":
            files = {"thing": b""}
        places: dict[str, tuple[tuple[str, ...], dict[str, Content]]] = {
            "recipe": (("check", path), {}),
            "train": (("train", path), {}),
            "resume": (("train", "--resume", path), {}),
            "run_dir": (("train", "arithmetic_grpo", "--run-dir", path, "--model", "./nowhere"), {}),
            "data": (("check", "recipe.toml", "--path", path), {"recipe.toml": DATASET_RECIPE}),
            "held out": (
                ("check", "recipe.toml", "--held-out-path", path),
                {"recipe.toml": DATASET_RECIPE, "data.jsonl": jsonl()},
            ),
            "model": (("check", "arithmetic_grpo", "--model", path), {}),
            "sampled model": (("sample", path, "hello"), {}),
            "evaluated model": (("eval", path, "--task", "arithmetic"), {}),
            "planned model": (("plan", path), {}),
            "reward": (("eval", "./nowhere", "--task", "arithmetic", "--reward", f"{path}.py:f"), {}),
            "compared": (("compare", path, "--seeds", "1"), {}),
            "output": (("compare", "cartpole_grpo", "cartpole_grpo", "--output", path), {}),
            "environment": (("check", "cartpole_grpo", "--environment.id", path), {}),
            "cache": (("plan", "./nowhere"), {}),
        }
        for place, (words, more) in places.items():
            environment = {"COVEY_CACHE": path} if place == "cache" and "\0" not in path and path.isascii() else {}
            accepted = (place, name) in ACCEPTED
            what = f"path: {place} is {name}"
            yield Input(what, words, {**files, **more}, environment, accepted=accepted, needs_model=accepted)


# ---- words ----

# Words after those of the key, split at spaces; `spell` says what a word in capitals stands for. A plus in an argument
# of compare is a space.
COMMANDS = {
    "": (
        "EMPTY", "--", "-", "--=", "--=5", "---", "--debu", "-h-", "-x", "NUL", "trainNUL", "HALF", "ESC", "LONG",
        "train", "train EMPTY", "train --", "train --resume", "train --resume EMPTY", "train --resume x y",
        "train a b", "train ESC", "train LONG", "check", "check EMPTY", "check --", "plan", "plan EMPTY", "eval",
        "eval EMPTY", "eval smollm2-135m", "eval LONG --task arithmetic", "sample", "sample x", "compare",
        "compare EMPTY",
    ),
    "check arithmetic_grpo": (
        "--steps", "--steps EMPTY", "--steps BIG", "--steps 1e3", "--steps 0x10", "--steps NUL", "--seed -1",
        "--seed 18446744073709551616", "--learning-rate nan", "--learning-rate inf", "--learning-rate -0.0",
        "--learning-rate 1e999", "--threads 1000000", "--threads BIG", "--prompts-per-step 100000000",
        "--group-size 100000000000", "--max-new-tokens 9223372036854775807", "--microbatch-tokens -5",
        "--digits EMPTY", "--digits ,", "--digits LIST", "--digits 99", "--operators ESC", "--task", "--task EMPTY",
        "--task HALF", "--task dataset", "--task.name x", "--task. x", "--. x", "-- x", "--instruction HALF",
        "--instruction ESC", "--rewards x", "--rewards.name x", "--sampling x", "--environment x", "--a.b.c.d x",
        "--LONG x", "--model", "--model a/b/c", "--model LONG", "--model é/ü/ö", "--problems 1000000000",
        "--token-budget -1", "--temperature 1e-310",
    ),
    "check cartpole_grpo": (
        "--task arithmetic", "--hidden 0", "--hidden BIG", "--hidden 99999999", "--environments -1",
        "--initial-std 1e-400", "--environment EMPTY", "--environment a:b:c", "--environment :", "--environment ..:x",
        "--environment os:path", "--environment CartPole", "--environment CartPole-v99", "--environment LONG",
        "--environment ESC:x", "--environment .:x", "--environment HALF", "--episodes 1000000000",
        "--group-size 1000000000", "--vectorization none",
    ),
    "plan smollm2-135m": (
        "--algorithm EMPTY", "--algorithm ,", "--algorithm ESC", "--prompt-tokens 0", "--prompt-tokens BIG",
        "--prompt-tokens x", "--prompt-tokens HUGE", "--critic-trunk x", "--group-size 0", "--microbatch-tokens HUGE",
        "--task x", "--group-size 999999999999",
    ),
    "eval smollm2-135m --task": (
        "x", "arithmetic --episodes 5", "arithmetic --render", "arithmetic --samples 0", "arithmetic --samples BIG",
        "arithmetic --samples 1000000000000", "arithmetic --temperature nan", "arithmetic --temperature 1e999",
        "arithmetic --temperature 1e-310", "arithmetic --problems 1000000000", "arithmetic --problems BIG",
        "arithmetic --threads 1000000", "arithmetic --reward EMPTY", "arithmetic --reward :",
        "arithmetic --reward ESC", "arithmetic --reward a:bNUL", "arithmetic --reward format", "arithmetic --digits 0",
        "arithmetic --max-new-tokens 99999999999999", "arithmetic --seed x",
    ),
    "sample smollm2-135m": (
        "hi --n 0", "hi --n 1000000000000", "hi --n BIG", "hi --n 1.5", "hi --max-new-tokens 1000000000000",
        "hi --temperature nan", "hi --temperature -1", "hi --temperature 1e-310", "hi --seed 99999999999999999999",
        "hi --seed -1", "HALF", "hi there",
    ),
    "compare": (
        "'cartpole_grpo", 'cartpole_grpo+"', "cartpole_grpo+\\", "cartpole_grpo ''", "cartpole_grpo+--seed+3",
        "cartpole_grpo cartpole_grpo", "cartpole_grpo --seeds 0", "cartpole_grpo --seeds 1000000000000",
        "cartpole_grpo --seeds BIG", "cartpole_grpo --jobs -1", "cartpole_grpo --jobs 1000000000",
        "cartpole_grpo --threshold nan", "cartpole_grpo --threshold inf", "NUL", "ESC", "HALF",
        "cartpole_grpo arithmetic_grpo", "cartpole_grpo+--steps", "cartpole_grpo+--x+1", "cartpole_grpo --output LONG",
        "cartpole_grpo+--group-size+HUGE", "cartpole_grpo+extra",
    ),
}  # fmt: skip
SPELT = {
    "EMPTY": "", "NUL": "\0", "ESC": "\x1b[31m", "HALF": "\ud800", "LONG": "x" * 10_000, "LIST": "2," * 5000,
    "BIG": BIG, "HUGE": "9" * 40,
}  # fmt: skip


def spell(word: str) -> str:
    """A word of `COMMANDS` as it is given to the command."""
    for name, text in SPELT.items():
        word = word.replace(name, text)
    return word


def commands() -> Iterator[Input]:
    """Command lines."""
    for command, lines in COMMANDS.items():
        for line in lines:
            words = tuple(spell(word) for word in f"{command} {line}".split())
            words = tuple(word.replace("+", " ") for word in words) if command == "compare" else words
            yield Input(f"words: {command} {line}", words)
