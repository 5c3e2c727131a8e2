"""One PPO step (T1): score a batch, train the critic, train the actor, measure how far it moved.

    advantages     = score(state, batch)                # behaviour's log-probs, critic's values, GAE
    state, metrics = train_step(state, batch, advantages, train_actor)
    metrics       |= measure(state, batch, advantages)  # the same batch once more, after the update
    state          = rotate(state)                      # the new policy becomes the behaviour snapshot

Each network takes one optimizer step a batch. The actor trains against `advantages`, made before the
critic moved. Both sides of its ratio are the trainer's own log-probs under the same replayed experts;
the sampler's are diagnostics only. The critic always routes freely.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from t1jax import masked
from t1jax.batch import Advantages, RolloutBatch
from t1jax.model.config import ModelConfig
from t1jax.model.lm import token_logp, token_values
from t1jax.ppo import loss as losses
from t1jax.ppo.gae import gae
from t1jax.ppo.microbatch import map_rows
from t1jax.ppo.optim import make_update


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """T1: clips 0.2, gamma = lam = 1, replay, no whitening, reduction "token"; no KL, no entropy bonus."""

    clip_low: float | None  # None = that side is open
    clip_high: float | None
    value_clip: float | None
    gamma: float
    lam: float
    replay: bool  # the actor uses the recorded experts; False = it routes freely
    whiten: bool  # advantages to mean 0 and variance 1 over the batch
    reduction: losses.Reduction
    microbatch: int  # rows that go through a model at a time on each device


@struct.dataclass
class TrainState:
    """Everything a run trains, arrays only. `behaviour` is the policy that the sampler runs."""

    step: jax.Array  # i32[]: batches trained on
    actor: Any
    critic: Any
    behaviour: Any
    actor_opt: Any
    critic_opt: Any


def init_state(
    policy: Any,
    value: Any,
    actor_optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation,
) -> TrainState:
    """Step 0 from given parameters, with fresh optimizer moments and buffers of its own."""
    actor, critic = _copy(policy), _copy(value)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        actor=actor,
        critic=critic,
        behaviour=_copy(policy),
        actor_opt=actor_optimizer.init(actor),
        critic_opt=critic_optimizer.init(critic),
    )


def rotate(state: TrainState) -> TrainState:
    """The trained policy becomes the behaviour snapshot: call it where the sampler gets new weights."""
    return state.replace(behaviour=_copy(state.actor))


def make_score(config: ModelConfig, ppo: PPOConfig, mesh: Mesh) -> Callable:
    """Returns score(state, batch) -> Advantages."""

    def score(state: TrainState, batch: RolloutBatch) -> Advantages:
        old_logp, _ = _policy(config, ppo, mesh, state.behaviour, batch)
        return _advantages(ppo, old_logp, _values(config, ppo, mesh, state.critic, batch), batch)

    return score


def make_train_step(
    config: ModelConfig,
    ppo: PPOConfig,
    actor_optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> Callable:
    """Returns train_step(state, batch, advantages, train_actor) -> (state, metrics f32[]).

    `train_actor` is a Python bool; False (critic warm-up) leaves the actor and its moments alone.
    The buffers of actor, critic and moments are taken over: use the returned state only. `behaviour`
    is left alone, so a sampler may hold on to it. A network whose loss or gradient is not finite
    stays as it was and guard/nonfinite is 1: stop the run. Shares and ratios of "ppo/" are from
    before the update, so with the sampler at the trainer's version the ratio is 1.
    """

    def critic_loss(params, inputs):
        batch, advantages, weights = inputs
        values = token_values(config, params, batch.tokens, batch.positions, batch.segments)
        clip = ppo.value_clip
        return losses.value_loss(
            values, advantages.values, advantages.returns, weights, clip
        ), values

    def actor_loss(params, inputs):
        batch, advantages, weights = inputs
        logp, entropy = _policy_rows(config, ppo, params, batch)
        value = losses.policy_loss(
            logp,
            advantages.old_logp,
            advantages.advantages,
            weights,
            ppo.clip_low,
            ppo.clip_high,
        )
        return value, (logp, entropy)

    update_critic = make_update(critic_loss, critic_optimizer, ppo.microbatch, mesh)
    update_actor = make_update(actor_loss, actor_optimizer, ppo.microbatch, mesh)

    def train_step(
        state: TrainState, batch: RolloutBatch, advantages: Advantages, train_actor: bool
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        inputs = (batch, advantages, _weights(ppo, batch.sampled))
        critic, critic_opt, _, update = update_critic(state.critic, state.critic_opt, inputs)
        state = state.replace(step=state.step + 1, critic=critic, critic_opt=critic_opt)
        nonfinite = update.pop("nonfinite")
        metrics = _room("critic", update | _batch_metrics(advantages, batch.sampled))
        if train_actor:
            actor, actor_opt, (logp, entropy), update = update_actor(
                state.actor, state.actor_opt, inputs
            )
            state = state.replace(actor=actor, actor_opt=actor_opt)
            nonfinite = jnp.maximum(nonfinite, update.pop("nonfinite"))
            moved = _policy_metrics(ppo, logp, entropy, advantages, batch.sampled)
            metrics |= _room("ppo", update | moved)
        return state, metrics | {"guard/nonfinite": nonfinite}

    return train_step


def make_measure(config: ModelConfig, ppo: PPOConfig, mesh: Mesh) -> Callable:
    """Returns measure(state, batch, advantages) -> metrics of the policy after its update.

    "gap/": the train-inference gap and its parts; "after/": as "ppo/", ratio = updated / behaviour.
    """

    def measure(
        state: TrainState, batch: RolloutBatch, advantages: Advantages
    ) -> dict[str, jax.Array]:
        logp, entropy = _policy(config, ppo, mesh, state.actor, batch)
        gap = _gap_metrics(logp, advantages.old_logp, batch.sampler_logp, batch.sampled)
        after = _policy_metrics(ppo, logp, entropy, advantages, batch.sampled)
        return _room("gap", gap) | _room("after", after)

    return measure


def make_flips(config: ModelConfig, ppo: PPOConfig, mesh: Mesh) -> Callable:
    """Returns flips(state, batch) -> metrics: the share of recorded experts that free routing leaves out.

    Of the behaviour snapshot, which is the policy that the sampler ran: "r3/flips" over all layers, and
    "r3/flips_layer_i". One more forward pass.
    """

    def flips(state: TrainState, batch: RolloutBatch) -> dict[str, jax.Array]:
        flips_L = _flips(config, ppo, mesh, state.behaviour, batch)
        layers = {f"flips_layer_{i}": share for i, share in enumerate(flips_L)}
        return _room("r3", layers | {"flips": flips_L.mean()})

    return flips


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _flips(config, ppo, mesh, params, batch):
    """f32[L]."""

    def rows(params, batch):
        place = batch.tokens, batch.positions, batch.segments
        _, _, free_BTLK = token_logp(config, params, *place, None, batch.temperature)
        same = batch.experts[..., :, None] == free_BTLK[..., None, :]
        return 1.0 - same.any(-1).mean(-1)

    flips_BTL = map_rows(rows, params, batch, ppo.microbatch, mesh)
    recorded_BT = batch.experts[..., 0, 0] >= 0
    return jax.vmap(masked.mean, in_axes=(2, None))(flips_BTL, recorded_BT)


def _policy_rows(config, ppo, params, batch):
    logp_BT, entropy_BT, _ = token_logp(
        config,
        params,
        batch.tokens,
        batch.positions,
        batch.segments,
        batch.experts if ppo.replay else None,
        batch.temperature,
    )
    return logp_BT, entropy_BT


# Compiled once each, for scoring and for measuring: without an update the movement is exactly 0.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _policy(config, ppo, mesh, params, batch):
    """(logp_BT, entropy_BT) of a policy on a batch."""
    rows = functools.partial(_policy_rows, config, ppo)
    return map_rows(rows, params, batch, ppo.microbatch, mesh)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _values(config, ppo, mesh, params, batch):
    def rows(params, batch):
        return token_values(config, params, batch.tokens, batch.positions, batch.segments)

    return map_rows(rows, params, batch, ppo.microbatch, mesh)


@functools.partial(jax.jit, static_argnums=0)
def _advantages(ppo, old_logp, values, batch) -> Advantages:
    nothing = jnp.zeros_like(batch.reward)
    advantages, returns = gae(
        batch.reward, values, batch.sampled, batch.ended, ppo.gamma, ppo.lam, nothing
    )
    if ppo.whiten:
        advantages = masked.whiten(advantages, batch.sampled)
    return Advantages(
        old_logp=masked.select(old_logp, batch.sampled),
        values=masked.select(values, batch.sampled),
        advantages=advantages,
        returns=returns,
    )


@functools.partial(jax.jit, static_argnums=0)
def _weights(ppo, sampled):
    return losses.loss_weights(sampled, ppo.reduction)


@jax.jit
def _batch_metrics(advantages, sampled):
    return {
        "explained_variance": masked.explained_variance(
            advantages.values, advantages.returns, sampled
        ),
        "value": masked.mean(advantages.values, sampled),
        "return": masked.mean(advantages.returns, sampled),
        "tokens": sampled.sum().astype(jnp.float32),
    }


@functools.partial(jax.jit, static_argnums=0)
def _policy_metrics(ppo, logp, entropy, advantages, sampled):
    moved = losses.policy_metrics(
        logp, advantages.old_logp, advantages.advantages, sampled, ppo.clip_low, ppo.clip_high
    )
    return moved | {"entropy": masked.mean(entropy, sampled)}


_gap_metrics = jax.jit(losses.gap_metrics)


def _room(name, metrics):
    return {f"{name}/{key}": value for key, value in metrics.items()}


def _copy(tree):
    """Fresh buffers of the same dtype, never weakly typed (a weak type compiles every step twice)."""
    return jax.tree.map(lambda x: jnp.array(x, dtype=x.dtype, copy=True), tree)
