import dataclasses

import numpy as np
import pytest

from t1jax.batch import make_batch, pick_bucket
from t1jax.types import Trajectory, Turn, digest

LAYERS, TOP_K = 2, 2


def turn(context, sampled, logprobs, version=0):
    return Turn(
        context=np.array(context, np.int32),
        sampled=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish="stop",
        version=version,
        action="command",
        command="true",
        result=None,
        seconds=0.0,
        digest=digest(np.array(sampled, np.int32)),
        join="strict",
    )


def trajectory(*turns, trial=0, reward=0.5, status="submitted", temperature=1.0, seed=0):
    n = sum(len(t.context) + len(t.sampled) for t in turns)
    experts = np.random.default_rng(seed).integers(0, 200, (n - 1, LAYERS, TOP_K)).astype(np.uint8)
    return Trajectory(
        task="t",
        family="f",
        trial=trial,
        attempt=0,
        chunk=0,
        turns=turns,
        experts=experts,
        status=status,
        cause="",
        temperature=temperature,
        reward=reward,
    )


EXAMPLE = trajectory(
    turn([11, 12], [21, 22], [-0.5, -0.25], version=3), turn([13], [23], [-2.0], version=4), trial=7
)
SHORT = trajectory(
    turn([11], [24], [0.0], version=4),
    trial=9,
    reward=1.5,
    status="length",
    temperature=0.5,
    seed=1,
)


def random_trajectories(seed, count):
    rng = np.random.default_rng(seed)
    return [
        trajectory(
            *(
                turn(
                    rng.integers(0, 99, rng.integers(1, 5)),
                    s := rng.integers(0, 99, rng.integers(0, 4)),
                    -rng.random(len(s)),
                    version=int(rng.integers(0, 9)),
                )
                for _ in range(rng.integers(1, 4))
            ),
            trial=int(rng.integers(0, 1000)),
            reward=float(rng.random()),
            status=str(rng.choice(["submitted", "timeout"])),
            seed=i,
        )
        for i in range(count)
    ]


def test_hand_drawn_example():
    batch = make_batch([EXAMPLE, SHORT], length=8, rows=3)
    np.testing.assert_array_equal(
        batch.tokens, [[11, 12, 21, 22, 13, 23, 0, 0], [11, 24] + [0] * 6, [0] * 8]
    )
    np.testing.assert_array_equal(
        batch.positions, [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1] + [0] * 6, [0] * 8]
    )
    np.testing.assert_array_equal(batch.segments, [[1] * 6 + [0] * 2, [1] * 2 + [0] * 6, [0] * 8])
    np.testing.assert_array_equal(
        batch.turn, [[0, 0, 0, 0, 1, 1, -1, -1], [0, 0] + [-1] * 6, [-1] * 8]
    )
    np.testing.assert_array_equal(
        batch.version, [[3, 3, 3, 3, 4, 4, -1, -1], [4, 4] + [-1] * 6, [-1] * 8]
    )
    np.testing.assert_array_equal(
        batch.sampled, np.array([[0, 0, 1, 1, 0, 1, 0, 0], [0, 1] + [0] * 6, [0] * 8], bool)
    )
    np.testing.assert_array_equal(
        batch.sampler_logp, [[0, 0, -0.5, -0.25, 0, -2, 0, 0], [0] * 8, [0] * 8]
    )
    np.testing.assert_array_equal(batch.experts[0, :5], EXAMPLE.experts)
    np.testing.assert_array_equal(batch.experts[1, :1], SHORT.experts)
    for row, n in ((0, 6), (1, 2), (2, 1)):  # the last token was never read
        np.testing.assert_array_equal(batch.experts[row, n - 1 :], -1)
    np.testing.assert_array_equal(batch.reward, np.array([0.5, 1.5, 0], np.float32))
    np.testing.assert_array_equal(batch.ended, [True, False, True])
    np.testing.assert_array_equal(batch.trial, [7, 9, -1])
    np.testing.assert_array_equal(batch.temperature, [1, 0.5, 1])


def test_dtypes_do_not_depend_on_the_data():
    """Rewards are float32 beside integer ids (a reward of 0.6 must not become 0)."""
    batch = make_batch([dataclasses.replace(EXAMPLE, reward=1)], length=8, rows=1)
    kinds = {f.name: getattr(batch, f.name).dtype for f in dataclasses.fields(batch)}
    assert {k for k, v in kinds.items() if v == np.float32} == {
        "sampler_logp",
        "reward",
        "temperature",
    }
    assert {k for k, v in kinds.items() if v.kind == "b"} == {"sampled", "ended"}
    assert set(kinds.values()) == {np.dtype(x) for x in (np.float32, bool, np.int32)}


def test_unbatch_gives_the_trajectories_back():
    trajectories = random_trajectories(seed=0, count=12)
    batch = make_batch(trajectories, length=32, rows=16)
    for row, t in enumerate(trajectories):
        n = int(batch.segments[row].sum())
        np.testing.assert_array_equal(batch.segments[row], np.arange(32) < n)
        np.testing.assert_array_equal(batch.positions[row, :n], np.arange(n))
        np.testing.assert_array_equal(batch.tokens[row, :n], t.tokens)
        np.testing.assert_array_equal(batch.sampled[row, :n], t.sampled)
        np.testing.assert_array_equal(batch.sampler_logp[row, :n], t.logprobs)
        np.testing.assert_array_equal(batch.version[row, :n], t.versions)
        np.testing.assert_array_equal(batch.turn[row, :n], t.turn_index)
        np.testing.assert_array_equal(batch.experts[row, : n - 1], t.experts)
        assert batch.reward[row] == np.float32(t.reward)
        assert batch.ended[row] == t.ended
        assert batch.trial[row] == t.trial
    assert not batch.sampled[12:].any()
    assert not batch.segments[12:].any()
    assert (batch.experts >= 0).all(axis=(2, 3)).sum() == sum(len(t.experts) for t in trajectories)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, "trial 7: reward None"),
        ({"reward": float("nan")}, "trial 7: reward nan"),
        ({"temperature": 0.0}, "trial 7: temperature 0.0"),
        ({"experts": EXAMPLE.experts[:-1]}, "trial 7: 4 rows of experts for 6 tokens"),
        ({"experts": EXAMPLE.experts[:, :1]}, r"trial 7: experts \(1, 2\)"),
        ({"turns": (), "experts": EXAMPLE.experts[:0]}, "trial 7: 0 tokens"),
    ],
)
def test_untrainable_trajectories_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_batch([SHORT, dataclasses.replace(EXAMPLE, **change)], length=8, rows=2)


def test_first_token_must_be_context():
    first = trajectory(turn([], [1, 2], [-1.0, -1.0]), trial=7)
    with pytest.raises(ValueError, match="first token is sampled"):
        make_batch([first], length=8, rows=1)


def test_too_long_or_too_many():
    with pytest.raises(ValueError, match="trial 7: 6 tokens for rows of 5"):
        make_batch([EXAMPLE], length=5, rows=1)
    with pytest.raises(ValueError, match="2 trajectories for a batch of 1 rows"):
        make_batch([EXAMPLE, SHORT], length=8, rows=1)
    with pytest.raises(ValueError, match="0 trajectories"):
        make_batch([], length=8, rows=1)


def test_pick_bucket():
    assert pick_bucket([3, 128], [256, 128]) == 128
    assert pick_bucket([129], [128, 256]) == 256
    with pytest.raises(ValueError, match=r"trajectory 1 has 300 tokens.*256"):
        pick_bucket([10, 300, 20], [128, 256])
