"""The gated delta net: a linear-attention layer with a decaying, error-correcting memory.

Per head: S <- exp(g) S;  S <- S + k (x) beta (v - S^T k);  o = S^T q  (Yang et al., Gated Delta Networks).
Dims: B rows, T tokens, D model, H value heads, K key dim, V value dim, N chunks, C tokens a chunk.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from t1jax.model.config import ModelConfig
from t1jax.model.layers import Linear, Place, dense_init, scale, unit_l2, unit_rms

GROUP = 8  # chunks that the backward pass computes again at one time


class DeltaState(NamedTuple):
    """What a row carries: the last inputs of the convolution, and the memory in float32."""

    conv_BWC: Array
    memory_BHKV: Array


def zero_state(config: ModelConfig, rows: int) -> DeltaState:
    c = config
    memory = (rows, c.delta_v_heads, c.delta_k_dim, c.delta_v_dim)
    return DeltaState(
        jnp.zeros((rows, c.conv_width - 1, c.conv_dim), c.dtype), jnp.zeros(memory, jnp.float32)
    )


class DeltaNet(nn.Module):
    """in_proj_qkv -> causal depthwise convolution -> SiLU -> gated delta rule -> gated norm -> out_proj."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: Array, place: Place, state: DeltaState | None = None
    ) -> tuple[Array, DeltaState]:
        """Returns y_BTD and the state after each row's last valid token.

        A given `state` belongs to the sequence of the row's first token.
        """
        c = self.config
        B, T, D = x_BTD.shape
        H, K, V = c.delta_v_heads, c.delta_k_dim, c.delta_v_dim
        key_dim = c.delta_k_heads * K
        state = zero_state(c, B) if state is None else state
        conv_WC = self.param("conv", dense_init, (c.conv_width, c.conv_dim), c.param_dtype)
        a_log_H = self.param("A_log", init_a_log, (H,), jnp.float32)
        dt_bias_H = self.param("dt_bias", init_dt_bias, (H,), jnp.float32)
        norm_V = self.param("norm", nn.initializers.ones, (V,), jnp.float32)

        qkv_BTC = Linear(c, c.conv_dim, name="in_proj_qkv")(x_BTD)
        z_BTHV = Linear(c, H * V, name="in_proj_z")(x_BTD).reshape(B, T, H, V)
        b_BTH = Linear(c, H, name="in_proj_b")(x_BTD).astype(jnp.float32)
        a_BTH = Linear(c, H, name="in_proj_a")(x_BTD).astype(jnp.float32)

        qkv_BTC, conv_BWC = causal_conv(qkv_BTC, conv_WC.astype(x_BTD.dtype), state.conv_BWC, place)
        q, k, v = jnp.split(jax.nn.silu(qkv_BTC), [key_dim, 2 * key_dim], axis=-1)
        q_BTHK = unit_l2(q.reshape(B, T, c.delta_k_heads, K)) * K**-0.5
        k_BTHK = unit_l2(k.reshape(B, T, c.delta_k_heads, K))
        q_BTHK, k_BTHK = (jnp.repeat(h, H // c.delta_k_heads, axis=2) for h in (q_BTHK, k_BTHK))
        v_BTHV = v.reshape(B, T, H, V).astype(jnp.float32)
        beta_BTH = jax.nn.sigmoid(b_BTH)
        g_BTH = -jnp.exp(a_log_H)[None, None] * jax.nn.softplus(a_BTH + dt_bias_H[None, None])

        # A padding token leaves the memory as it is: nothing decays, nothing is written.
        k_BTHK, v_BTHV = (
            jnp.where(place.valid_BT[..., None, None], h, 0) for h in (k_BTHK, v_BTHV)
        )
        beta_BTH, g_BTH = (jnp.where(place.valid_BT[..., None], h, 0) for h in (beta_BTH, g_BTH))
        inputs = q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH
        if T == 1:
            o_BTHV, memory_BHKV = delta_step(*inputs, state.memory_BHKV)
        else:
            o_BTHV, memory_BHKV = delta_rule(
                *inputs, state.memory_BHKV, place.runs_BT, c.delta_chunk
            )
        o_BTHV = scale(unit_rms(o_BTHV, c.rms_eps), norm_V).astype(x_BTD.dtype)
        o_BTHV = (o_BTHV * jax.nn.silu(z_BTHV.astype(jnp.float32))).astype(x_BTD.dtype)
        y_BTD = Linear(c, D, name="out_proj")(o_BTHV.reshape(B, T, H * V))
        return y_BTD, DeltaState(conv_BWC, memory_BHKV)


def causal_conv(x_BTC: Array, kernel_WC: Array, before_BWC: Array, place: Place):
    """Depthwise convolution over each token and the W-1 before it in the same sequence.

    before_BWC: the W-1 inputs before the row. Returns y_BTC and the W-1 inputs up to the last valid token.
    """
    B, T, _ = x_BTC.shape
    width = kernel_WC.shape[0]
    x_BTC = jnp.where(place.valid_BT[..., None], x_BTC, 0)
    window = jnp.concatenate([before_BWC.astype(x_BTC.dtype), x_BTC], axis=1)
    first = jnp.broadcast_to(place.runs_BT[:, :1], (B, width - 1))
    runs = jnp.concatenate([first, place.runs_BT], axis=1)
    y_BTC = scale(x_BTC, kernel_WC[-1])
    for back in range(1, width):
        start = width - 1 - back
        same_BT = runs[:, start : start + T] == place.runs_BT
        past_BTC = jnp.where(same_BT[..., None], window[:, start : start + T], 0)
        y_BTC += scale(past_BTC, kernel_WC[start])
    end_B = jnp.max(jnp.where(place.valid_BT, jnp.arange(1, T + 1)[None], 0), axis=1)
    last_BW = end_B[:, None] + jnp.arange(width - 1)[None]
    return y_BTC, jnp.take_along_axis(window, last_BW[..., None], axis=1)


def delta_step(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, memory_BHKV):
    """The rule for one token a row (T = 1), as written at the top."""
    q, k, v, g, beta = (x[:, 0] for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    memory = memory_BHKV * jnp.exp(g)[..., None, None]
    error = v - jnp.sum(memory * k[..., None], axis=2)
    memory = memory + k[..., None] * (beta[..., None] * error)[..., None, :]
    return jnp.sum(memory * q[..., None], axis=2)[:, None], memory


def delta_rule(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    g_BTH: Array,
    beta_BTH: Array,
    memory_BHKV: Array,
    runs_BT: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """The rule for whole rows, in chunks: all but a product of small matrices a chunk is parallel.

    runs_BT: tokens of different runs do not share memory; the given memory belongs to the first run.
    Returns o_BTHV and the memory after the last token, both float32. The backward pass keeps the memory
    between groups of GROUP chunks alone and computes the rest again, while it fits the cache.
    """
    T = q_BTHK.shape[1]
    C = min(chunk, 1 << (T - 1).bit_length())
    span = C * min(GROUP, -(-T // C))
    pad = -T % span

    def groups(x, mode="constant"):  # [B, T, ...] -> [n, B, span, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, span, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, group):
        memory, before_B = carry
        *inputs, runs = group
        o, memory = _chunked(*inputs, memory, runs, before_B, C)
        return (memory, runs[:, -1]), o

    inputs = (*map(groups, (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)), groups(runs_BT, "edge"))
    (memory_BHKV, _), o = jax.lax.scan(step, (memory_BHKV, runs_BT[:, 0]), inputs)
    o_BTHV = jnp.moveaxis(o, 0, 1)
    return o_BTHV.reshape(len(runs_BT), T + pad, *o_BTHV.shape[3:])[:, :T], memory_BHKV


def _chunked(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, memory_BHKV, runs_BT, before_B, C: int):
    """The rule in WY form for T a multiple of C; `before_B` is the run whose memory is given."""
    B, T, H, _ = q_BTHK.shape
    q, k, v, g, beta = (
        jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), 2, 3)
        for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    )  # [B, N, H, C, ...]
    runs_BNC = runs_BT.reshape(B, -1, C)
    before_BN = jnp.concatenate([before_B[:, None], runs_BNC[:, :-1, -1]], axis=1)
    from_before = (runs_BNC == before_BN[..., None])[:, :, None]  # [B, N, 1, C]
    to_after = (runs_BNC == runs_BNC[..., -1:])[:, :, None]
    same = runs_BNC[..., :, None] == runs_BNC[..., None, :]
    lower = (same & jnp.tri(C, dtype=bool)[None, None])[:, :, None]  # [B, N, 1, C, C]
    strict = lower & ~jnp.eye(C, dtype=bool)[None, None, None]

    total = jnp.cumsum(g, axis=-1)
    decay = _exp_where(lower, total[..., :, None] - total[..., None, :])
    decay_in = _exp_where(from_before, total)
    decay_out = _exp_where(to_after, total[..., -1:] - total)
    decay_all = decay_in[..., -1]

    kk = jnp.einsum("bnhik,bnhjk->bnhij", k, k)
    inverse = unit_lower_inverse(jnp.where(strict, kk * decay, 0) * beta[..., None])
    kv = jnp.concatenate([k * decay_in[..., None], v], axis=-1) * beta[..., None]
    w, u = jnp.split(jnp.einsum("bnhij,bnhjx->bnhix", inverse, kv), [k.shape[-1]], axis=-1)
    k_out = k * decay_out[..., None]
    eye = jnp.eye(k.shape[-1], dtype=jnp.float32)[None, None, None]
    keep = decay_all[..., None, None] * eye - jnp.einsum("bnhck,bnhcl->bnhkl", k_out, w)
    add = jnp.einsum("bnhck,bnhcv->bnhkv", k_out, u)

    def step(memory, chunk_update):
        keep, add = chunk_update
        return jnp.einsum("bhkl,bhlv->bhkv", keep, memory) + add, memory

    scanned = (jnp.moveaxis(keep, 1, 0), jnp.moveaxis(add, 1, 0))
    memory_BHKV, befores = jax.lax.scan(step, memory_BHKV, scanned)
    before = jnp.moveaxis(befores, 0, 1)
    scores = jnp.einsum("bnhik,bnhjk->bnhij", q, k) * decay
    new = u - jnp.einsum("bnhck,bnhkv->bnhcv", w, before)
    o = jnp.einsum("bnhij,bnhjv->bnhiv", scores, new)
    o += jnp.einsum("bnhck,bnhkv->bnhcv", q * decay_in[..., None], before)
    return jnp.moveaxis(o, 2, 3).reshape(B, T, H, -1), memory_BHKV


def _exp_where(mask: Array, x: Array) -> Array:
    """exp(x) under the mask, 0 elsewhere; masked before exp, so that no gradient is inf * 0."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)


@jax.custom_vjp
def unit_lower_inverse(a: Array) -> Array:
    """(I + a)^-1 for strictly lower triangular a[..., C, C], C a power of two.

    Inverts blocks of 1, 2, 4, ... along the diagonal: as exact as forward substitution.
    """
    C = a.shape[-1]
    x = jnp.broadcast_to(jnp.eye(C, dtype=a.dtype), a.shape)
    index = jnp.arange(C)
    size = 1
    while size < C:
        block = index // size
        below = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        coupling = jnp.where(jnp.expand_dims(below, range(a.ndim - 2)), a, 0)
        x = x - x @ coupling @ x
        size *= 2
    return x


def _inverse_fwd(a):
    x = unit_lower_inverse(a)
    return x, x


def _inverse_bwd(x, dx):
    xt = jnp.swapaxes(x, -1, -2)
    return (-(xt @ dx @ xt),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)


def init_a_log(key: Array, shape: tuple[int, ...], dtype) -> Array:
    """log A, A uniform in (0, 16): memories from long to short."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1e-2, 16.0))


def init_dt_bias(key: Array, shape: tuple[int, ...], dtype) -> Array:
    """softplus^-1 of a step log-uniform in (0.001, 0.1), so that a fresh model remembers."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
    return dt + jnp.log(-jnp.expm1(-dt))
