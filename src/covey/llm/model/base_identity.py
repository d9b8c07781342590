"""The identity of the frozen weights to which an adapter belongs.

An adapter is of use with the weights that it was trained on, and a path or a hub's name may lead to others later. So
checkpoints and adapters name a checksum of the weights.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from covey.config import ConfigError
from covey.config.files import read_json
from covey.llm.model.adapted_layers import base_parameters

BASE_FILE = "base.json"  # beside an adapter's config


class BaseIdentity:
    """The frozen weights of a model, to which its adapters belong."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def checksum(self) -> str:
        """The checksum of the weights, computed once. The first to read it must do so before the ranks divide them."""
        return checksum_of_base(self.model)


def checksum_of_base(module: PreTrainedModel) -> str:
    """SHA-256 of the names and the weights of a model without its adapters.

    The weights are rounded to bf16 before, so the checksum is the same in every precision in which they are loaded.
    """
    with ThreadPoolExecutor() as executor:
        parts = executor.map(_checksum, *zip(*base_parameters(module), strict=True))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _checksum(name: str, weight: Tensor) -> str:
    rounded = weight.detach().to(torch.bfloat16).cpu().contiguous()
    digest = hashlib.sha256(rounded.view(torch.int16).numpy().data).hexdigest()
    return f"{name} {tuple(weight.shape)} {digest}"


def save_base(name: str, checksum: str, folder: Path) -> None:
    """Write the name and the checksum of a base model into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BASE_FILE).write_text(json.dumps({"model": name, "sha256": checksum}) + "\n", encoding="utf-8")


def check_base(folder: Path, checksum: str, fix: str) -> None:
    """Refuse a base model with other weights than those whose checksum `save_base` wrote.

    Raises:
        ConfigError: if they differ, with the fix, or if the file is damaged or missing.
    """
    path = folder / BASE_FILE
    saved = read_json(path, strict=False)
    if not isinstance(saved, dict) or not isinstance(saved.get("sha256"), str):
        raise ConfigError(f"{path} is damaged: it must name the checksum of the adapter's base model")
    if saved["sha256"] != checksum:
        raise ConfigError(
            f"the model's weights are not those of {saved.get('model')} to which the adapter of {path} belongs: {fix}"
        )
