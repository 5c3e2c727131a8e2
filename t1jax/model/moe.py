"""Sparse experts: the router, its replay, and the experts' MLP.

Dims: N tokens, D model, I expert width, E experts, K experts a token.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from t1jax.model.config import ModelConfig
from t1jax.model.layers import Linear, dense_init

expert_init = nn.initializers.lecun_normal(batch_axis=(0,))


class MoE(nn.Module):
    """Top-k routed SwiGLU experts plus a shared one behind a sigmoid gate."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: Array, valid_BT: Array, replay_BTK: Array | None
    ) -> tuple[Array, Array]:
        """Returns y_BTD and the experts used i32[B, T, K], -1 under padding.

        replay: experts to use; a token with -1 among them routes freely.
        """
        c = self.config
        B, T, D = x_BTD.shape
        E, width = c.num_experts, c.expert_width
        router_DE = self.param("router", dense_init, (D, E), c.param_dtype)
        gate_up = self.param("gate_up", expert_init, (E, D, 2 * width), c.param_dtype)
        down = self.param("down", expert_init, (E, width, D), c.param_dtype)

        x_ND = x_BTD.reshape(B * T, D)
        replay = None if replay_BTK is None else replay_BTK.reshape(B * T, -1)
        logits_NE = x_ND.astype(jnp.float32) @ router_DE.astype(jnp.float32)
        experts_NK, weight_NK = route(logits_NE, c.experts_per_token, replay)
        valid_N1 = valid_BT.reshape(B * T, 1)
        experts_NK = jnp.where(valid_N1, experts_NK, -1)
        y_ND = experts_mlp(
            x_ND,
            experts_NK,
            jnp.where(valid_N1, weight_NK, 0).astype(x_ND.dtype),
            gate_up.astype(x_ND.dtype),
            down.astype(x_ND.dtype),
        )
        shared = swiglu(Linear(c, 2 * c.shared_width, name="shared_gate_up")(x_BTD))
        shared = Linear(c, D, name="shared_down")(shared)
        gate = jax.nn.sigmoid(Linear(c, 1, name="shared_gate")(x_BTD))
        return y_ND.reshape(B, T, D) + gate * shared, experts_NK.reshape(B, T, -1)


def route(logits_NE: Array, k: int, replay_NK: Array | None) -> tuple[Array, Array]:
    """Experts i32[N, K] and their float32 weights, which sum to 1.

    Weights always come from the live probabilities, so the router learns under replay too.
    """
    p_NE = jax.nn.softmax(logits_NE, axis=-1)
    experts_NK = jax.lax.top_k(jax.lax.stop_gradient(p_NE), k)[1]
    if replay_NK is not None:
        free_N1 = jnp.any(replay_NK < 0, axis=-1, keepdims=True)
        experts_NK = jnp.where(free_N1, experts_NK, replay_NK)
    weight_NK = jnp.take_along_axis(p_NE, experts_NK, axis=-1)
    return experts_NK, weight_NK / jnp.sum(weight_NK, axis=-1, keepdims=True)


def swiglu(gate_up: Array) -> Array:
    """silu(gate) * up, the gate in the first half of the last axis."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def experts_mlp(x_ND: Array, experts_NK: Array, weight_NK: Array, gate_up: Array, down: Array):
    """Weighted sum of each token's experts, y_ND; dropless.

    experts_NK: -1 = none (weight 0). gate_up [E, D, 2I], down [E, I, D].
    """
    E = gate_up.shape[0]
    mix_NE = jnp.sum(jax.nn.one_hot(experts_NK, E, dtype=x_ND.dtype) * weight_NK[..., None], axis=1)
    hidden_NEI = swiglu(jnp.einsum("nd,edf->nef", x_ND, gate_up)) * mix_NE[..., None]
    return jnp.einsum("nei,eid->nd", hidden_NEI, down)
