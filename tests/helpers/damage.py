"""Malformed inputs without number: valid recipes, data, models and runs, damaged at random as a seed says.

A generator takes the valid `Samples`, a `random.Random` and a count. More than the tests run, with another seed:
`PYTHONPATH=tests python -m helpers.damage --seed 7 --count 500`.
"""

import argparse
import json
import random
import string
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from covey.config import ControlConfig, RunConfig
from covey.config.recipe import describe_fields
from helpers.forks import Forks
from helpers.malformed import CONTROL, DATASET_RECIPE, LANGUAGE, ROWS, Content, Input, cases, faults, jsonl
from helpers.tiny_models import CHARACTERS, tiny_folder

Files = dict[str, bytes]

# What stands where something else belongs, in TOML and on the command line.
TOML_VALUES = (
    "0", "-1", "1", "2", "3", "7", "100", "10_000", "1_000_000", "1_000_000_000", "9223372036854775807",
    "-9223372036854775808", "9" * 30, "0x" + "f" * 40, "0.0", "-0.0", "0.5", "1.0", "1e-320", "1e-30", "1e30", "1e308",
    "nan", "inf", "-inf", "true", "false", '""', '" "', '"none"', '"x"', '"\\u0000"', '"\\u001b[31m"', '"\\u202e"',
    '"\\U0001F600"', "'''\n'''", '"~nobody_at_all/x"', '"/dev/zero"', '"."', "'a:b'", "[]", "[[]]", "[1]", "[1, 2]",
    "[0]", "[-1]", "['x']", "[true]", "[1, 'x']", "[nan]", "{}", "{ a = 1 }", "[{ a = 1 }]", "1979-05-27", "07:32:00",
    "(", '"' + "x" * 500 + '"',
)  # fmt: skip
WORD_VALUES = (
    "", "0", "-1", "1", "2", "3", "1e3", "1.5", "100000", "1000000000", "9" * 25, "nan", "inf", "1e-320", "1e308",
    "true", "false", "none", "x", ",", "1,2", "1,x", "\x1b[31m", "\ud800", "\0", "~nobody_at_all", "/dev/zero",
    "a" * 400, "\U0001f600", "'", '"', "\n", "--", "=", "a:b", "[]", "{}", "é",
)  # fmt: skip
JSON_VALUES = (
    "null", "true", "false", "0", "-1", "1", "2", "3", "0.5", "1e3", "1e400", "-0", "NaN", "Infinity", "9" * 25,
    "4294967296", "1000000000000", "9223372036854775807", "18446744073709551616", '""', '"x"', '"\\u0000"',
    '"\\u001b[31m"', '"\\ud800"', '" "', "[]", "[[]]", "[1]", "[null]", "{}", '{"a":1}', '{"a":1,"a":2}',
    "[" * 40 + "]" * 40, "[" * 500 + "]" * 500, "(", '"' + "x" * 400 + '"', "-5", "1000000",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    255,
    256,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


@dataclass(frozen=True)
class Samples:
    """Valid things to damage."""

    model: Files  # a folder in Hugging Face's layout
    gguf: bytes
    control_run: Files  # stopped after its first of two steps
    language_run: Files


def files_of(folder: Path) -> Files:
    """Every file below a folder, by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_samples(folder: Path) -> Samples:
    """Train two small runs in `folder`, and make a model in both forms."""
    tiny_folder(folder / "model")
    (folder / "control.toml").write_text(CONTROL)
    (folder / "language.toml").write_text(f'model = "./model"\n{LANGUAGE}[checkpoint]\nevery = 1\n')
    given = [
        Input(name, ("train", f"{name}.toml", "--run-dir", "run"), files_of(folder)) for name in ("control", "language")
    ]
    with Forks() as forks:
        trained = list(cases(given, folder / "trained"))
        for outcome in forks.run(trained):
            assert outcome.code == 0, outcome.errors
    control, language = (_after_one_step(Path(run.cwd) / "run") for run in trained)
    return Samples(files_of(folder / "model"), gguf_bytes(folder / "x.gguf"), control, language)


def _after_one_step(run: Path) -> Files:
    """A run of two steps as it was before the second, which it has begun."""
    later = ("checkpoints/step-00000002/", "model/", "summary.json", "curve.png")
    return {name: content for name, content in files_of(run).items() if not name.startswith(later)}


def gguf_bytes(path: Path) -> bytes:
    """A GGUF file of a Llama of one layer with random weights."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    width, generator = 32, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3, 3, 3, *[6] * 256, *[1] * len(CHARACTERS)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {"blk.0.attn_q": (width, width), "blk.0.attn_k": (16, width), "blk.0.attn_v": (16, width)}
    shapes |= {"blk.0.attn_output": (width, width), "blk.0.ffn_down": (width, 2 * width)}
    shapes |= {f"blk.0.ffn_{name}": (2 * width, width) for name in ("gate", "up")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


# ---- how things are damaged ----


def damaged_bytes(data: bytes, rng: random.Random, within: int = 1 << 30) -> bytes:
    """One to three changes of bytes, the first ones below `within`."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(min(len(result), within) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 30, 300))
        kind = rng.randrange(7)
        if kind == 0:
            del result[place:]
        elif kind == 1:
            del result[place : place + length]
        elif kind == 2:
            result[place:place] = rng.randbytes(length)
        elif kind == 3:
            result[place : place + length] = rng.randbytes(length)
        elif kind == 4:
            result[place:place] = result[place : place + length]
        elif kind == 5:
            result[place : place + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        else:
            result[place : place + 1] = rng.choice(
                (b"\0", b"\xff", b"\x1b", b"\n", b'"', b"{", b"[", b"]", b"}", b",", b"\xed\xa0\x80")
            )
    return bytes(result)


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document in which one to three values or keys are replaced, left out, repeated or moved."""
    marks = {}
    document = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        places = [(container, key) for container in _containers(document) for key in _keys(container)]
        if not places:
            break
        container, key = rng.choice(places)
        mark = f"@{rng.getrandbits(64)}@"
        kind = rng.randrange(8)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container["".join(rng.choices(string.printable + "é\0", k=rng.randint(0, 12)))] = container.pop(key)
        elif kind == 2:
            container[key] = rng.choice(places)[0]
            if _depth(container) > 30:
                container[key] = None
        elif kind == 3 and type(container[key]) is int:
            container[key] = rng.choice((-1, 1)) * rng.choice(NUMBERS)
        else:
            container[key] = mark
            marks[f'"{mark}"'] = rng.choice(JSON_VALUES)
    text = json.dumps(document)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.encode()


def _containers(document: Any) -> list[Any]:
    found, waiting = [], [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            found.append(value)
            waiting += value.values() if isinstance(value, dict) else value
    return found


def _keys(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def _depth(document: Any) -> int:
    level, depth = [document], 0
    while level and depth < 40:
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        level, depth = [item for item in level if isinstance(item, (dict, list))], depth + 1
    return depth


def damaged_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose length, header or data is changed."""
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + size], data[8 + size :]
    kind = rng.randrange(4)
    if kind == 0:
        return struct.pack("<Q", rng.choice((*NUMBERS, size - 1, size + 1, len(data)))) + header + rest
    if kind == 1:
        return damaged_bytes(data, rng, 8 + size)
    if kind == 2:
        return data[: rng.randrange(len(data))]
    header = damaged_json(header, rng)
    return struct.pack("<Q", len(header)) + header + rest


# ---- generators ----


def recipes(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """Recipes of both kinds with wrong values, tables and bytes."""
    fields = {
        base: [row for row in describe_fields(kind) if row.section not in ("task (dataset)",)]
        for base, kind in ((LANGUAGE, RunConfig), (CONTROL, ControlConfig))
    }
    for number in range(count):
        base = rng.choice((LANGUAGE, CONTROL))
        text = base
        for _ in range(rng.randint(1, 3)):
            row, value = rng.choice(fields[base]), rng.choice(TOML_VALUES)
            if row.name == "model" and value in ('"."', '"/dev/zero"'):
                continue
            table, line = row.section.partition(" ")[0], f"{row.name} = {value}\n"
            lines = [one for one in text.splitlines(keepends=True) if not one.startswith(f"{row.name} =")]
            at = next((n + 1 for n, one in enumerate(lines) if one.strip("[]\n") == table), 0 if not table else None)
            if at is None:
                lines += [f"[{table}]\n", line]
            else:
                lines.insert(at, line)
            text = "".join(lines)
        if rng.randrange(5) == 0:
            text = text.replace(
                *rng.choice((("[", "[["), ("]", ""), ("=", ":"), ('"', "'"), ("\n", "\r"), ("_", "-"))), 1
            )
        data = damaged_bytes(text.encode(), rng) if rng.randrange(4) == 0 else text.encode()
        files: dict[str, Content] = {"recipe.toml": data}
        yield Input(f"recipe {number}: {text!r}", ("check", "recipe.toml"), files, accepted=True)


def commands(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """Fields on the command line with wrong values."""
    bases = {
        "arithmetic_grpo": RunConfig,
        "word_problems_grpo": RunConfig,
        "cartpole_grpo": ControlConfig,
        "cartpole_ppo": ControlConfig,
    }
    for number in range(count):
        recipe = rng.choice(list(bases))
        words = ["check", recipe]
        for _ in range(rng.randint(1, 3)):
            row = rng.choice(describe_fields(bases[recipe]))
            table = row.section.partition(" ")[0]
            name = f"{table}.{row.name}" if table and rng.randrange(3) else row.name
            words += [f"--{name.replace('_', rng.choice('-_'))}", rng.choice(WORD_VALUES)]
        if rng.randrange(6) == 0:
            words.insert(rng.randrange(len(words) + 1), rng.choice(WORD_VALUES))
        yield Input(f"words {number}: {words!r}", tuple(words), accepted=True)


def data(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """JSONL files with wrong rows and bytes."""
    for number in range(count):
        lines = [json.dumps(row).encode() for row in ROWS]
        lines += [
            json.dumps({"prompt": [{"role": "user", "content": f"{n}"}], "answer": [n, {"x": None}]}).encode()
            for n in range(3)
        ]
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(lines))
            lines[place] = (
                damaged_json(lines[place], rng)
                if lines[place].startswith(b"{")
                and rng.randrange(3)
                and b"\\u" not in lines[place]
                and _loads(lines[place])
                else damaged_bytes(lines[place], rng)
            )
        content = b"\n".join(lines) if rng.randrange(8) else damaged_bytes(b"\n".join(lines), rng)
        files: dict[str, Content] = {"recipe.toml": DATASET_RECIPE, "data.jsonl": content}
        yield Input(f"data {number}", ("check", "recipe.toml"), files, accepted=True)


def _loads(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def model_configs(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """Models whose config.json is damaged, planned for."""
    for number in range(count):
        change: Callable[[bytes, random.Random], bytes] = damaged_json if rng.randrange(5) else damaged_bytes
        files: dict[str, Content] = {"model/config.json": change(samples.model["config.json"], rng)}
        yield Input(f"config {number}: {files['model/config.json']!r}", ("plan", "model"), files, accepted=True)


def models(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """Models of which one file is damaged, sampled."""
    words = ("sample", "model", "1+1", "--n", "1", "--max-new-tokens", "2")
    for number in range(count):
        files: dict[str, Content] = {f"model/{name}": content for name, content in samples.model.items()}
        weights = [name for name in files if name.endswith(".safetensors")]
        name = rng.choice([*weights, *weights, *weights, *sorted(files)])
        content = files[name]
        assert isinstance(content, bytes)
        if name in weights:
            files[name] = damaged_safetensors(content, rng)
        else:
            files[name] = (
                damaged_json(content, rng)
                if name.endswith(".json") and rng.randrange(4)
                else damaged_bytes(content, rng)
            )
        shown = "" if name in weights else repr(files[name])[:2000]
        yield Input(f"model {number}: {name} {shown}", words, files, accepted=True, needs_model=True)


def gguf_files(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """GGUF files with a damaged header, planned for and sampled."""
    header = samples.gguf.rfind(b"output_norm.weight") + 60
    for number in range(count):
        content = damaged_bytes(samples.gguf, rng, rng.choice((24, 300, header)))
        sampled = rng.randrange(2) == 0
        words = ("sample", "x.gguf", "1+1", "--n", "1", "--max-new-tokens", "2") if sampled else ("plan", "x.gguf")
        environment = {"COVEY_CACHE": "cache"}
        yield Input(
            f"gguf {number}: {words[0]}",
            words,
            {"x.gguf": content, "cache/.keep": b""},
            environment,
            accepted=True,
            needs_model=sampled,
        )


def runs(samples: Samples, rng: random.Random, count: int) -> Iterator[Input]:
    """Runs of which one file is damaged, resumed and used as a model."""
    for number in range(count):
        run = rng.choice((samples.control_run, samples.language_run))
        files: dict[str, Content] = {f"r/{name}": content for name, content in run.items()}
        files |= {f"model/{name}": content for name, content in samples.model.items()}
        name = rng.choice(sorted(name for name in files if name.startswith("r/")))
        content = files[name]
        assert isinstance(content, bytes)
        if name.endswith(".json") and rng.randrange(4):
            content = damaged_json(content, rng)
        elif name.endswith(".safetensors"):
            content = damaged_safetensors(content, rng)
        else:
            content = damaged_bytes(content, rng) if content else rng.randbytes(9)
        if name.endswith(("state.json", "tensors.safetensors")) and rng.randrange(4):
            files[name] = content
            files |= _with_true_hashes(files, name)
        files[name] = content
        uses = [("train", "--resume", "r")] * 3 + [
            ("eval", "r"),
            ("plan", "r"),
            ("sample", "r", "1+1", "--n", "1", "--max-new-tokens", "2"),
        ]
        yield Input(f"run {number}: {name}", rng.choice(uses), files, accepted=True, needs_model=True)


def _with_true_hashes(files: dict[str, Content], name: str) -> dict[str, Content]:
    """The manifest of a checkpoint that takes a damaged file for what was written."""
    import hashlib

    folder = name.rpartition("/")[0]
    manifest = json.loads(files[f"{folder}/manifest.json"])  # type: ignore[arg-type]
    for file in manifest["files"]:
        content = files[f"{folder}/{file}"]
        assert isinstance(content, bytes)
        manifest["files"][file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {f"{folder}/manifest.json": json.dumps(manifest).encode()}


def undamaged(samples: Samples) -> Iterator[Input]:
    """What the generators damage, as it was."""
    sample = ("1+1", "--n", "1", "--max-new-tokens", "2")
    model: Files = {f"model/{name}": content for name, content in samples.model.items()}
    yield Input("language recipe", ("check", "recipe.toml"), {"recipe.toml": LANGUAGE})
    yield Input("control recipe", ("check", "recipe.toml"), {"recipe.toml": CONTROL})
    yield Input("data", ("check", "recipe.toml"), {"recipe.toml": DATASET_RECIPE, "data.jsonl": jsonl()})
    yield Input("planned model", ("plan", "model"), dict(model))
    yield Input("sampled model", ("sample", "model", *sample), dict(model))
    yield Input("sampled GGUF", ("sample", "x.gguf", *sample), {"x.gguf": samples.gguf}, {"COVEY_CACHE": "cache"})
    for run in (samples.control_run, samples.language_run):
        yield Input("run", ("train", "--resume", "r"), {f"r/{name}": content for name, content in run.items()} | model)


GENERATORS = {
    generator.__name__: generator for generator in (recipes, commands, data, model_configs, models, gguf_files, runs)
}


def main() -> int:
    """Run many inputs of some generators and print those that are not answered as they should be."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="inputs of each generator")
    parser.add_argument(
        "generators", nargs="*", metavar="GENERATOR", help=f"of {', '.join(GENERATORS)}; all by default"
    )
    arguments = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder, Forks() as forks:
        samples = make_samples(Path(folder) / "samples")
        for name in arguments.generators or GENERATORS:
            inputs = list(GENERATORS[name](samples, random.Random(arguments.seed), arguments.count))
            outcomes = forks.run(list(cases(inputs, Path(folder) / name)))
            print(f"{name}: exit codes {dict(Counter(outcome.code for outcome in outcomes))}", flush=True)
            for given, outcome in zip(inputs, outcomes, strict=True):
                if wrong := faults(given, outcome):
                    bad += 1
                    print(
                        f"  {given.name[:1500]}\n    {'; '.join(wrong)[:300]}\n    {outcome.errors[-700:]!r}",
                        flush=True,
                    )
    print(f"{bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
