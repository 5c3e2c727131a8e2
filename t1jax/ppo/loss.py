"""PPO's losses and what to watch about them. Everything is [B, T] and off `sampled` nothing counts:
inputs are masked before any arithmetic, so NaN there reaches neither a loss nor a gradient.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from t1jax import masked

Reduction = Literal["token", "trajectory"]


def loss_weights(sampled_BT: jax.Array, reduction: Reduction) -> jax.Array:
    """f32[B, T], summing to 1 over the batch: the share of each token in a loss.

    "token": every sampled token of the batch counts alike (T1). "trajectory": every row that sampled
    anything counts alike, and its tokens share that. Taken over the whole batch before it is cut into
    micro-batches or shards, so cutting never changes a gradient.
    """
    if reduction == "token":
        count = sampled_BT.sum(dtype=jnp.int32)
    elif reduction == "trajectory":
        count_B1 = sampled_BT.sum(axis=1, keepdims=True, dtype=jnp.int32)
        count = count_B1 * (count_B1 > 0).sum(dtype=jnp.int32)
    else:
        raise ValueError(f"reduction {reduction!r}: choose 'token' or 'trajectory'")
    return sampled_BT / jnp.maximum(count, 1).astype(jnp.float32)


def policy_loss(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantages_BT: jax.Array,
    weights_BT: jax.Array,
    clip_low: float | None,
    clip_high: float | None,
) -> jax.Array:
    """f32[]: -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    r = exp(logp - old_logp). A clip of 0 is a clip at 1; None leaves that side open. Weight 0 = masked.
    """
    mask_BT = weights_BT > 0
    ratio_BT = jnp.exp(masked.select(logp_BT, mask_BT) - masked.select(old_logp_BT, mask_BT))
    advantages_BT = masked.select(advantages_BT, mask_BT)
    clipped_BT = jnp.clip(ratio_BT, *_bounds(clip_low, clip_high))
    gain_BT = jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    return -(weights_BT * gain_BT).sum()


def value_loss(
    values_BT: jax.Array,
    old_values_BT: jax.Array,
    returns_BT: jax.Array,
    weights_BT: jax.Array,
    clip: float | None,
) -> jax.Array:
    """f32[]: sum_t w_t max((V - R)^2, (V_clip - R)^2), V_clip = V_old + clip(V - V_old, -clip, clip).

    `clip` None: the plain squared error.
    """
    mask_BT = weights_BT > 0
    values_BT, old_BT, returns_BT = (
        masked.select(x, mask_BT) for x in (values_BT, old_values_BT, returns_BT)
    )
    error_BT = jnp.square(values_BT - returns_BT)
    if clip is not None:
        clipped_BT = old_BT + jnp.clip(values_BT - old_BT, -clip, clip)
        error_BT = jnp.maximum(error_BT, jnp.square(clipped_BT - returns_BT))
    return (weights_BT * error_BT).sum()


def policy_metrics(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantages_BT: jax.Array,
    sampled_BT: jax.Array,
    clip_low: float | None,
    clip_high: float | None,
) -> dict[str, jax.Array]:
    """How far `logp` stands from `old_logp`, per sampled token.

    clip_frac: share of tokens whose gradient the clip cuts. clip_share: the same weighted by |A|, which
    tells whether the decisive tokens are among them. kl: the k3 estimate of KL(old, new).
    """
    low, high = _bounds(clip_low, clip_high)
    log_ratio_BT = masked.select(logp_BT, sampled_BT) - masked.select(old_logp_BT, sampled_BT)
    advantages_BT = masked.select(advantages_BT, sampled_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    cut_BT = jnp.where(advantages_BT > 0, ratio_BT > high, ratio_BT < low) & (advantages_BT != 0)
    size_BT = jnp.abs(advantages_BT)
    size = masked.mean(size_BT, sampled_BT)
    return {
        "ratio": masked.mean(ratio_BT, sampled_BT),
        "clip_frac": masked.mean(cut_BT.astype(jnp.float32), sampled_BT),
        "clip_share": masked.mean(size_BT * cut_BT, sampled_BT) / jnp.where(size > 0, size, 1.0),
        "kl": _k3(log_ratio_BT, sampled_BT),
        "ratio_over_2": _over_2(log_ratio_BT, sampled_BT),
    }


def gap_metrics(
    logp_BT: jax.Array, old_logp_BT: jax.Array, sampler_logp_BT: jax.Array, sampled_BT: jax.Array
) -> dict[str, jax.Array]:
    """The train-inference gap sum m|D| / sum m (T1) and its two parts, in nats.

    total: updated policy - sampler. movement: updated policy - behaviour snapshot, both on the trainer.
    engine: behaviour snapshot on the trainer - sampler, the same weights on two stacks.
    """
    now_BT, old_BT, sampler_BT = (
        masked.select(x, sampled_BT) for x in (logp_BT, old_logp_BT, sampler_logp_BT)
    )
    total_BT, engine_BT = now_BT - sampler_BT, old_BT - sampler_BT
    return {
        "total": masked.mean(jnp.abs(total_BT), sampled_BT),
        "movement": masked.mean(jnp.abs(now_BT - old_BT), sampled_BT),
        "engine": masked.mean(jnp.abs(engine_BT), sampled_BT),
        "engine_max": jnp.abs(engine_BT).max(),
        "kl": _k3(total_BT, sampled_BT),
        "ratio_over_2": _over_2(total_BT, sampled_BT),
    }


def _bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    low = 0.0 if clip_low is None else 1.0 - clip_low
    return low, math.inf if clip_high is None else 1.0 + clip_high


def _k3(log_ratio_BT, sampled_BT):
    """E_old[r - 1 - log r]: unbiased for KL(old, new) and never negative."""
    return masked.mean(jnp.expm1(log_ratio_BT) - log_ratio_BT, sampled_BT)


def _over_2(log_ratio_BT, sampled_BT):
    """Share of tokens that became more than twice, or less than half, as probable."""
    return masked.mean((jnp.abs(log_ratio_BT) > math.log(2)).astype(jnp.float32), sampled_BT)
