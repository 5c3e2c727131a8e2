"""The experts' MLP against a loop over tokens, for even, empty and crowded experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model.moe import blocked_experts, experts_mlp, ragged_experts, route

N, D, WIDTH, E, K = 45, 6, 5, 4, 2


def silu(x):
    return x / (1 + np.exp(-x))


def loop(x, experts, weight, gate_up, down):
    y = np.zeros_like(x)
    for n in range(len(x)):
        for k in range(experts.shape[1]):
            e = experts[n, k]
            if e >= 0:
                gate, up = np.split(x[n] @ gate_up[e], 2)
                y[n] += weight[n, k] * ((silu(gate) * up) @ down[e])
    return y


ROUTES = {
    "even": np.stack([np.arange(N) % E, (np.arange(N) + 1) % E], 1),
    "two experts get all": np.tile([3, 1], (N, 1)),
    "one empty": np.stack([np.arange(N) % 2, 2 + 0 * np.arange(N)], 1),
    "half is padding": np.where(np.arange(N)[:, None] % 2, -1, np.array([[0, 3]])),
    "nothing but padding": np.full((N, K), -1),
}


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    shapes = ((N, D), (N, K), (E, D, 2 * WIDTH), (E, WIDTH, D))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("form", [experts_mlp, blocked_experts, ragged_experts])
def test_the_sum_of_each_tokens_experts(form, name, weights):
    x, weight, gate_up, down = weights
    experts = ROUTES[name]
    found = jax.jit(form)(x, jnp.asarray(experts), weight, gate_up, down)
    np.testing.assert_allclose(found, loop(x, experts, weight, gate_up, down), atol=1e-4)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("form", [blocked_experts, ragged_experts])
def test_gradients_equal_those_of_the_dense_form(form, name, weights):
    experts = jnp.asarray(ROUTES[name])

    def dense(x, weight, gate_up, down):
        gate, up = jnp.split(jnp.einsum("nd,edi->nei", x, gate_up), 2, axis=-1)
        y_NED = jnp.einsum("nei,eid->ned", jax.nn.silu(gate) * up, down)
        mix = jnp.sum(jax.nn.one_hot(experts, E) * weight[..., None], axis=1)
        return jnp.einsum("ned,ne->nd", y_NED, mix)

    def grads(form):
        def loss(*args):
            return jnp.sum(form(*args) * jnp.cos(jnp.arange(N * D).reshape(N, D)))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*weights)

    wanted = grads(dense)
    found = grads(lambda x, w, *rest: form(x, experts, w, *rest))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    for expert in set(range(E)) - set(np.unique(experts)):
        assert not np.any(found[2][expert]) and not np.any(found[3][expert])


def test_weights_are_the_live_probabilities_renormalised():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    experts, weight = route(logits, 2, True, None)
    np.testing.assert_array_equal(experts, [[0, 1]])
    np.testing.assert_allclose(weight, [[0.625, 0.375]], atol=1e-6)
    experts, weight = route(logits, 2, True, jnp.array([[3, 2]]))
    np.testing.assert_array_equal(experts, [[3, 2]])
    np.testing.assert_allclose(weight, [[0.25, 0.75]], atol=1e-6)
    far = jnp.array([[0.0, -1.0, -200.0, -201.0]])  # of probability 0 in float32
    _, weight = route(far, 2, True, jnp.array([[2, 3]]))
    np.testing.assert_allclose(weight, jax.nn.softmax(jnp.array([[0.0, -1.0]])), atol=1e-6)
    experts, _ = route(logits, 2, True, jnp.array([[-1, 2]]))
    np.testing.assert_array_equal(experts, [[0, 1]])
