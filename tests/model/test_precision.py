"""What the configuration says about precision and recomputation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fixtures import CONFIG as SMALL

from t1jax.model.config import DELTA_FIELDS, REMAT
from t1jax.model.lm import init_policy, token_logp

CONFIG = dataclasses.replace(SMALL, num_layers=4)  # two blocks


def losses_and_gradients(config, T=20):
    params = init_policy(config, jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (2, T), 0, config.vocab_size)
    place = jnp.broadcast_to(jnp.arange(T)[None], (2, T)), jnp.ones((2, T), jnp.int32)

    def loss(params):
        logp, _, _ = token_logp(config, params, ids, *place, None, jnp.ones(2))
        return -jnp.mean(logp)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
def test_recomputation_changes_no_result():
    plain = losses_and_gradients(CONFIG)
    for remat in REMAT[1:]:
        other = losses_and_gradients(dataclasses.replace(CONFIG, remat=remat))
        for a, b in zip(*map(jax.tree.leaves, (plain, other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMAT[1:])
def test_recomputation_saves_memory(remat):
    """Of the compiled gradient: in a jaxpr alone, XLA may still merge both computations."""

    def temporaries(config):
        params = jax.eval_shape(lambda: init_policy(config, jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)

        def loss(params, tokens):
            ones = jnp.ones_like(tokens)
            return jnp.sum(token_logp(config, params, tokens, ones, ones, None, jnp.ones(2))[0])

        compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    deep = dataclasses.replace(CONFIG, num_layers=8)
    assert temporaries(dataclasses.replace(deep, remat=remat)) < 0.8 * temporaries(deep)


def test_parameters_are_stored_as_configured():
    params = init_policy(dataclasses.replace(CONFIG, param_dtype="bfloat16"), jax.random.key(0))
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/").rsplit("/", 1)[-1]: x.dtype
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    wide = {"A_log", "dt_bias", "norm"}
    assert {name for name, dtype in found.items() if dtype == jnp.float32} == wide
    assert {dtype for name, dtype in found.items() if name not in wide} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize("field", ["dtype", "router_dtype", "logits_dtype"])
def test_every_dtype_counts_and_stays_near(field):
    """bfloat16 in one place moves the loss of 4 nats, by less than 0.05."""
    plain, _ = losses_and_gradients(CONFIG)
    other, gradients = losses_and_gradients(dataclasses.replace(CONFIG, **{field: "bfloat16"}))
    assert 0 < abs(float(other - plain)) < 0.05
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"remat": "all"}, "remat='all' is not one of none, dots, block"),
        ({"dtype": "float16"}, "dtype='float16' is not one of float32, bfloat16"),
        ({"family": "llama"}, "family='llama'"),
        ({"family": "qwen3_moe"}, "qwen3_moe has full attention in every layer"),
        ({"shared_width": 0}, "shared_width=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(CONFIG, **change)
    plain = dict.fromkeys(DELTA_FIELDS, 0) | {"family": "qwen3_moe", "full_attention_interval": 1}
    dataclasses.replace(CONFIG, **plain)


def test_sums_over_chunks_are_float32():
    """bfloat16 gradients of the head would lose a percent in a hundred chunks."""

    def gradient(chunk):
        config = dataclasses.replace(CONFIG, dtype="bfloat16", logp_chunk=chunk)
        return losses_and_gradients(config, T=256)[1]["params"]["head"]

    whole, cut = gradient(256), gradient(2)
    assert whole.dtype == jnp.float32
    assert np.linalg.norm(cut - whole) < 2e-3 * np.linalg.norm(whole)
