"""The kernels of `bindings.Kernels` for a GPU, in Triton.

Every kernel reads and writes each tensor once, where torch has an operation and a pass over memory for each step of a
formula. Sums have a fixed order and there are no atomic additions, so results are reproducible. Storage is bf16, fp16
or fp32; arithmetic is fp32, and matrix products of fp32 are not rounded to TF32.

Without a GPU the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), as the tests do.

Shapes: R rows, W hidden width, N tokens or decisions, H heads, K key-value heads, D head width, V vocabulary,
S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.models.llama.modeling_llama import rotate_half

from covey.llm.model.architecture import GPU_FEATURES, AttentionRule
from covey.llm.native import triton_functions as gpu

TILE = 64  # tokens of a tile of queries or keys, with heads of up to 256 bytes; wider ones have half as many
VOCABULARY_BLOCK = 2048


@dataclass
class DecodedRows:
    """Rows of a decoding step, each with its prompt and its own keys and values; all tensors are on the device.

    Rows with one slot are consecutive tokens of it. A tile has rows of one prompt; -1 fills it up. Partial attention is
    computed in `parts` of the prompt and of the own tokens, so that few rows occupy the whole device.
    """

    shape: tuple[int, int, int]  # H, K and D
    own_keys: Tensor  # [layers, slots, K, capacity * D]
    own_values: Tensor
    prompt_keys: Tensor  # [R] int64, the address of the prompt's keys, [layers, K, P, D]
    prompt_values: Tensor
    prompt_lengths: Tensor  # [R] int32
    slots: Tensor  # [R] int32
    decoded: Tensor  # [R] int32, own tokens before this step
    tiles: Tensor  # [tiles, rows of a tile] int32
    cosine: Tensor  # [R, D], of the new tokens' positions
    sine: Tensor
    parts: tuple[int, int]
    capacity: int  # tokens of a slot
    epsilon: float


class TritonKernels:
    """The kernels for one storage type, `dtype`; the interface is that of `bindings.Kernels`."""

    has_avx512_bf16 = has_amx = False
    instruction_set = "Triton"
    features = GPU_FEATURES

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._trees = WeakIdKeyDictionary()

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
        """total = hidden + added; out = weight * total / rms(total); scales = 1 / rms of every row."""
        width = len(weight_W)
        gpu.add_rmsnorm[(hidden.numel() // width,)](
            hidden, added, weight_W, total, out, scales, width, epsilon, BLOCK=_block(width), num_warps=_warps(width)
        )

    def add_rmsnorm_backward(
        self, total: Tensor, weight_W: Tensor, scales: Tensor, dout: Tensor, dtotal: Tensor | None, has_addend: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of `hidden` (fp32), of `added` (the same in its dtype; None without one) and of the weight."""
        dhidden = torch.empty_like(total)
        converts = has_addend and dout.dtype != dhidden.dtype
        dadded = torch.empty_like(total, dtype=dout.dtype) if converts else None
        dweight = self._rmsnorm_backward(total, weight_W, scales, dout, dtotal, dhidden, dadded)
        return dhidden, dhidden if has_addend and not converts else dadded, dweight

    def rmsnorm(self, x: Tensor, weight_W: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """weight * x / rms(x) over the last dimension, and 1 / rms of every row (fp32)."""
        out, scales = torch.empty_like(x), x.new_empty(x.numel() // len(weight_W), dtype=torch.float32)
        self.add_rmsnorm(x, None, weight_W, epsilon, x, out, scales)
        return out, scales

    def rmsnorm_backward(self, x: Tensor, weight_W: Tensor, scales: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `rmsnorm` with respect to x and to the weight (fp32)."""
        dx = torch.empty_like(x)
        return dx, self._rmsnorm_backward(x, weight_W, scales, dout, None, dx, None)

    def _rmsnorm_backward(
        self,
        x: Tensor,
        weight_W: Tensor,
        scales: Tensor,
        dout: Tensor,
        dtotal: Tensor | None,
        dx: Tensor,
        dadded: Tensor | None,
    ) -> Tensor:
        """Writes the gradient of x (into `dadded` too); returns that of the weight, from one sum for each program."""
        rows, width = scales.numel(), len(weight_W)
        partial_sums = x.new_empty(min(rows, 256), width, dtype=torch.float32)
        gpu.rmsnorm_backward[(len(partial_sums),)](
            x, weight_W, scales, dout, dtotal, dx, dadded, partial_sums, rows, width,
            BLOCK=_block(width), num_warps=_warps(width),
        )  # fmt: skip
        return partial_sums.sum(dim=0)

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up, all [rows, width]. `gate` and `up` may be the two halves of one tensor."""
        self._gated(gate, up, out, is_gelu=False)

    def swiglu_backward(self, gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `swiglu` with respect to `gate` and `up`."""
        return self._gated_backward(gate, up, dout, is_gelu=False)

    def geglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """out = gelu(gate) * up with GELU's approximation by tanh; else as `swiglu`."""
        self._gated(gate, up, out, is_gelu=True)

    def geglu_backward(self, gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `geglu` with respect to `gate` and `up`."""
        return self._gated_backward(gate, up, dout, is_gelu=True)

    def _gated(self, gate: Tensor, up: Tensor, out: Tensor, *, is_gelu: bool) -> None:
        rows, width = out.shape
        gpu.gated[(rows, triton.cdiv(width, 1024))](gate, up, out, gate.stride(0), width, BLOCK=1024, GELU=is_gelu)

    def _gated_backward(self, gate: Tensor, up: Tensor, dout: Tensor, *, is_gelu: bool) -> tuple[Tensor, Tensor]:
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        gpu.gated_backward[(triton.cdiv(dout.numel(), 1024),)](
            gate, up, dout, dgate, dup, dout.numel(), BLOCK=1024, GELU=is_gelu
        )
        return dgate, dup

    def weight_gradients(self, x_TN: Tensor, dout_TM: Sequence[Tensor], out_MN: Sequence[Tensor]) -> None:
        """Weight gradients out = dout' x of linear layers with the same input."""
        for dout, out in zip(dout_TM, out_MN, strict=True):
            torch.mm(dout.T, x_TN, out=out)

    def prefix_attention(self, sequences_S3: Tensor, head_dim: int, rule: AttentionRule, **tensors: Tensor) -> None:
        """Causal attention over a prefix tree, or its gradients if `dout` is given; see `bindings.Kernels`.

        Query, key and value are [N, H D], [N, K D] and [N, K D] before rotation, cosine and sine [N, D], logsumexp
        [N, H]. `sequences_S3` is on the CPU. A tile is a run of tokens of one sequence; its queries attend to the
        tokens of the sequence and of its ancestors. No mask, score or repeated key is written to memory.
        """
        tokens, width = tensors["query"].shape
        heads, kv_heads = width // head_dim, tensors["key"].shape[1] // head_dim
        sequences, tiles = self._tree(sequences_S3, self._tile(head_dim), tensors["query"].device)
        query, key = (self._rotated(tensors[name], head_dim, tensors, backward=False) for name in ("query", "key"))
        value, out, logsumexp = (tensors[name] for name in ("value", "out", "logsumexp"))
        sizes, scaling = self._sizes(heads, kv_heads, head_dim, rule), rule.scaling
        if "dout" not in tensors:
            gpu.attend[(len(tiles), heads)](query, key, value, out, logsumexp, sequences, tiles, scaling, **sizes)
            return
        dout, dquery, dkey = tensors["dout"], torch.empty_like(query), torch.empty_like(key)
        delta = torch.empty_like(logsumexp)
        gpu.row_products[(tokens, heads)](out, dout, delta, D=head_dim, WIDTH=_block(head_dim))
        shared = query, key, value, dout, logsumexp, delta
        gpu.attend_dquery[(len(tiles), heads)](*shared, dquery, sequences, tiles, scaling, **sizes)
        gpu.attend_dkey[(len(tiles), kv_heads)](*shared, dkey, tensors["dvalue"], sequences, tiles, scaling, **sizes)
        for name, gradient in (("dquery", dquery), ("dkey", dkey)):
            self._rotated(gradient, head_dim, tensors, backward=True, out=tensors[name])

    def _sizes(self, heads: int, kv_heads: int, width: int, rule: AttentionRule) -> dict[str, Any]:
        """The constants of attention. What a program holds is at most 99 KB, as much as the GPUs of laptops have."""
        row_bytes = width * self.dtype.itemsize
        return {
            "D": width, "HEADS": heads, "GROUP": heads // kv_heads, "TILE": self._tile(width), "WIDTH": _block(width),
            "EXACT": self.dtype == torch.float32, "WINDOW": rule.window,
            "num_warps": 4 if row_bytes <= 128 else 8, "num_stages": 3 if row_bytes <= 128 else 2,
        }  # fmt: skip

    def _tile(self, width: int) -> int:
        return max(TILE * 256 // max(width * self.dtype.itemsize, 256), 16)

    def _tree(self, sequences_S3: Tensor, tile: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """On the device: first token, length, parent, last descendant + 1 and number of tokens before every sequence,
        and [sequence, begin] of every tile. Made once for a layout, whose layers share it."""
        if sequences_S3 not in self._trees:
            rows = sequences_S3.tolist()
            ends = list(range(1, len(rows) + 1))
            for number in range(len(rows) - 1, -1, -1):  # depth first: descendants follow
                if (parent := rows[number][2]) >= 0:
                    ends[parent] = max(ends[parent], ends[number])
            before = [0] * len(rows)
            for number, (_, _, parent) in enumerate(rows):
                before[number] = before[parent] + rows[parent][1] if parent >= 0 else 0
            of_rows = [[*row, end, others] for row, end, others in zip(rows, ends, before, strict=True)]
            sequences = torch.tensor(of_rows, dtype=torch.int32)
            # The tiles with the most keys first, so that no long one begins when the others have ended.
            tiles = [[number, begin] for number, row in enumerate(rows) for begin in range(0, row[1], tile)]
            tiles.sort(key=lambda tile: -before[tile[0]] - tile[1])
            self._trees[sequences_S3] = sequences.to(device), torch.tensor(tiles, dtype=torch.int32).to(device)
        found: tuple[Tensor, Tensor] = self._trees[sequences_S3]
        return found

    def _rotated(
        self, x_NX: Tensor, head_dim: int, angles: dict[str, Tensor], *, backward: bool, out: Tensor | None = None
    ) -> Tensor:
        """Rotary embeddings (arXiv 2104.09864) of all heads of [N, heads D]; the transposed rotation if `backward`."""
        out = torch.empty_like(x_NX) if out is None else out
        heads = x_NX.shape[1] // head_dim
        gpu.rotate[(len(x_NX), heads)](
            x_NX, angles["cosine"], angles["sine"], out, heads, HALF=head_dim // 2, BLOCK=_block(head_dim // 2),
            BACKWARD=backward,
        )  # fmt: skip
        return out

    def store_prompt_kv(self, keys_KPD: Tensor, values_KPD: Tensor, cached_keys: Tensor, cached_values: Tensor) -> None:
        """Store a prompt's keys and values of one layer, [K, P * D], as they are."""
        cached_keys.copy_(keys_KPD.flatten(1))
        cached_values.copy_(values_KPD.flatten(1))

    def decode_attention(
        self, rows: DecodedRows, layer: int, rule: AttentionRule, qkv_RX: Tensor, norms: Sequence[Tensor | None]
    ) -> Tensor:
        """Rotate queries and keys, append the new keys and values to the rows, and attend; returns [R, H D].

        The rows of a prompt attend to it together, so its keys and values are read once for a tile of rows. Partial
        results of prompts and of own tokens are merged by their logsumexp.

        Args:
            rows: the rows and their keys and values.
            layer: its number.
            rule: of its attention; `rows` has its angles.
            qkv_RX: queries, keys and values of the new tokens, [R, (H + 2 K) D].
            norms: weights of the RMSNorms of queries and of keys; None without them.
        """
        count, (heads, kv_heads, width) = len(qkv_RX), rows.shape
        query = qkv_RX.new_empty(count, heads, width)
        own_keys, own_values = rows.own_keys[layer], rows.own_values[layer]
        half = _block(width // 2)
        gpu.append[(count, heads + 2 * kv_heads)](
            qkv_RX, rows.cosine, rows.sine, *norms, query, own_keys, own_values, rows.slots, rows.decoded,
            rows.capacity, rows.epsilon, HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, BLOCK=half,
        )  # fmt: skip
        prompt_parts, own_parts = rows.parts
        parts = qkv_RX.new_empty(prompt_parts + own_parts, count, heads, width, dtype=torch.float32)
        logsumexp = parts.new_empty(parts.shape[:3])
        sizes = self._sizes(heads, kv_heads, width, rule)
        tiles, rows_in_tile = rows.tiles.shape
        gpu.attend_prompts[(tiles, kv_heads, prompt_parts)](
            query, rows.prompt_keys, rows.prompt_values, rows.prompt_lengths, rows.decoded, own_keys, parts, logsumexp,
            rows.tiles, count, layer, rule.scaling, ROWS=rows_in_tile,
            QUERIES=_block(rows_in_tile * (heads // kv_heads)), **sizes,
        )  # fmt: skip
        gpu.attend_own[(count, kv_heads, own_parts)](
            query, own_keys, own_values, rows.slots, rows.decoded, parts, logsumexp, prompt_parts, rows.capacity,
            rule.scaling, QUERIES=_block(heads // kv_heads), **sizes,
        )  # fmt: skip
        out = torch.empty_like(query)
        gpu.merge_parts[(count, heads)](
            parts, logsumexp, out, PARTS=len(parts), BLOCK=triton.next_power_of_2(len(parts)), D=width,
            WIDTH=_block(width),
        )  # fmt: skip
        return out.flatten(1)

    def sample_tokens(self, logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """As `token_sampling.sample_tokens`, for a temperature above 0, without a synchronisation."""
        rows, vocabulary = logits_RV.shape
        blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
        tokens_R, logprobs_R = (logits_RV.new_empty(rows, dtype=kind) for kind in (torch.int64, torch.float32))
        sums = logits_RV.new_empty(rows, blocks, dtype=torch.float64)
        gpu.draw[(rows,)](
            logits_RV, uniforms_R, sums, tokens_R, logprobs_R, vocabulary, blocks, temperature,
            BLOCK=VOCABULARY_BLOCK, num_warps=8,
        )  # fmt: skip
        return tokens_R, logprobs_R

    def logprob_entropy(self, logits_NV: Tensor, tokens_N: Tensor, temperature: float, out: Sequence[Tensor]) -> None:
        """Log-probability of each token, entropy and logsumexp of softmax(logits / temperature), into `out` (fp32)."""
        decisions, vocabulary = logits_NV.shape
        gpu.logprob_entropy[(decisions,)](
            logits_NV, tokens_N, *out, vocabulary, temperature, BLOCK=VOCABULARY_BLOCK, num_warps=8
        )

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
        decisions, vocabulary = logits_NV.shape
        gpu.logit_gradients[(decisions, triton.cdiv(vocabulary, VOCABULARY_BLOCK))](
            logits_NV, tokens_N, logsumexp_N, entropy_N, dlogprob_N, dentropy_N, vocabulary, temperature, first,
            BLOCK=VOCABULARY_BLOCK,
        )  # fmt: skip


@torch.enable_grad()
def check(kernels: TritonKernels, device: torch.device) -> None:
    """Compare the kernels with torch on random numbers of their type.

    Raises:
        RuntimeError: if one differs. Triton raises others if it cannot compile or launch one.
    """
    trial = _Trial(kernels, device)
    trial.norm_and_gate()
    for rule in (AttentionRule(0.3), AttentionRule(0.3, window=TILE - 7)):
        trial.attention(rule)
        trial.decoding(rule)
    trial.logits()


class _Trial:
    """Random numbers and comparisons with torch in fp64."""

    def __init__(self, kernels: TritonKernels, device: torch.device) -> None:
        self.kernels, self.device = kernels, device
        self.noise = torch.Generator().manual_seed(0)
        self.tolerance = 1e-4 if kernels.dtype == torch.float32 else 0.03

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.noise).to(self.device, self.kernels.dtype)

    def compare(self, what: str, ours: Tensor, right: Tensor) -> None:
        right = right.detach().double()
        gap = float((ours.double() - right).norm() / right.norm())
        if not gap < self.tolerance:
            raise RuntimeError(f"{what} differs from torch by {gap:.2g}")

    def compare_gradients(self, what: str, ours: Sequence[Tensor], out: Tensor, d: Tensor, *inputs: Tensor) -> None:
        for number, right in enumerate(torch.autograd.grad(out, inputs, d.double())):
            self.compare(f"gradient {number} of {what}", ours[number], right)

    def norm_and_gate(self) -> None:
        x, d, weight = self.random(5, 40), self.random(5, 40), self.random(40)
        exact = [tensor.double().requires_grad_() for tensor in (x, d, weight)]
        right = exact[2] * exact[0] * (exact[0].square().mean(1, keepdim=True) + 1e-6).rsqrt()
        out, scales = self.kernels.rmsnorm(x, weight, 1e-6)
        self.compare("RMSNorm", out, right)
        found = self.kernels.rmsnorm_backward(x, weight, scales, d)
        self.compare_gradients("RMSNorm", found, right, d, exact[0], exact[2])
        kernels, gelu = self.kernels, partial(torch.nn.functional.gelu, approximate="tanh")
        for name, gate, forward, backward in (
            ("SwiGLU", torch.nn.functional.silu, kernels.swiglu, kernels.swiglu_backward),
            ("GEGLU", gelu, kernels.geglu, kernels.geglu_backward),
        ):
            right = gate(exact[0]) * exact[1]
            forward(x, d, out)
            self.compare(name, out, right)
            self.compare_gradients(name, backward(x, d, d), right, d, exact[0], exact[1])

    def attend(self, rule: AttentionRule, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """[H, queries, D], of [K, keys, D] and a mask."""
        k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * rule.scaling
        return scores.masked_fill(~seen, -torch.inf).softmax(2) @ v

    def attention(self, rule: AttentionRule) -> None:
        """A tree with a sequence of two tiles, and two children that do not attend to each other."""
        own = TILE + 3
        sequences = torch.tensor([[0, 9, -1], [9, own, 0], [9 + own, 5, 1], [14 + own, 2, 1]], dtype=torch.int32)
        tokens, width = 16 + own, 16
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=self.device).tril()
        seen[14 + own :, 9 + own : 14 + own] = False
        places = torch.tensor([*range(9 + own + 5), 9 + own, 10 + own], device=self.device)
        if rule.window:
            seen &= places[:, None] - places < rule.window
        query, key, value, d = (self.random(tokens, heads * width) for heads in (4, 2, 2, 4))
        angles = torch.randn(tokens, width // 2, generator=self.noise).to(self.device).repeat(1, 2)
        cosine, sine = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        out, logsumexp = torch.empty_like(query), query.new_empty(tokens, 4, dtype=torch.float32)
        found = [torch.empty_like(tensor) for tensor in (query, key, value)]
        given = {"query": query, "key": key, "value": value, "cosine": cosine, "sine": sine, "out": out}
        given["logsumexp"] = logsumexp
        self.kernels.prefix_attention(sequences, width, rule, **given)
        given |= {"dout": d, "dquery": found[0], "dkey": found[1], "dvalue": found[2]}
        self.kernels.prefix_attention(sequences, width, rule, **given)
        exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
        q, k, v = (tensor.unflatten(1, (-1, width)).transpose(0, 1) for tensor in exact)
        q, k = (x * cosine.double() + rotate_half(x) * sine.double() for x in (q, k))
        right = self.attend(rule, q, k, v, seen).transpose(0, 1).flatten(1)
        self.compare("attention", out, right)
        self.compare_gradients("attention", found, right, d, *exact)

    def decoding(self, rule: AttentionRule) -> None:
        """Two prompts; a first token, three consecutive ones of a row, and one after more than a tile of own tokens."""
        device, (heads, kv_heads, width), capacity = self.device, (4, 2, 16), TILE + 9
        lengths, own = (9, TILE + 3), (2, 3, kv_heads, capacity * width)
        of_row, slots, decoded = [0, 0, 0, 0, 1], [2, 0, 0, 0, 1], [0, 5, 6, 7, TILE + 1]
        prompts = [self.random(2, 2, kv_heads, length * width) for length in lengths]  # keys and values, of two layers
        caches = [self.random(*own), self.random(*own)]
        qkv, query_norm, key_norm = (
            self.random(5, (heads + 2 * kv_heads) * width),
            self.random(width),
            self.random(width),
        )
        angles = torch.randn(5, width // 2, generator=self.noise).to(device).repeat(1, 2)
        exact = [cache[1].double().unflatten(2, (capacity, width)) for cache in caches]

        def numbers(values: Sequence[Any], kind: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        addresses = [
            numbers([prompts[prompt][kind].data_ptr() for prompt in of_row], torch.int64) for kind in (0, 1)
        ]  # fmt: skip
        rows = DecodedRows(
            (heads, kv_heads, width), own_keys=caches[0], own_values=caches[1], prompt_keys=addresses[0],
            prompt_values=addresses[1], prompt_lengths=numbers([lengths[prompt] for prompt in of_row]),
            slots=numbers(slots), decoded=numbers(decoded), tiles=numbers([[0, 1, 2, 3], [4, -1, -1, -1]]),
            cosine=angles.cos().to(qkv.dtype), sine=angles.sin().to(qkv.dtype), parts=(2, 2), capacity=capacity,
            epsilon=1e-6,
        )  # fmt: skip
        found = self.kernels.decode_attention(rows, 1, rule, qkv, (query_norm, key_norm))

        def rotated(x: Tensor, norm: Tensor) -> Tensor:
            x = norm.double() * x * (x.square().mean(2, keepdim=True) + 1e-6).rsqrt()
            return x * rows.cosine[:, None].double() + rotate_half(x) * rows.sine[:, None].double()

        q, k, v = qkv.double().unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], dim=1)
        q, k = rotated(q, query_norm), rotated(k, key_norm)
        for row, (slot, place) in enumerate(zip(slots, decoded, strict=True)):
            exact[0][slot, :, place], exact[1][slot, :, place] = k[row], v[row]
        right = []
        for row, (slot, place) in enumerate(zip(slots, decoded, strict=True)):
            prompt = prompts[of_row[row]][:, 1].double().unflatten(2, (-1, width))
            keys, values = (torch.cat([prompt[kind], exact[kind][slot, :, : place + 1]], dim=1) for kind in (0, 1))
            seen = torch.arange(keys.shape[1], device=device) > keys.shape[1] - 1 - (rule.window or keys.shape[1])
            right.append(self.attend(rule, q[row][:, None], keys, values, seen).flatten())
        self.compare("attention of a decoding step", found, torch.stack(right))
        for cache, expected in zip(caches, exact, strict=True):
            self.compare("an appended key or value", cache[1], expected.flatten(2))

    def logits(self) -> None:
        def numbers(*values: float) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=self.device)

        logits, picked = 3 * self.random(4, VOCABULARY_BLOCK + 30), numbers(3, 0, VOCABULARY_BLOCK + 2, 7).long()
        exact = logits.double().requires_grad_()
        logp = (exact / 0.7).log_softmax(1)
        probability = logp.detach().exp()
        logprobs, entropy, logsumexp = (torch.empty(4, device=self.device) for _ in range(3))
        self.kernels.logprob_entropy(logits, picked, 0.7, (logprobs, entropy, logsumexp))
        right = logp.gather(1, picked[:, None])[:, 0], -(logp.exp() * logp).sum(1)
        self.compare("the log-probability", logprobs, right[0])
        self.compare("the entropy", entropy, right[1])
        uniforms = numbers(0.0, 0.3, 0.6, 1 - 2**-53)
        tokens, drawn = self.kernels.sample_tokens(logits, uniforms, 0.7)
        upto, mass = (part.gather(1, tokens[:, None])[:, 0] for part in (probability.cumsum(1), probability))
        if not bool(((upto - mass <= uniforms + 1e-5) & (upto >= uniforms - 1e-5)).all()):
            raise RuntimeError("a drawn token is not the one of its random number")
        self.compare("the log-probability of a drawn token", drawn, mass.log())
        weights = numbers(1.0, -2.0, 0.5, 0.1), numbers(0.3, 1.0, -1.0, 2.0)
        loss = right[0] @ weights[0] + right[1] @ weights[1]
        of_logprob, of_entropy = (part.float() for part in weights)
        self.kernels.logit_gradients(logits, picked, logsumexp, entropy, of_logprob, of_entropy, 0.7, 0)
        self.compare_gradients("the logits", [logits], loss, torch.ones_like(loss), exact)


def _block(width: int) -> int:
    """Numbers of a row that a program holds; a matrix product needs at least 16."""
    return max(triton.next_power_of_2(width), 16)


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8
