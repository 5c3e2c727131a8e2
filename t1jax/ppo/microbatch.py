"""Micro-batches: the rows of a batch in groups that fit in memory, one `lax.scan` over the groups.

Each device of the mesh's "data" axis takes an equal share of the rows and goes through it group by group.

A loss over a batch must be a sum over its rows with weights fixed beforehand (loss.loss_weights);
then the sum over the groups is the same loss, and so is its gradient, however the rows are grouped
and shared.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

WHOLE, ROWS = PartitionSpec(), PartitionSpec("data")


def map_rows(fn: Callable, params: Any, inputs: Any, rows: int, mesh: Mesh) -> Any:
    """fn(params, group of `rows` rows); every leaf of `inputs` and of the result leads with [B]."""

    def share(params, inputs):
        return _join(jax.lax.map(lambda group: fn(params, group), _split(inputs, rows)))

    return _on_devices(share, mesh, ROWS)(params, inputs)


def value_and_grad(
    loss: Callable, params: Any, inputs: Any, rows: int, mesh: Mesh
) -> tuple[Any, Any, Any]:
    """Returns (loss f32[], gradients f32, aux) of loss(params, inputs) -> (sum over rows, aux [B, ...])."""

    def add(params, total, group):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, group)
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        return jax.tree.map(jnp.add, total, (value, grads)), aux

    def share(params, inputs):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        zero = (jnp.zeros((), jnp.float32), zeros)
        sums, aux = jax.lax.scan(functools.partial(add, params), zero, _split(inputs, rows))
        return *jax.lax.psum(sums, "data"), _join(aux)

    return _on_devices(share, mesh, (WHOLE, WHOLE, ROWS))(params, inputs)


def _on_devices(share: Callable, mesh: Mesh, out_specs: Any) -> Callable:
    def checked(params, inputs):
        for x in jax.tree.leaves(inputs):
            if len(x) % mesh.size:
                raise ValueError(
                    f"a batch of {len(x)} rows cannot be shared by {mesh.size} devices"
                )
        return mapped(params, inputs)

    # Varying-axes checks are off: scans and custom gradients inside a model do not state theirs.
    mapped = jax.shard_map(
        share, mesh=mesh, in_specs=(WHOLE, ROWS), out_specs=out_specs, check_vma=False
    )
    return checked


def _split(tree, rows):
    def split(x):
        if len(x) % rows:
            raise ValueError(
                f"{len(x)} rows of a device cannot be cut into micro-batches of {rows}"
            )
        return x.reshape(-1, rows, *x.shape[1:])

    return jax.tree.map(split, tree)


def _join(tree):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
