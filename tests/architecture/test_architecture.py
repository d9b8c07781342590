"""The shape of the code: who may import whom, what may not be called, how long things may be."""

import ast
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest

from covey import ArithmeticConfig, LossConfig, RunConfig, SamplingConfig, run
from covey.train import loop
from helpers.tiny_models import tiny_folder

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "covey"
FILES = sorted(SOURCE.rglob("*.py"))
CPP_FILES = sorted([*SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")])

MOST_FILES, MOST_FILES_OF_A_STEP = 260, 55
LONGEST_FILE = 800
LONGEST_CPP_FILE = 400
LONGEST_CLASS = 340  # RewardConfig, the fields of every kind of reward with their checks
LONGEST_FUNCTION = 60
LONGEST_LOOP_AND_UPDATE, LONGEST_TRAIN_STEP = 200, 25
MOST_TESTS_FOR_NONE = 6  # in all of train/: an optional component is an object, with a null object if there is none
LIGHT_MODULES = ["covey.config", "covey.cli.main", "covey.watch.command", "covey.watch.index"]
HEAVY_PACKAGES = {"torch", "transformers", "gymnasium", "matplotlib"}
LOADED_FIRST = {  # beside covey.cli and covey.config
    "covey.runtime.interrupts", "covey.runtime.variables", "covey.tracking.output", "covey.tracking.run_folder",
}  # fmt: skip
SLOW_MODULES = {"asyncio", "hashlib", "multiprocessing", "random", "tempfile"}  # of the standard library
OPENED_PLAINLY = (
    "experiment/export.py: card.read_text(",  # the card of the model that the user names
    "experiment/reward_models.py: open(self.path",  # of the pairs that this process writes
    "experiment/reward_models.py: open(name",  # a data file that the user names
    "tracking/diagnosis/__init__.py: Path(__file__)",
    "tracking/metrics.py: Path(__file__)",
    "tracking/rollout_export.py: open(file, 'x'",  # a new file
    "tracking/run_folder.py: Path('/proc/locks')",
    "tracking/run_store.py: open(path, 'wb')",  # a step that this process writes
    "tracking/trackers.py: Path(self._client.download_artifacts",
    "watch/index.py: open(path.with_suffix('.lock')",  # in the cache
    "watch/report.py: (STATIC /",
)
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CORE_IMPORTS = {"torch", "covey"} | {"__future__", "collections", "dataclasses", "functools", "math", "typing"}
# A paper's number, an equation, a section, or a formula: an operator between two operands.
CITATION = re.compile(r"\d{4}\.\d{4,5}|\beq\. \d|\bsection \d|[\w)\]}] [-+*/=] [\w({]")


def name_of(path):
    return str(path.relative_to(ROOT))


@cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno


def unsafe(tree):
    """Lines that can run code from data: pickle in any form, eval and exec."""
    for module, line in imported_modules(tree):
        if module.split(".")[0] in PICKLING_MODULES:
            yield line, module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            yield from ((node.lineno, f"torch.{a.name}") for a in node.names if a.name in ("load", "save"))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "torch.save"):
                yield node.lineno, called
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.value.lineno, "allow_pickle"


def compares_with_a_string(tree):
    """Lines that branch on the value of a string."""

    def has_string(node):
        parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
        return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)

    for node in ast.walk(tree):
        # `"key" in mapping` asks what a dict holds, not which variant was chosen.
        if isinstance(node, ast.Compare):
            asks_for_a_key = isinstance(node.ops[0], (ast.In, ast.NotIn)) and not has_string(node.comparators[0])
            if not asks_for_a_key and any(has_string(part) for part in (node.left, *node.comparators)):
                yield node.lineno
        if isinstance(node, ast.MatchValue) and has_string(node.value):
            yield node.lineno


def docstring_lines(definition):
    first = definition.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(definition) is not None else 0


def code_lines(function):
    """Lines of a function, its docstring aside."""
    return function.end_lineno - function.lineno + 1 - docstring_lines(function)


def class_lines(definition):
    """Lines of a class, its docstring and those of its methods aside."""
    inside = (node for node in ast.walk(definition) if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return definition.end_lineno - definition.lineno + 1 - sum(map(docstring_lines, inside))


CPP_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
CPP_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
CPP_ACCESS = re.compile(r"\b(?:public|protected|private)\s*:")
CPP_TYPE = re.compile(r"\b(?:class|struct|union|enum)\b[^()=]*$")


def cpp_definitions(text):
    """Kind ("class" or "function"), first line and number of lines of the definitions in a C++ source.

    A brace outside of functions opens a namespace, a class, a function or an initialiser, by the text before it;
    comments, strings and directives (macros with them) do not count. Both branches of an `#if` must have their braces
    in pairs.
    """

    def blank(match):
        """Line breaks alone, so that the numbers of the lines stay; an empty string where there was one."""
        return "''" if match.group()[0] in "'\"" else "\n" * match.group().count("\n")

    text = CPP_ACCESS.sub(";", CPP_DIRECTIVE.sub(blank, CPP_TEXT.sub(blank, text)))
    opened, found, begin = [], [], 0
    for at, character in enumerate(text):
        if character == "{":
            head = text[begin:at]
            outside = all(kind in ("namespace", "class") for kind, _ in opened)
            if not outside:
                kind = "block"
            elif re.search(r"\bnamespace\b|\bextern\s*''\s*$", head):
                kind = "namespace"
            elif CPP_TYPE.search(head):
                kind = "class"
            else:
                kind = "function" if ")" in head else "block"
            first = text.count("\n", 0, begin + len(head) - len(head.lstrip())) + 1
            opened.append((kind, first))
        elif character == "}":
            kind, first = opened.pop()
            if kind in ("class", "function"):
                found.append((kind, first, text.count("\n", 0, at) + 2 - first))
        if character in ";{}":
            begin = at + 1
    assert not opened, "braces that do not close"
    return found


def long_cpp_definitions(text):
    limits = {"class": LONGEST_CLASS, "function": LONGEST_FUNCTION}
    return [(kind, first, lines) for kind, first, lines in cpp_definitions(text) if lines > limits[kind]]


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@pytest.mark.slow
def test_import_contracts_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_mistake_is_told_before_anything_heavy_loads(module):
    script = f"import sys, {module}; print(*sorted({HEAVY_PACKAGES!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize("words", ["--version", "--help", "recipes", "check bad.toml"])
def test_what_the_command_line_loads_before_it_answers(words, tmp_path):
    """A version, a help text and a refused recipe take at most 0.15 s of processor time (0.12 s when this was set)."""
    (tmp_path / "bad.toml").write_text("stepz = 3\n")
    script = (
        "import sys\nbefore = set(sys.modules)\nimport covey.cli.main as cli\n"
        "try: cli.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('loaded:', *sorted({*sys.modules} - before))"
    )
    command = [sys.executable, "-c", script, *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    *answer, loaded = result.stdout.splitlines()
    assert "did you mean 'steps'" in result.stderr if words.startswith("check") else answer
    packages = {module.partition(".")[0] for module in loaded.split()[1:]}
    assert packages - sys.stdlib_module_names == {"covey"}
    assert words == "--version" or not packages & SLOW_MODULES  # importlib.metadata loads some
    rest = {module for module in loaded.split() if module.startswith("covey.") and module.count(".") > 1}
    assert {module for module in rest if not module.startswith(("covey.cli.", "covey.config."))} <= LOADED_FIRST


def test_files_of_a_run_folder_are_opened_as_plain_files():
    """A pipe, a device or a link in a folder of unknown origin must not stop a reader or lead it elsewhere."""
    packages = [SOURCE / name for name in ("tracking", "experiment", "comparison", "watch")]
    found = {
        f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"
        for path in FILES
        if any(path.is_relative_to(package) for package in packages)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == "open")
            or (isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "read_bytes"))
        )
    }
    assert {call for call in found if not call.startswith(OPENED_PLAINLY)} == set()


def test_nothing_runs_code_from_data():
    found = [f"{name_of(path)}:{line} {what}" for path in FILES for line, what in unsafe(parse(path))]
    allowed = (
        "src/covey/llm/rewards/sandbox/harness.py:",  # runs a model's program; it is itself run in the sandbox alone
        "src/covey/llm/rewards/sandbox/harness.py:1",  # and reads what ...
        "src/covey/llm/rewards/sandbox/supervisor.py:",  # ... its supervisor writes
        "src/covey/llm/conversation/processes.py:",  # copies a class of the running program ...
        "src/covey/llm/conversation/environment.py:",  # ... into a process that this program starts
        "src/covey/control/envs/manual_reset.py:",  # a state goes from one process of a run to another
    )
    assert [place for place in found if not place.startswith(allowed)] == []
    assert len(found) == len(allowed)


def loads_by_transformers(tree):
    """Lines that call a loader of transformers, and whether the call forbids code of the model's own and the hub."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr == "from_pretrained" or (node.func.attr == "from_config" and owner.startswith("Auto")):
                words = {keyword.arg or ast.unparse(keyword.value) for keyword in node.keywords}
                yield node.lineno, bool(words & {"SAFELY", "trust_remote_code"}) or owner == "GenerationConfig"


@pytest.mark.slow
def test_models_are_loaded_in_one_place_without_code_of_their_own():
    found = {name_of(path): list(loads_by_transformers(parse(path))) for path in FILES}
    assert {name for name, calls in found.items() if calls} == {
        f"src/covey/llm/model/{name}.py" for name in ("files", "gguf")
    }
    assert all(is_safe for calls in found.values() for _, is_safe in calls)
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert "trust_remote_code=True" not in text.replace(" ", "")


def test_the_training_path_has_no_string_flags():
    files = sorted((SOURCE / "train").rglob("*.py"))
    assert files
    assert [f"{name_of(path)}:{line}" for path in files for line in compares_with_a_string(parse(path))] == []


def branches_on_none(tree):
    """Lines that branch on None; an assertion is none, because it narrows a type."""
    asserted = {id(node) for check in ast.walk(tree) if isinstance(check, ast.Assert) for node in ast.walk(check)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and id(node) not in asserted:
            parts = (node.left, *node.comparators)
            if any(isinstance(part, ast.Constant) and part.value is None for part in parts):
                yield node.lineno


def test_the_training_path_has_few_optional_parts():
    found = [
        f"{name_of(path)}:{line}"
        for path in sorted((SOURCE / "train").rglob("*.py"))
        for line in branches_on_none(parse(path))
    ]
    assert len(found) <= MOST_TESTS_FOR_NONE, found


def test_the_training_step_fits_on_a_screen():
    texts = [(SOURCE / "train" / name).read_text(encoding="utf-8") for name in ("loop.py", "update.py")]
    assert sum(len(text.splitlines()) for text in texts) <= LONGEST_LOOP_AND_UPDATE
    (step,) = [function for function in functions(ast.parse(texts[0])) if function.name == "train_step"]
    assert code_lines(step) <= LONGEST_TRAIN_STEP


DECODER_MODULES = {"batch", "decoder", "hf_cache_decoder", "native_decoder", "native_layers", "shared_prefix_decoder"}


def touches_a_decoder(tree):
    """Lines that import a module of decoders, or ask for a decoder."""
    for module, line in imported_modules(tree):
        package, _, name = module.rpartition(".")
        if package == "covey.llm.generation" and name in DECODER_MODULES:
            yield line
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "covey.llm.generation":
            yield from (node.lineno for alias in node.names if alias.name in DECODER_MODULES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decoder":
            yield node.lineno


@pytest.mark.slow
def test_decoders_are_used_in_generation_only():
    """Evaluation, commands and trainers go through a sampler or a `Generator`; the plan asks for sizes."""
    inside = {SOURCE / "llm" / "generation", SOURCE / "llm" / "memory.py"}
    outside = [path for path in FILES if inside.isdisjoint((path, *path.parents))]
    assert [f"{name_of(path)}:{line}" for path in outside for line in touches_a_decoder(parse(path))] == []


def test_kernels_are_looked_up_in_one_place():
    """`choose_backend` hands them on: what computes is chosen once, and can be printed and recorded."""
    outside = [path for path in FILES if SOURCE / "llm" / "native" not in path.parents]
    users = [name_of(path) for path in outside if "kernels_for" in path.read_text(encoding="utf-8")]
    assert users == ["src/covey/llm/generation/backend.py"]


def test_files_are_few():
    assert len(FILES) <= MOST_FILES


@pytest.mark.slow
def test_a_step_of_a_language_model_passes_few_files(tmp_path, monkeypatch):
    """With a reference, which the KL needs; calls in threads that a step starts count too."""
    passed, train_step = set(), loop.train_step

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            passed.add(frame.f_code.co_filename)

    def watched(*arguments):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return train_step(*arguments)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    monkeypatch.setattr(loop, "train_step", watched)
    sampling, loss = SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=4), LossConfig(kl_coefficient=0.02)
    model, folder = str(tiny_folder(tmp_path / "model")), str(tmp_path / "run")
    run(RunConfig(model=model, steps=1, task=ArithmeticConfig(), sampling=sampling, loss=loss, run_dir=folder))
    assert 40 < len(passed) <= MOST_FILES_OF_A_STEP, sorted(passed)


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


@pytest.mark.slow
def test_functions_are_short():
    lengths = {f"{name_of(path)}:{f.name}": code_lines(f) for path in FILES for f in functions(parse(path))}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


@pytest.mark.slow
def test_classes_are_short():
    classes = [(path, node) for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
    lengths = {f"{name_of(path)}:{found.name}": class_lines(found) for path, found in classes}
    assert {name: length for name, length in lengths.items() if length > LONGEST_CLASS} == {}


def test_cpp_files_classes_and_functions_are_short():
    assert CPP_FILES
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in CPP_FILES}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_CPP_FILE} == {}
    assert {name: found for name, text in texts.items() if (found := long_cpp_definitions(text))} == {}


def test_core_imports_torch_only():
    files = sorted((SOURCE / "core").rglob("*.py"))
    assert files
    found = [
        f"{name_of(path)}:{line} {module}"
        for path in files
        for module, line in imported_modules(parse(path))
        if module.split(".")[0] not in CORE_IMPORTS
    ]
    assert found == []


def test_core_says_where_its_mathematics_comes_from():
    """Every public function of core gives a formula or cites a paper in its docstring."""
    unsourced = [
        f"{name_of(path)}:{node.name}"
        for path in sorted((SOURCE / "core").rglob("*.py"))
        for node in parse(path).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not CITATION.search(ast.get_docstring(node) or "")
    ]
    assert unsourced == []


def test_paths_of_the_user_are_read_in_one_place():
    """`user_path` refuses what no path can be; the reward worker, which imports nothing of covey, gets its result."""
    readers = {name_of(path) for path in FILES if "expanduser" in path.read_text(encoding="utf-8")}
    assert readers <= {
        "src/covey/config/files.py",
        "src/covey/runtime/worker/child.py",
    }
