"""Generalised advantage estimation over sampled tokens (arXiv 1506.02438; T1, skip-observation).

Alignment is batch.py's: values[t] is the value of the state in which token t was chosen, so the
successor of a sampled token is the *next sampled* token, however much context stands in between.
"""

import jax
import jax.numpy as jnp

from t1jax import masked


def gae(
    reward_B: jax.Array,
    values_BT: jax.Array,
    sampled_BT: jax.Array,
    ended_B: jax.Array,
    gamma: float,
    lam: float,
    bootstrap_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns (advantages_BT, returns_BT), f32 and 0 off `sampled`.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R = A + V

    t+1 is the next sampled token. The reward sits on a row's last sampled token, wherever the padding
    begins. What follows that token is worth 0 where the episode ended and `bootstrap_B` where a limit
    cut it. A verifier's reward is final whatever ended the trial, so T1 bootstraps with 0; another
    value is for rewards that only cover what was done so far.
    """
    values_BT = masked.select(values_BT, sampled_BT)
    after_B = jnp.where(ended_B, 0.0, bootstrap_B).astype(jnp.float32)

    def backwards(carry, token):
        pending_B, next_value_B, next_advantage_B = carry
        value_B, sampled_B = token
        delta_B = pending_B + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        stepped = (jnp.zeros_like(pending_B), value_B, advantage_B)
        carry = jax.tree.map(lambda new, old: jnp.where(sampled_B, new, old), stepped, carry)
        return carry, jnp.where(sampled_B, advantage_B, 0.0)

    carry = (reward_B.astype(jnp.float32), after_B, jnp.zeros_like(after_B))
    _, advantages_TB = jax.lax.scan(backwards, carry, (values_BT.T, sampled_BT.T), reverse=True)
    return advantages_TB.T, advantages_TB.T + values_BT
