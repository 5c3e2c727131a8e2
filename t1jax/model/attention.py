"""Softmax attention: causal over whole rows, block by block, and over a cache.

Dims: B rows, T tokens, S cached positions, H query heads, G key/value heads, R = H / G, K head dim,
N blocks, C tokens a block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

BLOCK = 256  # queries and keys whose scores exist at one time
MASKED = -1e30  # finite: a row of it has no NaN


def attend(q_BTHK: Array, k_BGKS: Array, v_BGSK: Array, seen_BTS: Array) -> Array:
    """Attention in float32 over the cached positions that `seen` allows; returns y_BTHK."""
    B, T, H, K = q_BTHK.shape
    G, S = v_BGSK.shape[1:3]
    q_BGRTK = jnp.moveaxis(q_BTHK.reshape(B, T, G, H // G, K), 1, 3) * K**-0.5
    q_BGMK = q_BGRTK.reshape(B, G, -1, K)
    s_BGMS = jnp.matmul(q_BGMK, k_BGKS, preferred_element_type=jnp.float32)
    s_BGRTS = s_BGMS.reshape(B, G, H // G, T, S)
    s_BGRTS = jnp.where(seen_BTS[:, None, None], s_BGRTS, MASKED)
    p_BGMS = jax.nn.softmax(s_BGRTS, axis=-1).astype(v_BGSK.dtype).reshape(B, G, -1, S)
    y_BGRTK = (p_BGMS @ v_BGSK).reshape(B, G, H // G, T, K)
    return jnp.moveaxis(y_BGRTK, 3, 1).reshape(B, T, H, K)


def attend_causal(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, segments_BT: Array) -> Array:
    """Each token attends to those of its segment up to itself; returns y_BTHK.

    Goes by pairs of a block of queries and one of keys, as in FlashAttention: work for the lower triangle
    alone, memory linear in T, and nothing but y and a sum a row kept for the backward pass.
    """
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    C = min(BLOCK, T)
    pad = -T % C

    def blocks(x):  # [B, T, heads, K] -> [N, B, heads, C, K]
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), (1, 3), (0, 2))

    q = blocks(q_BTHK * K**-0.5).reshape(-1, B, G, H // G * C, K)
    segments = jnp.moveaxis(jnp.pad(segments_BT, ((0, 0), (0, pad))).reshape(B, -1, C), 1, 0)
    y = _attend_blocks(q, blocks(k_BTGK), blocks(v_BTGK), segments)
    y = jnp.moveaxis(y.reshape(-1, B, H, C, K), (0, 2), (1, 3))
    return y.reshape(B, T + pad, H, K)[:, :T]


@jax.custom_vjp
def _attend_blocks(q, k, v, segments):
    """q [N, B, G, R * C, K], k and v [N, B, G, C, K], segments [N, B, C] -> y like q."""
    return _forward(q, k, v, segments)[0]


def _forward(q, k, v, segments):
    def step(n, carry):
        i, j = pairs[n, 0], pairs[n, 1]
        top, total, y = (x[i] for x in carry)
        s = _scores(q[i], k[j], segments, i, j)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        p = jnp.exp(s - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(p, axis=-1)
        y = y * shrink[..., None] + _dot(p.astype(v.dtype), v[j])
        new = new_top, total, y
        return tuple(x.at[i].set(value) for x, value in zip(carry, new, strict=True))

    pairs = _pairs(len(q))
    rows = q.shape[:-1]
    first = (
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    top, total, y = _loop(len(pairs), step, first)
    y = (y / total[..., None]).astype(v.dtype)
    return y, (q, k, v, segments, y, top + jnp.log(total))


def _backward(residuals, dy):
    q, k, v, segments, y, log_total = residuals
    dot_y = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)

    def step(n, carry):
        i, j = pairs[n, 0], pairs[n, 1]
        dq, dk_t, dv_t = carry  # transposed: ds and p are large, q and dy are not
        p = jnp.exp(_scores(q[i], k[j], segments, i, j) - log_total[i][..., None])
        dp = _dot(dy[i], jnp.swapaxes(v[j], -1, -2))
        ds = (p * (dp - dot_y[i][..., None])).astype(q.dtype)
        p = p.astype(v.dtype)
        return (
            dq.at[i].add(_dot(ds, k[j])),
            dk_t.at[j].add(_dot(jnp.swapaxes(q[i], -1, -2), ds)),
            dv_t.at[j].add(_dot(jnp.swapaxes(dy[i], -1, -2), p)),
        )

    pairs = _pairs(len(q))
    k_t, v_t = (jnp.swapaxes(x, -1, -2) for x in (k, v))
    first = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k_t, v_t))
    dq, dk_t, dv_t = _loop(len(pairs), step, first)
    dk, dv = (jnp.swapaxes(x, -1, -2) for x in (dk_t, dv_t))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend_blocks.defvjp(_forward, _backward)


def _loop(count: int, step, first):
    """step(n, carry) for n < count. Not a scan, whose derivative would keep every pair's mask."""
    done = lambda state: state[0] < count  # noqa: E731
    return jax.lax.while_loop(done, lambda s: (s[0] + 1, step(*s)), (jnp.int32(0), first))[1]


def _scores(q, k, segments, i, j):
    """float32 [B, G, R * C, C], MASKED where a query may not see a key."""
    C = k.shape[-2]
    s = _dot(q, jnp.swapaxes(k, -1, -2))
    seen = segments[i][:, :, None] == segments[j][:, None, :]
    seen &= (jnp.arange(C)[:, None] + (i - j) * C >= jnp.arange(C)[None])[None]
    s = s.reshape(*s.shape[:2], -1, C, C)
    return jnp.where(seen[:, None, None], s, MASKED).reshape((*q.shape[:-1], C))


_dot = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def _pairs(count: int) -> Array:
    """Every pair of a block of queries and a block of keys not behind it, i32[P, 2]."""
    return jnp.asarray(np.stack(np.tril_indices(count), axis=1), jnp.int32)
