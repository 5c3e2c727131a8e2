"""The bridge from trajectories to device arrays: RolloutBatch (facts) and Advantages (inferences).

Row t belongs to token t. B rows, T tokens, L layers, K experts a token. A trajectory of two turns,
context tokens a b / e, sampled tokens C D / F, in a row of T = 8 (upper case = the policy chose it):

    t              0      1      2      3      4      5      6      7
    tokens         a      b      C      D      e      F      .      .      . = padding: 0
    positions      0      1      2      3      4      5      0      0
    segments       1      1      1      1      1      1      0      0
    turn           0      0      0      0      1      1     -1     -1
    version        v      v      v      v      w      w     -1     -1
    sampled        .      .      x      x      .      x      .      .
    sampler_logp   0      0     q(C)   q(D)    0     q(F)    0      0
    experts       R(a)   R(b)   R(C)   R(D)   R(e)   -1     -1     -1

q(C) = log p(C | a b) as the sampler recorded it; R(b) are the experts used while b was *read*, those
behind q(C). F is the last token and was never read. The inferences follow the same rule: old_logp[2]
is log p(C | a b), values[2] is the value of the state in which C was chosen. They are 0 off `sampled`.
"""

from collections.abc import Sequence

import jax
import numpy as np
from flax import struct

from t1jax.types import Trajectory


@struct.dataclass
class RolloutBatch:
    """What happened: one trajectory a row, empty rows (segments 0, nothing sampled) at the end."""

    tokens: jax.Array  # i32[B, T]
    positions: jax.Array  # i32[B, T]
    segments: jax.Array  # i32[B, T]: 0 = padding
    turn: jax.Array  # i32[B, T]: -1 = padding
    sampled: jax.Array  # bool[B, T]
    sampler_logp: jax.Array  # f32[B, T]: 0 off `sampled`
    version: jax.Array  # i32[B, T]: -1 = padding
    experts: jax.Array  # i32[B, T, L, K]: -1 = none recorded
    reward: jax.Array  # f32[B]
    ended: jax.Array  # bool[B]: the episode came to its own end
    trial: jax.Array  # i32[B]: -1 = empty row
    temperature: jax.Array  # f32[B]: what the row was sampled at


@struct.dataclass
class Advantages:
    """What the trainer infers from a batch before it updates anything. All 0 off `sampled`."""

    old_logp: jax.Array  # f32[B, T]: the behaviour snapshot's log-probs
    values: jax.Array  # f32[B, T]: the critic's, before its update
    advantages: jax.Array  # f32[B, T]
    returns: jax.Array  # f32[B, T]


def pick_bucket(lengths: Sequence[int], buckets: Sequence[int]) -> int:
    """The smallest bucket that holds every length. Raises ValueError naming the one that fits none."""
    longest = int(np.argmax(lengths))
    for bucket in sorted(buckets):
        if lengths[longest] <= bucket:
            return bucket
    raise ValueError(
        f"trajectory {longest} has {lengths[longest]} tokens but the largest bucket holds "
        f"{max(buckets)}: add a bucket or lower the episode's context limit"
    )


def make_batch(trajectories: Sequence[Trajectory], length: int, rows: int) -> RolloutBatch:
    """Lays one trajectory a row into [rows, length] numpy arrays; the rest is padding.

    Raises ValueError for a trajectory that cannot be trained on: too long, no reward, records that
    disagree, a first token nothing predicts, a temperature of 0.
    """
    if not 0 < len(trajectories) <= rows:
        raise ValueError(f"{len(trajectories)} trajectories for a batch of {rows} rows")
    layers, top_k = trajectories[0].experts.shape[1:]
    batch = _empty(rows, length, layers, top_k)
    for row, trajectory in enumerate(trajectories):
        _check(trajectory, length, (layers, top_k))
        n = len(trajectory.tokens)
        batch.tokens[row, :n] = trajectory.tokens
        batch.positions[row, :n] = np.arange(n)
        batch.segments[row, :n] = 1
        batch.turn[row, :n] = trajectory.turn_index
        batch.sampled[row, :n] = trajectory.sampled
        batch.sampler_logp[row, :n] = trajectory.logprobs
        batch.version[row, :n] = trajectory.versions
        batch.experts[row, : n - 1] = trajectory.experts
        batch.reward[row] = trajectory.reward
        batch.ended[row] = trajectory.ended
        batch.trial[row] = trajectory.trial
        batch.temperature[row] = trajectory.temperature
    return batch


def _empty(rows: int, length: int, layers: int, top_k: int) -> RolloutBatch:
    def full(value, dtype, *shape):
        return np.full((rows, *shape), value, dtype)

    return RolloutBatch(
        tokens=full(0, np.int32, length),
        positions=full(0, np.int32, length),
        segments=full(0, np.int32, length),
        turn=full(-1, np.int32, length),
        sampled=full(False, bool, length),
        sampler_logp=full(0, np.float32, length),
        version=full(-1, np.int32, length),
        experts=full(-1, np.int32, length, layers, top_k),
        reward=full(0, np.float32),
        ended=full(True, bool),
        trial=full(-1, np.int32),
        temperature=full(1, np.float32),
    )


def _check(trajectory: Trajectory, length: int, experts_shape: tuple[int, int]) -> None:
    trajectory.check()
    n, name = len(trajectory.tokens), f"trial {trajectory.trial}"
    if not 0 < n <= length:
        raise ValueError(f"{name}: {n} tokens for rows of {length}")
    if trajectory.reward is None or not np.isfinite(trajectory.reward):
        raise ValueError(f"{name}: reward {trajectory.reward}; drop or refill trials without one")
    if trajectory.sampled[0]:
        raise ValueError(f"{name}: its first token is sampled, but nothing comes before it")
    if not trajectory.temperature > 0:
        raise ValueError(
            f"{name}: temperature {trajectory.temperature} has no log-probs to train on"
        )
    if trajectory.experts.shape[1:] != experts_shape:
        raise ValueError(
            f"{name}: experts {trajectory.experts.shape[1:]} (layers, experts a token), "
            f"the batch began with {experts_shape}"
        )
