import jax
import jax.numpy as jnp
import numpy as np

from t1jax.mesh import MeshConfig, make_mesh
from t1jax.model.config import ModelConfig
from t1jax.model.lm import init_policy, token_logp
from t1jax.ppo.imitate import Examples, make_imitate_step
from t1jax.ppo.optim import OptimConfig, make_optimizer

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    num_layers=1,
    full_attention_interval=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    delta_k_heads=1,
    delta_v_heads=1,
    delta_k_dim=8,
    delta_v_dim=8,
    num_experts=2,
    experts_per_token=1,
    expert_width=8,
    shared_width=8,
    rotary_fraction=0.5,
    logp_chunk=8,
)
OPTIMIZER = make_optimizer(
    OptimConfig(lr=1e-2, warmup_steps=0, clip_norm=1.0, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.0)
)


def examples():
    rng = np.random.default_rng(0)
    inside = np.arange(8) < np.array([[8], [3], [6], [0]])
    weights = np.where(inside & (np.arange(8) > 1), rng.random((4, 8)), 0)
    return Examples(
        tokens=np.where(inside, rng.integers(0, 16, (4, 8)), 0).astype(np.int32),
        positions=np.where(inside, np.arange(8), 0).astype(np.int32),
        segments=inside.astype(np.int32),
        weights=weights.astype(np.float32),
    )


def run(microbatch, steps, devices=1):
    step = make_imitate_step(CONFIG, OPTIMIZER, microbatch, make_mesh(MeshConfig(devices)))
    params = init_policy(CONFIG, jax.random.key(0))
    opt_state, losses = OPTIMIZER.init(params), []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, examples())
        losses.append(metrics["loss"])
    return params, losses, metrics


def test_loss_is_the_weighted_mean_negative_log_prob():
    _, losses, metrics = run(4, steps=1)
    e = examples()
    params = init_policy(CONFIG, jax.random.key(0))
    logp, entropy, _ = token_logp(
        CONFIG, params, e.tokens, e.positions, e.segments, None, jnp.ones(4)
    )
    np.testing.assert_allclose(losses[0], -(e.weights * logp).sum() / e.weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy[e.weights > 0].mean(), rtol=1e-5)


def test_micro_batches_give_one_loss_and_gradient():
    _, losses, metrics = run(4, steps=1)
    for rows, devices in ((1, 1), (2, 1), (2, 2), (1, 4)):
        _, other, other_metrics = run(rows, steps=1, devices=devices)
        np.testing.assert_allclose(other[0], losses[0], rtol=1e-6)
        np.testing.assert_allclose(other_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-5)


def test_it_learns_and_repeats_bit_for_bit():
    params, losses, _ = run(2, steps=40)
    assert losses[-1] < 0.5 * losses[0]
    again, _, _ = run(2, steps=40)
    jax.tree.map(np.testing.assert_array_equal, params, again)
