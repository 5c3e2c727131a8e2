"""Reading piece by piece equals reading at once; sampling by hand-made numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fixtures import CONFIG

from t1jax.model.decode import extend, init_cache, sample, uniforms
from t1jax.model.lm import init_policy, token_logp

T, SLOTS = 23, 8
TOKENS = jax.random.randint(jax.random.key(1), (2, T), 0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def params():
    return init_policy(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def at_once(params):
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    ones = jnp.ones((2, T), jnp.int32)
    logp, _, used = token_logp(CONFIG, params, TOKENS, positions, ones, None, jnp.ones(2))
    return np.asarray(logp), np.asarray(used)


run = jax.jit(extend, static_argnums=0)


def read(params, pieces, rows=None, width=None):
    """log p of the token behind each piece, and the experts, of both streams read piece by piece."""
    cache, place, logps, experts = init_cache(CONFIG, SLOTS, 32), 0, [], []
    slots = jnp.array([5, 2]) if rows is None else rows
    for size in pieces:
        tokens = jnp.zeros((2, width or size), jnp.int32)
        tokens = tokens.at[:, :size].set(TOKENS[:, place : place + size])
        cache, logits, used = run(CONFIG, params, cache, slots, tokens, jnp.full(2, size))
        place += size
        experts.append(used[:, :size])
        if place < T:
            logps.append(jax.nn.log_softmax(logits)[jnp.arange(2), TOKENS[:, place]])
    return np.stack(logps, 1), np.concatenate(experts, 1)


@pytest.mark.parametrize("pieces", [[1] * T, [7, 9, 7], [22, 1], [3, 1, 1, 1, 16, 1]])
def test_any_split_gives_the_same_log_probs(params, at_once, pieces):
    logps, experts = read(params, pieces)
    ends = np.cumsum(pieces)[:-1] if sum(pieces) == T else np.cumsum(pieces)
    np.testing.assert_allclose(logps, at_once[0][:, ends], atol=1e-4)
    np.testing.assert_array_equal(np.sort(experts, -1), np.sort(at_once[1], -1))


def test_padding_behind_a_piece_changes_nothing(params, at_once):
    logps, _ = read(params, [7, 9, 7], width=12)
    np.testing.assert_allclose(logps, at_once[0][:, [7, 16]], atol=1e-4)


def test_rows_of_count_0_and_rows_outside_change_nothing(params):
    cache = init_cache(CONFIG, SLOTS, 32)
    cache, _, _ = run(CONFIG, params, cache, jnp.array([0, 3]), TOKENS[:, :6], jnp.array([6, 6]))
    rows, counts = jnp.array([3, SLOTS]), jnp.array([0, 6])
    after, _, _ = run(CONFIG, params, cache, rows, TOKENS[:, :6], counts)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_slot_starts_anew_at_length_0(params, at_once):
    cache = init_cache(CONFIG, SLOTS, 32)
    rows = jnp.array([1, 4])
    cache, _, _ = run(CONFIG, params, cache, rows, TOKENS[::-1, :9], jnp.array([9, 9]))
    cache = cache.replace(length=cache.length.at[rows].set(0))
    _, logits, _ = run(CONFIG, params, cache, rows, TOKENS[:, :9], jnp.array([9, 9]))
    found = jax.nn.log_softmax(logits)[jnp.arange(2), TOKENS[:, 9]]
    np.testing.assert_allclose(found, at_once[0][:, 9], atol=1e-4)


def test_the_inverse_cdf():
    p = np.array([0.1, 0.2, 0.0, 0.4, 0.3], np.float32)
    with np.errstate(divide="ignore"):
        logits = jnp.broadcast_to(jnp.asarray(np.log(p)), (6, 5))
    u = jnp.array([0.0, 0.09, 0.11, 0.31, 0.69, 0.9999999])
    ids, logp = sample(logits, u, jnp.ones(6))
    np.testing.assert_array_equal(ids, [0, 0, 1, 3, 3, 4])
    np.testing.assert_allclose(logp, np.log(p[np.asarray(ids)]), atol=1e-6)


def test_cuts_restrict_ids_and_not_log_probs():
    p = jnp.array([0.1, 0.25, 0.4, 0.2, 0.05])
    u = (jnp.arange(200) + 0.5) / 200
    logits = jnp.broadcast_to(jnp.log(p), (200, 5))
    for settings, kept in (
        ((1.0, 2), {1, 2}),
        ((0.6, 0), {1, 2}),
        ((0.3, 0), {2}),
        ((1.0, 0), set(range(5))),
    ):
        ids, logp = sample(logits, u, jnp.ones(200), *settings)
        assert set(np.asarray(ids).tolist()) == kept
        np.testing.assert_allclose(logp, np.log(p)[ids], atol=1e-6)


def test_temperature_flattens():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.8, 0.2])), (2, 2))
    _, logp = sample(logits, jnp.zeros(2), jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(np.exp(logp), [0.8, 2 / 3], atol=1e-6)


def test_uniforms_depend_on_their_key_alone():
    trial, turn, position = (jnp.array(x) for x in ([1, 2, 1], [0, 0, 1], [7, 7, 7]))
    found = uniforms(3, trial, turn, position)
    assert len(set(np.asarray(found).tolist())) == 3
    np.testing.assert_array_equal(uniforms(3, trial[1:2], turn[1:2], position[1:2]), found[1:2])
    assert not np.array_equal(uniforms(4, trial, turn, position), found)
