"""Attention by pairs of blocks against the whole square at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model.attention import BLOCK, attend_causal

B, H, G, K = 2, 4, 2, 8


def dense(q, k, v, segments):
    """softmax(q k^T / sqrt(K)) v over the same segment's past, in one go."""
    T = q.shape[1]
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    s = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tri(T, dtype=bool)[None]
    p = jax.nn.softmax(jnp.where(seen[:, None], s, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", p, v)


def inputs(T, scale=1.0):
    rng = np.random.default_rng(T)
    q, k, v = (rng.normal(size=(B, T, n, K)).astype(np.float32) * scale for n in (H, G, G))
    segments = np.sort(rng.integers(0, 4, (B, T)), axis=1)[:, ::-1]  # 0, the padding, comes last
    return q, k, v, segments.astype(np.int32)


@pytest.mark.parametrize("T", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 90])
def test_values_and_gradients(T):
    q, k, v, segments = inputs(T)
    r = np.random.default_rng(0).normal(size=q.shape).astype(np.float32)
    for a, b in zip(
        *(jax.vjp(lambda *x: f(*x, segments), q, k, v)[1](r) for f in (attend_causal, dense)),  # noqa: B023
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)
    got = attend_causal(q, k, v, segments)
    np.testing.assert_allclose(got, dense(q, k, v, segments), atol=2e-6)


def test_scores_of_any_size():
    """A maximum is taken off before exp: scores of hundreds neither overflow nor vanish."""
    q, k, v, segments = inputs(BLOCK + 30, scale=20.0)
    got = attend_causal(q, k, v, segments)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, dense(q, k, v, segments), atol=1e-2)  # scores round by 1e-4


def test_memory_grows_with_the_length_not_its_square():
    def temporaries(T):
        q, k, v, segments = inputs(T)
        loss = jax.grad(lambda q: jnp.sum(attend_causal(q, k, v, segments)))
        return jax.jit(loss).lower(q).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8 * BLOCK) < 2.5 * temporaries(4 * BLOCK)
