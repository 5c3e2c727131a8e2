"""The PPO step on a tiny model. Entropy and KL have no coefficient, so no loss term of theirs can be
masked wrongly or run under a stop-gradient; they are metrics only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.batch import RolloutBatch
from t1jax.mesh import MeshConfig, make_mesh, replicate
from t1jax.model.config import ModelConfig
from t1jax.model.lm import init_policy, init_value, token_logp
from t1jax.ppo.optim import OptimConfig, make_optimizer
from t1jax.ppo.step import (
    PPOConfig,
    init_state,
    make_flips,
    make_measure,
    make_score,
    make_train_step,
    rotate,
)

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=1,
    full_attention_interval=1,
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
    rotary_fraction=0.5,
    embed_std=1.0,
    delta_chunk=8,
    logp_chunk=8,
)
MESH = make_mesh(MeshConfig(1))
PPO = PPOConfig(
    clip_low=0.2,
    clip_high=0.2,
    value_clip=0.2,
    gamma=1.0,
    lam=1.0,
    replay=True,
    whiten=False,
    reduction="token",
    microbatch=4,
)
ACTOR, CRITIC = (
    make_optimizer(
        OptimConfig(
            lr=lr, warmup_steps=0, clip_norm=1.0, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.1
        )
    )
    for lr in (1e-3, 1e-2)
)
ROWS, LENGTH = 8, 16
LENGTHS = np.array([16, 5, 9, 16, 7, 12, 3, 0])  # unequal token counts; the last row is empty


@functools.cache
def policy():
    return init_policy(CONFIG, jax.random.key(0))


@functools.cache
def value():
    """A critic whose head is not zero, as after some training."""
    params = init_value(CONFIG, jax.random.key(1))
    head = 0.1 * jax.random.normal(jax.random.key(2), params["params"]["value"].shape)
    return {"params": {**params["params"], "value": head}}


def fresh_state():
    return init_state(policy(), value(), ACTOR, CRITIC)


@functools.cache
def recorded() -> RolloutBatch:
    """Random streams with the policy's own log-probs and experts as the sampler's record."""
    rng = np.random.default_rng(0)
    inside = np.arange(LENGTH) < LENGTHS[:, None]
    sampled = (rng.random((ROWS, LENGTH)) < 0.5) & inside & (np.arange(LENGTH) > 0)
    tokens = np.where(inside, rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)), 0)
    positions = np.where(inside, np.arange(LENGTH), 0)
    temperature = np.where(np.arange(ROWS) % 2, 0.5, 1.0).astype(np.float32)
    i32 = functools.partial(np.asarray, dtype=np.int32)
    logp, _, experts = token_logp(
        CONFIG, policy(), i32(tokens), i32(positions), i32(inside), None, temperature
    )
    last = np.arange(LENGTH) >= LENGTHS[:, None] - 1
    return RolloutBatch(
        tokens=i32(tokens),
        positions=i32(positions),
        segments=i32(inside),
        turn=i32(np.where(inside, 0, -1)),
        sampled=sampled,
        sampler_logp=np.where(sampled, logp, 0).astype(np.float32),
        version=i32(np.where(inside, 0, -1)),
        experts=i32(np.where(last[..., None, None], -1, experts)),
        reward=rng.random(ROWS).astype(np.float32),
        ended=np.arange(ROWS) % 3 > 0,
        trial=np.arange(ROWS, dtype=np.int32),
        temperature=temperature,
    )


@functools.cache
def functions():
    return (
        make_score(CONFIG, PPO, MESH),
        make_train_step(CONFIG, PPO, ACTOR, CRITIC, MESH),
        make_measure(CONFIG, PPO, MESH),
    )


@functools.cache
def first_step():
    """(advantages, state, metrics of the step, metrics after it) from fresh parameters."""
    score, train_step, measure = functions()
    state = fresh_state()
    advantages = score(state, recorded())
    state, metrics = train_step(state, recorded(), advantages, True)
    return advantages, state, metrics, measure(state, recorded(), advantages)


def leaves(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def assert_equal(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(a, b, atol):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


def gradient(state):
    """The step's gradient, from Adam's first moments after one step (before that they are 0)."""
    return [np.array(x) / 0.1 for opt in (state.actor_opt, state.critic_opt) for x in moments(opt)]


def moments(opt_state):
    return jax.tree.leaves(opt_state[1][0].mu)


def test_scores_are_aligned_and_zero_off_sampled():
    advantages, *_ = first_step()
    sampled = recorded().sampled
    for x in jax.tree.leaves(advantages):
        assert x.shape == sampled.shape
        assert x.dtype == jnp.float32
        assert not x[~sampled].any()
    np.testing.assert_allclose(advantages.old_logp, recorded().sampler_logp, atol=1e-5)
    returns = np.broadcast_to(recorded().reward[:, None], sampled.shape)
    np.testing.assert_allclose(advantages.returns[sampled], returns[sampled], atol=1e-6)
    np.testing.assert_allclose(
        advantages.advantages, np.where(sampled, returns - advantages.values, 0), atol=1e-6
    )


def test_first_step_has_ratio_one_and_no_clipping():
    _, state, metrics, _ = first_step()
    np.testing.assert_allclose(metrics["ppo/ratio"], 1, atol=1e-5)
    assert metrics["ppo/clip_frac"] == metrics["ppo/clip_share"] == 0
    assert metrics["ppo/ratio_over_2"] == 0
    np.testing.assert_allclose(metrics["ppo/kl"], 0, atol=1e-6)
    assert metrics["guard/nonfinite"] == 0
    assert metrics["critic/tokens"] == recorded().sampled.sum()
    assert state.step == 1
    assert state.step.dtype == jnp.int32


def test_explained_variance_is_that_of_the_values_before_the_update():
    advantages, _, metrics, _ = first_step()
    mask = recorded().sampled
    values, returns = np.array(advantages.values)[mask], np.array(advantages.returns)[mask]
    expected = 1 - np.var(returns - values) / np.var(returns)
    np.testing.assert_allclose(metrics["critic/explained_variance"], expected, rtol=1e-4)


def test_the_update_moves_the_policy_where_the_advantages_point():
    advantages, state, _, after = first_step()
    assert 0 < after["gap/movement"] < 0.5
    assert after["gap/engine_max"] < 1e-5
    np.testing.assert_allclose(after["gap/total"], after["gap/movement"], atol=1e-5)
    assert after["after/kl"] > 0
    batch = recorded()
    logp, _, _ = token_logp(
        CONFIG,
        state.actor,
        batch.tokens,
        batch.positions,
        batch.segments,
        batch.experts,
        batch.temperature,
    )
    moved = np.where(batch.sampled, logp - advantages.old_logp, 0)
    assert (moved * np.array(advantages.advantages)).sum() > 0
    np.testing.assert_allclose(
        after["gap/movement"], np.abs(moved).sum() / batch.sampled.sum(), rtol=1e-3
    )


def test_golden_gradient_of_the_dense_formula():
    """The micro-batched actor gradient against a few lines that spell the loss out."""
    advantages, state, _, _ = first_step()
    batch = recorded()

    def dense(params):
        logp, _, _ = token_logp(
            CONFIG,
            params,
            batch.tokens,
            batch.positions,
            batch.segments,
            batch.experts,
            batch.temperature,
        )
        ratio = jnp.exp(logp - advantages.old_logp)
        return -jnp.where(batch.sampled, ratio * advantages.advantages, 0).sum() / 28

    assert batch.sampled.sum() == 28
    grads = jax.tree.leaves(jax.grad(dense)(policy()))
    norm = np.sqrt(sum(np.square(g).sum() for g in grads))
    clipped = [g / max(norm, 1.0) for g in grads]
    got = [np.array(m) / 0.1 for m in moments(state.actor_opt)]
    assert_close(got, clipped, atol=1e-5)


@pytest.mark.parametrize(("rows", "devices"), [(1, 1), (2, 1), (8, 1), (4, 2), (1, 4), (1, 8)])
def test_micro_batches_of_unequal_token_counts_give_one_gradient(rows, devices):
    """However the rows are grouped and shared by devices, for actor and critic."""
    advantages, state, metrics, _ = first_step()
    grouped = dataclasses.replace(PPO, microbatch=rows)
    mesh = make_mesh(MeshConfig(devices))
    train_step = make_train_step(CONFIG, grouped, ACTOR, CRITIC, mesh)
    inputs = replicate((fresh_state(), recorded(), advantages), mesh)
    other, other_metrics = train_step(*inputs, True)
    assert_close(gradient(other), gradient(state), atol=1e-6)
    for name in ("critic/loss", "ppo/loss", "critic/grad_norm", "ppo/grad_norm"):
        np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=1e-5, atol=1e-6)


def test_padding_changes_nothing():
    """More pads in a row, more empty rows, and junk under the padding."""
    score, train_step, _ = functions()

    def pad(x):
        return np.pad(x, ([(0, 4), (0, 8)] + [(0, 0)] * x.ndim)[: x.ndim])

    padded = jax.tree.map(pad, recorded())
    outside = padded.segments == 0
    padded = padded.replace(
        tokens=np.where(outside, 7, padded.tokens),
        positions=np.where(outside, 3, padded.positions),
        sampler_logp=np.where(outside, np.float32("nan"), padded.sampler_logp),
        experts=np.where(outside[..., None, None], -1, padded.experts),
        reward=np.where(padded.segments.any(axis=1), padded.reward, np.float32(5)),
        temperature=np.where(padded.segments.any(axis=1), padded.temperature, np.float32(1)),
    )
    advantages, state, metrics, _ = first_step()
    wide = score(fresh_state(), padded)
    assert_close(jax.tree.map(lambda x: x[:ROWS, :LENGTH], wide), advantages, atol=1e-5)
    other, other_metrics = train_step(fresh_state(), padded, wide, True)
    assert_close(gradient(other), gradient(state), atol=2e-6)
    for name in metrics:
        np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=1e-4, atol=1e-5)


def test_warm_up_leaves_the_actor_bitwise_alone():
    score, train_step, measure = functions()
    state, losses = fresh_state(), []
    actor, actor_opt = leaves(state.actor), leaves(state.actor_opt)
    for _ in range(5):
        advantages = score(state, recorded())
        state, metrics = train_step(state, recorded(), advantages, False)
        losses.append(float(metrics["critic/loss"]))
        assert jnp.isfinite(metrics["critic/explained_variance"])
        assert not any(name.startswith("ppo/") for name in metrics)
    assert_equal(state.actor, actor)
    assert_equal(state.actor_opt, actor_opt)
    assert losses[-1] < 0.5 * losses[0]
    assert state.step == 5
    assert measure(state, recorded(), advantages)["gap/movement"] == 0
    critic_opt = int(state.critic_opt[1][0].count)
    state, _ = train_step(state, recorded(), advantages, True)
    assert (int(state.actor_opt[1][0].count), int(state.critic_opt[1][0].count)) == (
        1,
        critic_opt + 1,
    )
    assert any((a != b).any() for a, b in zip(leaves(state.actor), actor, strict=True))


def test_actor_trains_against_the_values_before_the_critics_update():
    """Another critic, the same Advantages: the same actor, bit for bit."""
    _, train_step, _ = functions()
    advantages, state, _, _ = first_step()
    blank = init_value(CONFIG, jax.random.key(9))
    other = init_state(policy(), blank, ACTOR, CRITIC)
    other, _ = train_step(other, recorded(), advantages, True)
    assert_equal(other.actor, state.actor)


def test_behaviour_stays_until_it_is_rotated():
    _, train_step, _ = functions()
    advantages, *_ = first_step()
    state = fresh_state()
    held = state.behaviour  # what a sampler holds on to
    state, _ = train_step(state, recorded(), advantages, True)
    assert_equal(held, policy())
    assert_equal(state.behaviour, policy())
    assert_equal(rotate(state).behaviour, state.actor)
    train_step(rotate(state), recorded(), advantages, True)  # donates no buffer twice


def test_an_update_after_rotation_starts_at_ratio_one():
    score, train_step, _ = functions()
    state = fresh_state()
    for _ in range(2):
        state, metrics = train_step(state, recorded(), score(state, recorded()), True)
        state = rotate(state)
        np.testing.assert_allclose(metrics["ppo/ratio"], 1, atol=1e-5)


@pytest.mark.parametrize(("field", "actor_moves"), [("returns", True), ("advantages", False)])
def test_guard_stops_the_network_that_is_not_finite(field, actor_moves):
    _, train_step, _ = functions()
    advantages, *_ = first_step()
    row, token = np.argwhere(recorded().sampled)[0]
    broken = getattr(advantages, field).at[row, token].set(jnp.nan)
    state, metrics = train_step(
        fresh_state(), recorded(), advantages.replace(**{field: broken}), True
    )
    assert metrics["guard/nonfinite"] == 1
    still = state.critic if actor_moves else state.actor
    assert_equal(still, value() if actor_moves else policy())
    assert all(np.isfinite(x).all() for x in leaves((state.actor, state.critic)))


def test_poison_on_context_tokens_reaches_no_update():
    """Whatever stands off `sampled` in the inferences, the step is the same bit for bit."""
    _, train_step, _ = functions()
    advantages, *_ = first_step()
    state, metrics = train_step(fresh_state(), recorded(), advantages, True)
    poisoned = jax.tree.map(lambda x: jnp.where(recorded().sampled, x, jnp.nan), advantages)
    other, other_metrics = train_step(fresh_state(), recorded(), poisoned, True)
    assert_equal((other.actor, other.critic), (state.actor, state.critic))
    assert_equal(other_metrics, metrics)


def test_two_steps_compile_once():
    """No jaxpr is traced in the second round, whether the actor trains or not."""
    score, train_step, measure = functions()
    traces, state = [], replicate(fresh_state(), MESH)

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traces.append(event)

    def step(state):
        for train_actor in (False, True):
            advantages = score(state, recorded())
            state, metrics = train_step(state, recorded(), advantages, train_actor)
            metrics |= measure(state, recorded(), advantages)
            state = rotate(state)
        return state

    state = step(state)
    jax.monitoring.register_event_duration_secs_listener(listen)
    step(state)
    assert traces == []
    jax.jit(lambda x: x + 1)(1.0)
    assert traces  # the listener does hear


def test_state_has_strong_types_and_buffers_of_its_own():
    weak = jax.tree.map(lambda x: jnp.broadcast_to(1.0, x.shape), policy())
    assert all(x.weak_type for x in jax.tree.leaves(weak))
    arrays = jax.tree.leaves(init_state(weak, value(), ACTOR, CRITIC))
    assert not any(x.weak_type for x in arrays)
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)


def test_replay_uses_the_record_for_the_actor_and_never_for_the_critic():
    batch = recorded()
    wrong = batch.replace(
        experts=np.where(batch.experts < 0, -1, (batch.experts + 1) % CONFIG.num_experts)
    )
    score, _, _ = functions()
    own, other = score(fresh_state(), batch), score(fresh_state(), wrong)
    assert np.abs(own.old_logp - other.old_logp).max() > 1e-3
    assert_equal(own.values, other.values)
    free = make_score(CONFIG, dataclasses.replace(PPO, replay=False), MESH)
    assert_close(free(fresh_state(), wrong).old_logp, own.old_logp, atol=1e-5)


def test_temperature_divides_logits_and_not_values():
    batch = recorded()
    score, _, _ = functions()
    own = score(fresh_state(), batch)
    hot = score(fresh_state(), batch.replace(temperature=batch.temperature * 2))
    assert np.abs(own.old_logp - hot.old_logp).max() > 1e-2
    assert_equal(own.values, hot.values)


def test_whitened_advantages_have_mean_zero_and_variance_one():
    mask = recorded().sampled
    plain = functions()[0](fresh_state(), recorded())
    scores = make_score(CONFIG, dataclasses.replace(PPO, whiten=True), MESH)
    white = scores(fresh_state(), recorded())
    np.testing.assert_allclose(np.mean(white.advantages[mask]), 0, atol=1e-5)
    np.testing.assert_allclose(np.var(white.advantages[mask]), 1, atol=1e-4)
    assert_equal(white.returns, plain.returns)


def test_flips_are_the_recorded_experts_that_free_routing_leaves_out():
    """None of one's own; one of K in one layer counts 1/K there, wherever it stands in the set."""
    batch = recorded()
    flips = make_flips(CONFIG, PPO, MESH)
    assert all(share == 0 for share in flips(fresh_state(), batch).values())
    reordered = batch.replace(experts=batch.experts[..., ::-1])
    assert flips(fresh_state(), reordered)["r3/flips"] == 0
    free = np.arange(CONFIG.num_experts)
    row = batch.experts[0, 3, 0]
    changed = np.array(batch.experts)
    changed[0, 3, 0, 0] = np.setdiff1d(free, row)[0]
    shares = flips(fresh_state(), batch.replace(experts=changed))
    read = (batch.experts[..., 0, 0] >= 0).sum()
    wanted = 1 / CONFIG.experts_per_token / read
    for name in ("r3/flips_layer_0", "r3/flips"):  # of one layer
        assert shares[name] == pytest.approx(wanted, rel=1e-4)
