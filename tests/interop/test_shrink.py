"""Tiny configurations of transformers."""

import pytest
import torch

from avgpipe.model.shrink import shrunk
from benchmarks.models.depth import with_layers
from tests.interop.models import transformers

_WORDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def parameters_of(model):
    return sum(p.numel() for p in model.parameters())


FAMILIES = [
    *("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "BloomForCausalLM", "MambaForCausalLM"),
    *(
        "Gemma3nForCausalLM",
        "Gemma4ForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "OPTForCausalLM",
    ),
    *("Qwen3NextForCausalLM", "LagunaForCausalLM", "T5Model", "BartModel", "DistilBertModel"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_of_families_make_tiny_models_that_run(name):
    if not hasattr(transformers, name):
        pytest.skip(f"this release of transformers has no {name}")
    kind = getattr(transformers, name)
    default = kind.config_class()
    config = shrunk(with_layers(getattr(default, "text_config", None) or default, 2))
    model = kind(config).eval()
    assert parameters_of(model) < 8e6
    more = {"decoder_input_ids": _WORDS} if config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=_WORDS, **more)[0]
    assert output.isfinite().all()


def test_the_original_stays_as_it_is():
    config = transformers.LlamaConfig()
    before = config.to_dict()
    assert shrunk(with_layers(config, 2)) is not config
    assert config.to_dict() == before


def test_flags_multipliers_and_the_ratio_of_heads_stay():
    config = transformers.GraniteConfig(
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        num_key_value_heads=8,
        attention_bias=True,
        eos_token_id=[3, 9],
    )
    small = shrunk(config)
    assert (small.embedding_multiplier, small.logits_scaling, small.attention_bias) == (12.0, 8.0, True)
    assert (small.num_attention_heads, small.num_key_value_heads) == (2, 1)
    assert small.num_hidden_layers == config.num_hidden_layers
    assert small.hidden_size == 2 * config.hidden_size // config.num_attention_heads
    assert shrunk(transformers.LlamaConfig()).num_key_value_heads == 2


def test_one_layer_of_each_kind_is_kept_in_their_order():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = transformers.Gemma3TextConfig(num_hidden_layers=12, layer_types=kinds * 2)
    assert shrunk(with_layers(config, 1)).layer_types == ["sliding_attention", "full_attention"]
    assert shrunk(with_layers(config, 4)).layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert shrunk(with_layers(config, 4)).num_hidden_layers == 4
    assert shrunk(config).layer_types == config.layer_types


def test_every_stack_is_cut():
    small = shrunk(with_layers(transformers.BartConfig(encoder_layers=6, decoder_layers=4), 3))
    assert (small.encoder_layers, small.decoder_layers) == (3, 3)


def test_numbers_of_layers_are_those_that_are_kept():
    config = transformers.Qwen2MoeConfig(
        num_hidden_layers=24, mlp_only_layers=[0, 1, 23], max_window_layers=12
    )
    small = shrunk(with_layers(config, 4))
    assert small.mlp_only_layers == [0, 1]
    assert small.max_window_layers == 2


def test_special_words_are_in_the_vocabulary_each_with_its_own_number():
    config = transformers.LlamaConfig(
        vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128008], pad_token_id=3
    )
    small = shrunk(config)
    words = [small.bos_token_id, *small.eos_token_id]
    assert len(set(words)) == 3
    assert all(3 < word < small.vocab_size for word in words)
    assert small.pad_token_id == 3


def test_what_is_as_wide_as_the_model_stays_so():
    small = shrunk(transformers.OPTConfig(hidden_size=768, word_embed_proj_dim=768))
    assert small.word_embed_proj_dim == small.hidden_size


def test_what_is_not_as_wide_as_the_model_stays_so():
    small = shrunk(transformers.ElectraConfig(embedding_size=128, hidden_size=256, num_attention_heads=4))
    assert small.embedding_size != small.hidden_size == 128


def test_sections_of_rotary_embeddings_fit():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    config = transformers.Qwen2VLTextConfig(rope_parameters=rope)
    model = transformers.Qwen2VLTextModel(shrunk(with_layers(config, 2)))
    with torch.no_grad():
        assert model(input_ids=_WORDS)[0].isfinite().all()


def test_parts_are_made_tiny_too():
    config = transformers.CLIPConfig()
    small = shrunk(with_layers(config, 2))
    for part in (small.text_config, small.vision_config):
        assert part.num_hidden_layers == 2
        assert part.hidden_size < 200
    assert config.text_config.num_hidden_layers == 12
    assert parameters_of(transformers.CLIPModel(small)) < 2e6
