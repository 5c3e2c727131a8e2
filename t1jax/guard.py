"""Checks that stop a run before it does harm."""

import jax
import numpy as np

from t1jax.batch import RolloutBatch


class GuardError(RuntimeError):
    """The run stopped itself: one line with the measure that was out of bounds."""


def check_version(batch: RolloutBatch, step: int) -> None:
    """Raises GuardError where a token was sampled by other weights than those that train in `step`."""
    version, sampled = np.asarray(batch.version), np.asarray(batch.sampled)
    wrong = np.argwhere(sampled & (version != step))
    if len(wrong):
        row, token = wrong[0]
        raise GuardError(
            f"step {step}: trial {batch.trial[row]} was sampled by weights {version[row, token]}: a "
            "publication was left out"
        )


def check_parity(band: float, old_logp: jax.Array, batch: RolloutBatch, step: int) -> None:
    """Raises GuardError where trainer and sampler differ by more than `band` nats on a sampled token.

    Both evaluated the same weights, so a larger difference means a stale or wrong sampler.
    """
    gap = np.abs(np.where(batch.sampled, np.asarray(old_logp) - batch.sampler_logp, 0))
    row, token = np.unravel_index(np.argmax(gap), gap.shape)
    if not gap[row, token] <= band:
        raise GuardError(
            f"step {step}: trainer and sampler differ by {gap[row, token]:.3g} nats at token {token} of "
            f"trial {batch.trial[row]}, the band is {band:g}: the sampler has other weights, routes were not "
            "replayed, or the history is text (episode.history) and needs a wide train.parity_band"
        )


def check_finite(nonfinite: float, step: int) -> None:
    """Raises GuardError where a loss or gradient was not finite (the update was not made)."""
    if nonfinite:
        raise GuardError(
            f"step {step}: a loss or gradient is not finite, that network was not updated; the step's "
            "trajectories are stored, copy them before the run goes on from its last checkpoint"
        )
