"""The kernels, kernels.cpp and its headers, called through ctypes; build.py compiles them.

Shapes: R rows, W hidden width, I width inside the MLP, H heads, K key-value heads, D head width, V vocabulary; of a
linear layer: T tokens, M outputs, N inputs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from covey.config import ConfigError
from covey.llm.native.build import BuildError, find_compiler, load_library
from covey.runtime.device import cpu_info

PAD = 32  # `PAD` in simd.h: keys and values lie in rows of a multiple of it
SWITCH = "COVEY_NATIVE"  # 0 in the environment: torch alone

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # flag of /proc/cpuinfo: name
_log = logging.getLogger("covey")


class AttentionArgs(ctypes.Structure):
    """`Attention` in decode_attention.h: where everything lies, as addresses."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cosine", "sine", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("prompt_keys", "prompt_values", "prompt_lengths")),
        *((name, ctypes.c_void_p) for name in ("own_keys", "own_values", "slots", "decoded", "out")),
        *((name, ctypes.c_int32) for name in ("qkv_row_stride", "out_row_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "kv_heads", "width", "capacity", "layer", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "epsilon")),
    )


class SharedAttention(ctypes.Structure):
    """`SharedAttention` in prefix_attention.h: the tokens of sequences that share prefixes, and where they lie."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "cosine", "sine", "out", "logsumexp")),
        *((name, ctypes.c_void_p) for name in ("dout", "dquery", "dkey", "dvalue", "sequences")),
        *((name, ctypes.c_int32) for name in ("count", "heads", "kv_heads", "width", "threads")),
        ("scaling", ctypes.c_float),
    )


class WeightGradients(ctypes.Structure):
    """`WeightGradients` in weight_gradients.h: linear layers with one input, and where everything lies."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("d", ctypes.POINTER(ctypes.c_void_p)),
        ("out", ctypes.POINTER(ctypes.c_void_p)),
        ("outputs", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.c_int32) for name in ("layers", "tokens", "inputs", "threads")),
    )


class Linear(ctypes.Structure):
    """`Linear` in decode_step.h: a linear layer whose weight lies as tiles."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("outputs", "inputs")),
    )


class Layer(ctypes.Structure):
    """`Layer` in decode_step.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "query_norm", "key_norm", "inner_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
    )


class Step(ctypes.Structure):
    """`Step` in decode_step.h: one new token of every row, from its embedding to the logits of the next."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("head", Linear),
        ("attention", AttentionArgs),
        ("own_per_layer", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "normed", "qkv", "attended", "gated", "logits")),
        ("layer_count", ctypes.c_int32),
    )


class Kernels:
    """The entry points for one storage type. Every tensor given is on the CPU, contiguous, and of that type."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype

        def entry(name: str, *types: Any, returns: type | None = None) -> Callable[..., Any]:
            function = getattr(library, f"{name}_{_SUFFIXES[dtype]}")
            function.argtypes, function.restype = types, returns
            return function  # type: ignore[no-any-return]

        address, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
        shape = number, number, real, number
        self._add_and_normalise = entry("add_and_normalise", *[address] * 6, *shape)
        self._add_and_normalise_backward = entry("add_and_normalise_backward", *[address] * 8, number, number, number)
        self._normalise = entry("normalise", *[address] * 4, *shape)
        self._swiglu = entry("swiglu", address, address, number, address, number, number, number)
        self._swiglu_backward = entry("swiglu_backward", *[address] * 5, ctypes.c_int64, number)
        self._normalise_backward = entry("normalise_backward", *[address] * 6, number, number, number)
        self._prefix_attention = entry("prefix_attention", ctypes.POINTER(SharedAttention))
        self._store_prompt_kv = entry("store_prompt_kv", *[address] * 4, number, number, number)
        self._attend = entry("attend", ctypes.POINTER(AttentionArgs))
        self._sample_tokens = entry(
            "sample_tokens", address, address, real, address, address, number, number, number, returns=ctypes.c_int
        )
        self._logprob_entropy = entry("logprob_entropy", address, address, real, *[address] * 3, number, number, number)
        library.has_pairs.restype = library.has_tiles.restype = ctypes.c_bool
        # Whether the processor multiplies pairs of bf16 (AVX512-BF16), and whether whole tiles of them (AMX).
        self.has_pairs, self.has_tiles = (
            dtype == torch.bfloat16 and has() for has in (library.has_pairs, library.has_tiles)
        )
        if self.has_tiles:
            self._weight_gradients = entry("weight_gradients", ctypes.POINTER(WeightGradients))
        if self.has_pairs:
            self._prepack_weight = entry("prepack_weight", address, number, number, address, number)
            self._multiply = entry("multiply", address, ctypes.POINTER(Linear), address, number, number)
            self._decode = entry("decode", ctypes.POINTER(Step))
        self._slope = entry("logit_gradients", *[address] * 6, real, ctypes.c_int64, number, number, number)

    @property
    def instruction_set(self) -> str:
        """The instructions of the matrix products; the other kernels use the widest vectors of the processor."""
        if self.has_tiles or self.has_pairs:
            return "AMX" if self.has_tiles else "AVX512-BF16"
        flags = cpu_info("flags").split()  # what -march=native compiles for
        return next((name for flag, name in _VECTORS.items() if flag in flags), platform.machine())

    def add_and_normalise(
        self,
        hidden: Tensor,
        added: Tensor | None,
        weight_W: Tensor,
        epsilon: float,
        total: Tensor,
        out: Tensor,
        scales: Tensor | None = None,
    ) -> None:
        """total = hidden + added; out = weight * total / rms(total), and 1 / rms of every row into `scales`.

        `hidden` and `total` (which may be the same) are fp32. Where nothing is added, `total` is left alone.
        """
        rows, width = hidden.numel() // len(weight_W), len(weight_W)
        where = (address_of(tensor) for tensor in (hidden, added, total, weight_W, out, scales))
        self._add_and_normalise(*where, rows, width, epsilon, torch.get_num_threads())

    def add_and_normalise_backward(
        self, total: Tensor, weight_W: Tensor, scales: Tensor, d: Tensor, past: Tensor | None, adds: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of hidden, of added where anything was (the same, in its type) and of the weight (fp32), from those
        of `out` and of `total`."""
        threads = torch.get_num_threads()
        dtotal, parts = torch.empty_like(total), torch.empty(threads, len(weight_W))
        narrows = adds and d.dtype != dtotal.dtype
        dadded = torch.empty_like(total, dtype=d.dtype) if narrows else None
        where = (address_of(tensor) for tensor in (total, weight_W, scales, d, past, dtotal, dadded, parts))
        self._add_and_normalise_backward(*where, scales.numel(), len(weight_W), threads)
        return dtotal, dtotal if adds and not narrows else dadded, parts.sum(dim=0)

    def normalise(self, x: Tensor, weight_W: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """weight * x / rms(x) over the last dimension, and 1 / rms of every row."""
        out, scales = torch.empty_like(x), torch.empty(x.numel() // len(weight_W))
        where = (tensor.data_ptr() for tensor in (x, weight_W, out, scales))
        self._normalise(*where, len(scales), len(weight_W), epsilon, torch.get_num_threads())
        return out, scales

    def normalise_backward(self, x: Tensor, weight_W: Tensor, scales: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `normalise` for x and for the weight (fp32)."""
        threads = torch.get_num_threads()
        dx, parts = torch.empty_like(x), torch.empty(threads, len(weight_W))
        given = (tensor.data_ptr() for tensor in (x, weight_W, scales, d, dx, parts))
        self._normalise_backward(*given, len(scales), len(weight_W), threads)
        return dx, parts.sum(dim=0)

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up. `gate` and `up` may be the two halves of one tensor."""
        rows, width = out.shape
        where = gate.data_ptr(), up.data_ptr(), gate.stride(0), out.data_ptr()
        self._swiglu(*where, rows, width, torch.get_num_threads())

    def swiglu_backward(self, gate: Tensor, up: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `gate` for both."""
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        given = (tensor.data_ptr() for tensor in (gate, up, d, dgate, dup))
        self._swiglu_backward(*given, d.numel(), torch.get_num_threads())
        return dgate, dup

    def weight_gradients(self, x_TN: Tensor, d_TM: Sequence[Tensor], out_MN: Sequence[Tensor]) -> None:
        """out = d' x for each of some linear layers with the same input."""
        if not self.has_tiles:
            for d, out in zip(d_TM, out_MN, strict=True):
                torch.mm(d.T, x_TN, out=out)
            return
        addresses, numbers = ctypes.c_void_p * len(d_TM), ctypes.c_int32 * len(d_TM)
        shape = WeightGradients(
            x=x_TN.data_ptr(),
            d=addresses(*(d.data_ptr() for d in d_TM)),
            out=addresses(*(out.data_ptr() for out in out_MN)),
            outputs=numbers(*(d.shape[1] for d in d_TM)),
            layers=len(d_TM), tokens=len(x_TN), inputs=x_TN.shape[1], threads=torch.get_num_threads(),
        )  # fmt: skip
        self._weight_gradients(ctypes.byref(shape))

    def prefix_attention(self, sequences_S3: Tensor, width: int, scaling: float, **places: Tensor) -> None:
        """Causal attention of heads `width` wide, of which sequences share keys and values; or its gradients.

        Args:
            sequences_S3: `PackedLayout.sequences`.
            places: what `SharedAttention` has addresses of: query, key, value, cosine, sine, out and logsumexp; for the
                gradients, from those of `out` in dout: dquery, dkey and dvalue too.
        """
        heads, kv_heads = (places[name].shape[1] // width for name in ("query", "key"))
        shape = SharedAttention(
            **{name: place.data_ptr() for name, place in places.items()}, sequences=sequences_S3.data_ptr(),
            count=len(sequences_S3), heads=heads, kv_heads=kv_heads, width=width,
            threads=torch.get_num_threads(), scaling=scaling,
        )  # fmt: skip
        self._prefix_attention(ctypes.byref(shape))

    def store_prompt_kv(self, keys_KPD: Tensor, values_KPD: Tensor, kept_keys: Tensor, kept_values: Tensor) -> None:
        """Keys and values of a prompt in one layer, as `attend` reads them: a head takes padded(P) x padded(D)."""
        where = (tensor.data_ptr() for tensor in (keys_KPD, values_KPD, kept_keys, kept_values))
        self._store_prompt_kv(*where, *keys_KPD.shape)

    def attend(self, args: AttentionArgs) -> None:
        """Rotate queries and keys, store keys and values of the new tokens, and attend."""
        self._attend(ctypes.byref(args))

    def prepack_weight(self, weight_MN: Tensor) -> Tensor:
        """A linear layer's weight as `multiply` and `decode` read it. Like these only where it `has_pairs`."""
        outputs, inputs = weight_MN.shape
        tiles = weight_MN.new_empty(padded(outputs) * padded(inputs))
        self._prepack_weight(weight_MN.data_ptr(), outputs, inputs, tiles.data_ptr(), torch.get_num_threads())
        return tiles

    def multiply(self, x_RN: Tensor, linear: Linear) -> Tensor:
        """x W' + b. `x` has a multiple of 16 rows, each of padded(N) numbers, those past N 0."""
        out_RM = x_RN.new_empty(len(x_RN), linear.outputs)
        self._multiply(x_RN.data_ptr(), ctypes.byref(linear), out_RM.data_ptr(), len(x_RN), torch.get_num_threads())
        return out_RM

    def decode(self, step: Step) -> None:
        """All layers, the last norm and the head."""
        self._decode(ctypes.byref(step))

    def sample_tokens(self, logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """As `token_sampling.sample_tokens`, for a temperature above 0.

        Raises:
            FloatingPointError: if the logits of a row define no distribution.
        """
        tokens_R = torch.empty(len(logits_RV), dtype=torch.int64)
        logprobs_R = torch.empty(len(logits_RV), dtype=torch.float32)
        where = tokens_R.data_ptr(), logprobs_R.data_ptr()
        failed = self._sample_tokens(
            logits_RV.data_ptr(), uniforms_R.data_ptr(), temperature, *where, *logits_RV.shape, torch.get_num_threads()
        )
        if failed:
            raise FloatingPointError(f"{failed} rows of logits define no distribution")
        return tokens_R, logprobs_R

    def logprob_entropy(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float, out: Sequence[Tensor]) -> None:
        """Log-probability of each token, entropy and log sum exp of softmax(logits / temperature), into `out`."""
        given = logits_NV.data_ptr(), tokens_N.data_ptr(), temperature, *(tensor.data_ptr() for tensor in out)
        self._logprob_entropy(*given, *logits_NV.shape, torch.get_num_threads())

    def logit_gradients(
        self,
        logits_NV: Tensor,
        tokens_N: Tensor,
        log_total_N: Tensor,
        entropy_N: Tensor,
        dlogprob_N: Tensor | None,
        dentropy_N: Tensor | None,
        temperature: float,
        first: int,
    ) -> None:
        """Turns the logits of some tokens of the vocabulary, from `first` on, into their gradients, in place."""
        of_row = (logits_NV, tokens_N, log_total_N, entropy_N, dlogprob_N, dentropy_N)
        given = (None if tensor is None else tensor.data_ptr() for tensor in of_row)
        self._slope(*given, temperature, first, *logits_NV.shape, torch.get_num_threads())


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def padded(count: int) -> int:
    """`count` rounded up to the kernels' block size."""
    return -(-count // PAD) * PAD


class KernelSet:
    """The kernels of a device by storage type; none if torch computes alone."""

    def __init__(self, kernels: Mapping[torch.dtype, Kernels]) -> None:
        self._kernels = kernels

    def of(self, tensor: Tensor) -> Kernels | None:
        """The kernels for tensors of this type on this device."""
        return self._kernels.get(tensor.dtype) if tensor.device.type == "cpu" else None


TORCH_ALONE = KernelSet({})


def kernels_for(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for tensors of this kind, where there are any: bf16 and fp32 on a CPU whose compiler was found."""
    if device.type != "cpu" or dtype not in _SUFFIXES:
        return None
    return _kernels(dtype)


@cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    library = _library()
    return None if library is None else Kernels(library, dtype)


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernels; if there are none, one line says why."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return load_library(find_compiler())
    except (BuildError, ConfigError) as error:
        _log.warning(
            "covey's kernels are not used, so sampling and updates are slower and bf16 is rounded elsewhere: %s", error
        )
        return None
