"""Norms, rotary positions and attention of Qwen3.5-MoE and Qwen3-MoE.

Dims: B rows, T tokens, S cached positions, D model, H query heads, G key/value heads, K head dim.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from t1jax.model.attention import attend, attend_causal
from t1jax.model.config import ModelConfig

dense_init = nn.initializers.lecun_normal()


class Place(NamedTuple):
    """Where each token of x_BTD stands; the same for all layers.

    positions_BT: of the token in its sequence. segments_BT: 0 = padding, else the sequence's id.
    runs_BT: `segments` with padding filled by the last sequence before it: whose memory is carried.
    """

    positions_BT: Array
    segments_BT: Array
    runs_BT: Array

    @property
    def valid_BT(self) -> Array:
        return self.segments_BT != 0


def make_place(positions_BT: Array, segments_BT: Array) -> Place:
    """Garbage positions under padding become 0. Padding stands between sequences, not inside one."""
    index_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1])[None, :], segments_BT.shape)
    last_BT = jax.lax.cummax(jnp.where(segments_BT != 0, index_BT, 0), axis=1)
    runs_BT = jnp.take_along_axis(segments_BT, last_BT, axis=1)
    return Place(jnp.where(segments_BT != 0, positions_BT, 0), segments_BT, runs_BT)


class RMSNorm(nn.Module):
    """x_hat * (1 + w) in float32, rounded once, w 0 at the start; in Qwen3-MoE w * x_hat, rounded before."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        plain = self.config.family == "qwen3_moe"
        init = nn.initializers.ones if plain else nn.initializers.zeros
        w = self.param("scale", init, (x.shape[-1],), self.config.param_dtype)
        unit = unit_rms(x, self.config.rms_eps)
        if plain:
            return scale(unit.astype(x.dtype), w.astype(x.dtype))
        return scale(unit, 1.0 + w.astype(jnp.float32)).astype(x.dtype)


class Linear(nn.Module):
    """x @ kernel, without bias, in the compute dtype."""

    config: ModelConfig
    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", dense_init, shape, self.config.param_dtype)
        return project(x, kernel.astype(x.dtype))


class AttentionState(NamedTuple):
    """Keys and values of every slot, laid out as the products want them: k_RGKS, v_RGSK."""

    k_RGKS: Array
    v_RGSK: Array


class Attention(nn.Module):
    """Grouped-query attention; in Qwen3.5 its output is gated per channel."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: Array, place: Place, cache: "tuple[AttentionState, Rows] | None" = None
    ) -> tuple[Array, AttentionState | None]:
        """Returns y_BTD, and with `cache` the state after x was written into it."""
        c = self.config
        B, T, D = x_BTD.shape
        gated = c.family == "qwen3_5_moe"
        q_BTHK = Linear(c, c.num_heads * (1 + gated) * c.head_dim, name="q_proj")(x_BTD)
        q_BTHK = q_BTHK.reshape(B, T, c.num_heads, -1)
        if gated:  # a head's query and gate stand side by side
            q_BTHK, gate_BTHK = jnp.split(q_BTHK, 2, axis=-1)
        k_BTGK = Linear(c, c.num_kv_heads * c.head_dim, name="k_proj")(x_BTD)
        v_BTGK = Linear(c, c.num_kv_heads * c.head_dim, name="v_proj")(x_BTD)
        k_BTGK = k_BTGK.reshape(B, T, c.num_kv_heads, c.head_dim)
        v_BTGK = v_BTGK.reshape(B, T, c.num_kv_heads, c.head_dim)
        q_BTHK = rotate(c, RMSNorm(c, name="q_norm")(q_BTHK), place.positions_BT)
        k_BTGK = rotate(c, RMSNorm(c, name="k_norm")(k_BTGK), place.positions_BT)
        if cache is None:
            state = None
            y_BTHK = attend_causal(q_BTHK, k_BTGK, v_BTGK, place.segments_BT)
        else:
            state, rows = cache
            state, k_BGKS, v_BGSK = write(state, rows, place, k_BTGK, v_BTGK)
            seen_BTS = jnp.arange(k_BGKS.shape[-1])[None, None] <= place.positions_BT[..., None]
            y_BTHK = attend(q_BTHK, k_BGKS, v_BGSK, seen_BTS)
        if gated:
            y_BTHK *= jax.nn.sigmoid(gate_BTHK)
        return Linear(c, D, name="o_proj")(y_BTHK.reshape(B, T, -1)), state


class Rows(NamedTuple):
    """Which cache slots a batch of rows stands for: ids i32[R], or None for every slot in order."""

    ids: Array | None

    def read(self, x: Array) -> Array:
        return x if self.ids is None else x.at[self.ids].get(mode="clip")

    def write(self, x: Array, new: Array) -> Array:
        """Puts whole rows; ids outside the cache are dropped."""
        return new if self.ids is None else x.at[self.ids].set(new, mode="drop")

    def index(self, count: int) -> Array:
        return jnp.arange(count) if self.ids is None else self.ids


def write(
    state: AttentionState, rows: Rows, place: Place, k_RTGK: Array, v_RTGK: Array
) -> tuple[AttentionState, Array, Array]:
    """Stores new keys and values at their positions; returns the state, and k and v of the rows."""
    k, v = state
    row_R1 = rows.index(k_RTGK.shape[0])[:, None]
    position_RT = jnp.where(place.valid_BT, place.positions_BT, k.shape[-1])  # outside: dropped
    k = k.at[row_R1, :, :, position_RT].set(k_RTGK.astype(k.dtype), mode="drop")
    v = v.at[row_R1, :, position_RT].set(v_RTGK.astype(v.dtype), mode="drop")
    return AttentionState(k, v), rows.read(k), rows.read(v)


def rotate(config: ModelConfig, x_BTHK: Array, positions_BT: Array) -> Array:
    """RoPE in halves on the first `rotary_dim` dims of each head; the rest passes."""
    half = config.rotary_dim // 2
    if half == 0:
        return x_BTHK
    # Constants, to float32's last bit: at position 100,000 an error of 1e-7 is one of 0.01 radians.
    frequency = (config.rope_theta ** (-np.arange(half) / half)).astype(np.float32)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle).astype(x_BTHK.dtype), jnp.sin(angle).astype(x_BTHK.dtype)
    a, b, rest = jnp.split(x_BTHK, [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Array, kernel: Array, dtype=None) -> Array:
    """x @ kernel over the last axis, in x's dtype or the given one.

    The kernel's gradient is a product of x's transpose, which lies in memory. Derived automatically it is
    one of dy's, and XLA:CPU computes dy again for it, column by column.
    """
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def _project_bwd(dtype, residuals, dy):
    x, kernel = residuals
    dy = dy.astype(x.dtype)
    rows_NF = dy.reshape(-1, dy.shape[-1])
    return dy @ kernel.T, x.reshape(len(rows_NF), -1).T @ rows_NF


project.defvjp(lambda x, kernel, dtype: (project(x, kernel, dtype), (x, kernel)), _project_bwd)


@jax.custom_vjp
def scale(x: Array, w: Array) -> Array:
    """x * w over the last axis."""
    return x * jnp.expand_dims(w, range(x.ndim - 1))


def _scale_bwd(residuals, dy):
    """The sum over rows is a product: XLA:CPU is slow at the sum of a long expression."""
    x, w = residuals
    terms_ND = (dy * x).reshape(-1, x.shape[-1])
    with jax.default_matmul_precision("highest"):
        return scale(dy, w), (jnp.ones((1, len(terms_ND)), x.dtype) @ terms_ND)[0]


scale.defvjp(lambda x, w: (scale(x, w), (x, w)), _scale_bwd)


def unit_rms(x: Array, eps: float) -> Array:
    """x in float32, divided by the root of its mean square over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def unit_l2(x: Array, eps: float = 1e-6) -> Array:
    """x in float32, divided by its length over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
