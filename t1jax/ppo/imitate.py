"""Supervised fine-tuning: maximum likelihood of weighted tokens. Routes freely."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from t1jax import masked
from t1jax.model.config import ModelConfig
from t1jax.model.lm import token_logp
from t1jax.ppo.optim import make_update


@struct.dataclass
class Examples:
    """Token rows to imitate, aligned as in batch.py. Several may share a row, as segments 1, 2, ..."""

    tokens: jax.Array  # i32[B, T]
    positions: jax.Array  # i32[B, T]
    segments: jax.Array  # i32[B, T]: 0 = padding
    weights: jax.Array  # f32[B, T]: how much token t counts; 0 = context


def make_imitate_step(
    config: ModelConfig, optimizer: optax.GradientTransformation, microbatch: int, mesh: Mesh
) -> Callable:
    """Returns step(params, opt_state, examples) -> (params, opt_state, metrics f32[]).

    loss = -sum w log p(token) / sum w over the whole batch, in nats. Buffers of params and opt_state
    are taken over. metrics: loss, entropy (nats a token), grad_norm, nonfinite (1 = nothing updated).
    """

    def loss(params, inputs):
        examples, shares = inputs
        logp, entropy, _ = token_logp(
            config,
            params,
            examples.tokens,
            examples.positions,
            examples.segments,
            None,
            jnp.ones(len(examples.tokens)),
        )
        return -(shares * masked.select(logp, shares > 0)).sum(), entropy

    update = make_update(loss, optimizer, microbatch, mesh)

    def step(params, opt_state, examples: Examples):
        shares = _shares(examples.weights)
        params, opt_state, entropy, metrics = update(params, opt_state, (examples, shares))
        return params, opt_state, metrics | {"entropy": _entropy(entropy, examples.weights)}

    return step


@jax.jit
def _shares(weights):
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1.0)


@jax.jit
def _entropy(entropy, weights):
    return masked.mean(entropy, weights > 0)
