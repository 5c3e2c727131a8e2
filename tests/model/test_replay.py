"""Routing replay (R3): what it must change, what it must not, and that the router learns under it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fixtures import CONFIG

from t1jax.model.lm import init_policy, init_value, token_logp, token_values

B, T = 2, 11
TOKENS = jax.random.randint(jax.random.key(1), (B, T), 0, CONFIG.vocab_size)
POSITIONS = jnp.broadcast_to(jnp.arange(T), (B, T))
SEGMENTS = jnp.ones((B, T), jnp.int32)
ONES = jnp.ones(B)


@pytest.fixture(scope="module")
def params():
    return init_policy(CONFIG, jax.random.key(0))


@jax.jit
def logp(params, experts=None):
    return token_logp(CONFIG, params, TOKENS, POSITIONS, SEGMENTS, experts, ONES)


def test_replaying_ones_own_experts_is_free_routing(params):
    free, _, used = logp(params)
    replayed, _, again = logp(params, used)
    np.testing.assert_array_equal(free, replayed)
    np.testing.assert_array_equal(used, again)


def test_minus_one_routes_freely_token_by_token(params):
    free, _, used = logp(params)
    for share in (0.0, 0.5, 1.0):
        keep = jax.random.uniform(jax.random.key(2), used.shape[:2]) < share
        mixed = jnp.where(keep[..., None, None], used, -1)
        found, _, again = logp(params, mixed)
        np.testing.assert_allclose(found, free, atol=1e-6)
        np.testing.assert_array_equal(used, again)


def test_wrong_experts_change_the_log_probs_and_are_really_used(params):
    free, _, used = logp(params)
    wrong = (used + 1) % CONFIG.num_experts
    forced, _, again = logp(params, wrong)
    np.testing.assert_array_equal(again, wrong)
    assert (np.abs(np.asarray(forced - free))[:, 1:] > 1e-4).mean() > 0.9


def test_the_last_row_of_experts_predicts_nothing(params):
    _, _, used = logp(params)
    changed = used.at[:, -1].set((used[:, -1] + 1) % CONFIG.num_experts)
    np.testing.assert_array_equal(logp(params, used)[0], logp(params, changed)[0])
    changed = used.at[:, 4].set((used[:, 4] + 1) % CONFIG.num_experts)
    before, after = logp(params, used)[0], logp(params, changed)[0]
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.asarray(before[:, 5] != after[:, 5]))


def test_the_router_learns_under_replay(params):
    _, _, used = logp(params)
    forced = (used + 1) % CONFIG.num_experts  # not its own choice

    def loss(router):
        changed = jax.tree_util.tree_map_with_path(
            lambda path, x: router if path[-1].key == "router" and "layer_1" in str(path) else x,
            params,
        )
        return logp(changed, forced)[0].sum()

    router = params["params"]["trunk"]["blocks"]["layer_1"]["moe"]["router"]
    grad = jax.grad(loss)(router)
    assert float(jnp.abs(grad).max()) > 1e-3
    direction = jax.random.normal(jax.random.key(3), router.shape)
    step = 1e-2
    numeric = (loss(router + step * direction) - loss(router - step * direction)) / (2 * step)
    np.testing.assert_allclose(
        float(jnp.sum(grad * direction)), float(numeric), rtol=2e-2, atol=1e-3
    )


def test_padding_changes_nothing_whatever_stands_there(params):
    free, _, used = logp(params)
    pads = 5

    def padded(x, value):
        return jnp.pad(x, ((0, 0), (0, pads)) + ((0, 0),) * (x.ndim - 2), constant_values=value)

    found, entropy, experts = token_logp(
        CONFIG,
        params,
        padded(TOKENS, 10_000),
        padded(POSITIONS, -7),
        padded(SEGMENTS, 0),
        padded(used, 3),
        ONES,
    )
    np.testing.assert_allclose(found[:, :T], free, atol=1e-5)
    assert not np.any(found[:, T:]) and not np.any(entropy[:, T:])
    assert np.all(np.asarray(experts[:, T:]) == -1)


def test_packed_rows_equal_their_parts(params):
    free, _, used = logp(params)
    row = (
        TOKENS.reshape(1, -1),
        POSITIONS.reshape(1, -1),
        jnp.repeat(jnp.array([[1, 2]]), T, axis=1),
    )
    packed, _, experts = token_logp(CONFIG, params, *row, used.reshape(1, B * T, 2, 2), jnp.ones(1))
    np.testing.assert_allclose(packed.reshape(B, T), free, atol=1e-5)
    np.testing.assert_array_equal(experts.reshape(used.shape), used)


def test_temperature_flattens_the_distribution(params):
    hot = token_logp(CONFIG, params, TOKENS, POSITIONS, SEGMENTS, None, jnp.full(B, 2.0))
    cold = token_logp(CONFIG, params, TOKENS, POSITIONS, SEGMENTS, None, ONES)
    assert np.all(np.asarray(hot[1][:, 1:] > cold[1][:, 1:]))  # entropy rises
    assert np.all(np.asarray(hot[0]) <= 0)


def test_a_fresh_critic_says_zero_and_takes_the_policys_trunk(params):
    value = init_value(CONFIG, jax.random.key(4), params)
    assert value["params"]["trunk"] is params["params"]["trunk"]
    assert not np.any(token_values(CONFIG, value, TOKENS, POSITIONS, SEGMENTS))


def test_nothing_looks_ahead(params):
    place, before = 6, logp(params)[0]
    later = TOKENS.at[:, place:].set((TOKENS[:, place:] + 1) % CONFIG.vocab_size)
    after, _, _ = token_logp(CONFIG, params, later, POSITIONS, SEGMENTS, None, ONES)
    np.testing.assert_allclose(after[:, :place], before[:, :place], atol=1e-6)
    assert np.all(np.asarray(after[:, place] != before[:, place]))
