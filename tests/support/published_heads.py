"""Published formats of heads: settings, and names and shapes of tensors, of sizes that fit a test.

Real files have the same names; nothing here was read from a hub.
"""

import json
from itertools import count

import torch
from safetensors.torch import save_file

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
VOCAB, DRAFTED, RANK, BLOCK = 128, 96, 6, 4
TAPS, GROUP = 2, 8

LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "vocab_size": VOCAB,
}
LLAMA = LAYER | {"model_type": "llama", "num_hidden_layers": 1}
QWEN = LAYER | {"model_type": "qwen3", "num_hidden_layers": 2, "use_sliding_window": False}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "use_sliding_window": True,
}


def _norms(*names):
    return {f"{name}.weight": (WIDTH,) for name in names}


def _block(prefix, fed=WIDTH, qk_norms=False):
    """One decoder layer without its first norm."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, fed),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, fed),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, fed),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
    } | _norms("post_attention_layernorm")
    if qk_norms:
        shapes |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _eagle3(prefix, qk_norms=False, output=None):
    norms = _norms(f"{prefix}.input_layernorm", f"{prefix}.hidden_norm", "norm")
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH)} | norms | _block(prefix, 2 * WIDTH, qk_norms)
    return shapes | (output or REDUCED)


def _dflash():
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH)} | _norms("hidden_norm", "norm")
    for number in range(2):
        shapes |= _norms(f"layers.{number}.input_layernorm")
        shapes |= _block(f"layers.{number}", qk_norms=True)
    return shapes


def _dspark(vocab, drafted, **extra):
    shapes = {
        "markov_head.markov_w1.weight": (vocab, RANK),
        "markov_head.markov_w2.weight": (drafted, RANK),
        "confidence_head.proj.weight": (1, WIDTH + RANK),
        "confidence_head.proj.bias": (1,),
    }
    return _dflash() | shapes | {f"markov_head.{name}": shape for name, shape in extra.items()}


def _dflash2():
    shapes = {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, WIDTH),
    }
    for conv in [f"layers.{n}.{part}_conv" for n in range(2) for part in ("attention", "mlp")]:
        shapes[f"{conv}.base_kernel"] = (2, TAPS, WIDTH)
        shapes[f"{conv}.kernel_projection.weight"] = (2 * TAPS * WIDTH // GROUP, WIDTH)
    return _dflash() | shapes


def _speculators(kind, layer, drafts=BLOCK - 1, **settings):
    methods = [{"proposal_type": "greedy", "speculative_tokens": drafts}]
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "architectures": [f"{kind.title()}Speculator"],
        "model_type": "speculator_model",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": methods,
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        **settings,
    }


OWN = {"embed_tokens.weight": (VOCAB, WIDTH)}
OUTPUT = {"lm_head.weight": (VOCAB, WIDTH)}
REDUCED = {"lm_head.weight": (DRAFTED, WIDTH), "d2t": (DRAFTED,), "t2d": (VOCAB,)}
MASKED = {"mask_token_id": 3, "block_size": BLOCK}
SPARK = MASKED | {"markov_rank": RANK, "enable_confidence_head": True}
SPARK |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
SELECTS = {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
SELECTS |= {"selector_rank": RANK, "selector_top_k": 8}
SCALED = {"output_multiplier": 0.2, "final_logit_softcapping": 20.0}
AUX = {"aux_hidden_state_layer_ids": [2, 5]}
LAYERS = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
ENCODER_NORM = "encoder.output_norm_enc.weight"
GATE = {"gate_proj.weight": (RANK, WIDTH + RANK), "gate_proj.bias": (RANK,)}
JOINT = {"joint_proj.weight": (3 * RANK, 2 * RANK + WIDTH), "joint_proj.bias": (3 * RANK,)}

FORMATS = {
    "EAGLE-1 of SafeAILab": (
        LLAMA | {"architectures": ["LlamaForCausalLM"]},
        OWN | {"fc.weight": (WIDTH, 2 * WIDTH)} | _block("layers.0"),
    ),
    "EAGLE-3 of SafeAILab": (
        LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFTED},
        _eagle3("midlayer"),
    ),
    "EAGLE-3 of SpecForge": (
        LLAMA
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
        | {"eagle_config": LAYERS | {"use_aux_hidden_state": True}},
        _eagle3("midlayer") | OWN,
    ),
    "EAGLE-3.1, a norm for each layer's features": (
        LLAMA
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
        | {"eagle_config": LAYERS | {"fc_norm": True, "norm_output": True}},
        _eagle3("midlayer") | _norms(*(f"fc_norm.{number}" for number in range(3))),
    ),
    # Its files were not read; others load them as EAGLE-3 with `d2t`.
    "EAGLE-3 of AngelSlim": (
        LLAMA | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": DRAFTED},
        _eagle3("midlayer"),
    ),
    "speculators eagle3": (
        _speculators(
            *("eagle3", QWEN | {"num_hidden_layers": 1}),
            **{"draft_vocab_size": DRAFTED, "norm_before_residual": True},
            **LAYERS,
            norm_before_fc=True,
        ),
        _eagle3("layers.0", qk_norms=True) | OWN | {"input_norm.weight": (3 * WIDTH,)},
    ),
    "speculators peagle": (
        _speculators("peagle", LLAMA, draft_vocab_size=DRAFTED, mask_token_id=3, **LAYERS),
        _eagle3("layers.0") | OWN | {"mask_hidden": (1, 1, 3 * WIDTH)},
    ),
    "speculators dflash": (
        _speculators("dflash", QWEN, draft_vocab_size=VOCAB, **MASKED, **AUX),
        _dflash(),
    ),
    "speculators dflash, windows and a reduced vocabulary": (
        _speculators(
            *("dflash", QWEN | WINDOWS, BLOCK),
            **{"draft_vocab_size": DRAFTED, **MASKED, **AUX},
            sample_from_anchor=True,
        ),
        _dflash() | OWN | REDUCED,
    ),
    "speculators dspark, gated": (
        _speculators(
            *("dspark", QWEN, BLOCK),
            **{"draft_vocab_size": DRAFTED, **SPARK, **AUX, "markov_head_type": "gated"},
            sample_from_anchor=True,
        ),
        _dspark(VOCAB, DRAFTED, **GATE) | REDUCED,
    ),
    "speculators dspark, rnn": (
        _speculators(
            *("dspark", QWEN, BLOCK),
            **{"draft_vocab_size": VOCAB, **SPARK, **AUX, "markov_head_type": "rnn"},
        ),
        _dspark(VOCAB, VOCAB, **JOINT),
    ),
    "speculators dspark, slot 0 fills in": (
        _speculators("dspark", QWEN, BLOCK - 1, draft_vocab_size=VOCAB, **SPARK, **AUX),
        _dspark(VOCAB, VOCAB),
    ),
    "speculators dspark, confidence alone": (
        _speculators(
            *("dspark", QWEN, BLOCK),
            **{"draft_vocab_size": VOCAB, **SPARK, **AUX, "markov_rank": 0}
            | {"confidence_head_with_markov": False},
        ),
        _dflash() | {"confidence_head.proj.weight": (1, WIDTH), "confidence_head.proj.bias": (1,)},
    ),
    "DFlash of z-lab": (
        QWEN
        | {"architectures": ["DFlashDraftModel"], "num_target_layers": 10}
        | {"dflash_config": MASKED | {"target_layer_ids": [1, 4]}},
        _dflash(),
    ),
    "DFlash of z-lab, older": (
        QWEN
        | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK}
        | {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4]}},
        _dflash(),
    ),
    "DFlash of transformers": (
        LAYER
        | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
        | {"num_hidden_layers": 2, "target_layer_ids": [1, 4], **MASKED, **WINDOWS},
        {
            {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": ENCODER_NORM}.get(k, k): shape
            for k, shape in _dflash().items()
        },
    ),
    "DFlash 2 of z-lab": (
        QWEN
        | WINDOWS
        | {"architectures": ["DFlash2DraftModel"], "num_target_layers": 10, "is_causal": False}
        | {"input_embedding_scale": 1.5, "sliding_window": 12}
        | {"dflash_config": MASKED | SELECTS | {"target_layer_ids": [1, 4]} | SCALED},
        _dflash2(),
    ),
    "speculators dflash2": (
        _speculators("dflash2", QWEN, draft_vocab_size=VOCAB, **MASKED, **AUX, **SELECTS),
        _dflash2(),
    ),
    "DSpark of DeepSpec": (
        QWEN
        | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 8}
        | {"num_target_layers": 10, "target_layer_ids": [-1, 4], **SPARK},
        _dspark(VOCAB, VOCAB) | OWN | OUTPUT,
    ),
    "DFlash of DeepSpec": (
        QWEN
        | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 8, "target_layer_ids": [1, 4]}
        | MASKED
        | {"markov_rank": 0, "enable_confidence_head": False},
        _dflash() | OWN | OUTPUT,
    ),
    "EAGLE-3 of DeepSpec": (
        QWEN
        | {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "ttt_length": 7}
        | {"target_layer_ids": [0, 3, 5]},
        _eagle3("layers.0", qk_norms=True, output=OUTPUT) | OWN,
    ),
}
"""Publisher and kind -> (config.json, tensors' shapes)."""


def tensors_of(name):
    """Random tensors of a format, norms near 1; the drafted ids are every one but each fourth."""
    generator, found = torch.Generator().manual_seed(0), {}
    for tensor, shape in FORMATS[name][1].items():
        values = torch.randn(shape, generator=generator)
        if "norm" in tensor:
            found[tensor] = 1 + values / 5
        elif tensor in OWN or tensor == "markov_head.markov_w1.weight":
            found[tensor] = values
        else:
            found[tensor] = values * 2 * shape[-1] ** -0.5
    if "d2t" in found:
        found["t2d"] = torch.arange(VOCAB) % 4 > 0
        found["d2t"] = found["t2d"].nonzero().flatten() - torch.arange(DRAFTED)
    return found


_number = count()


def save(folder, config, tensors):
    """A folder below `folder` with a head in it."""
    path = folder / f"head{next(_number)}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def saved(folder, name, **changes):
    """A format's head, its settings changed by `changes`."""
    return save(folder, FORMATS[name][0] | changes, tensors_of(name))


def as_speculators(tensor):
    """What `speculators` calls a tensor."""
    name = tensor.replace("midlayer.", "layers.0.").replace("encoder.fc.", "fc.")
    return name.replace("encoder.output_norm_enc.", "hidden_norm.")
