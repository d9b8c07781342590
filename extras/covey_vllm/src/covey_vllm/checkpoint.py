"""The names, shapes and dtype that new weights of a model must have, from the headers of its own checkpoint.

vLLM's parameters are not a guide: it merges the projections of queries, keys and values into one, and packs them on
CPUs. An update with a wrong tensor must be refused before the model is touched, because vLLM's reload first moves the
parameters away, and one that fails in the middle leaves an engine that dies at the next token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
OUTPUT_LAYER = "lm_head.weight"


class BadWeights(ValueError):
    """Weights that are refused; the message is one line."""


@dataclass(frozen=True)
class Expected:
    """What new weights must be."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    def check_names(self, names: Iterable[str]) -> None:
        """Check that the names are those of the checkpoint, each once.

        Raises:
            BadWeights: naming the first that is missing, unknown or repeated.
        """
        found: set[str] = set()
        for name in names:
            if name in found:
                raise BadWeights(f"the tensor {name[:200]!r} comes twice")
            if name not in self.shapes:
                raise BadWeights(f"the served model has no tensor {name[:200]!r}")
            found.add(name)
        for name in self.shapes:
            if name not in found:
                raise BadWeights(f"the tensor {name} is missing: the server must serve the run's model")

    def check_kind(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check the shape and the dtype of a tensor.

        Raises:
            BadWeights: if one differs.
        """
        if shape != self.shapes[name]:
            raise BadWeights(f"the tensor {name} has shape {shape}, the served model has {self.shapes[name]}")
        if dtype != self.dtype:
            raise BadWeights(
                f"the tensor {name} has {dtype}, the server has {self.dtype}: start it with the run's precision"
            )

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check names, shapes, dtypes, and that every number is finite.

        Raises:
            BadWeights: for the first fault.
        """
        self.check_names(tensors)
        for name, tensor in tensors.items():
            self.check_kind(name, tuple(tensor.shape), tensor.dtype)
            # The sum of a tensor is not finite if a number in it is not. A sum that overflows is looked at again.
            if not torch.isfinite(tensor.sum(dtype=torch.float64)) and not torch.isfinite(tensor).all():
                raise BadWeights(f"the tensor {name} has numbers that are not finite")


def expected_of(folder: Path, dtype: torch.dtype, *, tied: bool) -> Expected:
    """What the weights of a model must be, from the headers of the safetensors files in its folder.

    Args:
        folder: the model, in transformers' layout.
        dtype: the precision in which it is served.
        tied: True if the output layer is the embedding. A run sends tied weights once, under the embedding's name; some
            checkpoints have them twice.

    Raises:
        BadWeights: if the folder has no safetensors files.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 -- it is not a dict
                shapes[name] = tuple(content.get_slice(name).get_shape())
    if not shapes:
        raise BadWeights(f"{folder} has no safetensors files, so the names of its weights are unknown")
    if tied:
        shapes.pop(OUTPUT_LAYER, None)
    return Expected(shapes, dtype)
