"""config.json: read, written, and refused where this model would compute something else."""

import dataclasses

import pytest
from model_fixtures import QWEN3, QWEN3_5

from t1jax.model.config import QWEN3_5_122B_A10B
from t1jax.model.hf_config import HFError, from_hf, to_hf


@pytest.mark.parametrize("config", [QWEN3_5, QWEN3, QWEN3_5_122B_A10B])
def test_config_json_there_and_back(config):
    plain = dataclasses.replace(config, dtype="float32", remat="none", delta_chunk=32)
    assert from_hf(to_hf(config, "bfloat16")) == plain
    nested = {"model_type": "qwen3_5_moe", "text_config": to_hf(config, "bfloat16")}
    if config.family == "qwen3_5_moe":
        assert from_hf(nested | {"vision_config": {"depth": 27}, "image_token_id": 3}) == plain


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is unknown"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type 'linear'"),
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2}, "layer_types"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"num_experts_per_tok": 4}, "experts_per_token=4"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"num_experts": None}, "num_experts=None is no int"),
        ({"head_dim": 8.0}, "head_dim=8.0 is no int"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is no int"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is no float"),
        ({"text_config": None}, "text_config=None is no object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_scaling": 2.0}, "2.0 are no object"),
    ],
)
def test_what_the_model_would_compute_otherwise_is_refused(change, says):
    with pytest.raises(HFError, match=says):
        from_hf(to_hf(QWEN3_5, "float32") | change)


def test_a_size_that_is_missing_is_named():
    config = to_hf(QWEN3_5, "float32")
    del config["head_dim"]
    with pytest.raises(HFError, match="head_dim is missing"):
        from_hf(config)
