"""Compiles the kernels for GPUs without a GPU, and prints the shared memory of each in bytes, by dtype.

    python compiled_kernels.py 90     for compute capability 9.0

Triton's compiler asks the driver only for the device that it compiles for.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from covey.llm.model.architecture import AttentionRule
from covey.llm.native.triton_kernels import DecodedRows, TritonKernels

shared: dict[str, int] = {}
launch = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    compiled = launch(self, *args, grid=grid, warmup=True, **options)
    name = self.__name__
    shared[name] = max(shared.get(name, 0), compiled.metadata.shared)


def attend(kernels: TritonKernels, heads: int, kv_heads: int, width: int, rule: AttentionRule) -> None:
    """Compile attention of the update and of decoding."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    kind, rows = kernels.dtype, 16
    query, key = numbers(99, heads * width, dtype=kind), numbers(99, kv_heads * width, dtype=kind)
    angles = numbers(99, width, dtype=kind)
    given = {"query": query, "key": key, "value": key, "cosine": angles, "sine": angles, "out": query}
    given["logsumexp"] = numbers(99, heads, dtype=torch.float32)
    sequences = torch.tensor([[0, 90, -1], [90, 9, 0]], dtype=torch.int32)
    kernels.prefix_attention(sequences, width, rule, **given)
    kernels.prefix_attention(sequences, width, rule, **given, dout=query, dquery=query, dkey=key, dvalue=key)
    own, addresses = numbers(2, 17, kv_heads, 64 * width, dtype=kind), numbers(rows, dtype=torch.int64)
    state = DecodedRows(
        (heads, kv_heads, width), own, own, addresses, addresses, numbers(rows), numbers(rows), numbers(rows),
        numbers(2, 64 * kv_heads // heads), angles, angles, (4, 4), 64, 1e-6,
    )  # fmt: skip
    for norm in (None, angles[0]):
        qkv = numbers(rows, (heads + 2 * kv_heads) * width, dtype=kind)
        kernels.decode_attention(state, 1, rule, qkv, (norm, norm))


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    JITFunction.run = compile_only
    of_dtypes = {}
    for dtype in (torch.bfloat16, torch.float32):
        compile_all(TritonKernels(dtype))
        of_dtypes[str(dtype)] = shared.copy()
        shared.clear()
    print(json.dumps(of_dtypes))


def compile_all(kernels: TritonKernels) -> None:
    x, scales = torch.zeros(4, 40, dtype=kernels.dtype), torch.zeros(4)
    for added in (None, x):
        for weight in (x[0], x[0].float()):
            kernels.add_rmsnorm(x.float(), added, weight, 1e-6, x.float(), x, scales)
        kernels.add_rmsnorm_backward(x.float(), x[0], scales, x, None, added is not None)
    for forward, backward in ((kernels.swiglu, kernels.swiglu_backward), (kernels.geglu, kernels.geglu_backward)):
        forward(x, x, x)
        backward(x, x, x)
    tokens = scales.long()
    kernels.sample_tokens(x, scales.double(), 0.7)
    kernels.logprob_entropy(x, tokens, 0.7, (scales, scales, scales))
    kernels.logit_gradients(x, tokens, scales, scales, scales, scales, 0.7, 0)
    plain, limited = AttentionRule(0.1), AttentionRule(0.1, window=512)
    wide = [] if kernels.dtype == torch.float32 else [(8, 4, 256)]  # which has no room in fp32 on a laptop
    for shape in [(14, 2, 64), (12, 2, 128), *wide]:
        for rule in (plain, limited):
            attend(kernels, *shape, rule)


if __name__ == "__main__":
    main()
