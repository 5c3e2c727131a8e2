"""AdamW as T1 uses it, and one guarded step of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from t1jax.ppo import microbatch

DECAYED = frozenset({"kernel", "embed", "head", "value", "router", "gate_up", "down", "conv"})
PLAIN = frozenset({"scale", "norm", "A_log", "dt_bias"})


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """T1: betas (0.9, 0.98), weight decay 0.1, clip 1.0, constant rate (actor 1e-6, critic 1.5e-5)."""

    lr: float
    warmup_steps: int  # linear, reaching lr at this step; 0 = constant from the start
    clip_norm: float  # of the whole gradient
    b1: float
    b2: float
    eps: float
    weight_decay: float


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Global norm clip, then AdamW; decoupled weight decay on `DECAYED` parameters only."""

    def rate(count):
        return config.lr * jnp.minimum(1.0, (count + 1) / config.warmup_steps)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            rate if config.warmup_steps else config.lr,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def decays(params: Any) -> Any:
    """Which parameters decay: weights do; norm scales, biases and decay rates do not.

    By name and not by rank, as the layer scan gives every parameter one more axis. Raises ValueError
    for a name it does not know.
    """

    def rule(path, _):
        name = path[-1].key
        if name not in DECAYED | PLAIN:
            raise ValueError(f"parameter {jax.tree_util.keystr(path)} has no weight decay rule")
        return name in DECAYED

    return jax.tree_util.tree_map_with_path(rule, params)


def make_update(
    loss: Callable, optimizer: optax.GradientTransformation, rows: int, mesh: Mesh
) -> Callable:
    """One optimizer step of loss(params, inputs) -> (sum over rows, aux), `rows` rows at a time
    on each device.

    Returns a jitted update(params, opt_state, inputs) -> (params, opt_state, aux, metrics) that takes
    over the buffers of `params` and `opt_state`. If the loss or the gradient's norm is not finite, both
    come back as they were and metrics["nonfinite"] is 1. grad_norm is the norm before clipping.
    """

    def update(params, opt_state, inputs):
        value, grads, aux = microbatch.value_and_grad(loss, params, inputs, rows, mesh)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        updates, stepped = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), stepped)
        params, opt_state = jax.tree.map(
            lambda n, old: jnp.where(finite, n, old), new, (params, opt_state)
        )
        metrics = {
            "loss": value,
            "grad_norm": norm,
            "nonfinite": 1.0 - finite.astype(jnp.float32),
        }
        return params, opt_state, aux, metrics

    return jax.jit(update, donate_argnums=(0, 1))
