"""Masked statistics. An option that whitens without shifting the mean does not exist, so it cannot be
wrong (slime#1369): `whiten` always centres."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax import masked

NAN = float("nan")


def test_mean_and_var_ignore_padding():
    x, mask = jnp.array([1.0, 3.0, 0.0, 0.0]), jnp.array([True, True, False, False])
    assert masked.mean(x, mask) == 2.0
    assert masked.var(x, mask) == 1.0  # population, not Bessel


def test_whiten_uses_population_std_of_the_mask():
    x, mask = jnp.array([1.0, 3.0, 0.0, 0.0]), jnp.array([True, True, False, False])
    np.testing.assert_allclose(masked.whiten(x, mask), [-1, 1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("valid", [0, 1])
def test_one_token_or_none_is_finite(valid):
    x, mask = jnp.array([5.0, 7.0, 9.0]), jnp.arange(3) < valid
    np.testing.assert_array_equal(masked.whiten(x, mask), 0)
    assert masked.var(x, mask) == 0
    assert masked.mean(x, mask) == (5.0 if valid else 0.0)
    assert masked.explained_variance(x, x + 1, mask) == 0


@pytest.mark.parametrize("statistic", [masked.mean, masked.var, masked.whiten])
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_masked_poison_reaches_neither_value_nor_gradient(statistic, poison):
    x, mask = jnp.array([1.0, 4.0, poison]), jnp.array([True, True, False])
    weight = jnp.array([1.0, 2.0, 3.0])  # the mean of whitened values alone has no gradient
    value, grad = jax.value_and_grad(lambda x: (weight * statistic(x, mask)).sum())(x)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    assert grad[2] == 0


def test_select_stops_an_infinite_derivative():
    """where(mask, exp(x), 0) alone has the gradient 0 * inf; masking the input first does not."""
    x, mask = jnp.array([0.0, 1000.0]), jnp.array([True, False])
    naive = jax.grad(lambda x: jnp.where(mask, jnp.exp(x), 0).sum())(x)
    safe = jax.grad(lambda x: masked.select(jnp.exp(masked.select(x, mask)), mask).sum())(x)
    assert jnp.isnan(naive[1])
    np.testing.assert_array_equal(safe, [1, 0])


def test_explained_variance():
    returns, mask = jnp.array([0.0, 2.0, 4.0, NAN]), jnp.array([True, True, True, False])

    def ev(*values):
        return float(masked.explained_variance(jnp.array([*values, NAN]), returns, mask))

    assert ev(0.0, 2.0, 4.0) == 1.0
    assert ev(1.0, 3.0, 5.0) == 1.0  # a constant bias explains as much
    assert ev(7.0, 7.0, 7.0) == 0.0
    assert ev(4.0, 2.0, 0.0) == -3.0  # residuals -4, 0, 4: variance 32/3 over 8/3
