"""A decoding step as a CUDA graph, which the processor launches as a whole.

A step of a language model is a thousand small kernels. The processor takes several times as long to launch them one by
one as the GPU to compute them. A graph has fixed addresses, so it is captured anew if an input is another tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST_FAILURES = 3  # captures that fail, as of a model that reads numbers back from the GPU; then none is tried again


class GraphedStep:
    """Calls a function, as a CUDA graph if possible. Its inputs are tensors that it finds in place."""

    def __init__(self, compute: Callable[[], Tensor], device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None
        self._pool: Any = None
        # The first call of a decoder is not captured, because kernels may be loaded by it.
        self._is_first, self._failures = True, 0

    def reset(self) -> None:
        """Forget the graph, because tensors were replaced."""
        self._graph = self._output = None

    def __call__(self) -> Tensor:
        """The function's result. The next call may overwrite it."""
        if self._device.type != "cuda" or self._is_first or not (self._graph or self._capture()):
            self._is_first = False
            return self._compute()
        assert self._graph is not None
        assert self._output is not None
        self._graph.replay()
        return self._output

    def _capture(self) -> bool:
        if self._failures >= MOST_FAILURES:
            return False
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                # Other threads of the process, such as one that trains, may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = self._compute()
                finally:
                    graph.capture_end()
        except Exception:  # whatever the model's code raises, or CUDA for what a graph cannot have
            self._failures += 1
            return False
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graph, self._output = graph, output
        return True
