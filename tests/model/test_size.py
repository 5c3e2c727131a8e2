"""The published sizes, counted without an array."""

import dataclasses

from t1jax.model.config import QWEN3_5_35B_A3B, QWEN3_5_122B_A10B, QWEN3_30B_A3B
from t1jax.model.size import count_active, count_parameters


def test_the_122b_model_by_hand():
    c = QWEN3_5_122B_A10B
    counts = count_parameters(c)
    assert counts["embedding"] == counts["head"] == 248320 * 3072
    assert counts["experts"] == 48 * 256 * 3 * 3072 * 1024  # 115.96e9
    assert counts["shared experts"] == 48 * (3 * 3072 * 1024 + 3072)
    assert counts["routers"] == 48 * 3072 * 256
    q_and_gate, k_and_v, out = 3072 * 32 * 512, 2 * 3072 * 2 * 256, 32 * 256 * 3072
    assert counts["attention"] == 12 * (q_and_gate + k_and_v + out + 2 * 256)
    qkv, z, out = 3072 * (2 * 16 + 64) * 128, 3072 * 64 * 128, 64 * 128 * 3072
    small = 2 * 3072 * 64 + 4 * (2 * 16 + 64) * 128 + 2 * 64 + 128
    assert counts["delta nets"] == 36 * (qkv + z + out + small)
    assert counts["norms"] == (2 * 48 + 1) * 3072
    total = sum(counts.values())
    assert round(total / 1e9, 1) == 122.1
    assert round((total - counts["experts"]) / 1e9, 2) == 6.15
    assert round(count_active(c) / 1e9, 1) == 9.0


def test_a_tied_embedding_is_the_head():
    tied = dataclasses.replace(QWEN3_30B_A3B, tie_embeddings=True)
    assert count_active(tied) == count_active(QWEN3_30B_A3B)


def test_the_names_of_the_models_hold():
    for config, billions, active in ((QWEN3_5_35B_A3B, 35, 3), (QWEN3_30B_A3B, 30, 3)):
        assert int(sum(count_parameters(config).values()) / 1e9) in (billions - 1, billions)
        assert round(count_active(config) / 1e9) == active
