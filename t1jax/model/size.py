"""How many parameters a model has, and where."""

import math

import jax

from t1jax.model.config import ModelConfig
from t1jax.model.lm import init_policy

PARTS = {
    "embed": "embedding",
    "head": "head",
    "attn": "attention",
    "delta": "delta nets",
    "gate_up": "experts",
    "down": "experts",
    "router": "routers",
    "shared_gate_up": "shared experts",
    "shared_down": "shared experts",
    "shared_gate": "shared experts",
}


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of the policy by part; nothing is allocated."""
    counts = dict.fromkeys([*PARTS.values(), "norms"], 0)
    tree = jax.eval_shape(lambda: init_policy(config, jax.random.key(0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = {key.key for key in path}
        part = next((PARTS[name] for name in PARTS if name in names), "norms")
        counts[part] += math.prod(leaf.shape)
    return counts


def count_active(config: ModelConfig) -> int:
    """Parameters that one token is multiplied with: its own experts, and no embedding table but as a head."""
    counts = count_parameters(config)
    experts = counts.pop("experts") // config.num_experts * config.experts_per_token
    looked_up = 0 if config.tie_embeddings else counts["embedding"]
    return experts + sum(counts.values()) - looked_up
