"""GAE over sampled tokens only, against hand-computed values.

Decay across turn boundaries alone (trap 43, TB-GAE) is an estimator this package does not have.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.ppo.gae import gae

NAN = float("nan")


def run(reward, values, sampled, gamma=1.0, lam=1.0, ended=True, bootstrap=0.0):
    """One row."""
    advantages, returns = gae(
        jnp.array([reward], jnp.float32),
        jnp.array([values], jnp.float32),
        jnp.array([sampled], bool),
        jnp.array([ended]),
        gamma,
        lam,
        jnp.array([bootstrap], jnp.float32),
    )
    assert advantages.dtype == returns.dtype == jnp.float32
    return np.array(advantages[0]), np.array(returns[0])


def textbook(rewards, values, gamma, lam, after):
    advantages, following = np.zeros(len(values)), 0.0
    for t in reversed(range(len(values))):
        next_value = values[t + 1] if t + 1 < len(values) else after
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t] = following
    return advantages


@pytest.mark.parametrize("context_value", [9.0, -100.0, NAN])
def test_observations_take_no_part(context_value):
    values = [0.1, 0.2, context_value, context_value, 0.3]
    advantages, returns = run(1.0, values, [1, 1, 0, 0, 1], lam=0.95)
    np.testing.assert_allclose(advantages, [0.82675, 0.765, 0, 0, 0.7], atol=1e-6)
    np.testing.assert_allclose(returns, [0.92675, 0.965, 0, 0, 1.0], atol=1e-6)


def test_lambda_one_is_reward_minus_value():
    """T1: A = r - V, R = r at every sampled token, however long the row."""
    rng = np.random.default_rng(0)
    values, sampled = rng.normal(size=200), rng.random(200) < 0.5
    advantages, returns = run(1.35, values, sampled)
    np.testing.assert_allclose(advantages[sampled], 1.35 - values[sampled], atol=1e-5)
    np.testing.assert_allclose(returns[sampled], 1.35, atol=1e-5)
    assert not advantages[~sampled].any()
    assert not returns[~sampled].any()


def test_masked_equals_textbook_on_the_compressed_sequence():
    rng = np.random.default_rng(1)
    values, sampled = rng.normal(size=50), rng.random(50) < 0.4
    rewards = np.zeros(sampled.sum())
    rewards[-1] = 0.8
    advantages, _ = run(0.8, values, sampled, gamma=0.9, lam=0.8, ended=False, bootstrap=0.7)
    expected = textbook(rewards, values[sampled], 0.9, 0.8, after=0.7)
    np.testing.assert_allclose(advantages[sampled], expected, atol=1e-6)


def test_only_a_truncated_row_bootstraps():
    for ended, delta in ((False, 0.3), (True, -0.2)):
        advantages, _ = run(0.0, [0.0, 0.2], [0, 1], ended=ended, bootstrap=0.5)
        np.testing.assert_allclose(advantages, [0, delta], atol=1e-6)


def test_a_row_that_fills_the_width_is_not_truncated_by_that():
    full, _ = run(1.0, [0.5, 0.25], [1, 1], bootstrap=9.0)
    padded, _ = run(1.0, [0.5, 0.25, NAN, NAN], [1, 1, 0, 0], bootstrap=9.0)
    np.testing.assert_allclose(full, [0.5, 0.75], atol=1e-6)
    np.testing.assert_array_equal(padded, [*full, 0, 0])


@pytest.mark.parametrize("pads", [0, 1, 5])
def test_reward_sits_on_the_last_sampled_token(pads):
    """gamma 0 shows each token its own reward only."""
    advantages, _ = run(2.0, [0.0] * (4 + pads), [0, 1, 1, 0] + [0] * pads, gamma=0.0)
    np.testing.assert_array_equal(advantages, [0, 0, 2, 0] + [0] * pads)


def test_a_row_without_sampled_tokens_is_zero():
    advantages, returns = run(1.0, [1.0, NAN], [0, 0])
    assert not advantages.any()
    assert not returns.any()


def test_rows_are_independent_and_rewards_stay_fractions():
    advantages, _ = gae(
        jnp.array([0.6, 1.5]),
        jnp.zeros((2, 3)),
        jnp.array([[True, False, True], [False, True, False]]),
        jnp.array([True, True]),
        1.0,
        1.0,
        jnp.zeros(2),
    )
    np.testing.assert_allclose(advantages, [[0.6, 0, 0.6], [0, 1.5, 0]], atol=1e-7)
