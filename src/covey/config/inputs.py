"""What a run reads and runs: its data, functions, judge prompts, reward models, teacher and adapters."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from covey.config.control import ControlConfig
from covey.config.conversation import BUILT_IN_ENVIRONMENTS
from covey.config.files import faults_of, user_path
from covey.config.hub import KEPT, HubData, versions
from covey.config.llm import RunConfig
from covey.config.model_sources import adapter_files, locate_model
from covey.config.named_modules import data_files, find_module, place_of
from covey.config.sft import locate_reward_model, model_files
from covey.config.tasks import DatasetConfig


def input_checksums(config: RunConfig | ControlConfig, *, own_task: bool, own_rewards: bool) -> dict[str, str]:
    """SHA-256 of the files of data, functions, questions, reward models, teacher and adapter: name in the config ->
    digest.

    Args:
        own_task: the task is a script's own, so the config's files of it are not used.
        own_rewards: the same for the rewards.

    Raises:
        MachineError: if a file cannot be read.
    """
    if not isinstance(config, RunConfig):
        return {}
    names = []
    of_hub: dict[str, Path] = {}
    if isinstance(config.task, DatasetConfig) and not own_task:
        for path in filter(None, config.task.sources):
            folder = user_path(path)
            if HubData.read(path):
                of_hub |= {f"{path} {file.name}": file for file in data_files(folder, path)}
            else:
                names += [str(file) for file in data_files(folder, path)] if folder.is_dir() else [path]
    rewards = () if own_rewards else config.rewards
    names += [reward.judge_prompt_file for reward in rewards]
    functions = [config.conversation.source, config.process.boundary, *(reward.function for reward in rewards)]
    sources = (function.rpartition(":")[0] for function in functions)
    names += [source for source in sources if source.endswith(".py")]
    names += [name for reward in rewards if reward.model for name in model_files(locate_reward_model(reward.model))]
    names += model_files(locate_model(config.teacher.model)) if config.teacher.is_own_model else []
    names += adapter_files(config.lora.adapter) if config.lora.adapter else []
    files = {name: user_path(name) for name in names if name}
    return {name: _checksum(file) for name, file in (files | of_hub).items()}


def keep_hub_data(config: RunConfig | ControlConfig, checksums: Mapping[str, str]) -> None:
    """Let a resumed run read the data of the hub that it began with, if they are on this machine, though the hub has
    newer ones.

    Args:
        checksums: `input_checksums` of its beginning.
    """
    if not isinstance(config, RunConfig) or not isinstance(config.task, DatasetConfig):
        return
    KEPT.clear()
    for path in config.task.sources:
        if data := HubData.read(path):
            began = {name: checksum for name, checksum in checksums.items() if name.startswith(f"{path} ")}
            for files in versions(data):
                if {f"{path} {file.name}": _checksum(file) for file in files} == began:
                    KEPT[data] = files


def _checksum(path: Path) -> str:
    with faults_of(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named_code(config: RunConfig | ControlConfig) -> list[str]:
    """One line for each function, class or module that a run of the config runs, with its file.

    Raises:
        ConfigError: for a module that a recipe cannot name.
    """
    lines = []
    for where, name, library in _names(config):
        source, _, function = name.rpartition(":")
        found = None if source.endswith(".py") else find_module(source, where, library)
        file = place_of(found) if found else user_path(source).absolute()
        lines.append(f"{where} runs {function or source} of {file}")
    return lines


def _names(config: RunConfig | ControlConfig) -> Iterator[tuple[str, str, str]]:
    """Field, name and library of what the config names."""
    if isinstance(config, ControlConfig):
        if ":" in config.environment.id:
            yield "environment.id", config.environment.id.rpartition(":")[0] + ":", "gymnasium"
        return
    for number, reward in enumerate(config.rewards, start=1):
        if reward.function:
            yield f"[[rewards]] number {number}", reward.function, "covey"
    if ":" in config.process.boundary:
        yield "process.boundary", config.process.boundary, "covey"
    conversation = config.conversation
    if ":" in conversation.source and conversation.environment not in BUILT_IN_ENVIRONMENTS:
        yield "conversation.environment", conversation.source, "covey"
    module, library = conversation.imported_module
    if module:
        yield "conversation.environment", f"{module}:", library
