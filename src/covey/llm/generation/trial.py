"""Tests of a model on random tokens: whether it can be trained, and which implementations give its own logits.

Shapes: L tokens of a sequence, R rows, S prompts, D decisions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.config import ConfigError
from covey.config.files import raise_fault
from covey.data import Batch
from covey.llm.generation.decoder import Decoder
from covey.llm.generation.hf_cache_decoder import CacheDecoder, FullForwardDecoder
from covey.llm.model.architecture import (
    exact_length,
    is_llama_like,
    layers_of,
    logit_scale,
    longest_row,
    vocabulary_of,
    windows_of,
)
from covey.llm.model.images import placeholders
from covey.llm.model.logprobs import EXCLUDED_LOGIT, hidden_states_for_actions, row_lengths, row_tokens
from covey.llm.model.plain_forward import PlainPasses, exact_logprobs, next_token_logits
from covey.llm.model.prefix_attention import IMPLEMENTATION
from covey.llm.model.recompute import decoder_layers

MakeDecoder = Callable[[int, int], Decoder]  # from a number of rows and max_new_tokens

# Longer attention windows are not tested, because this takes too long: models with one do not share prompts.
MAX_TESTED_WINDOW = 64
# Of log-probabilities in fp32, relative to their largest deviation from the mean.
TOLERANCE = 2e-4
EAGER_AND_SDPA = ("eager", "sdpa")  # the two that transformers has on every device
MIN_TOKENS = 16  # minimal length of the longest row of a trial


class Trial:
    """Random tokens, and the logits of the model's own forward pass."""

    def __init__(self, module: PreTrainedModel, example: Sequence[int] = (), *, by_kernels: bool = False) -> None:
        """
        Args:
            module: the model.
            example: a prompt with images that decoders are tried with; empty: of a run without images.
            by_kernels: kernels compute the model's layers. Their own check tests long windows of attention.
        """
        self.module, self.by_kernels = module, by_kernels
        self.fault = ""  # of the last implementation that raised an exception
        self.attention = _attention_settings(module)
        exact = exact_length(module.config)
        if exact is not None and exact[0] < MIN_TOKENS + 8:
            raise ConfigError(
                f"{type(module).__name__} cannot be trained: beyond {exact[0]} tokens {exact[1]}; choose another model"
            )
        longest = longest_row(module.config)
        room = 1 << 62 if longest is None else longest
        if by_kernels or is_llama_like(module):
            possible = sorted({layer.rule.window for layer in layers_of(module)} - {0})
        else:
            possible = [size for size in windows_of(module.config) if size < room]
        tested = [window for window in possible if window <= min(MAX_TESTED_WINDOW, room - 14)]
        self.has_untested_window = not by_kernels and len(tested) < len(possible)
        self.logit_scale = logit_scale(module) if by_kernels else 1.0
        self.window = max(tested, default=0)
        self.longest = max(MIN_TOKENS, self.window + 6)
        count = vocabulary_of(module)
        ids = [(7 * i * i + 11 * i + 5) % count for i in range(2 * self.longest + 40)]
        pad = getattr(module.config, "pad_token_id", None)
        if isinstance(pad, int) and 0 <= pad < count:
            ids[::11] = [pad] * len(ids[::11])  # a policy treats it as any other token
        if example:
            ids = [id for id in ids if id not in placeholders(module.config)]
        self.ids, self.example = ids, example
        self.device = module.device
        self.plain = PlainPasses(module, example)

    @property
    def advice(self) -> str:
        """The remedy in error messages: some models work in fp32 only."""
        exact = self.module.dtype in (torch.float32, torch.float64)
        return "choose another model" if exact else "try --precision fp32, or choose another model"

    def restore_attention(self) -> None:
        for config, implementation in self.attention:
            config._attn_implementation_internal = implementation

    def refuse_unusable(self) -> None:
        """Check that the model is a deterministic autoregressive function of tokens alone.

        Raises:
            ConfigError: if it is not, in one line that names the architecture.
        """
        name = type(self.module).__name__
        ids, alike = self.ids, self.longest - 4
        sequence, other = ids[: self.longest + 5], ids[:alike] + ids[self.longest : self.longest + 2]
        sums = _sums(self.module)
        try:
            whole, forked = self.plain.after([sequence, other])
        except Exception as error:  # whatever transformers raises for inputs that this model does not take
            raise_fault(error)
            raise ConfigError(
                f"{name} cannot be trained: its forward pass over tokens alone fails ({_first_line(error)}); "
                "choose another model"
            ) from error
        if bool(whole.isnan().any()):
            raise ConfigError(f"{name} cannot be trained: its logits are not numbers; the weights may be damaged")
        if sums != _sums(self.module):
            raise ConfigError(f"{name} cannot be trained: its forward pass changes its own weights")
        if len(whole) == len(sequence) and _agree(forked[:alike], whole[:alike]):
            return
        # Only here, a third pass distinguishes a model with random results from one that attends to later tokens.
        (again,) = PlainPasses(self.module).after([sequence])
        if not _agree(again, whole):
            raise ConfigError(f"{name} cannot be trained: two forward passes over the same tokens differ")
        is_no_decoder = getattr(self.module.config, "is_decoder", True) is False
        hint = "set is_decoder = true in its config.json" if is_no_decoder else "choose another model"
        raise ConfigError(
            f"{name} cannot be trained: its prediction of a token depends on the tokens after it, so it is not "
            f"an autoregressive language model; {hint}"
        )

    def refuse_without_gradient(self) -> None:
        """Check that a backward pass reaches the weights; the forward pass of some models has no gradient.

        Raises:
            ConfigError: if it does not.
        """
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not trainable:
            return
        # The gradient of the embedding passes through all layers and needs no weight gradients of the other matrices.
        embedding = [
            parameter
            for parameter in trainable
            if parameter is getattr(self.module.get_input_embeddings(), "weight", None)
        ]
        if not (self._has_gradient(embedding) or self._has_gradient(trainable)):
            raise ConfigError(
                f"{type(self.module).__name__} cannot be trained: transformers' code for it has no gradient on this "
                f"device; {self.advice}"
            )

    def _has_gradient(self, parameters: list[nn.Parameter]) -> bool:
        """True if a gradient reaches any of these parameters."""
        tokens_L = torch.tensor(self.ids[:8], device=self.device)
        try:
            with torch.enable_grad():
                logits_TV = next_token_logits(self.module, tokens_L, 4)
                gradients = torch.autograd.grad(exact_logprobs(logits_TV)[:, 0].sum(), parameters, allow_unused=True)
        except Exception as error:  # Reformer asserts that it is in training mode
            raise_fault(error)
            return False
        return any(gradient is not None for gradient in gradients)

    def shares_prompts(self) -> bool:
        """True if a packed forward pass gives the logits of the plain one; then sets the model's attention."""
        tokens_L = torch.tensor(self.ids[:8], device=self.device)
        if self.has_untested_window or not _head_is_last(self.module, tokens_L, self.logit_scale):
            return False
        if not self.module._can_set_attn_implementation():
            return False
        try:
            return all(self._packs(length) for length in sorted({MIN_TOKENS, self.longest}))
        except Exception as error:  # model code that does not support a layout may raise any exception
            raise_fault(error)
            return False
        finally:
            if not self._shares:
                self.restore_attention()

    _shares = False

    def _packs(self, length: int) -> bool:
        batch = probe_batch(self.ids, length).to(self.device)
        self._shares = False
        self.restore_attention()
        plain = self._plain_of(batch)
        self.module.set_attn_implementation(IMPLEMENTATION)
        decided = hidden_states_for_actions(self.module.base_model, batch, packed=True)
        head: Any = self.module.get_output_embeddings()
        logits_NV = head(decided.hidden_NW) / self.logit_scale
        self._shares = _agree(logits_NV[decided.index_D], plain)
        return self._shares

    def _plain_of(self, batch: Batch) -> Tensor:
        lengths = row_lengths(batch)
        fed = [row_tokens(batch, row, length).tolist()[:-1] for row, length in enumerate(lengths)]
        return torch.cat(
            [
                logits_LV[-length:][mask_T[:length]]
                for logits_LV, length, mask_T in zip(self.plain.after(fed), lengths, batch.mask_BT, strict=True)
            ]
        )

    def samples(self, make_decoder: MakeDecoder, *, exact: bool) -> bool:
        """True if a decoder works: unequal prompts, removed and copied rows, lengths beyond every attention window.

        Args:
            make_decoder: makes the decoder.
            exact: compare the logits with those of the plain forward pass; otherwise only check that none is NaN.
        """
        prompts: list[Sequence[int]] = [
            self.example or self.ids[: self.longest], self.ids[self.longest : self.longest + max(3, self.window - 3)]
        ]  # fmt: skip
        try:
            contexts, logits = _decode(make_decoder, prompts, self.ids[::-1])
            if not exact:
                return not any(bool(logits_V.isnan().any()) for logits_V in logits)
            plain = [logits_LV[-1] for logits_LV in self.plain.after(contexts)]
        except Exception as error:  # a cache that the model does not support may raise any exception
            raise_fault(error)
            self.fault = _first_line(error)
            return False
        return _agree(torch.stack(logits), torch.stack(plain))

    def state_bytes(self, make_decoder: MakeDecoder, length: int) -> int:
        """Memory of the state of a row with this many tokens."""
        decoder = make_decoder(1, 1)
        decoder.prefill([self.ids[:length]], 1)
        assert isinstance(decoder, (CacheDecoder, FullForwardDecoder))
        return decoder.state_bytes()


def attention_note(trial: Trial) -> str:
    """A note if transformers' own attention, eager and sdpa, gives two distributions for this model; else empty.

    Every other trial compares with the implementation that the model has, so none of them can detect this.
    """
    ours = trial.module.config._attn_implementation
    if is_llama_like(trial.module) or not trial.module._supports_sdpa or ours not in EAGER_AND_SDPA:
        return ""
    ids = trial.ids[: trial.longest]
    (known,) = trial.plain.after([ids])
    other = EAGER_AND_SDPA[1 - EAGER_AND_SDPA.index(ours)]
    try:
        for config, _ in trial.attention:
            config._attn_implementation_internal = other
        (found,) = PlainPasses(trial.module).after([ids])
    except Exception as error:  # whatever transformers raises for a model without this implementation
        raise_fault(error)
        return ""
    finally:
        trial.restore_attention()
    if _agree(found, known):
        return ""
    return (
        f"transformers' {other} attention gives other log-probabilities than the {ours} attention that is used, "
        f"{float((exact_logprobs(found) - exact_logprobs(known)).abs().max()):.2g} nats at most"
    )


def _decode(
    make_decoder: MakeDecoder, prompts: Sequence[Sequence[int]], ids: list[int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Decode a few rows of two prompts with tokens of `ids`; contexts, and the logits of the token after each."""
    decoder = make_decoder(4, 8)
    size = 1 if decoder.can_fork else 2
    logits_SV = decoder.prefill(prompts, size)
    seen, found = [list(prompt) for prompt in prompts], list(logits_SV)
    rows = [list(prompt) for prompt in prompts for _ in range(size)]
    fresh = iter(ids)
    for keep in ([0, 0, 1] if size == 1 else [0, 1, 2], None, [0, 2], None, [1], None):
        if keep is not None:
            decoder.select(torch.tensor(keep, device=logits_SV.device))
            rows = [list(rows[row]) for row in keep]
        for row in rows:
            row.append(next(fresh))
        logits_RV = decoder.step(torch.tensor([row[-1] for row in rows], device=logits_SV.device))
        seen += [list(row) for row in rows]
        found += list(logits_RV.clone())
    return seen, found


def probe_batch(ids: list[int], length: int) -> Batch:
    """Two groups of two short rollouts; their prompts have a common prefix, the longest row has `length` tokens."""
    common = length - 8
    one, other = (tuple(ids[:common] + rest) for rest in (ids[common : common + 4], ids[common + 6 : common + 8]))
    actions_BT = torch.tensor(ids[common + 4 : common + 20]).view(4, 4)  # the first row is the first of `ids`
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    return Batch.blank(
        mask_BT, context=(one, one, other, other), actions_BT=actions_BT, group_B=torch.tensor([0, 0, 1, 1])
    )


def _agree(ours: Tensor, plain: Tensor) -> bool:
    """True if two tensors of logits are the same distributions up to rounding."""
    ours, plain = exact_logprobs(ours), exact_logprobs(plain)
    if ours.shape != plain.shape:
        return False
    finite = plain > EXCLUDED_LOGIT / 2
    scale = (plain - plain[finite].mean())[finite].abs().max()
    gap = torch.where(ours == plain, 0.0, ours - plain).abs().max()  # both may be -inf
    return bool(gap <= TOLERANCE * scale)


def _sums(module: nn.Module) -> list[float]:
    """Sum of every parameter, to detect changed weights."""
    return [float(parameter.sum()) for parameter in module.parameters()]


def _head_is_last(module: PreTrainedModel, tokens_L: Tensor, scale: float) -> bool:
    """True if the logits are exactly the output layer applied to the decoder's last hidden states, divided by `scale`.

    Some models scale or cap the input or the output of their output layer. A cap hardly changes small logits, so a hook
    replaces the output by large values.
    """
    head = module.get_output_embeddings()
    base = module.base_model
    if not isinstance(head, nn.Linear) or base is module:
        return False
    seen: dict[str, Tensor] = {}

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        seen["output"] = torch.linspace(-300, 300, output.numel(), device=output.device).view_as(output).to(output)
        return seen["output"]

    hook = head.register_forward_hook(replace_output)
    try:
        logits = module(input_ids=tokens_L[None]).logits
        hidden = base(input_ids=tokens_L[None]).last_hidden_state
        expected = (seen["output"] / scale).to(logits.dtype)
        return torch.equal(logits, expected) and torch.allclose(seen["input"], hidden, rtol=1e-4)
    except Exception:  # an output or a base model of another form
        return False
    finally:
        hook.remove()


@contextmanager
def in_fp32(module: PreTrainedModel) -> Iterator[None]:
    """Context manager that converts bf16 and fp16 tensors of a module to fp32 and back.

    On a GPU a decoder layer is fp32 only while it computes: all layers together would need twice the memory of the
    model, which training with an adapter may not need.
    """
    layers = decoder_layers(module) if module.device.type == "cuda" else []
    in_layers = {id(tensor) for layer in layers for tensor in _low(layer)}
    with ExitStack() as stack:
        stack.enter_context(_converted([tensor for tensor in _low(module) if id(tensor) not in in_layers]))
        for layer in layers:
            stack.enter_context(_converted_in_calls(layer))
        yield


def _low(module: nn.Module) -> list[Tensor]:
    tensors = (*module.parameters(), *module.buffers())
    return [tensor for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]


@contextmanager
def _converted(tensors: list[Tensor]) -> Iterator[None]:
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


@contextmanager
def _converted_in_calls(layer: nn.Module) -> Iterator[None]:
    calls: list[ExitStack] = []

    def begin(*_: object) -> None:
        calls.append(ExitStack())
        calls[-1].enter_context(_converted(_low(layer)))

    def end(*_: object) -> None:
        calls.pop().close()

    hooks = layer.register_forward_pre_hook(begin), layer.register_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _attention_settings(module: nn.Module) -> list[tuple[Any, str | None]]:
    """Every config of the model and of its submodules, with its attention implementation."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [part.config for part in module.modules() if hasattr(part, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [(config, config._attn_implementation_internal) for config in configs.values()]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
