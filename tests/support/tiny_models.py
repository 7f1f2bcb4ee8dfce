"""Tiny random models of any transformers class, built from a shrunken default configuration."""

import torch
from transformers import PreTrainedConfig

VOCAB = 67
LAYERS = 3
WINDOW = 6

# Sizes under the names that configurations use for them.
_SMALL = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("vocab_size_per_layer_input", "audio_vocab_size"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim"), 32
    ),
    **dict.fromkeys(
        ("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"), 32
    ),
    **dict.fromkeys(("router_hidden_size", "hidden_size_global"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("depth", "num_blocks"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(
        ("num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "kv_n_heads", "num_kv_heads", "swa_num_key_value_heads"), 2
    ),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "dim_head", "d_head"), 8),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "index_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("qk_head_dim",), 12),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("index_n_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_inner", "dff", "dim_ff"), 48
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "mlp_dim"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "dense_intermediate_size", "feed_forward_size"), 48),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16
    ),
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 16
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "moe_layer_start_index", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention", "window_size"), WINDOW),
    **dict.fromkeys(("floor_scale", "log_scaling_n_floor"), 8),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128
    ),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "model_max_length"), 128),
    "decoder_start_token_id": 2,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "index_topk": 64,
    "zero_expert_num": 2,
    "query_pre_attn_scalar": 8,
    # State-space and convolution layers.
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_ssm": 64,
    # Vision and audio towers.
    **dict.fromkeys(("image_size", "crop_size"), 32),
    "patch_size": 8,
    "num_channels": 3,
    **dict.fromkeys(("out_hidden_size", "output_dim", "vision_output_dim"), 32),
}


# A decoder with an output layer of its own: a tied one mostly repeats the last token.
_CAUSAL = {"is_decoder": True, "use_cache": True, "tie_word_embeddings": False}

# Lists with one kind per layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")

# What the general sizes do not fit.
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED}
_MAMBA_LAST = ["linear_attention", "linear_attention", "full_attention"]
_OVERRIDES = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3"), _QWEN),
    **dict.fromkeys(("laguna", "mellum", "smollm3"), _QWEN),
    "qwen3_moe": {"use_sliding_window": True},
    "granitemoehybrid": {"layer_types": _MAMBA_LAST},
    "bamba": {"attn_layer_indices": [2]},
    # Its blocks are exchanged for random new ones by the first short text, which draws numbers.
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dory": {"layer_types": _MIXED} | dict.fromkeys(("n_input_layers", "n_output_layers"), 1),
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma4_text": {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8, "layer_types": _MIXED},
    "dots1": _QWEN | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 8),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        "swa_head_dim": 12,
        "sliding_window": WINDOW,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "roc_bert": {
        "pronunciation_vocab_size": VOCAB,
        "shape_vocab_size": VOCAB,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def shrink(config_class):
    """Keyword arguments that make a tiny configuration of a class, its sub-configurations too."""
    default = config_class()
    names = default.to_dict()
    small = {name: value for name, value in _SMALL.items() if names.get(name) is not None}
    small |= {name: value for name, value in _CAUSAL.items() if name in names}
    if "kv_lora_rank" in small:
        small |= {"num_key_value_heads": 4, "head_dim": small["qk_rope_head_dim"]}
    for name in _PER_LAYER:
        derived = isinstance(getattr(config_class, name, None), property)
        if not derived and (kinds := list(dict.fromkeys(names.get(name) or ()))):
            small[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    for name in default.sub_configs:
        if isinstance(part := getattr(default, name, None), PreTrainedConfig):
            small[name] = shrink(type(part))
    return small | _OVERRIDES.get(default.model_type, {})


def tiny_config(config_class, **overrides):
    config = config_class(**(shrink(config_class) | overrides))
    text = config.get_text_config(decoder=True)
    text.bos_token_id, text.pad_token_id, text.eos_token_id = 1, 0, None
    config.bos_token_id, config.pad_token_id, config.eos_token_id = 1, 0, None
    return config


def randomise(model, std=0.3):
    """Weights large enough that attention, positions and masks decide what is generated."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, std, generator=generator)


def tiny_model(model_class, config):
    """A random float32 model in evaluation mode that stops at no token of its own accord."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
