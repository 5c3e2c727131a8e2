"""Sparse experts: the router, its replay, and the experts' MLP.

Dims: N tokens, D model, I expert width, E experts, K experts a token.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from t1jax.model.config import ModelConfig
from t1jax.model.layers import Linear, dense_init

expert_init = nn.initializers.lecun_normal(batch_axis=(0,))


class MoE(nn.Module):
    """Top-k routed SwiGLU experts; in Qwen3.5 also a shared one behind a sigmoid gate."""

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
        with jax.default_matmul_precision("highest"):
            logits_NE = x_ND.astype(c.router_dtype) @ router_DE.astype(c.router_dtype)
        experts_NK, weight_NK = route(logits_NE, c.experts_per_token, c.norm_topk, replay)
        valid_N1 = valid_BT.reshape(B * T, 1)
        experts_NK = jnp.where(valid_N1, experts_NK, -1)
        y_ND = experts_mlp(
            x_ND,
            experts_NK,
            jnp.where(valid_N1, weight_NK, 0).astype(x_ND.dtype),
            gate_up.astype(x_ND.dtype),
            down.astype(x_ND.dtype),
        )
        y_BTD, experts_BTK = y_ND.reshape(B, T, D), experts_NK.reshape(B, T, -1)
        if not c.shared_width:
            return y_BTD, experts_BTK
        shared = swiglu(Linear(c, 2 * c.shared_width, name="shared_gate_up")(x_BTD))
        shared = Linear(c, D, name="shared_down")(shared)
        gate = jax.nn.sigmoid(Linear(c, 1, name="shared_gate")(x_BTD))
        return y_BTD + gate * shared, experts_BTK


def route(
    logits_NE: Array, k: int, norm_topk: bool, replay_NK: Array | None
) -> tuple[Array, Array]:
    """Experts i32[N, K] and their float32 weights: probabilities, with `norm_topk` made to sum to 1.

    Weights always come from the live probabilities, so the router learns under replay too.
    """
    logits_NE = logits_NE.astype(jnp.float32)
    experts_NK = jax.lax.top_k(jax.lax.stop_gradient(logits_NE), k)[1]
    if replay_NK is not None:
        free_N1 = jnp.any(replay_NK < 0, axis=-1, keepdims=True)
        experts_NK = jnp.where(free_N1, experts_NK, replay_NK)
    if norm_topk:  # of these logits alone: the same numbers, never 0 / 0
        chosen_NK = jnp.take_along_axis(logits_NE, experts_NK, axis=-1)
        return experts_NK, jax.nn.softmax(chosen_NK, axis=-1)
    p_NE = jax.nn.softmax(logits_NE, axis=-1)
    return experts_NK, jnp.take_along_axis(p_NE, experts_NK, axis=-1)


def swiglu(gate_up: Array) -> Array:
    """silu(gate) * up, the gate in the first half of the last axis."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def experts_mlp(
    x_ND: Array, experts_NK: Array, weight_NK: Array, gate_up: Array, down: Array
) -> Array:
    """Weighted sum of each token's experts, y_ND; dropless, exact for empty and for crowded experts.

    experts_NK: -1 = none, its weight does not count. gate_up [E, D, 2I], down [E, I, D].
    """
    return jax.lax.platform_dependent(
        x_ND, experts_NK, weight_NK, gate_up, down, cpu=blocked_experts, default=ragged_experts
    )


def ragged_experts(x_ND, experts_NK, weight_NK, gate_up, down):
    """Tokens sorted by expert, then one ragged product a matrix: for accelerators."""
    E, K = gate_up.shape[0], experts_NK.shape[1]
    flat_A = jnp.where(experts_NK < 0, E, experts_NK).reshape(-1)  # A = N * K assignments
    order_A = jnp.argsort(flat_A)
    sizes_E = jnp.bincount(flat_A, length=E).astype(jnp.int32)
    # Rows behind the last group: a kernel may leave anything there, forward and backward.
    real_A1 = jnp.arange(len(flat_A))[:, None] < jnp.sum(sizes_E)
    x_AD = jnp.where(real_A1, x_ND[order_A // K], 0)
    hidden = swiglu(jnp.where(real_A1, jax.lax.ragged_dot(x_AD, gate_up, sizes_E), 0))
    y_AD = jnp.where(real_A1, jax.lax.ragged_dot(hidden, down, sizes_E), 0)
    y_NKD = y_AD[jnp.argsort(order_A)].reshape(*experts_NK.shape, -1)
    return jnp.sum(y_NKD * weight_NK[..., None], axis=1)


class Plan(NamedTuple):
    """Assignments sorted by expert, each expert's cut into blocks of equal size (M blocks at most).

    expert_M: of each block. rows_MS: the assignment n * K + k in each row, N * K where there is none.
    place_NK: where each assignment stands in rows_MS, flattened. used: how many blocks there are.
    """

    expert_M: Array
    rows_MS: Array
    place_NK: Array
    used: Array


def plan_blocks(experts_NK: Array, num_experts: int) -> Plan:
    assignments = experts_NK.size
    size = 16
    while size < 256 and size * num_experts * 4 <= assignments:
        size *= 2
    flat_A = jnp.where(experts_NK < 0, num_experts, experts_NK).reshape(-1)
    order_A = jnp.argsort(flat_A)
    bounds = jnp.searchsorted(flat_A[order_A], jnp.arange(num_experts + 1))
    blocks_E = -(-jnp.diff(bounds) // size)
    ends_E = jnp.cumsum(blocks_E)
    block_M = jnp.arange(assignments // size + num_experts)
    expert_M = jnp.minimum(jnp.searchsorted(ends_E, block_M, side="right"), num_experts - 1)
    start_M = bounds[expert_M] + (block_M - (ends_E - blocks_E)[expert_M]) * size
    sorted_MS = start_M[:, None] + jnp.arange(size)[None]
    real_MS = sorted_MS < bounds[expert_M + 1][:, None]
    rows_MS = jnp.where(real_MS, order_A.at[sorted_MS].get(mode="clip"), assignments)
    place_A = jnp.zeros(assignments, jnp.int32)
    place_A = place_A.at[rows_MS.reshape(-1)].set(jnp.arange(rows_MS.size), mode="drop")
    return Plan(expert_M, rows_MS, place_A.reshape(experts_NK.shape), ends_E[-1])


@jax.custom_vjp
def blocked_experts(x_ND, experts_NK, weight_NK, gate_up, down):
    """A loop over blocks of tokens that share an expert; padding costs nothing."""
    return _blocked_fwd(x_ND, experts_NK, weight_NK, gate_up, down)[0]


def _blocked_fwd(x_ND, experts_NK, weight_NK, gate_up, down):
    plan = plan_blocks(experts_NK, gate_up.shape[0])

    def step(i, y_MSD):
        expert, x_SD = plan.expert_M[i], _take_block(plan, i, x_ND)
        return y_MSD.at[i].set(swiglu(x_SD @ gate_up[expert]) @ down[expert])

    y_MSD = jnp.zeros((*plan.rows_MS.shape, x_ND.shape[1]), x_ND.dtype)
    y_MSD = jax.lax.fori_loop(0, plan.used, step, y_MSD)
    weight = jnp.where(experts_NK < 0, 0, weight_NK)
    y_ND = jnp.sum(_gather(plan, y_MSD) * weight[..., None], axis=1)
    return y_ND, (x_ND, experts_NK, weight_NK, gate_up, down, plan)


def _blocked_bwd(residuals, dy_ND):
    x_ND, experts_NK, weight_NK, gate_up, down, plan = residuals
    weight_A = weight_NK.reshape(-1)

    def step(i, carry):
        dx_MSD, dweight_MS, dgate_up, ddown = carry
        expert, x_SD = plan.expert_M[i], _take_block(plan, i, x_ND)
        dy_SD = _take_block(plan, i, dy_ND)
        weight_S1 = weight_A.at[plan.rows_MS[i]].get(mode="fill", fill_value=0)[:, None]
        hidden_SI, pull = jax.vjp(swiglu, x_SD @ gate_up[expert])
        back_SI = dy_SD @ down[expert].T
        (dpre,) = pull(back_SI * weight_S1)
        return (
            dx_MSD.at[i].set(dpre @ gate_up[expert].T),
            dweight_MS.at[i].set(jnp.sum(hidden_SI * back_SI, axis=-1)),
            dgate_up.at[expert].add(_wide(x_SD.T, dpre)),
            ddown.at[expert].add(_wide((hidden_SI * weight_S1).T, dy_SD)),
        )

    rows = plan.rows_MS.shape
    zeros = (
        jnp.zeros((*rows, x_ND.shape[1]), x_ND.dtype),
        jnp.zeros(rows, x_ND.dtype),
        jnp.zeros(gate_up.shape, jnp.float32),  # sums over blocks
        jnp.zeros(down.shape, jnp.float32),
    )
    dx, dweight, dgate_up, ddown = jax.lax.fori_loop(0, plan.used, step, zeros)
    none = experts_NK < 0
    dx_ND = jnp.sum(jnp.where(none[..., None], 0, _gather(plan, dx)), axis=1)
    dweight_NK = jnp.where(none, 0, _gather(plan, dweight[..., None])[..., 0])
    return dx_ND, None, dweight_NK, dgate_up.astype(gate_up.dtype), ddown.astype(down.dtype)


blocked_experts.defvjp(_blocked_fwd, _blocked_bwd)


_wide = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def _take_block(plan: Plan, i: Array, x_ND: Array) -> Array:
    """The tokens of block i, zeros in its empty rows."""
    token_S = plan.rows_MS[i] // plan.place_NK.shape[1]
    return x_ND.at[token_S].get(mode="fill", fill_value=0)


def _gather(plan: Plan, y_MSD: Array) -> Array:
    """[N, K, D] from blocks."""
    return y_MSD.reshape(-1, y_MSD.shape[-1])[plan.place_NK]
