"""Chunked log-probs equal dense ones, value and gradient, whatever the chunk, T and V."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fixtures import CONFIG

from t1jax.model.lm import PolicyLM, by_token, init_policy, token_logp

T = 21
TOKENS = jax.random.randint(jax.random.key(1), (2, T), 0, CONFIG.vocab_size)
POSITIONS = jnp.broadcast_to(jnp.arange(T), (2, T))
ONES = jnp.ones((2, T), jnp.int32)
TEMPERATURE = jnp.array([1.0, 0.7])


@pytest.mark.parametrize("chunk", [1, 8, 21, 64])
def test_chunked_equals_dense(chunk):
    config = dataclasses.replace(CONFIG, logp_chunk=chunk)
    params = init_policy(config, jax.random.key(0))

    def chunked(params):
        logp, entropy, _ = token_logp(config, params, TOKENS, POSITIONS, ONES, None, TEMPERATURE)
        return jnp.sum(jnp.cos(jnp.arange(T))[None] * logp) + jnp.sum(entropy), (logp, entropy)

    def dense(params):
        hidden = PolicyLM(config).apply(params, TOKENS, POSITIONS, ONES).hidden_BTD
        logits = by_token(hidden, ONES) @ params["params"]["head"] / TEMPERATURE[:, None, None]
        full = jax.nn.log_softmax(logits)
        keep = (jnp.arange(T) > 0)[None]
        logp = jnp.where(keep, jnp.take_along_axis(full, TOKENS[..., None], -1)[..., 0], 0)
        entropy = jnp.where(keep, -jnp.sum(jnp.exp(full) * full, -1), 0)
        return jnp.sum(jnp.cos(jnp.arange(T))[None] * logp) + jnp.sum(entropy), (logp, entropy)

    (_, found), grads = jax.jit(jax.value_and_grad(chunked, has_aux=True))(params)
    (_, wanted), wanted_grads = jax.jit(jax.value_and_grad(dense, has_aux=True))(params)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.all(np.asarray(found[0]) <= 0)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_logits_never_exist_as_a_whole():
    """Trap 137: what the gradient needs at one time is a few chunks, not rows times vocabulary."""
    config = dataclasses.replace(CONFIG, vocab_size=20_000, logp_chunk=32)
    params = jax.eval_shape(lambda: init_policy(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def loss(params, tokens):
        ones = jnp.ones_like(tokens)
        return jnp.sum(token_logp(config, params, tokens, ones, ones, None, TEMPERATURE)[0])

    memory = jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()
    logits = 2 * 1024 * config.vocab_size * 4
    assert memory.temp_size_in_bytes < 0.4 * logits


def test_the_shift():
    x, segments = jnp.arange(1.0, 7.0)[None], jnp.array([[1, 1, 2, 2, 2, 0]])
    np.testing.assert_array_equal(by_token(x, segments), [[0, 1, 0, 3, 4, 0]])
