"""What the trainer inferred of a step, computed once more and compared: GAE by its definition, the rest by the weights.

Log-probs and values are those of the weights that the run still has:

    step c                  a checkpoint of step c holds the policy that sampled it, and the critic
    step 0                  the first state; gone where `initial_policy` is gone
    steps 1..warmup_steps   log-probs alone: the critic warms up, the policy stays what it was

They go through the trainer's own forward pass (ppo/step.py), under the experts that are stored. A row of them at
another token, of another layer, or an id of the context that was read otherwise changes the log-probs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from t1jax.batch import make_batch, pick_bucket
from t1jax.checkpoint import read
from t1jax.experiment import Experiment
from t1jax.mesh import MeshConfig, make_mesh
from t1jax.ppo.step import PPOConfig, TrainState, make_score
from t1jax.run import first_state
from t1jax.types import Trajectory

TOLERANCE = 1e-4  # of float32, relative to the largest value or reward
NATS = {"float32": 1e-3, "bfloat16": 0.3}  # between machines that compute alike, by model.dtype

Inferred = dict[tuple[int, int], dict[str, np.ndarray]]  # by (trial, chunk): f32[N] by name


def saved_steps(run: Path) -> list[int]:
    """The checkpoints that are there. (`Checkpoints` would also clear up behind a run that still writes.)"""
    return sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit())


def make_recompute(
    experiment: Experiment, run: Path
) -> Callable[[int, Sequence[Trajectory]], Inferred]:
    """Returns recompute(step, rows) -> old_logp, and values where the critic is there; {} without weights.

    One device is enough. Raises CheckpointError for weights that are damaged or another model's, ValueError for
    rows that make no batch.
    """
    mesh = make_mesh(MeshConfig(data=1))
    score = make_score(experiment.model, experiment.ppo, mesh)
    begun = not experiment.initial_policy or Path(experiment.initial_policy).is_dir()
    saved = [0] * begun + saved_steps(run)

    @functools.cache
    def shapes() -> TrainState:
        random = dataclasses.replace(experiment, initial_policy="")  # its file may be gone
        return jax.eval_shape(lambda: first_state(random, mesh))

    @functools.lru_cache(maxsize=1)
    def state_of(step: int) -> TrainState:
        if step == 0:
            return first_state(experiment, mesh)
        return read(run / "checkpoints" / f"{step:06d}", shapes())[0]

    def recompute(step: int, rows: Sequence[Trajectory]) -> Inferred:
        same = [s for s in saved if s == step or max(s, step) <= experiment.train.warmup_steps]
        if not rows or not same:
            return {}
        source = step if step in same else same[0]
        trials = experiment.rollout.trials
        length = pick_bucket([len(t.tokens) for t in rows], experiment.train.buckets)
        batch = make_batch(rows, length, -(-len(rows) // trials) * trials)
        again = vars(jax.device_get(score(state_of(source), batch)))
        names = ("old_logp", "values") if source == step else ("old_logp",)
        return {
            (t.trial, t.chunk): {name: again[name][i, : len(t.tokens)] for name in names}
            for i, t in enumerate(rows)
        }

    return recompute


def check_inferred(
    experiment: Experiment, rows: Sequence[Trajectory], inferred: Inferred, again: Inferred
) -> None:
    """What is stored beside the rows is theirs. Raises ValueError with the first token that says otherwise."""
    if list(inferred) != [(t.trial, t.chunk) for t in rows]:
        raise ValueError("its advantages are of other rows than its trajectories")
    for t in rows:
        place, found = f"trial {t.trial}, chunk {t.chunk}", inferred[t.trial, t.chunk]
        if any(len(values) != len(t.tokens) for values in found.values()):
            raise ValueError(f"{place}: {len(t.tokens)} tokens have other numbers of advantages")
        gap, band = gaps(t, found), experiment.train.parity_band
        if not gap.max(initial=0) <= band:
            raise ValueError(
                f"{place}: token {gap.argmax()}: trainer and sampler differ by {gap.max():.3g} nats, the band "
                f"is {band:g}"
            )
        for name, wanted in again.get((t.trial, t.chunk), {}).items():
            tolerance = NATS[experiment.model.dtype] * np.maximum(1, np.abs(wanted))
            _compare(place, name, found[name], wanted, tolerance, "its experts and weights give")
    if rows:
        check_advantages(experiment.ppo, rows, inferred)


def gaps(t: Trajectory, found: dict[str, np.ndarray]) -> np.ndarray:
    """f32[N]: nats between trainer and sampler, 0 on context."""
    return np.where(t.sampled, np.abs(found["old_logp"] - t.logprobs), 0)


def check_advantages(ppo: PPOConfig, rows: Sequence[Trajectory], inferred: Inferred) -> None:
    """Advantages and returns follow from rewards and the stored values, in float64."""
    values = [inferred[t.trial, t.chunk]["values"].astype(np.float64) for t in rows]
    expected = [gae(t, v, ppo.gamma, ppo.lam) for t, v in zip(rows, values, strict=True)]
    largest = max(np.abs(v).max(initial=abs(t.reward)) for t, v in zip(rows, values, strict=True))
    tolerance, scale = TOLERANCE * max(1, largest), 1.0
    if ppo.whiten:  # divides what float32 has rounded, too
        mean, scale = moments(rows, [a for a, _ in expected])
        expected = [
            (np.where(t.sampled, (a - mean) / scale, 0), r)
            for t, (a, r) in zip(rows, expected, strict=True)
        ]
    for t, (advantages, returns) in zip(rows, expected, strict=True):
        place, found = f"trial {t.trial}, chunk {t.chunk}", inferred[t.trial, t.chunk]
        for name, wanted, allowed in (
            ("advantages", advantages, tolerance / scale),
            ("returns", returns, tolerance),
        ):
            allowed = allowed * np.maximum(1, np.abs(wanted))
            _compare(place, name, found[name], wanted, allowed, "its values give")


def gae(t: Trajectory, values: np.ndarray, gamma: float, lam: float) -> tuple:
    """(advantages, returns) f64[N], 0 on context: the recursion, written over sampled tokens alone (T1).

    values f64[N]. The reward stands on the last of them, and nothing is worth anything behind it.
    """
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    ahead = value_ahead = 0.0
    last_reward = t.reward
    for i in reversed(np.flatnonzero(t.sampled)):
        delta = last_reward + gamma * value_ahead - values[i]
        ahead = advantages[i] = delta + gamma * lam * ahead
        returns[i] = ahead + values[i]
        value_ahead, last_reward = values[i], 0.0
    return advantages, returns


def moments(rows: Sequence[Trajectory], advantages: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean, and what whitening divides by, over all sampled tokens."""
    every = np.concatenate([a[t.sampled] for t, a in zip(rows, advantages, strict=True)])
    return every.mean(), np.sqrt(every.var() + 1e-8)


def _compare(place, name, found, wanted, tolerance, basis) -> None:
    over = np.abs(found - wanted) - tolerance
    if not over.max(initial=0) <= 0:
        i = over.argmax()
        raise ValueError(f"{place}: {name} of token {i} is {found[i]:.6g}, {basis} {wanted[i]:.6g}")
