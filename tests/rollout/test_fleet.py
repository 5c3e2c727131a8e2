"""The fleet on real SGLang engines, on the CPU: exactness, publication, failure."""

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fixtures import CONFIG

from t1jax.model.config import DELTA_FIELDS
from t1jax.model.hf import by_path, export_params
from t1jax.model.lm import init_policy, token_logp
from t1jax.rollout.fleet import Fleet, FleetConfig, TokenBucket
from t1jax.rollout.server import ServerConfig
from t1jax.rollout.sglang import EngineModel, Settings
from t1jax.types import SamplerError

QWEN3_5 = dataclasses.replace(CONFIG, vocab_size=128, hidden_size=32, num_layers=4)
QWEN3 = dataclasses.replace(
    QWEN3_5,
    family="qwen3_moe",
    full_attention_interval=1,
    num_layers=2,
    rotary_fraction=1.0,
    **dict.fromkeys(DELTA_FIELDS, 0),
)
FLEET = FleetConfig(
    server=ServerConfig("cpu", "float32", 16, 8192, start_timeout_s=300.0, flags=""),
    engines=2,
    reply_timeout_s=60.0,
    control_timeout_s=60.0,
    probe_period_s=0.5,
    probe_timeout_s=5.0,
    probe_failures=2,
    starts_per_s=1000.0,
    burst=100,
    probe_tolerance=1e-3,
)
CONTEXT, STOP = 128, 3


def logp(config, params, streams, experts=None):
    """(log-probs f32[N], experts) of each stream by the trainer, at temperature 1."""
    out = []
    score = jax.jit(token_logp, static_argnums=0)
    for i, tokens in enumerate(streams):
        n = len(tokens)
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, :n] = tokens
        segments = (np.arange(CONTEXT) < n).astype(np.int32)[None]
        positions = np.arange(CONTEXT, dtype=np.int32)[None] * segments
        replay = np.full((1, CONTEXT, config.num_layers, config.experts_per_token), -1, np.int32)
        if experts is not None:
            replay[0, : n - 1] = experts[i]
        found, _, used = score(
            config, params, row, positions, segments, jnp.asarray(replay), np.ones(1, np.float32)
        )
        out.append((np.asarray(found)[0, :n], np.asarray(used)[0, : n - 1]))
    return out


def make_fleet(config, folder: Path, **changes) -> Fleet:
    def export(params, out):
        export_params(by_path(params), config, out)

    def probe(params, tokens):
        return logp(config, params, [tokens])[0][0][1:]

    model = EngineModel(
        config.vocab_size, CONTEXT, config.num_layers, config.num_experts, config.experts_per_token
    )
    settings = Settings(1.0, 1.0, 0, (STOP,), reply_timeout_s=60.0, control_timeout_s=60.0)
    fleet = dataclasses.replace(FLEET, **changes)
    return Fleet(fleet, model, settings, export, probe, folder)


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
    assert fleet.drifted == 0
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
def test_a_publication_reaches_the_first_reply(served):
    """Trap 89: nothing cached under the old weights is used again."""
    config, _, fleet = served
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
def test_a_dead_engine_loses_its_trials_and_comes_back_with_the_next_weights(served):
    _, params, fleet = served
    stream = np.arange(4, 20, dtype=np.int32)

    async def turns(trials):
        return await asyncio.gather(
            *(fleet.sample(t, 0, stream, 0, 4) for t in trials), return_exceptions=True
        )

    assert all(r.version == fleet.version for r in asyncio.run(turns(range(2000, 2004))))
    victim = fleet._members[0]
    lost = set(victim.trials)
    assert len(lost) == 2  # the least loaded engine took every other trial
    os.killpg(victim.server.process.pid, signal.SIGKILL)
    victim.server.process.wait()
    results = dict(zip(range(2000, 2004), asyncio.run(turns(range(2000, 2004))), strict=True))
    assert {t for t, r in results.items() if isinstance(r, SamplerError)} == lost
    for trial in range(2000, 2004):
        asyncio.run(fleet.release(trial))
    (alone,) = asyncio.run(turns([2005]))  # the other engine serves on
    assert alone.version == fleet.version
    asyncio.run(fleet.release(2005))
    fleet.load(params, fleet.version + 1)
    assert all(m.alive for m in fleet._members)
    again = asyncio.run(turns(range(2010, 2014)))
    assert all(r.version == fleet.version for r in again)
    for trial in range(2010, 2014):
        asyncio.run(fleet.release(trial))


@pytest.mark.engine
def test_weights_that_are_not_the_published_ones_are_noticed(served):
    """Trap 88: an engine that says it has them is asked for log-probs."""
    config, params, fleet = served
    version = fleet.version
    honest = fleet._probe
    fleet._probe = lambda params, tokens: honest(init_policy(config, jax.random.key(9)), tokens)
    try:
        with pytest.raises(SamplerError, match=r"engines did not take weights .* nats off"):
            fleet.load(params, version + 1)
    finally:
        fleet._probe = honest
    with pytest.raises(SamplerError, match="the fleet has no weights"):
        asyncio.run(fleet.sample(3000, 0, np.arange(4, 9, dtype=np.int32), 0, 4))
    fleet.load(params, version + 1)
    assert fleet.version == version + 1


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
