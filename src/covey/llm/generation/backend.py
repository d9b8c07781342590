"""Selects the code that evaluates and samples a model. This is the only place where it is selected.

The rows are tried in this order:

| sampling        | decoder               | update | model                                                             |
|-----------------|-----------------------|--------|-------------------------------------------------------------------|
| native          | `NativeDecoder`       | packed | Llama-like, bf16 or fp32, on a CPU with kernels                   |
| native          | `GraphDecoder`        | packed | the same on a GPU with Triton                                     |
| shared prefix   | `SharedPrefixDecoder` | packed | others whose attention takes a layout                             |
| padded cache    | `CacheDecoder`        | by row | other attention, and recurrent models whose state ignores padding |
| cache by length | `CacheDecoder`        | by row | models that padding changes                                       |
| no cache        | `FullForwardDecoder`  | by row | models whose cache does not give the numbers of a forward pass    |
| cache by length | `CacheDecoder`        | by row | vision-language models in runs whose prompts have images          |
| refused         |                       |        | random, not autoregressive, without a gradient, with other inputs |

The layers depend on the dtype and on the instructions of the processor (`Kernels.instruction_set`):

| sampling      | dtype, instructions        | layers while sampling                    | attention               |
|---------------|----------------------------|------------------------------------------|-------------------------|
| native        | bf16, AMX or AVX512-BF16   | `TiledStack`: one C++ call for a token   | C++                     |
| native        | fp32, or AVX-512, AVX2     | `PackedStack`: oneDNN products, else C++ | C++                     |
| native        | on a GPU                   | one CUDA graph: torch products, Triton   | Triton                  |
| shared prefix | Llama-like on a CPU        | `LlamaLayers`: oneDNN products and torch | `SharedPrefixAttention` |
| shared prefix | others                     | `OwnForward`: transformers' layers       | `SharedPrefixAttention` |
| the others    | any                        | transformers' layers                     | transformers' choice    |

| part of the update         | native                              | shared prefix                | by row        |
|----------------------------|-------------------------------------|------------------------------|---------------|
| layers                     | `fused_layers`: C++ or Triton       | transformers'                | transformers' |
| attention                  | the same, tiled as FlashAttention   | `PackedLayout.attend`: torch | transformers' |
| weight gradients of layers | C++ with AMX (no bias), else torch  | torch                        | torch         |
| log-probabilities, entropy | `logprobs`: C++ or Triton           | with kernels, else torch     | torch         |

Tokens are drawn by the kernels from logits in bf16 or fp32, for every model, else by torch (`token_sampling`). A CPU
has kernels if a wheel brought them or a C++ compiler is found, a GPU if Triton is installed and its kernels have
torch's numbers (`check`). Neither has them if `COVEY_NATIVE` is 0.

The choice does not depend on an architecture's name: every row is tested on random tokens, in fp32, and must give the
logits of one plain forward pass over each sequence (`plain_forward.py`). The prompts of the test are longer than every
attention window in the config, because a window has no effect on shorter ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import cast

import torch
from transformers import PreTrainedModel

from covey.config import ConfigError
from covey.llm.generation.decoder import Decoder, SlotDecoder, token_bytes
from covey.llm.generation.hf_cache_decoder import CacheDecoder, FullForwardDecoder
from covey.llm.generation.native_decoder import NativeDecoder
from covey.llm.generation.shared_prefix_decoder import SharedPrefixDecoder
from covey.llm.generation.trial import Trial, attention_note, in_fp32
from covey.llm.model.architecture import Heads, obstacle
from covey.llm.model.prefix_attention import all_scores
from covey.llm.native.bindings import Kernels, KernelSet, kernels_for


class Sampling(StrEnum):
    """The first column of the table."""

    NATIVE = "native"
    SHARED_PREFIX = "shared prefix"
    PADDED_CACHE = "padded cache"
    CACHE_BY_LENGTH = "cache by length"
    NO_CACHE = "no cache"


NOT_BY_KERNELS = "covey's kernels do not compute %s, so torch does"
CHUNK = 128  # tokens of replies in conversations that are fed at once
SAMPLING_BY_CACHE = (Sampling.PADDED_CACHE, Sampling.CACHE_BY_LENGTH, Sampling.NO_CACHE)


@dataclass(frozen=True)
class Backend:
    """The code that evaluates and samples a model, chosen once by `choose_backend`."""

    model: str  # the name of its class
    sampling: Sampling
    kernels: KernelSet  # of all computations that have kernels
    instructions: str | None  # instruction set of the kernels for the model's dtype; None: torch without kernels
    row_bytes: int = 0  # memory of a row while sampling, independent of its length
    token_bytes: int = 0  # memory of each token of a row while sampling
    note: str = ""  # for the user, or empty

    @property
    def shares_prompts(self) -> bool:
        """True if the prompt of a group is computed once, in the update and while sampling."""
        return self.sampling not in SAMPLING_BY_CACHE

    def decoder(self, module: PreTrainedModel, rows: int, max_new_tokens: int) -> Decoder:
        """A decoder on the model's weights, for at most `rows` rows at a time."""
        if self.sampling is Sampling.NATIVE:
            kernels = self.kernels.of(next(module.parameters()))
            if isinstance(kernels, Kernels):
                return NativeDecoder(module, kernels, rows, max_new_tokens)
            from covey.llm.generation.graph_decoder import GraphDecoder  # needs Triton

            return GraphDecoder(module, kernels, rows, max_new_tokens)
        if self.sampling is Sampling.SHARED_PREFIX:
            return SharedPrefixDecoder(module, rows)
        if self.sampling is Sampling.NO_CACHE:
            return FullForwardDecoder(module, rows)
        return CacheDecoder(module, rows, pads=self.sampling is Sampling.PADDED_CACHE)

    def conversation_decoder(self, module: PreTrainedModel, rows: int, max_new_tokens: int) -> SlotDecoder | None:
        """A decoder whose rows can be parked; None if the model has none.

        On a CPU, its bits do not depend on the other rows.
        """
        if self.sampling is not Sampling.NATIVE:
            return None
        kernels = self.kernels.of(next(module.parameters()))
        if isinstance(kernels, Kernels):
            return NativeDecoder(module, kernels, rows, max_new_tokens, chunk=CHUNK)
        return cast(SlotDecoder, self.decoder(module, rows, max_new_tokens))

    def recorded(self) -> dict[str, str]:
        """The choice as recorded in a run and in `summary.json`; compared when a run is resumed."""
        return {
            "update": "packed" if self.shares_prompts else "by row",
            "sampling": str(self.sampling),
            "kernels": "torch's" if self.instructions is None else f"covey's, {self.instructions}",
        }

    def describe(self) -> str:
        """One line for the user."""
        prompts = "shared within a group" if self.shares_prompts else "not shared within a group, which is slower"
        choice = "; ".join(f"{name}: {value}" for name, value in self.recorded().items())
        return f"{self.model}: {choice}; prompts are {prompts}{f'; {self.note}' if self.note else ''}"


def find_kernels(device: torch.device, dtype: torch.dtype | None = None) -> KernelSet:
    """The kernels of a device: of every dtype on a CPU, on a GPU of `dtype` alone.

    Those of a CPU are compiled at first use, which takes about 20 s; those of a GPU for every type and shape.
    """
    wanted = (torch.bfloat16, torch.float32) if dtype is None or device.type == "cpu" else (dtype,)
    found = {kind: kernels_for(kind, device) for kind in wanted}
    return KernelSet({kind: kernels for kind, kernels in found.items() if kernels is not None}, device.type)


@torch.no_grad()
def choose_backend(module: PreTrainedModel, example: Sequence[int] = ()) -> Backend:
    """Choose the first row of the table that works for the model.

    If prompts are shared, this sets the model's attention implementation to covey's.

    Args:
        module: the model.
        example: a prompt of the run with images, which then are sampled by a cache, by length; empty: there is none.

    Raises:
        ConfigError: if the model cannot be trained, in one line that names its architecture.
    """
    kernels = find_kernels(module.device, module.dtype)
    native = kernels.of(next(module.parameters()))
    instructions = None if native is None else native.instruction_set
    backend = Backend(type(module).__name__, Sampling.SHARED_PREFIX, kernels, instructions)
    if example:
        trial = Trial(module, example)
        with in_fp32(module):
            trial.refuse_unusable()
        trial.refuse_without_gradient()
        return _sampled_by_cache(backend, module, trial, (Sampling.CACHE_BY_LENGTH,))
    if native is not None and not (reason := obstacle(module, native.features)):
        found = _by_trial(replace(backend, sampling=Sampling.NATIVE), module)
        if isinstance(found, Backend):
            return found
        reason = f"this model, whose trial failed ({found})"
    found = _by_trial(backend, module)
    assert isinstance(found, Backend)
    if native is None:
        return found
    return replace(found, note="; ".join(filter(None, (found.note, NOT_BY_KERNELS % reason))))


def _by_trial(backend: Backend, module: PreTrainedModel) -> Backend | str:
    """The backend, or one that samples by a cache in its place; of a backend with kernels, what its trial failed by.

    Raises:
        ConfigError: if the model cannot be trained.
    """
    by_kernels = backend.sampling is Sampling.NATIVE
    trial = Trial(module, by_kernels=by_kernels)
    with all_scores(by_kernels):
        with in_fp32(module):
            trial.refuse_unusable()
            backend = replace(backend, note=attention_note(trial))
            shares = trial.shares_prompts()
        trial.refuse_without_gradient()
        if shares:
            if trial.samples(partial(backend.decoder, module), exact=module.dtype in (torch.float32, torch.float64)):
                return _with_token_bytes(backend, module)
            trial.restore_attention()
    return trial.fault or "other logits" if by_kernels else _sampled_by_cache(backend, module, trial)


def _sampled_by_cache(
    backend: Backend, module: PreTrainedModel, trial: Trial, kinds: Sequence[Sampling] = SAMPLING_BY_CACHE
) -> Backend:
    """The first cache decoder of `kinds` that gives the logits of the plain forward pass and runs in the model's dtype.

    Raises:
        ConfigError: if there is none.
    """
    for sampling in kinds:
        backend = replace(backend, sampling=sampling)
        make_decoder = partial(backend.decoder, module)
        with in_fp32(module):
            fits = trial.samples(make_decoder, exact=True)
        if fits and trial.samples(make_decoder, exact=False):
            short, long = (trial.state_bytes(make_decoder, length) for length in (4, 12))
            token_bytes = max((long - short) // 8, 1)
            return replace(backend, row_bytes=max(short - 4 * token_bytes, 0), token_bytes=token_bytes)
    fault = f" ({trial.fault})" if trial.example and trial.fault else ""
    raise ConfigError(f"{type(module).__name__} cannot be sampled by covey{fault}: {trial.advice}")


def _with_token_bytes(backend: Backend, module: PreTrainedModel) -> Backend:
    """The backend with `token_bytes` set to the size of a token's keys and values."""
    heads, layers = Heads.of(module), module.config.get_text_config().num_hidden_layers
    return replace(backend, token_bytes=token_bytes(layers, heads, module.dtype.itemsize))
