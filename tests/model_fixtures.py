"""Models small enough to compile in seconds."""

import dataclasses

from t1jax.model.config import DELTA_FIELDS, ModelConfig

# Two layers with every part.
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    full_attention_interval=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    delta_k_heads=1,
    delta_v_heads=2,
    delta_k_dim=8,
    delta_v_dim=8,
    num_experts=6,
    experts_per_token=2,
    expert_width=8,
    shared_width=8,
    embed_std=1.0,
)

# Of both families, with sizes that no two dims share.
QWEN3_5 = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    num_layers=4,
    full_attention_interval=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    delta_k_heads=1,
    delta_v_heads=3,
    delta_k_dim=8,
    delta_v_dim=4,
    num_experts=3,
    experts_per_token=2,
    expert_width=10,
    shared_width=6,
    conv_width=3,
    rotary_fraction=0.5,
)
QWEN3 = dataclasses.replace(
    QWEN3_5,
    family="qwen3_moe",
    num_layers=2,
    full_attention_interval=1,
    conv_width=4,
    rotary_fraction=1.0,
    norm_topk=False,
    **dict.fromkeys(DELTA_FIELDS, 0),
)
