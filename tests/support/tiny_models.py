"""Tiny random models of any transformers class, built from a shrunken default configuration."""

import torch
from transformers import PreTrainedConfig

VOCAB = 67
LAYERS = 3
WINDOW = 6

# Sizes, and the names that configurations use for them.
_SIZES = f"""
{VOCAB} audio_vocab_size decoder_vocab_size unpadded_vocab_size vocab_size
{VOCAB} vocab_size_per_layer_input
{LAYERS} decoder_layers encoder_layers n_layer n_layers num_decoder_layers num_encoder_layers
{LAYERS} num_hidden_layers num_layers
{WINDOW} attention_chunk_size attention_window_size local_attention sliding_window
{WINDOW} sliding_window_size window_size
1 first_k_dense_replace moe_layer_start_index moe_num_shared_experts n_group n_shared_experts
1 num_dense_layers num_expert_group num_nextn_predict_layers num_shared_experts topk_group
2 decoder_start_token_id depth index_n_heads kv_n_heads linear_num_heads linear_num_key_heads
2 linear_num_value_heads moe_k moe_top_k moe_topk num_blocks num_experts_per_tok
2 num_experts_per_token num_key_value_heads num_kv_heads swa_num_key_value_heads zero_expert_num
4 attention_heads decoder_attention_heads encoder_attention_heads laurel_rank mamba_dt_rank
4 moe_num_experts n_head n_heads n_routed_experts num_attention_heads num_decoder_attention_heads
4 num_encoder_attention_heads num_experts num_heads num_local_experts qk_rope_head_dim rotary_dim
4 swa_num_attention_heads time_step_rank
8 floor_scale gated_norm_rank hidden_size_per_layer_input index_head_dim
8 kv_channels kv_lora_rank linear_head_dim linear_key_head_dim linear_value_head_dim
8 log_scaling_n_floor mamba_d_state mamba_n_heads
8 mamba_num_heads o_lora_rank patch_size q_lora_rank qk_nope_head_dim query_pre_attn_scalar
8 ssm_state_size state_size swa_head_dim v_head_dim
12 qk_head_dim
16 chunk_size d_head dim_head head_dim mamba_d_head mamba_head_dim mamba_headdim
16 mamba_chunk_size moe_intermediate_size moe_shared_expert_intermediate_size
16 shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size
32 crop_size emb_dim embedding_dim embedding_size hidden_size_global image_size
32 input_embedding_size lru_width output_embedding_size router_hidden_size
32 vision_output_dim word_embed_proj_dim
48 d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim expert_ffn_hidden_size
48 feed_forward_size ffn_dim ffn_hidden_size intermediate_size intermediate_size_mlp mlp_dim
64 d_model hidden_size index_topk n_embd out_hidden_size
128 context_length mamba_d_ssm max_position_embeddings max_seq_len max_source_positions
128 max_target_positions
128 model_max_length n_ctx n_positions
"""
_SMALL = {
    name: int(size) for size, *names in map(str.split, _SIZES.split("\n")[1:-1]) for name in names
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
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dory": {"layer_types": _MIXED} | dict.fromkeys(("n_input_layers", "n_output_layers"), 1),
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16, "layer_types": _MIXED},
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
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "roc_bert": {
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 8),
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
            drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            parameter.data.copy_(drawn)


def tiny_model(model_class, config):
    """A random float32 model in evaluation mode that stops at no token of its own accord."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
