"""vLLM's weight-transfer engine `covey`. Written for vLLM 0.32.

It differs from vLLM's own in three ways, each for a fault that was found on the CPU build of 0.32:

1. The model is touched in `finish_weight_update` alone, with weights that are whole and verified. vLLM's engines begin
   the layerwise reload in `start_weight_update`: from then on the parameters are gone until the update has succeeded,
   and one that fails leaves an engine that dies at the next token. Here the old weights serve on.
2. The tied output layer is packed again. On CPUs vLLM multiplies by packed copies of the weights. The layerwise reload
   makes those of the linear layers again, but a tied output layer loads nothing of its own, so it would keep its old
   copy: the routes answer 200, the version is the new one, and every log-probability is wrong.
3. Weights travel by a file or over a gloo process group, without a GPU; the run chooses in
   `/init_weight_transfer_engine`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class Init(WeightTransferInitInfo):
    """`init_info` in the body of `/init_weight_transfer_engine`: of a file transport `folder`, else the others."""

    folder: str = ""  # of later files: one that the server was started with, or below it
    address: str = ""  # where the trainer waits
    port: int = 0
    world_size: int = 2  # of the process group, with the trainer
    rank_offset: int = 1  # rank of this server's first worker in the group; the trainer is 0
    timeout_seconds: float = 60.0


@dataclass
class Update(WeightTransferUpdateInfo):
    """`update_info` in the body of `/update_weights`: a file, or what is broadcast in which order; and its checksum."""

    sha256: str
    path: str = ""
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class CoveyEngine(WeightTransferEngine[Init, Update]):
    """Receives and verifies first, and touches the model only when an update is finished."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False
    transport: FileTransport | GlooTransport | None = None
    staged: dict[str, Tensor] | None = None  # received and verified
    known: Expected | None = None  # read at the first update

    def init_transfer_engine(self, init_info: Init) -> None:
        """Choose the transport of later updates. Every run calls it, also of a server that earlier runs have used."""
        self.shutdown()
        if init_info.folder:
            self.transport = FileTransport.below(str(init_info.folder), allowed_folders())
        else:
            rank = init_info.rank_offset + self.parallel_config.rank
            self.transport = GlooTransport(
                init_info.address, init_info.port, rank, init_info.world_size, init_info.timeout_seconds
            )

    @property
    def expected(self) -> Expected:
        """What the weights of the served model must be."""
        if self.known is None:
            tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
            self.known = expected_of(Path(self.model_config.model), self.model_config.dtype, tied=tied)
        return self.known

    def start_weight_update(self) -> None:
        self.staged = None

    def receive_weights(self, update_info: Update) -> None:
        """Keep verified weights for `finish_weight_update`.

        Raises:
            BadWeights: if they are not verified, or come for the second time in an update.
        """
        if self.staged is not None:
            self.staged = None
            raise BadWeights("weights came twice in one update, so two runs use this server; both updates have ended")
        if self.transport is None:
            raise BadWeights("/init_weight_transfer_engine was not called")
        self.staged = self.transport.receive(update_info, self.expected)

    def finish_weight_update(self) -> None:
        """Put the weights in place."""
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
        self.staged = self.transport = None


def pack_output_layer(model: nn.Module) -> None:
    """Make the CPU's packed copy of the output layer again, from the weights that it shares with the embedding."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if current_platform.is_cpu() and method is not None:
        method.process_weights_after_loading(head)
