"""A model of two layers, small enough to compile in seconds, that has every part."""

from t1jax.model.config import ModelConfig

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
