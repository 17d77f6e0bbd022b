"""Which families of transformers are tried, and with what their default configurations lack."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLANNED, NAMED, OTHER = "with a pipeline plan", "named without one", "further ones"

_NAMED = """
OPTForCausalLM BloomForCausalLM T5ForConditionalGeneration BartForConditionalGeneration DistilBertForMaskedLM
RobertaForMaskedLM ElectraForPreTraining ModernBertForMaskedLM ViTForImageClassification
WhisperForConditionalGeneration CLIPModel MambaForCausalLM
"""
_OTHERS = """
BertForMaskedLM GPT2LMHeadModel DebertaV2ForMaskedLM AlbertForMaskedLM XLMRobertaForMaskedLM MPNetForMaskedLM
MT5ForConditionalGeneration MBartForConditionalGeneration PegasusForConditionalGeneration LongformerForMaskedLM
BigBirdForMaskedLM XLNetLMHeadModel FalconForCausalLM MptForCausalLM RwkvForCausalLM Mamba2ForCausalLM
Wav2Vec2ForCTC HubertForCTC DeiTForImageClassification SwinForImageClassification Dinov2ForImageClassification
CLIPTextModel CLIPVisionModel
"""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HALF = {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
SETTINGS: Mapping[
    str, Mapping[str, Any]
] = {  # without which a family's default configuration makes no model that runs
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 31], **_EXPERTS},
    "deepseek_v2": _EXPERTS,
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 1024},
    "dots1": _EXPERTS,
    "glm4v_moe_text": {"head_dim": 128, "rope_parameters": _HALF},
    "glm4v_text": {"rope_parameters": _HALF},
    "glm_image_text": {"rope_parameters": _HALF},
    "ministral": {"head_dim": 128},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 1024},
    "step3p5": {"sliding_window": 512},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
}


@dataclass(frozen=True)
class Family:
    """A class of models to try.

    Attributes:
        name: of the configuration in the library, or of the class.
        group: why it is tried.
        settings: of its configuration.
    """

    name: str
    group: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def families() -> list[Family]:
    """Return those of the installed library that state how a pipeline would cut them, those named, and others."""
    from transformers import CONFIG_MAPPING

    planned = [name for name in CONFIG_MAPPING if getattr(CONFIG_MAPPING[name], "base_model_pp_plan", None)]
    multiplied = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
    return [
        *(Family(name, PLANNED, SETTINGS.get(name, {})) for name in planned),
        *(Family(name, NAMED) for name in _NAMED.split()),
        *(Family(name, OTHER) for name in _OTHERS.split()),
        Family("GraniteForCausalLM", OTHER, multiplied),
    ]


def class_of(name: str) -> Any:
    """Return the class of that name; of a configuration's name the causal language model, else the model itself.

    Raises:
        ValueError: the library has no such class.
    """
    import transformers

    if name in transformers.CONFIG_MAPPING:
        return _model_class(transformers.CONFIG_MAPPING[name])
    if not hasattr(transformers, name):
        raise ValueError("this release of transformers does not have it")
    return getattr(transformers, name)


def _model_class(config: Any) -> Any:
    import transformers

    for known in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        found = known.get(config, None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    models = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)
    ]
    of_its_own = [c for c in models if c.config_class is config and "forward" in vars(c)]
    if not of_its_own:
        raise ValueError("the library has no model of this configuration alone")
    return of_its_own[0]
