"""vLLM's weight-transfer engines `covey_file` and `covey_gloo`. Written for vLLM 0.32.

They differ from vLLM's own in three ways, each for a fault that was found on the CPU build of 0.32:

1. The model is touched in `finish_weight_update` alone, with weights that are whole and verified. vLLM's engines begin
   the layerwise reload in `start_weight_update`: from then on the parameters are gone until the update has succeeded,
   and one that fails leaves an engine that dies at the next token. Here the old weights serve on.
2. The tied output layer is packed again. On CPUs vLLM multiplies by packed copies of the weights. The layerwise reload
   makes those of the linear layers anew, but a tied output layer loads nothing of its own, so it would keep its old
   copy: the routes answer 200, the version is the new one, and every log-probability is wrong.
3. The CPU's weights need no GPU transport: a file, or a gloo process group.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from covey_vllm.checkpoint import BadWeights, Expected, expected_of
from covey_vllm.transports import FileTransport, GlooTransport, allowed_folders

logger = init_logger("vllm.covey")

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class VerifyingEngine(WeightTransferEngine[Init, Update]):
    """Receives and verifies first, and touches the model only when an update is finished."""

    supports_draft_weight_update = False
    staged: dict[str, Tensor] | None = None  # received and verified
    known: Expected | None = None  # read at the first update

    @property
    def expected(self) -> Expected:
        """What the weights of the served model must be."""
        if self.known is None:
            tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
            self.known = expected_of(Path(self.model_config.model), self.model_config.dtype, tied=tied)
        return self.known

    def start_weight_update(self) -> None:
        self.staged = None

    def stage(self, tensors: dict[str, Tensor]) -> None:
        """Keep verified weights for `finish_weight_update`.

        Raises:
            BadWeights: if there are some already, because two runs update at once.
        """
        if self.staged is not None:
            self.staged = None
            raise BadWeights("weights came twice in one update, so two runs use this server; both updates have ended")
        self.staged = tensors

    def finish_weight_update(self) -> None:
        if self.staged is None:
            raise BadWeights("no weights were received")
        staged, self.staged = self.staged, None
        began = time.perf_counter()
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(staged.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            pack_output_layer(self.model)
        logger.info("covey: %d tensors in place after %.2f s", len(staged), time.perf_counter() - began)

    def shutdown(self) -> None:
        self.staged = None


def pack_output_layer(model: nn.Module) -> None:
    """Make the CPU's packed copy of the output layer anew, from the weights that it shares with the embedding."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if current_platform.is_cpu() and method is not None:
        method.process_weights_after_loading(head)


@dataclass
class FileInit(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`: the folder of later files, one that the server was started with or below
    it.
    """

    folder: str


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Body of `/update_weights`: a safetensors file and its checksum."""

    path: str
    sha256: str


class FileEngine(VerifyingEngine[FileInit, FileUpdate]):
    """Reads weights from files."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    transport: FileTransport | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        self.transport = FileTransport.below(str(init_info.folder), allowed_folders())

    def receive_weights(self, update_info: FileUpdate) -> None:
        if self.transport is None:
            raise BadWeights("/init_weight_transfer_engine was not called")
        self.stage(self.transport.receive(str(update_info.path), str(update_info.sha256), self.expected))


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`: where the trainer waits, and the size of the group with it."""

    address: str
    port: int
    world_size: int
    rank_offset: int = 1  # rank of this server's first worker in the group; the trainer is 0
    timeout_seconds: float = 60.0


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """Body of `/update_weights`: what is broadcast, in this order, and its checksum."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sha256: str


class GlooEngine(VerifyingEngine[GlooInit, GlooUpdate]):
    """Receives weights over a gloo process group."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    transport: GlooTransport | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()
        rank = init_info.rank_offset + self.parallel_config.rank
        self.transport = GlooTransport(
            init_info.address, init_info.port, rank, init_info.world_size, init_info.timeout_seconds
        )

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self.transport is None:
            raise BadWeights("/init_weight_transfer_engine was not called")
        self.stage(
            self.transport.receive(
                update_info.names, update_info.dtypes, update_info.shapes, update_info.sha256, self.expected
            )
        )

    def shutdown(self) -> None:
        super().shutdown()
        self.transport = None

    def parse_update_info(self, update_dict: dict[str, Any]) -> GlooUpdate:
        info = super().parse_update_info(update_dict)
        if not all(isinstance(value, list) for value in (info.names, info.dtypes, info.shapes)):
            raise BadWeights("names, dtypes and shapes must be lists")
        return info
