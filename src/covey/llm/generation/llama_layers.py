"""Layers of a Llama-like decoder for one new token per row, with a minimal number of torch operations.

With one token per row, the overhead of calling an operation is as large as its computation, and transformers calls 1.5
times as many operations. The residual stream is in fp32, as in the kernels.

Shapes: R rows, W hidden width, H heads, K key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from covey.llm.generation.prepacked_linear import PackedLinear
from covey.llm.model.architecture import Heads, LayerModules
from covey.llm.model.prefix_attention import Layout


class PackedLayer:
    """The modules of a layer, and its linear layers with prepacked weights."""

    def __init__(self, layer: Any) -> None:
        self.modules = modules = LayerModules.of(layer)
        self.qkv = PackedLinear(*modules.qkv)
        self.output = PackedLinear(modules.output)
        self.gate_up = PackedLinear(*modules.gate_up)
        self.down = PackedLinear(modules.down)


class LlamaLayers:
    """All layers and the output layer. The layout computes attention and stores keys and values."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base = cast(Any, module.base_model)  # with `embed_tokens`, `rotary_emb`, `layers` and `norm`
        self.layers = [PackedLayer(layer) for layer in self.base.layers]
        self.norm = self.base.norm.weight.detach()
        self.head = PackedLinear(module.get_output_embeddings())  # type: ignore[arg-type]
        self.heads = Heads.of(module)
        self.exact = torch.promote_types(module.dtype, torch.float32)
        self.epsilon = torch.tensor(module.config.get_text_config().rms_norm_eps, dtype=self.exact)

    def __call__(self, tokens_R: Tensor, positions_R: Tensor, layout: Layout) -> Tensor:
        """logits_RV of the next tokens."""
        residual_RW = self.base.embed_tokens(tokens_R).to(self.exact)
        angles = self._angles(residual_RW, positions_R)
        for number, layer in enumerate(self.layers):
            normed_RW = self._normalise(residual_RW, layer.modules.input_norm)
            query, key, value = self._queries_keys_values(layer, normed_RW, *angles)
            attended_RHD = layout.attend(number, query, key, value, self.heads.width**-0.5)
            residual_RW += layer.output(attended_RHD.flatten(1))
            gate, up = layer.gate_up(self._normalise(residual_RW, layer.modules.inner_norm)).chunk(2, dim=1)
            residual_RW += layer.down(F.silu(gate).mul_(up))
        return self.head(self._normalise(residual_RW, self.norm))

    def _angles(self, residual_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, 1, 2, D / 2] of the rotary embeddings (arXiv 2104.09864, eq. 34) for both halves of a
        head. The sines of the first half are negated."""
        angles = self.base.rotary_emb(residual_RW, positions_R[None])
        cosine, sine = (part[0].to(self.norm.dtype).unflatten(1, (1, 2, -1)) for part in angles)
        return cosine, torch.cat([-sine[:, :, :1], sine[:, :, 1:]], dim=2)

    def _queries_keys_values(
        self, layer: PackedLayer, normed_RW: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries [H, R, D], keys [K, R, D] and values [K, R, D], with rotary embeddings on queries and keys."""
        heads = self.heads
        parts_RHD = layer.qkv(normed_RW).unflatten(1, (-1, heads.width))
        rotary, value = parts_RHD.split([heads.queries + heads.keys, heads.keys], dim=1)
        if layer.modules.query_norm is not None and layer.modules.key_norm is not None:
            query, key = rotary.split([heads.queries, heads.keys], dim=1)
            norms = self._normalise(query, layer.modules.query_norm), self._normalise(key, layer.modules.key_norm)
            rotary = torch.cat(norms, dim=1)
        halves = rotary.unflatten(2, (2, -1))
        rotated = torch.addcmul(halves * cosine, halves.roll(1, dims=2), sine).flatten(2)
        query, key = rotated.split([heads.queries, heads.keys], dim=1)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (arXiv 1910.07467, eq. 4): weight * x / rms(x), rounded once to the dtype of the weight."""
        x = x.to(self.exact)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(weight.dtype)
