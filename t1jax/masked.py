"""Statistics over the masked tokens of an array, safe where the others hold NaN or infinity.

`0 * nan` is nan, so masking is always a `where`, and it stands *before* any arithmetic: the gradient
with respect to a masked-out element is then exactly 0 as well (masking only afterwards leaves
0 * inf in the backward pass). All variances are population variances: one token has variance 0.
"""

import jax
import jax.numpy as jnp


def select(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x` where `mask`, else 0; the gradient stops at masked-out elements."""
    return jnp.where(mask, x, jnp.zeros_like(x))


def mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[]: mean over `mask`, 0 where the mask is empty."""
    count = jnp.maximum(mask.sum(dtype=jnp.int32), 1)
    return select(x, mask).sum(dtype=jnp.float32) / count


def var(x: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[]: population variance over `mask`, 0 for one token or none."""
    x = select(x, mask)
    return mean(jnp.square(x - mean(x, mask)), mask)


def whiten(x: jax.Array, mask: jax.Array, eps: float = 1e-8) -> jax.Array:
    """`x` shifted and scaled to mean 0 and variance 1 over `mask`; 0 elsewhere."""
    x = select(x, mask)
    return select((x - mean(x, mask)) * jax.lax.rsqrt(var(x, mask) + eps), mask)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[]: 1 - Var[R - V] / Var[R] over `mask`; 0 where all returns agree (it is undefined)."""
    total = var(returns, mask)
    residual = var(select(returns, mask) - select(values, mask), mask)
    return jnp.where(total > 0, 1.0 - residual / jnp.where(total > 0, total, 1.0), 0.0)
