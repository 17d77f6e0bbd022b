"""Tiny models of many families of transformers, by class; those with a pipeline plan, and those without."""

import torch

from tests.interop.models import ENDS, VOCABULARY, transformers

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **ENDS}
_BOTH = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1}
_ROTARY = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, **_TEXT}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES = {  # by class, the settings that make it tiny
    "GraniteForCausalLM": {
        **_ROTARY,
        "embedding_multiplier": 12.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
    },
    "Gemma2ForCausalLM": {**_ROTARY, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "Gemma3ForCausalLM": {**_ROTARY, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "Qwen3ForCausalLM": _ROTARY,
    "MixtralForCausalLM": {**_ROTARY, **_EXPERTS},
    "Qwen3MoeForCausalLM": {**_ROTARY, **_EXPERTS},
    "GPTNeoXForCausalLM": {**_SIZES, **_TEXT},
    "OPTForCausalLM": {
        **_SIZES,
        **_TEXT,
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **_TEXT},
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        **_TEXT,
    },
    "BartForConditionalGeneration": {"d_model": 32, **_BOTH, **_LAYERS, **_TEXT},
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **_TEXT},
    "RobertaForMaskedLM": {**_SIZES, **_TEXT},
    "ElectraForPreTraining": {**_SIZES, **_TEXT, "embedding_size": 16},
    "ModernBertForMaskedLM": {**_SIZES, **_TEXT, "cls_token_id": 1, "sep_token_id": 2},
    "DebertaV2ForMaskedLM": {**_SIZES, **_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "MPNetForMaskedLM": {**_SIZES, **_TEXT},
    "MambaForCausalLM": {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, **_TEXT},
    "ViTForImageClassification": {**_SIZES, "image_size": 16, "patch_size": 8, "num_labels": 5},
    "WhisperForConditionalGeneration": {
        "d_model": 32,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 32,
        **_BOTH,
        **_LAYERS,
        **_TEXT,
    },
}


def tiny(name, **changes):
    """A tiny model, float64 where that can be, without dropout; its classes' defaults have dropout under many names."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**FAMILIES[name], **changes}))
    if FAMILIES[name].keys().isdisjoint(_EXPERTS):  # which multiply in float32 at most
        model.double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for field, value in vars(module).items():
            if "drop" in field and isinstance(value, float):
                setattr(module, field, 0.0)
    return model


def batch(model, seed, samples=6, positions=9):
    """A batch's inputs, padded at its end where there is a mask for that."""
    draw = torch.Generator().manual_seed(seed)
    config, main = model.config, model.main_input_name
    words = torch.randint(3, VOCABULARY, (samples, positions), generator=draw)
    if main == "input_ids":
        mask = torch.ones_like(words)
        mask[1, -3:] = 0
        inputs = {"input_ids": words * mask, "attention_mask": mask}
    elif main == "pixel_values":
        inputs = {main: torch.randn(samples, 3, 16, 16, generator=draw).to(model.dtype)}
    else:
        inputs = {main: torch.randn(samples, 8, 24, generator=draw).to(model.dtype)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = words[:, :5].flip(0)
    return inputs
