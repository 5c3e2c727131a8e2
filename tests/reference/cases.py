"""Tiny random models of both families, spelt as fields of transformers' config classes."""

LENGTHS = (1, 7, 64, 65, 513)

COMMON = dict(
    vocab_size=131,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    max_position_embeddings=1024,
    initializer_range=0.15,
)
QWEN3_5 = COMMON | dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    shared_expert_intermediate_size=24,
    full_attention_interval=2,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_section=[1, 1, 0],
        mrope_interleaved=True,
    ),
)
QWEN3 = COMMON | dict(
    norm_topk_prob=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)
)


def rope(base: dict, **changes) -> dict:
    return {"rope_parameters": base["rope_parameters"] | changes}


CASES = {
    "qwen3_5_moe": {
        "plain": QWEN3_5,
        "odd_heads": QWEN3_5
        | dict(num_attention_heads=3, num_key_value_heads=1, linear_num_key_heads=1)
        | dict(linear_num_value_heads=3, linear_value_head_dim=8, num_experts_per_tok=1),
        "tied_conv2": QWEN3_5
        | dict(tie_word_embeddings=True, linear_conv_kernel_dim=2, num_experts_per_tok=8),
        "half_rotary": QWEN3_5
        | dict(num_key_value_heads=4, full_attention_interval=4, num_experts_per_tok=3)
        | rope(QWEN3_5, partial_rotary_factor=0.5, rope_theta=1e4, mrope_section=[2, 1, 1]),
        "wide_shared": QWEN3_5
        | dict(shared_expert_intermediate_size=40, num_experts=16, num_experts_per_tok=4)
        | dict(linear_conv_kernel_dim=3, vocab_size=97)
        | rope(QWEN3_5, partial_rotary_factor=1.0, mrope_section=[4, 2, 2]),
    },
    "qwen3_moe": {
        "plain": QWEN3,
        "odd_heads": QWEN3 | dict(num_attention_heads=5, num_key_value_heads=1, head_dim=8),
        "unnormed": QWEN3 | dict(norm_topk_prob=False, num_experts_per_tok=4),
        "tied_top8": QWEN3 | dict(tie_word_embeddings=True, num_experts_per_tok=8),
        "top1": QWEN3 | dict(num_experts_per_tok=1, num_key_value_heads=4, num_hidden_layers=3),
    },
}
