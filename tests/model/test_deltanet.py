"""The chunked delta rule against the rule itself, step by step in float64, for kind and for cruel inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model.delta_rule import delta_rule, delta_step, unit_lower_inverse

B, J, H, K, V = 2, 2, 4, 4, 3


def sequential(q, k, v, g, beta, memory, runs):
    q, k, v, g, beta, memory = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, memory))
    q, k = (np.repeat(x, H // J, axis=2) for x in (q, k))
    o = np.zeros(v.shape)
    for b in range(q.shape[0]):
        for h in range(H):
            S = memory[b, h].copy()
            for t in range(q.shape[1]):
                if t and runs[b, t] != runs[b, t - 1]:
                    S[:] = 0
                S = S * np.exp(g[b, t, h])
                S += np.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - S.T @ k[b, t, h]))
                o[b, t, h] = S.T @ q[b, t, h]
            memory[b, h] = S
    return o, memory


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs(T, kind="random", seed=0):
    rng = np.random.default_rng(seed)
    q, k = unit(rng.normal(size=(2, B, T, J, K)))
    v = rng.normal(size=(B, T, H, V))
    g, beta = -rng.exponential(0.3, (B, T, H)), rng.random((B, T, H))
    if kind == "the same key again and again":
        k = np.broadcast_to(k[:, :1], k.shape)
        beta, g = np.ones_like(beta), np.zeros_like(g)
    elif kind == "nearly the same key":
        k = unit(k[:, :1] + 1e-3 * rng.normal(size=k.shape))
    elif kind == "forgets at once":
        g = np.full_like(g, -300.0)
    elif kind == "now and then forgets":
        g = np.where(rng.random(g.shape) < 0.2, -300.0, 0.0)
    elif kind == "writes all or nothing":
        beta = (rng.random(beta.shape) < 0.5).astype(float)
    memory = rng.normal(size=(B, H, K, V))
    return [np.asarray(x, np.float32) for x in (q, k, v, g, beta, memory)]


KINDS = [
    *("random", "the same key again and again", "nearly the same key"),
    *("forgets at once", "now and then forgets", "writes all or nothing"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_the_rule(kind):
    args = inputs(37, kind)
    runs = np.ones((B, 37), int)
    o, memory = jax.jit(delta_rule, static_argnums=7)(*args, runs, 16)
    wanted_o, wanted_memory = sequential(*args, runs)
    np.testing.assert_allclose(o, wanted_o, atol=1e-4)
    np.testing.assert_allclose(memory, wanted_memory, atol=1e-4)


@pytest.mark.parametrize("T", [1, 2, 16, 17, 33, 128, 129, 300])  # a group of chunks is 128
def test_any_length(T):
    args, runs = inputs(T), np.ones((B, T), int)
    o, memory = delta_rule(*args, runs, 16)
    wanted_o, wanted_memory = sequential(*args, runs)
    np.testing.assert_allclose(o, wanted_o, atol=1e-4)
    np.testing.assert_allclose(memory, wanted_memory, atol=1e-4)


def test_runs_do_not_see_each_other():
    runs = np.array([[1] * 5 + [2] * 14 + [3] * 18, [1] * 16 + [2] * 16 + [4] * 5])
    args = inputs(37)
    o, memory = delta_rule(*args, runs, 16)
    wanted_o, wanted_memory = sequential(*args, runs)
    np.testing.assert_allclose(o, wanted_o, atol=1e-4)
    np.testing.assert_allclose(memory, wanted_memory, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_and_those_of_the_steps(kind):
    T = 75  # three groups of four chunks of 8
    args = [jnp.asarray(x) for x in inputs(T, kind)]
    runs = jnp.asarray([[1] * 33 + [2] * 42, [1] * 64 + [3] * 3 + [4] * 8])

    def by_steps(q, k, v, g, beta, memory):
        def step(memory, now):
            *now, begins_B = now
            memory = jnp.where(begins_B[:, None, None, None], 0, memory)
            o, memory = delta_step(*(x[:, None] for x in now), memory)
            return memory, o[:, 0]

        begins = jnp.diff(runs, axis=1, prepend=runs[:, :1]) != 0
        inputs = (jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, begins))
        memory, outs = jax.lax.scan(step, memory, tuple(inputs))
        return jnp.moveaxis(outs, 0, 1), memory

    def loss(rule):
        return lambda *a: sum(jnp.sum(jnp.sin(x)) for x in rule(*a))

    wanted = jax.jit(jax.grad(loss(by_steps), argnums=range(6)))(*args)
    chunked = lambda *a: delta_rule(*a, runs, 8)  # noqa: E731
    found = jax.jit(jax.grad(loss(chunked), argnums=range(6)))(*args)
    for a, b in zip(found, wanted, strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, atol=2e-3, rtol=2e-3)


def test_the_inverse_of_a_unit_triangular_matrix():
    a = np.tril(np.ones((32, 32), np.float32), -1)  # a Neumann product of it overflows
    found = np.asarray(unit_lower_inverse(jnp.asarray(a)))
    np.testing.assert_allclose(found @ (np.eye(32) + a), np.eye(32), atol=1e-4)
