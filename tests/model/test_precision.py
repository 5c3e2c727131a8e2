"""What the configuration says about precision and recomputation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.model.config import DELTA_FIELDS, REMAT, ModelConfig
from t1jax.model.lm import init_policy, token_logp

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=16,
    num_layers=4,
    full_attention_interval=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    delta_k_heads=1,
    delta_v_heads=2,
    delta_k_dim=8,
    delta_v_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_width=8,
    shared_width=8,
    embed_std=1.0,
)


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
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_recomputation_is_done():
    """The blocks' forward products stand in the backward pass once more."""

    def products(config):
        return str(jax.make_jaxpr(lambda: losses_and_gradients(config))()).count("dot_general")

    assert products(dataclasses.replace(CONFIG, remat="block")) > products(CONFIG)


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
    """bfloat16 in one place moves the loss, by less than a hundredth."""
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
