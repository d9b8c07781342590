"""Tiny random models of every family that transformers can build as a causal language model.

A family's own default config is shrunk by rules on the names of its fields, so that a family of a later version of
transformers is built as well. SPECIAL lists what the rules cannot know.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 83
POSITIONS = 256
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# The size of every field that is listed, unless it is smaller by default.
SIZES: dict[int, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input",),
    POSITIONS: (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "context_length",
        "model_max_length", "original_max_position_embeddings",
    ),
    32: (
        "hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim_model", "attention_hidden_size",
        "lru_width",
        "input_embedding_size", "output_embedding_size", "embedding_size", "word_embed_proj_dim", "dim_model_base",
        "decoder_hidden_size",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "num_experts",
        "n_routed_experts", "num_local_experts", "moe_num_experts", "swa_num_attention_heads", "index_n_heads",
        "linear_num_heads", "linear_num_value_heads", "num_query_groups", "zero_expert_num", "qk_rope_head_dim", "d_kv",
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers", "encoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack", "depth",
    ),
    2: (
        "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk", "moe_k", "top_k_experts", "n_groups", "o_groups",
    ),
    8: (
        "head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "kv_lora_rank", "q_lora_rank", "swa_head_dim",
        "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_state", "state_size",
        "ssm_state_size", "time_step_rank", "mamba_dt_rank", "o_lora_rank", "d_rel", "d_head", "dim_head",
        "kv_channels",
        "attention_head_size", "laurel_rank", "router_hidden_size", "adapter_rank", "gated_norm_rank", "hc_lowrank",
        "query_pre_attn_scalar", "rotary_dim", "swa_v_head_dim", "hidden_size_per_layer_input", "attention_head_dim",
    ),
    1: ("n_group", "topk_group"),
    48: (
        "intermediate_size", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff",
        "shared_expert_intermediate_size", "shared_experts_intermediate_size", "ffn_hidden_size", "n_inner", "d_inner",
        "shared_intermediate_size", "intermediate_size_mlp", "expert_ffn_hidden_size", "dense_intermediate_size",
        "moe_shared_expert_intermediate_size", "feed_forward_size",
    ),
}  # fmt: skip
SIZE_OF = {name: size for size, names in SIZES.items() for name in names}
TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "sep_token_id": 3, "cls_token_id": 4}
# Fields that say how far attention looks back.
WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "local_attention", "index_topk",
    "attention_window_size", "keep_window_size", "local_attention_window_len", "local_attn_chunk_length",
    "lsh_attn_chunk_length", "indexer_budget",
)  # fmt: skip
# Lists that a config makes again from the number of layers.
BY_LAYER = (
    "layer_types", "mlp_layer_types", "full_attn_idxs", "layers_block_type", "hybrid_layer_ids", "per_layer_config",
    "indexer_types", "attention_layers", "attention_types", "architectures", "transformers_version", "_name_or_path",
)  # fmt: skip

MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 8}
LATENT = {"num_key_value_heads": 4, "qk_head_dim": 12, "v_head_dim": 6}
HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4, "head_dim": 4},
    "bailing_hybrid": {"layer_group_size": 2, "num_expert_group": 1},
    "bamba": {**MAMBA_2, "attn_layer_indices": [1, 3]},

    "blenderbot": {"encoder_layers": 4, "decoder_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 12},
    "falcon_h1": MAMBA_2,
    "gemma3n_text": {
        "intermediate_size": 48, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA_2, "layer_types": HYBRID},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID, **LATENT},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 12, "head_dim": 4, "num_layers": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16], "num_attention_heads": 4,
        "attn_layers": ["local", "local"],
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "zamba": {
        "attention_hidden_size": 64, "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 64, "attention_head_dim": 16,
        "mamba_headdim": 8, "n_mamba_heads": 8, "chunk_size": 8, "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}  # fmt: skip


def zoo_model(kind: str, *, window: int | None = None, seed: int = 0, std: float | None = 0.15, **fields: Any):
    """A random model of a family.

    Args:
        kind: the `model_type`.
        window: what all windows and chunks that the config names are set to; None leaves them as they are.
        std: of the weights, large enough that distributions are far from uniform; None: as transformers makes them.
        fields: further fields of the config.
    """
    config = zoo_config(kind, window=window, **fields)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if std is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=std)
    return model.eval()


def zoo_config(kind: str, *, window: int | None = None, **fields: Any):
    default = AutoConfig.for_model(kind)
    made = {**_shrunk(default.to_dict(), window), **SPECIAL.get(kind, {}), **fields}
    made.pop("model_type", None)
    if "is_decoder" in made:  # a family of encoders, which may be decoders as well
        made["is_decoder"] = fields.get("is_decoder", True)
    return AutoConfig.for_model(kind, **made)


def _shrunk(fields: dict[str, Any], window: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            made[name] = {**_shrunk(value, window), **SPECIAL.get(value["model_type"], {})}
        elif name in BY_LAYER or (isinstance(value, list) and len(value) > 8):
            continue
        elif name in TOKENS:
            made[name] = TOKENS[name]
        elif name in WINDOWS and window is not None:
            made[name] = window
        elif name == "num_key_value_heads" and isinstance(value, int):
            made[name] = 4 if value == fields.get("num_attention_heads") else min(value, 2)
        elif name in SIZE_OF and type(value) is int:
            made[name] = min(value, SIZE_OF[name])
        else:
            made[name] = value
    return made
