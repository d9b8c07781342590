"""A decoding step as a CUDA graph, which the processor launches as a whole.

A step of a language model is a thousand small kernels. The processor takes several times as long to launch them one by
one as the GPU to compute them. A graph has fixed addresses, so it is captured anew if an input is another tensor.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class GraphedStep:
    """Calls a function, the same every time, as a CUDA graph if possible. It finds its inputs in place.

    The function is given with every call, because a decoder that its own step refers to would keep its memory until
    Python's garbage collector finds the cycle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not known before the first call, which also loads the kernels.
        self.can_be_captured: bool | None = None if device.type == "cuda" else False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None
        self._is_current = False
        self._pool: Any = None

    def reset(self) -> None:
        """Have the graph captured anew, because tensors were replaced."""
        self._is_current = False

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """The function's result. The next call may overwrite it."""
        if self.can_be_captured is None:
            output, self.can_be_captured = _computed_without_waiting(compute)
            return output
        if not self.can_be_captured or not (self._is_current or self._capture(compute)):
            return compute()
        assert self._graph is not None
        assert self._output is not None
        self._graph.replay()
        return self._output

    def _capture(self, compute: Callable[[], Tensor]) -> bool:
        """Capture a graph; False, now and later, if that fails."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream), _without_garbage_collection():
                # Other threads of the process, such as that of a reward, may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = compute()
                finally:
                    graph.capture_end()
        except Exception:  # whatever the model's code raises, or CUDA for what a graph cannot have
            self.can_be_captured = False
            return False
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # The graph before lives until now, because memory goes from one to the next while one of them has the pool.
        self._graph, self._output, self._is_current = graph, output, True
        return True


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Context manager for a capture, which may fail if the collector destroys another graph meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _computed_without_waiting(compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """A result, and whether the processor did not wait for the GPU meanwhile, as it cannot within a graph.

    It is not tried out, because a capture that CUDA breaks off may leave torch's state on the GPU unusable.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            output = compute()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return output, not any("called a synchronizing CUDA operation" in str(wait.message) for wait in waits)
