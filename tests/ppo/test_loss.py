import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.ppo.loss import gap_metrics, loss_weights, policy_loss, policy_metrics, value_loss

NAN = float("nan")
SAMPLED = jnp.array([[True, True, True, False], [False, True, False, False]])  # 3 and 1 tokens
PER_TOKEN = jnp.array([[1.0, 2.0, 3.0, NAN], [NAN, 10.0, NAN, NAN]])


def row(*values):
    return jnp.array([values], jnp.float32)


def one_token(ratio, advantage, low=0.2, high=0.2):
    """-loss and its gradient with respect to the log-prob."""
    loss, grad = jax.value_and_grad(policy_loss)(
        row(math.log(ratio)), row(0.0), row(advantage), row(1.0), low, high
    )
    return -float(loss), -float(grad[0, 0])


@pytest.mark.parametrize(
    ("reduction", "golden"),
    [("token", (1 + 2 + 3 + 10) / 4), ("trajectory", ((1 + 2 + 3) / 3 + 10) / 2)],
)
def test_golden_reductions(reduction, golden):
    """A loss of known per-token values: ratio 1, so -loss = sum w A."""
    weights = loss_weights(SAMPLED, reduction)
    loss = policy_loss(PER_TOKEN, PER_TOKEN, PER_TOKEN, weights, 0.2, 0.2)
    np.testing.assert_allclose(-loss, golden, rtol=1e-6)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def test_each_token_weighs_alike_whatever_its_row():
    sampled = jnp.arange(1000)[None] < jnp.array([[10], [1000], [0]])
    weights = loss_weights(sampled, "token")
    np.testing.assert_allclose(weights[sampled], 1 / 1010, rtol=1e-6)
    assert not weights[~sampled].any()


def test_rows_without_samples_take_no_share():
    sampled = jnp.array([[True, False], [False, False]])
    for reduction in ("token", "trajectory"):
        np.testing.assert_array_equal(loss_weights(sampled, reduction), [[1, 0], [0, 0]])
        assert not loss_weights(jnp.zeros((2, 2), bool), reduction).any()


def test_unknown_reduction():
    with pytest.raises(ValueError, match=r"'mean'.*'token' or 'trajectory'"):
        loss_weights(SAMPLED, "mean")


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "grad"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # clipped at 1.2
        (1.5, -2.0, -3.0, -3.0),  # the pessimistic side is not clipped
        (0.5, 2.0, 1.0, 1.0),
        (0.5, -2.0, -1.6, 0.0),  # clipped at 0.8
    ],
)
def test_clip(ratio, advantage, gain, grad):
    np.testing.assert_allclose(one_token(ratio, advantage), (gain, grad), rtol=1e-6)


def test_clip_zero_is_a_clip_and_none_is_none():
    np.testing.assert_allclose(one_token(0.9, -2.0, low=0.0), (-2.0, 0.0), rtol=1e-6)
    np.testing.assert_allclose(one_token(1.1, 2.0, high=0.0), (2.0, 0.0), rtol=1e-6)
    np.testing.assert_allclose(one_token(0.1, -2.0, low=None), (-0.2, -0.2), rtol=1e-6)
    np.testing.assert_allclose(one_token(9.0, 2.0, high=None), (18.0, 18.0), rtol=1e-6)


def test_value_loss_takes_the_worse_of_both_errors():
    def loss(value, old, target, clip=0.2):
        return float(value_loss(row(value), row(old), row(target), row(1.0), clip))

    np.testing.assert_allclose(loss(1.0, 0.0, 1.0), 0.64, rtol=1e-6)  # clipped to 0.2
    np.testing.assert_allclose(loss(1.0, 0.0, 0.0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(loss(0.1, 0.0, 1.0), 0.81, rtol=1e-6)
    np.testing.assert_allclose(loss(1.0, 0.0, 1.0, clip=None), 0.0)
    np.testing.assert_allclose(loss(0.1, 0.0, 1.0, clip=0.0), 1.0)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e4, 100.0])
def test_masked_tokens_reach_neither_loss_nor_gradient(poison):
    weights = loss_weights(jnp.array([[True, False, True]]), "token")
    clean, dirty = row(-1.0, -2.0, -0.5), row(-1.0, poison, -0.5)
    old = row(-1.1, 3.0, -0.7)

    def policy(logp, old, advantages):
        return policy_loss(logp, old, advantages, weights, 0.2, 0.2)

    def value(values, old, returns):
        return value_loss(values, old, returns, weights, 0.2)

    for loss in (policy, value):
        expected, expected_grad = jax.value_and_grad(loss)(clean, old, clean)
        for value_grad in (
            jax.value_and_grad(loss)(dirty, old, clean),
            jax.value_and_grad(loss)(clean, old, dirty),
            jax.value_and_grad(loss)(dirty, old, dirty),
            jax.value_and_grad(loss)(clean, jnp.where(dirty == clean, old, poison), clean),
        ):
            np.testing.assert_array_equal(value_grad[0], expected)
            np.testing.assert_array_equal(value_grad[1], expected_grad)
        assert expected_grad[0, 1] == 0


@pytest.mark.parametrize("poison", [NAN, 100.0])
def test_metrics_count_sampled_tokens_only(poison):
    ratios = jnp.log(jnp.array([[1.0, 1.5, 2.5, 0.4, 1.0]]))
    ratios = ratios.at[0, 4].set(poison)
    advantages = jnp.array([[1.0, 4.0, -2.0, -3.0, poison]])
    sampled = jnp.array([[True, True, True, True, False]])
    metrics = policy_metrics(ratios, row(0, 0, 0, 0, 0), advantages, sampled, 0.2, 0.2)
    expected = {
        "ratio": 5.4 / 4,
        "clip_frac": 2 / 4,  # 1.5 with A > 0 and 0.4 with A < 0; 2.5 with A < 0 is not cut
        "clip_share": (4 + 3) / (1 + 4 + 2 + 3),
        "kl": sum(r - 1 - math.log(r) for r in (1.0, 1.5, 2.5, 0.4)) / 4,
        "ratio_over_2": 2 / 4,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_no_advantage_no_clip_share():
    zero = row(0.0, 0.0)
    metrics = policy_metrics(row(1.0, 0.0), zero, zero, zero == 0, 0.2, 0.2)
    assert metrics["clip_share"] == metrics["clip_frac"] == 0


def test_gap_and_its_parts():
    metrics = gap_metrics(
        logp_BT=row(-1.0, -2.0, NAN),
        old_logp_BT=row(-1.1, -1.0, NAN),
        sampler_logp_BT=row(-1.3, -1.1, 0.0),
        sampled_BT=jnp.array([[True, True, False]]),
    )
    expected = {
        "total": (0.3 + 0.9) / 2,
        "movement": (0.1 + 1.0) / 2,
        "engine": (0.2 + 0.1) / 2,
        "engine_max": 0.2,
        "kl": ((math.exp(0.3) - 1 - 0.3) + (math.exp(-0.9) - 1 + 0.9)) / 2,
        "ratio_over_2": 1 / 2,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
