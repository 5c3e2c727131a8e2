"""The gated delta net: a linear-attention layer with a decaying, error-correcting memory.

The memory itself is in delta_rule.py.
Dims: B rows, T tokens, D model, H value heads, K key dim, V value dim.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from t1jax.model.config import ModelConfig
from t1jax.model.delta_rule import delta_rule, delta_step
from t1jax.model.layers import Linear, Place, dense_init, scale, unit_l2, unit_rms


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
        q_BTJK = unit_l2(q.reshape(B, T, c.delta_k_heads, K)) * K**-0.5
        k_BTJK = unit_l2(k.reshape(B, T, c.delta_k_heads, K))
        v_BTHV = v.reshape(B, T, H, V).astype(jnp.float32)
        beta_BTH = jax.nn.sigmoid(b_BTH)
        g_BTH = -jnp.exp(a_log_H)[None, None] * jax.nn.softplus(a_BTH + dt_bias_H[None, None])

        # A padding token leaves the memory as it is: nothing decays, nothing is written.
        k_BTJK, v_BTHV = (
            jnp.where(place.valid_BT[..., None, None], h, 0) for h in (k_BTJK, v_BTHV)
        )
        beta_BTH, g_BTH = (jnp.where(place.valid_BT[..., None], h, 0) for h in (beta_BTH, g_BTH))
        inputs = q_BTJK, k_BTJK, v_BTHV, g_BTH, beta_BTH
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


def init_a_log(key: Array, shape: tuple[int, ...], dtype) -> Array:
    """log A, A uniform in (0, 16): memories from long to short."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1e-2, 16.0))


def init_dt_bias(key: Array, shape: tuple[int, ...], dtype) -> Array:
    """softplus^-1 of a step log-uniform in (0.001, 0.1), so that a fresh model remembers."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
    return dt + jnp.log(-jnp.expm1(-dt))
