"""Python bindings (ctypes) of the C++ kernels in `csrc/`; `build` finds or compiles them.

Each kernel exists for both storage types, bf16 and fp32, and `Kernels` has those of one of them. Fields of
the structures are in the order of the C++ structs of the same name.

Shapes: R rows, W hidden width, H heads, K key-value heads, D head width, V vocabulary; of a linear layer: T tokens,
M outputs, N inputs; of a prompt: P tokens.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.config.files import raise_fault
from covey.llm.native.build import BuildError, find_compiler, load_library, load_prebuilt, variant_of
from covey.llm.native.variants import VARIANTS
from covey.runtime.device import cpu_info

if TYPE_CHECKING:  # Triton may not be installed
    from covey.llm.model.architecture import AttentionRule, Feature
    from covey.llm.native.triton_kernels import TritonKernels

PAD = 32  # `PAD` in simd.h: the KV cache and prepacked weights are padded to multiples of it
SWITCH = "COVEY_NATIVE"  # environment variable; 0 disables the kernels

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # flag of /proc/cpuinfo: name
_log = logging.getLogger("covey")


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` in decode_attention.h: one layer's attention of one new token per row."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cosine", "sine", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("prompt_keys", "prompt_values", "prompt_lengths")),
        *((name, ctypes.c_void_p) for name in ("own_keys", "own_values", "slots", "decoded", "out")),
        *((name, ctypes.c_int32) for name in ("qkv_row_stride", "out_row_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "kv_heads", "head_dim", "capacity", "layer", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "epsilon")),
    )


class PrefixAttentionArgs(ctypes.Structure):
    """`PrefixAttentionArgs` in prefix_tree.h: attention over a prefix tree of sequences, or its gradients."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "cosine", "sine", "out", "logsumexp")),
        *((name, ctypes.c_void_p) for name in ("dout", "dquery", "dkey", "dvalue", "sequences")),
        *((name, ctypes.c_int32) for name in ("sequence_count", "heads", "kv_heads", "head_dim", "threads")),
        ("scaling", ctypes.c_float),
    )


class WeightGradientArgs(ctypes.Structure):
    """`WeightGradientArgs` in weight_gradients.h: linear layers that share their input."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("dout", ctypes.POINTER(ctypes.c_void_p)),
        ("out", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.c_int32) for name in ("layers", "tokens", "inputs", "threads")),
    )


class Linear(ctypes.Structure):
    """`Linear` in decode_step.h: a linear layer with a prepacked weight."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("outputs", "inputs")),
    )


class Layer(ctypes.Structure):
    """`Layer` in decode_step.h: the weights of a decoder layer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "query_norm", "key_norm", "inner_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
    )


class DecodeStepArgs(ctypes.Structure):
    """`DecodeStepArgs` in decode_step.h: one new token per row, from its embedding to the logits of the next."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("head", Linear),
        ("attention", AttentionArgs),
        ("own_layer_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "normed", "qkv", "attended", "gated", "logits")),
        ("layer_count", ctypes.c_int32),
    )


class EntryPoints:
    """The C functions for one storage type, with their argument types. `library` has one per type and function."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        def entry(name: str, *types: Any) -> Callable[..., Any]:
            function = getattr(library, f"{name}_{_SUFFIXES[dtype]}")
            function.argtypes, function.restype = types, None
            return function  # type: ignore[no-any-return]

        address, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        rows_of = number, number, real, number  # rows, width, epsilon, threads
        self.add_rmsnorm = entry("add_rmsnorm", *[address] * 6, *rows_of)
        self.add_rmsnorm_backward = entry("add_rmsnorm_backward", *[address] * 8, number, number, number)
        self.rmsnorm = entry("rmsnorm", *[address] * 4, *rows_of)
        self.rmsnorm_backward = entry("rmsnorm_backward", *[address] * 6, number, number, number)
        self.swiglu = entry("swiglu", address, address, number, address, number, number, number)
        self.swiglu_backward = entry("swiglu_backward", *[address] * 5, ctypes.c_int64, number)
        self.prefix_attention = entry("prefix_attention", ctypes.POINTER(PrefixAttentionArgs))
        self.store_prompt_kv = entry("store_prompt_kv", *[address] * 4, number, number, number)
        self.decode_attention = entry("decode_attention", ctypes.POINTER(AttentionArgs))
        self.sample_tokens = entry("sample_tokens", address, address, real, address, address, number, number, number)
        self.logprob_entropy = entry("logprob_entropy", address, address, real, *[address] * 3, number, number, number)
        self.logit_gradients = entry("logit_gradients", *[address] * 6, real, ctypes.c_int64, number, number, number)
        library.has_avx512_bf16.restype = library.has_amx.restype = ctypes.c_bool
        self.has_avx512_bf16, self.has_amx = (
            dtype == torch.bfloat16 and has() for has in (library.has_avx512_bf16, library.has_amx)
        )
        if self.has_amx:
            self.weight_gradients = entry("weight_gradients", ctypes.POINTER(WeightGradientArgs))
        if self.has_avx512_bf16:
            self.prepack_weight = entry("prepack_weight", address, number, number, address, number)
            self.linear = entry("linear", address, ctypes.POINTER(Linear), address, number, number)
            self.decode_step = entry("decode_step", ctypes.POINTER(DecodeStepArgs))


class Kernels:
    """The kernels for one storage type, `dtype`.

    Tensors are on the CPU, contiguous, and of this dtype unless stated otherwise. Kernels use
    `torch.get_num_threads()` threads. `has_avx512_bf16` and `has_amx` are True if the processor has these instructions
    and `dtype` is bf16.
    """

    features: frozenset[Feature] = frozenset()  # that layers may have and Llama's have not

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype, self._library = dtype, library
        self._entries = EntryPoints(library, dtype)
        self.has_avx512_bf16, self.has_amx = self._entries.has_avx512_bf16, self._entries.has_amx

    @property
    def instruction_set(self) -> str:
        """Instruction set of the matrix products, for which the library was compiled, and whether a wheel brought it.

        The other kernels use the widest vectors of the library. A compiler may give other bits than the wheel's.
        """
        variant, machine = variant_of(self._library), platform.machine()
        # -march=native compiles for what the processor has.
        features = cpu_info("flags").split() if variant is None else VARIANTS[machine][1][variant]
        vectors = next((name for flag, name in _VECTORS.items() if flag in features), machine)
        name = "AMX" if self.has_amx else "AVX512-BF16" if self.has_avx512_bf16 else vectors
        return name if variant is None else f"{name}, of the wheel"

    def add_rmsnorm(
        self,
        hidden: Tensor,
        added: Tensor | None,
        weight_W: Tensor,
        epsilon: float,
        total: Tensor,
        out: Tensor,
        scales: Tensor | None = None,
    ) -> None:
        """total = hidden + added; out = weight * total / rms(total); scales = 1 / rms of every row.

        Args:
            hidden: fp32, any shape whose last dimension is W.
            added: the addend of the same shape; None if there is none.
            weight_W: the norm's weight.
            epsilon: added to the mean square.
            total: fp32, like `hidden`, which it may be. It is not written if `added` is None.
            out: like `hidden`.
            scales: fp32, one for each row; None if they are not needed.
        """
        rows, width = hidden.numel() // len(weight_W), len(weight_W)
        addresses = (address_of(tensor) for tensor in (hidden, added, total, weight_W, out, scales))
        self._entries.add_rmsnorm(*addresses, rows, width, epsilon, torch.get_num_threads())

    def add_rmsnorm_backward(
        self, total: Tensor, weight_W: Tensor, scales: Tensor, dout: Tensor, dtotal: Tensor | None, has_addend: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of `add_rmsnorm`.

        Args:
            total: the sum that was normalised.
            weight_W: the norm's weight.
            scales: those of the forward pass.
            dout: gradient of `out`.
            dtotal: gradient of `total`; None if it is 0.
            has_addend: True if there was an addend.

        Returns:
            gradients of `hidden` (fp32), of `added` (the same in its dtype; None without an addend) and of the weight
            (fp32).
        """
        threads = torch.get_num_threads()
        dhidden, partial_sums = torch.empty_like(total), torch.empty(threads, len(weight_W))
        converts = has_addend and dout.dtype != dhidden.dtype
        dadded = torch.empty_like(total, dtype=dout.dtype) if converts else None
        tensors = (total, weight_W, scales, dout, dtotal, dhidden, dadded, partial_sums)
        addresses = (address_of(tensor) for tensor in tensors)
        self._entries.add_rmsnorm_backward(*addresses, scales.numel(), len(weight_W), threads)
        return dhidden, dhidden if has_addend and not converts else dadded, partial_sums.sum(dim=0)

    def rmsnorm(self, x: Tensor, weight_W: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """weight * x / rms(x) over the last dimension, and 1 / rms of every row (fp32)."""
        out, scales = torch.empty_like(x), torch.empty(x.numel() // len(weight_W))
        addresses = (tensor.data_ptr() for tensor in (x, weight_W, out, scales))
        self._entries.rmsnorm(*addresses, len(scales), len(weight_W), epsilon, torch.get_num_threads())
        return out, scales

    def rmsnorm_backward(self, x: Tensor, weight_W: Tensor, scales: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `rmsnorm` with respect to x and to the weight (fp32)."""
        threads = torch.get_num_threads()
        dx, partial_sums = torch.empty_like(x), torch.empty(threads, len(weight_W))
        addresses = (tensor.data_ptr() for tensor in (x, weight_W, scales, dout, dx, partial_sums))
        self._entries.rmsnorm_backward(*addresses, len(scales), len(weight_W), threads)
        return dx, partial_sums.sum(dim=0)

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up, all [rows, width]. `gate` and `up` may be the two halves of one tensor."""
        rows, width = out.shape
        addresses = gate.data_ptr(), up.data_ptr(), gate.stride(0), out.data_ptr()
        self._entries.swiglu(*addresses, rows, width, torch.get_num_threads())

    def swiglu_backward(self, gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `swiglu` with respect to `gate` and `up`."""
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        addresses = (tensor.data_ptr() for tensor in (gate, up, dout, dgate, dup))
        self._entries.swiglu_backward(*addresses, dout.numel(), torch.get_num_threads())
        return dgate, dup

    def weight_gradients(self, x_TN: Tensor, dout_TM: Sequence[Tensor], out_MN: Sequence[Tensor]) -> None:
        """Weight gradients out = dout' x of linear layers with the same input; computed by torch without AMX."""
        if not self.has_amx:
            for dout, out in zip(dout_TM, out_MN, strict=True):
                torch.mm(dout.T, x_TN, out=out)
            return
        addresses, numbers = ctypes.c_void_p * len(dout_TM), ctypes.c_int32 * len(dout_TM)
        args = WeightGradientArgs(
            x=x_TN.data_ptr(),
            dout=addresses(*(dout.data_ptr() for dout in dout_TM)),
            out=addresses(*(out.data_ptr() for out in out_MN)),
            outputs=numbers(*(dout.shape[1] for dout in dout_TM)),
            layers=len(dout_TM), tokens=len(x_TN), inputs=x_TN.shape[1], threads=torch.get_num_threads(),
        )  # fmt: skip
        self._entries.weight_gradients(ctypes.byref(args))

    def prefix_attention(self, sequences_S3: Tensor, head_dim: int, rule: AttentionRule, **tensors: Tensor) -> None:
        """Causal attention over a prefix tree, or its gradients if `dout` is given.

        Args:
            sequences_S3: first token, length and parent (-1: none) of each sequence, int32, in depth-first order.
            head_dim: width of a head.
            rule: its scaling of the scores.
            tensors: by their names in `PrefixAttentionArgs`: query, key, value, cosine, sine, out and logsumexp (fp32),
                for the gradients also dout, dquery, dkey and dvalue. Shapes are in prefix_tree.h.
        """
        heads, kv_heads = (tensors[name].shape[1] // head_dim for name in ("query", "key"))
        args = PrefixAttentionArgs(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()}, sequences=sequences_S3.data_ptr(),
            sequence_count=len(sequences_S3), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            threads=torch.get_num_threads(), scaling=rule.scaling,
        )  # fmt: skip
        self._entries.prefix_attention(ctypes.byref(args))

    def store_prompt_kv(self, keys_KPD: Tensor, values_KPD: Tensor, cached_keys: Tensor, cached_values: Tensor) -> None:
        """Store a prompt's keys and values of one layer in the KV cache, padded(P) * padded(D) elements per head."""
        addresses = (tensor.data_ptr() for tensor in (keys_KPD, values_KPD, cached_keys, cached_values))
        self._entries.store_prompt_kv(*addresses, *keys_KPD.shape)

    def decode_attention(self, args: AttentionArgs) -> None:
        """Rotate queries and keys, append the new keys and values to the cache, and attend."""
        self._entries.decode_attention(ctypes.byref(args))

    def prepack_weight(self, weight_MN: Tensor) -> Tensor:
        """A prepacked copy of a linear layer's weight for `linear` and `decode_step`; needs `has_avx512_bf16`."""
        outputs, inputs = weight_MN.shape
        tiles = weight_MN.new_empty(padded(outputs) * padded(inputs))
        self._entries.prepack_weight(weight_MN.data_ptr(), outputs, inputs, tiles.data_ptr(), torch.get_num_threads())
        return tiles

    def linear(self, x_RN: Tensor, linear: Linear) -> Tensor:
        """x W' + b. R must be a multiple of 16, and `x` padded with zeros to padded(N) columns."""
        out_RM = x_RN.new_empty(len(x_RN), linear.outputs)
        self._entries.linear(
            x_RN.data_ptr(), ctypes.byref(linear), out_RM.data_ptr(), len(x_RN), torch.get_num_threads()
        )
        return out_RM

    def decode_step(self, args: DecodeStepArgs) -> None:
        """Compute all layers, the last norm and the head for one new token per row."""
        self._entries.decode_step(ctypes.byref(args))

    def sample_tokens(self, logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """As `token_sampling.sample_tokens`, for a temperature above 0."""
        tokens_R = torch.empty(len(logits_RV), dtype=torch.int64)
        logprobs_R = torch.empty(len(logits_RV), dtype=torch.float32)
        results = tokens_R.data_ptr(), logprobs_R.data_ptr()
        given = logits_RV.data_ptr(), uniforms_R.data_ptr(), temperature
        self._entries.sample_tokens(*given, *results, *logits_RV.shape, torch.get_num_threads())
        return tokens_R, logprobs_R

    def logprob_entropy(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float, out: Sequence[Tensor]) -> None:
        """Log-probability of each token, entropy and logsumexp of softmax(logits / temperature), into `out` (fp32)."""
        given = logits_NV.data_ptr(), tokens_N.data_ptr(), temperature, *(tensor.data_ptr() for tensor in out)
        self._entries.logprob_entropy(*given, *logits_NV.shape, torch.get_num_threads())

    def logit_gradients(
        self,
        logits_NV: Tensor,
        tokens_N: Tensor,
        logsumexp_N: Tensor,
        entropy_N: Tensor,
        dlogprob_N: Tensor | None,
        dentropy_N: Tensor | None,
        temperature: float,
        first: int,
    ) -> None:
        """Replace the logits of a slice of the vocabulary, which begins at token `first`, by their gradients."""
        tensors = (logits_NV, tokens_N, logsumexp_N, entropy_N, dlogprob_N, dentropy_N)
        addresses = (address_of(tensor) for tensor in tensors)
        self._entries.logit_gradients(*addresses, temperature, first, *logits_NV.shape, torch.get_num_threads())


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def padded(count: int) -> int:
    """`count` rounded up to a multiple of `PAD`."""
    return -(-count // PAD) * PAD


class KernelSet:
    """The kernels of a kind of device, "cpu" or "cuda", by storage type; empty if only torch is used."""

    def __init__(self, kernels: Mapping[torch.dtype, Kernels | TritonKernels], device: str = "cpu") -> None:
        self._kernels, self._device = kernels, device

    def of(self, tensor: Tensor) -> Any:
        """The kernels for tensors of this dtype and device; None if there are none."""
        return self._kernels.get(tensor.dtype) if tensor.device.type == self._device else None


TORCH_ALONE = KernelSet({})


OLDEST_GPU = (8, 0)  # compute capability


def may_have_kernels(device: str) -> bool:
    """Whether `kernels_for` may find kernels on such a device, without compiling one; true for an NVIDIA GPU not
    present."""
    if device not in ("cpu", "cuda") or os.environ.get(SWITCH) == "0":
        return False
    if device == "cpu" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability() >= OLDEST_GPU and find_spec("triton") is not None


def kernels_for(dtype: torch.dtype, device: torch.device) -> Any:
    """The kernels for bf16 or fp32 tensors on a CPU or a GPU; None for other tensors, or if they cannot be compiled or
    do not give torch's numbers there."""
    if dtype not in _SUFFIXES or os.environ.get(SWITCH) == "0":
        return None
    if device.type == "cuda":
        return _triton_kernels(dtype, device)
    return _kernels(dtype) if device.type == "cpu" else None


@cache
def _triton_kernels(dtype: torch.dtype, device: torch.device) -> TritonKernels | None:
    """None without Triton, on GPUs older than Ampere, and if a kernel fails its test, with a warning."""
    if torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return None
    try:
        from covey.llm.native import triton_kernels

        kernels = triton_kernels.TritonKernels(dtype)
        triton_kernels.check(kernels, device)
    except Exception as error:  # Triton, its compiler and the driver raise any exception
        raise_fault(error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        _log.warning("covey's kernels are not used on this GPU, so sampling and updates are slower: %s", reason)
        return None
    return kernels


@cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    library = _library()
    return None if library is None else Kernels(library, dtype)


@cache
def _library() -> ctypes.CDLL | None:
    """The kernels of the wheel, else compiled ones; None if they cannot be compiled, with a warning."""
    try:
        return load_prebuilt() or load_library(find_compiler())
    except (BuildError, ConfigError) as error:
        _log.warning(
            "covey's kernels are not used, so sampling and updates are slower and bf16 is rounded elsewhere: %s", error
        )
        return None
