"""GAE written once more: by hand, and against the trainer's own float32."""

import dataclasses

import numpy as np
import pytest
from test_batch import trajectory, turn

from configs import tiny
from t1jax import masked
from t1jax.batch import make_batch
from t1jax.experiment import read_experiment
from t1jax.ppo.gae import gae as trainers_gae
from t1jax.recompute import check_advantages, gae


def test_advantages_by_hand():
    """Traps 42: context takes no part. Two sampled tokens, one context between them and a third."""
    t = trajectory(turn([1], [2, 3], [-1, -1]), turn([4, 5], [6], [-1]), reward=1.0)
    values = np.array([9, 0.1, 0.2, 9, 9, 0.3])
    advantages, returns = gae(t, values, 1.0, 0.95)
    np.testing.assert_allclose(advantages, [0, 0.82675, 0.765, 0, 0, 0.7], atol=1e-9)
    np.testing.assert_allclose(returns, [0, 0.92675, 0.965, 0, 0, 1.0], atol=1e-9)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(
    ("lengths", "size", "seen"),
    [
        ([7, 30, 11], 0.0, 2.0),  # equal advantages: whitening divides mere rounding by 1e-4
        ([7, 30, 11], 1.0, 0.01),
        ([80_000], 5.0, 0.01),  # as long as float32 has to add
    ],
)
def test_rounding_passes_and_a_fault_does_not(lengths, size, seen, whiten):
    """The trainer's own float32, with values of a given size."""
    ppo = read_experiment(tiny.get_config()).ppo
    ppo = dataclasses.replace(ppo, lam=0.95, whiten=whiten)
    rng = np.random.default_rng(0)
    rows = [
        trajectory(turn([1], range(2, n), [-1] * (n - 2)), trial=i, reward=0.7)
        for i, n in enumerate(lengths)
    ]
    batch = make_batch(rows, max(lengths), len(rows))
    values = (size * rng.standard_normal(batch.tokens.shape)).astype(np.float32) * batch.sampled
    nothing = np.zeros(len(rows), np.float32)
    advantages, returns = trainers_gae(
        batch.reward, values, batch.sampled, batch.ended, 1.0, 0.95, nothing
    )
    if whiten:
        advantages = masked.whiten(advantages, batch.sampled)

    def check(change):
        found = {"values": values, "advantages": np.array(advantages), "returns": returns}
        found["advantages"][0, 3] += change
        inferred = {
            (t.trial, t.chunk): {
                name: np.asarray(x)[i, : len(t.tokens)] for name, x in found.items()
            }
            for i, t in enumerate(rows)
        }
        check_advantages(ppo, rows, inferred)

    check(0)
    with pytest.raises(ValueError, match="trial 0, chunk 0: advantages of token 3"):
        check(seen)
