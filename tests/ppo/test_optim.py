import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t1jax.mesh import MeshConfig, MeshError, make_mesh
from t1jax.ppo.microbatch import map_rows
from t1jax.ppo.optim import OptimConfig, decays, make_optimizer, make_update

CONFIG = OptimConfig(
    lr=0.1, warmup_steps=0, clip_norm=1.0, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0
)


def params(*values):
    return {"layer": {"kernel": jnp.array(values, jnp.float32)}}


def step(config, grads, now):
    optimizer = make_optimizer(config)
    updates, _ = optimizer.update(grads, optimizer.init(now), now)
    return optax.apply_updates(now, updates)["layer"]["kernel"]


def test_first_adam_step_is_the_rate_times_the_sign():
    got = step(CONFIG, params(0.5, -3.0), params(1.0, 1.0))
    np.testing.assert_allclose(got, [0.9, 1.1], rtol=1e-6)


def test_weight_decay_is_decoupled():
    config = dataclasses.replace(CONFIG, weight_decay=0.1)
    got = step(config, params(0.0), params(1.0))
    np.testing.assert_allclose(got, [1 - 0.1 * 0.1], rtol=1e-6)


def test_warmup_is_linear_and_reaches_the_rate():
    optimizer = make_optimizer(dataclasses.replace(CONFIG, warmup_steps=4))
    now, rates = params(0.0), []
    state = optimizer.init(now)
    for _ in range(6):
        updates, state = optimizer.update(params(1.0), state, now)
        rates.append(-float(updates["layer"]["kernel"][0]))
    np.testing.assert_allclose(rates, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-5)


def test_decay_goes_by_name_and_unknown_names_fail():
    stacked = jnp.zeros((2, 3))  # the layer scan makes a norm's scale a matrix
    tree = {"norm": {"scale": stacked}, "delta": {"A_log": stacked, "conv": stacked}}
    assert decays(tree) == {"norm": {"scale": False}, "delta": {"A_log": False, "conv": True}}
    with pytest.raises(ValueError, match=r"\['x'\]\['mystery'\] has no weight decay rule"):
        decays({"x": {"mystery": stacked}})


def squared_error(params, inputs):
    x, target = inputs
    error = params["layer"]["kernel"] * x - target
    return jnp.square(error).sum(), error


@pytest.mark.parametrize(("rows", "devices"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
def test_groups_of_rows_give_the_gradient_of_the_sum(rows, devices):
    x, target = jnp.array([1.0, 2.0, 2.0, -1.0]), jnp.array([0.0, 1.0, 1.0, 3.0])
    update = make_update(
        squared_error, make_optimizer(CONFIG), rows, make_mesh(MeshConfig(devices))
    )
    state = make_optimizer(CONFIG).init(params(1.0))
    _, _, error, metrics = update(params(1.0), state, (x, target))
    np.testing.assert_array_equal(error, x - target)
    assert metrics["loss"] == 1 + 1 + 1 + 16
    assert metrics["grad_norm"] == abs(2 * (1 + 2 + 2 + 4))  # 2 sum x (x - target)
    assert metrics["nonfinite"] == 0


def test_rows_must_divide_the_batch():
    one, two = make_mesh(MeshConfig(1)), make_mesh(MeshConfig(2))
    with pytest.raises(
        ValueError, match="4 rows of a device cannot be cut into micro-batches of 3"
    ):
        map_rows(lambda _, x: x, (), jnp.zeros(4), 3, one)
    with pytest.raises(ValueError, match="a batch of 3 rows cannot be shared by 2 devices"):
        map_rows(lambda _, x: x, (), jnp.zeros(3), 1, two)


def test_a_mesh_needs_its_devices():
    with pytest.raises(MeshError, match=r"mesh\.data=9 needs as many devices, cpu has 8"):
        make_mesh(MeshConfig(9))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_nonfinite_loss_or_gradient_updates_nothing(poison):
    """1e30: the loss overflows although every input is finite."""
    optimizer = make_optimizer(CONFIG)
    update = make_update(squared_error, optimizer, 1, make_mesh(MeshConfig(1)))
    good = (jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0]))
    now, state, _, _ = update(params(1.0), optimizer.init(params(1.0)), good)
    before = jax.tree.map(np.array, (now, state))
    now, state, _, metrics = update(now, state, (good[0].at[0].set(poison), good[1]))
    assert metrics["nonfinite"] == 1
    jax.tree.map(np.testing.assert_array_equal, (now, state), before)
