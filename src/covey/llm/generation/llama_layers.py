"""The layers of a Llama-like decoder for the newest tokens of some rows, in as few torch operations as can be.

So few tokens meet so many layers that calling an operation takes as long as what it does, and transformers calls half
as many again. In bf16 the sum that runs through all layers is kept in fp32, as the kernels do.

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
    """A layer's parts, and its linear layers with packed weights."""

    def __init__(self, layer: Any) -> None:
        self.parts = parts = LayerModules.of(layer)
        self.qkv = PackedLinear(*parts.qkv)
        self.output = PackedLinear(parts.output)
        self.gate_up = PackedLinear(*parts.gate_up)
        self.down = PackedLinear(parts.down)


class LlamaLayers:
    """All layers and the head. What a token attends to, and what becomes of its keys, the layout knows."""

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
        total_RW = self.base.embed_tokens(tokens_R).to(self.exact)
        angles = self._angles(total_RW, positions_R)
        for number, layer in enumerate(self.layers):
            normed_RW = self._normalise(total_RW, layer.parts.input_norm)
            query, key, value = self._queries_keys_values(layer, normed_RW, *angles)
            attended_RHD = layout.attend(number, query, key, value, self.heads.width**-0.5)
            total_RW += layer.output(attended_RHD.flatten(1))
            gate, up = layer.gate_up(self._normalise(total_RW, layer.parts.inner_norm)).chunk(2, dim=1)
            total_RW += layer.down(F.silu(gate).mul_(up))
        return self.head(self._normalise(total_RW, self.norm))

    def _angles(self, total_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, 1, 2, D / 2] of the rotary positions (arXiv 2104.09864, eq. 34), for both halves of a
        head: the sines of the first have the sign that the other half comes with."""
        angles = self.base.rotary_emb(total_RW, positions_R[None])
        cosine, sine = (part[0].to(self.norm.dtype).unflatten(1, (1, 2, -1)) for part in angles)
        return cosine, torch.cat([-sine[:, :, :1], sine[:, :, 1:]], dim=2)

    def _queries_keys_values(
        self, layer: PackedLayer, normed_RW: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, ...]:
        """[H, R, D], [K, R, D] and [K, R, D], turned by their positions."""
        heads = self.heads
        parts_RHD = layer.qkv(normed_RW).unflatten(1, (-1, heads.width))
        turning, value = parts_RHD.split([heads.queries + heads.keys, heads.keys], dim=1)
        if layer.parts.query_norm is not None and layer.parts.key_norm is not None:
            query, key = turning.split([heads.queries, heads.keys], dim=1)
            norms = self._normalise(query, layer.parts.query_norm), self._normalise(key, layer.parts.key_norm)
            turning = torch.cat(norms, dim=1)
        halves = turning.unflatten(2, (2, -1))
        turned = torch.addcmul(halves * cosine, halves.roll(1, dims=2), sine).flatten(2)
        query, key = turned.split([heads.queries, heads.keys], dim=1)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """weight * x / rms(x) over the last dimension (arXiv 1910.07467, eq. 4), rounded once, to the weight's type."""
        x = x.to(self.exact)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(weight.dtype)
