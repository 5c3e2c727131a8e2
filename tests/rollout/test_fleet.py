"""The fleet on real SGLang engines, on the CPU: exactness and publication. Failures: see test_faults.py."""

import asyncio
import dataclasses
import gc
import math
import os
import subprocess

import jax
import ml_dtypes
import numpy as np
import pytest
from fleet_fixtures import FLEET, QWEN3, QWEN3_5, logp, make_fleet

from t1jax.admission import TokenBucket
from t1jax.model.hf import by_path, export_params, export_tensors
from t1jax.model.hf_files import Shards
from t1jax.model.lm import init_policy
from t1jax.rollout.server import ROOT
from t1jax.rollout.tensors import buckets, pack
from t1jax.types import SamplerError


@pytest.fixture(scope="module", params=[QWEN3, QWEN3_5], ids=["qwen3", "qwen3_5"])
def served(request, tmp_path_factory):
    """(config, params, fleet): version 0 of random weights on two engines."""
    config = request.param
    params = init_policy(config, jax.random.key(0))
    fleet = make_fleet(config, tmp_path_factory.mktemp("fleet"))
    try:
        fleet.load(params, 0)
        yield config, params, fleet
    finally:
        fleet.close()


async def converse(fleet, trial: int, turns: int = 3):
    """One trial of a few turns with random context: (tokens, experts, sampled mask, log-probs)."""
    rng = np.random.default_rng(trial)
    tokens, sampled, logprobs = np.zeros(0, np.int32), [], []
    experts = []
    for turn in range(turns):
        context = rng.integers(4, 128, rng.integers(2, 14)).astype(np.int32)
        tokens = np.concatenate([tokens, context])
        rows = sum(map(len, experts))
        reply = await fleet.sample(trial, turn, tokens, rows, int(rng.integers(1, 16)))
        experts.append(reply.experts[rows - reply.experts_start :])
        sampled += [False] * len(context) + [True] * len(reply.ids)
        logprobs += [0.0] * len(context) + reply.logprobs.tolist()
        tokens = np.concatenate([tokens, reply.ids])
    await fleet.release(trial)
    return tokens, np.concatenate(experts), np.array(sampled), np.array(logprobs)


@pytest.mark.engine
def test_engines_and_trainer_agree(served):
    """50 episodes: log-probs within 1e-3 nats, routes the trainer's own but for ties, replayed exactly."""
    config, params, fleet = served

    async def episodes():
        return await asyncio.gather(*(converse(fleet, trial) for trial in range(50)))

    streams, experts, sampled, logprobs = zip(*asyncio.run(episodes()), strict=True)
    assert fleet.rewritten == 0
    free = logp(config, params, streams)
    same = [
        np.all(np.sort(own, axis=-1) == np.sort(theirs, axis=-1), axis=-1)
        for (_, own), theirs in zip(free, experts, strict=True)
    ]
    assert np.mean(np.concatenate([x.ravel() for x in same])) >= 0.999
    replayed = logp(config, params, streams, experts)
    for (own, used), theirs, mask, engine in zip(replayed, experts, sampled, logprobs, strict=True):
        np.testing.assert_array_equal(used, theirs)
        assert np.abs(own - engine)[mask].max() <= 1e-3


@pytest.mark.engine
@pytest.mark.parametrize("transfer", ["disk", "tensors"])
def test_a_publication_reaches_the_first_reply(served, transfer, monkeypatch):
    """Trap 89: nothing cached under the old weights is used again."""
    config, _, fleet = served
    monkeypatch.setattr(fleet, "_config", dataclasses.replace(fleet._config, transfer=transfer))
    stream = np.arange(4, 60, dtype=np.int32)
    before = asyncio.run(fleet.sample(1000, 0, stream, 0, 8))
    params = init_policy(config, jax.random.key(1))
    fleet.load(params, fleet.version + 1)
    after = asyncio.run(fleet.sample(1001, 0, stream, 0, 8))
    assert after.version == before.version + 1
    tokens = np.concatenate([stream, after.ids])
    ((own, used),) = logp(config, params, [tokens], [after.experts])
    np.testing.assert_array_equal(used, after.experts)
    assert np.abs(own[len(stream) :] - after.logprobs).max() <= 1e-3
    asyncio.run(fleet.release(1000))
    asyncio.run(fleet.release(1001))
    fleet.load(served[1], fleet.version + 1)


@pytest.mark.engine
def test_tensors_in_buckets_of_any_size_are_the_files_weights(served, monkeypatch):
    """Trap 91. The weights differ before each; no file is written."""
    config, params, fleet = served
    other = init_policy(config, jax.random.key(2))
    stream = np.arange(4, 100, dtype=np.int32)

    def read(member):
        work = member.engine.logprobs(stream)
        return asyncio.run_coroutine_threadsafe(work, fleet._loop).result()

    def published(params):
        fleet.load(params, fleet.version + 1)
        return [read(member) for member in fleet._members]

    expected = published(params)
    assert np.abs(expected[0] - logp(config, params, [stream])[0][0][1:]).max() <= 1e-3
    monkeypatch.setattr(fleet, "_export", lambda *_: pytest.fail("a file was written"))
    for size in (1, 5001, 2**30):
        new = dataclasses.replace(fleet._config, transfer="tensors", bucket_bytes=size)
        monkeypatch.setattr(fleet, "_config", new)
        assert np.abs(published(other)[0] - expected[0]).max() > 1e-2
        np.testing.assert_array_equal(published(params), expected)


@pytest.mark.engine
def test_packed_tensors_are_those_that_torch_reads():
    rng = np.random.default_rng(0)
    values = {
        "model.whole": rng.normal(size=(3, 4)).astype(np.float32),
        "model.half": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "model.turned": rng.normal(size=(2, 3, 4)).astype(np.float32).transpose(2, 0, 1),
    }
    code = """if True:
        import base64, pickle, sys, torch
        for name, x in pickle.loads(base64.b64decode(sys.stdin.read())):
            print(name, x.dtype, *x.shape, *x.float().flatten().tolist())"""
    done = subprocess.run(
        [ROOT / FLEET.server.python, "-c", code],
        input=pack(values.items()),
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for line, (name, value) in zip(done.stdout.splitlines(), values.items(), strict=True):
        numbers = [*value.shape, *value.astype(np.float32).ravel().tolist()]
        assert line == " ".join(map(str, [name, f"torch.{value.dtype.name}", *numbers]))


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *((FLEET, n) for n in ("bucket_bytes", "reply_timeout_s", "control_timeout_s", "burst")),
        *((FLEET, n) for n in ("load_timeout_s", "probe_period_s", "probe_timeout_s")),
        *((FLEET, n) for n in ("probe_failures", "probe_tolerance", "starts_per_s")),
        *((FLEET.server, n) for n in ("max_running", "max_tokens", "start_timeout_s")),
    ],
)
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_number_that_is_not_positive_is_named(part, name, value):
    with pytest.raises(ValueError, match=f"^{name}={value} must be positive"):
        dataclasses.replace(part, **{name: value})


@pytest.mark.parametrize("config", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3_5"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_tensors_are_those_of_the_files(config, dtype, tmp_path):
    params = by_path(init_policy(config, jax.random.key(0)))
    export_params(params, config, tmp_path / "out", dtype=dtype)
    files = Shards(tmp_path / "out")
    found = dict(export_tensors(params, config, dtype))
    assert sorted(found) == sorted(files.names())
    for name, tensor in found.items():
        there = files.read(name)
        assert tensor.dtype == there.dtype == np.dtype(dtype or np.float32)
        np.testing.assert_array_equal(tensor, there)


@pytest.mark.parametrize(
    ("size", "counts"), [(1, [1, 1, 1, 1]), (8, [2, 1, 1]), (20, [2, 2]), (10**9, [4])]
)
def test_buckets_hold_what_fits_in_order(size, counts):
    tensors = [
        (name, np.zeros(n, np.float32)) for name, n in zip("abcd", (1, 1, 4, 1), strict=True)
    ]
    found = list(buckets(tensors, size))
    assert [len(bucket) for bucket in found] == counts
    assert [name for bucket in found for name, _ in bucket] == list("abcd")


def test_admission_is_limited():
    now = [0.0]
    bucket = TokenBucket(2.0, 3, clock=lambda: now[0])

    async def take(count):
        for _ in range(count):
            assert bucket.wait() == 0
            await bucket.take()

    asyncio.run(take(3))  # the burst
    assert bucket.wait() == 0.5
    now[0] += 0.5
    asyncio.run(take(1))
    now[0] += 100
    assert bucket.wait() == 0
    asyncio.run(take(3))  # no more than a burst is saved up
    assert bucket.wait() == 0.5


@pytest.mark.filterwarnings("error")
def test_a_fleet_that_closes_tells_who_waits_and_nobody_else(tmp_path, caplog):
    slow = dataclasses.replace(FLEET, starts_per_s=0.01, burst=1)
    fleet = make_fleet(QWEN3, tmp_path, fleet=slow)

    async def wait():
        await fleet.admit()
        admission = asyncio.create_task(fleet.admit())
        left = asyncio.create_task(fleet.sample(1, 0, np.arange(4, dtype=np.int32), 0, 4))
        await asyncio.sleep(0.1)
        left.cancel()
        assert not admission.done()
        await asyncio.to_thread(fleet.close)
        with pytest.raises(SamplerError, match="the fleet is closed"):
            await admission

    asyncio.run(wait())
    gc.collect()
    assert not caplog.records
