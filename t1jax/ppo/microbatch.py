"""Micro-batches: the rows of a batch in groups that fit in memory, one `lax.scan` over the groups.

A loss over a batch must be a sum over its rows with weights fixed beforehand (loss.loss_weights);
then the sum over the groups is the same loss, and so is its gradient, however the rows are grouped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def map_rows(fn: Callable, inputs: Any, rows: int) -> Any:
    """`fn` over groups of `rows` rows; every leaf of `inputs` and of the result leads with [B]."""
    return _join(jax.lax.map(fn, _split(inputs, rows)))


def value_and_grad(loss: Callable, params: Any, inputs: Any, rows: int) -> tuple[Any, Any, Any]:
    """Returns (loss f32[], gradients, aux) of loss(params, inputs) -> (sum over rows, aux [B, ...])."""

    def add(total, group):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, group)
        return jax.tree.map(jnp.add, total, (value, grads)), aux

    zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    (value, grads), aux = jax.lax.scan(add, zero, _split(inputs, rows))
    return value, grads, _join(aux)


def _split(tree, rows):
    def split(x):
        if len(x) % rows:
            raise ValueError(f"a batch of {len(x)} rows cannot be cut into micro-batches of {rows}")
        return x.reshape(-1, rows, *x.shape[1:])

    return jax.tree.map(split, tree)


def _join(tree):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
