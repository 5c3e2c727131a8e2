"""The embedded sampler against the trainer's forward pass, and against itself in other company."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from t1jax import engine
from t1jax.engine import JaxSampler, Sampling
from t1jax.experiment import read_experiment
from t1jax.model.lm import init_policy, token_logp
from t1jax.publish import publish

MODEL = dataclasses.replace(read_experiment(tiny.get_config("debug")).model, vocab_size=96)
STOP = 90
TRIALS, MAX_LEN, OBSERVATION = 12, 96, np.arange(1, 8, dtype=np.int32)
PROMPTS = [
    np.random.default_rng(i).integers(0, 80, 5 + 3 * i).astype(np.int32) for i in range(TRIALS)
]


def make_sampler(**changes) -> JaxSampler:
    settings = dict(slots=12, max_len=MAX_LEN, prefill_rows=4, prefill_buckets=(8, 24), seed=0)
    settings |= {"sampling": Sampling(1.0, 1.0, 0), "stop_ids": (STOP,)} | changes
    return JaxSampler(MODEL, **settings)


@pytest.fixture(scope="module")
def params():
    return init_policy(MODEL, jax.random.key(0))


@pytest.fixture
def sampler(params):
    made = make_sampler()
    made.load(params, 0)
    yield made
    made.close()


async def converse(sampler, trial: int, delay: float = 0.0, turns: int = 3):
    """(tokens, log-probs with 0 on context, experts) of one trial."""
    await asyncio.sleep(delay)
    tokens, logprobs, experts = PROMPTS[trial], np.zeros(len(PROMPTS[trial])), []
    rows = 0
    for turn in range(turns):
        reply = await sampler.sample(trial, turn, tokens, rows, 6)
        assert reply.experts_start == rows
        assert len(reply.experts) == len(tokens) + len(reply.ids) - 1 - rows
        assert (reply.finish == "stop") == (reply.ids[-1] == STOP)
        rows += len(reply.experts)
        experts.append(reply.experts)
        tokens = np.concatenate([tokens, reply.ids])
        logprobs = np.concatenate([logprobs, reply.logprobs])
        if turn + 1 < turns:
            tokens = np.concatenate([tokens, OBSERVATION])
            logprobs = np.concatenate([logprobs, np.zeros(len(OBSERVATION))])
    await sampler.release(trial)
    return tokens, logprobs, np.concatenate(experts)


def converse_all(sampler, trials, delays=None):
    async def run():
        waits = delays or [0.0] * len(trials)
        return await asyncio.gather(
            *(converse(sampler, t, d) for t, d in zip(trials, waits, strict=True))
        )

    return asyncio.run(run())


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_trial_does_not_depend_on_its_company(sampler, params):
    together = converse_all(sampler, range(TRIALS))
    sampler.load(params, 1)
    for trial in (0, 5, 11):
        assert_same(converse_all(sampler, [trial])[0], together[trial])
    sampler.load(params, 2)
    order = list(reversed(range(TRIALS)))
    late = converse_all(sampler, order, [0.01 * (7 * i % 5) for i in order])
    for trial, found in zip(order, late, strict=True):
        assert_same(found, together[trial])
    assert sampler.drifted == 0


def test_fewer_slots_than_trials_change_nothing(sampler, params):
    together = converse_all(sampler, range(TRIALS))
    small = make_sampler(slots=12, prefill_buckets=(8, 24))
    small._slots = small._slots[:3]  # the device shapes stay, so results must stay bit for bit
    small.load(params, 0)
    try:
        found = converse_all(small, range(TRIALS))
    finally:
        small.close()
    for a, b in zip(found, together, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_allclose(a[1], b[1], atol=1e-4)
        assert a[2].shape == b[2].shape


def test_the_trainer_agrees(sampler, params):
    found = converse_all(sampler, range(TRIALS))
    shape = (TRIALS, MAX_LEN)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    logprobs = np.zeros(shape, np.float32)
    experts = np.full((*shape, MODEL.num_layers, MODEL.experts_per_token), -1, np.int32)
    for row, (ids, logp, used) in enumerate(found):
        n = len(ids)
        tokens[row, :n], segments[row, :n], logprobs[row, :n] = ids, 1, logp
        experts[row, : n - 1] = used
    positions = np.broadcast_to(np.arange(MAX_LEN), shape)
    run = jax.jit(
        lambda e: token_logp(MODEL, params, tokens, positions, segments, e, jnp.ones(TRIALS))
    )
    chosen = logprobs < 0
    replayed, _, _ = run(experts)
    assert np.abs(np.asarray(replayed) - logprobs)[chosen].max() < 2e-5
    free, _, used = run(np.full_like(experts, -1))
    assert np.abs(np.asarray(free) - logprobs)[chosen].max() < 2e-5
    recorded = experts[..., 0] >= 0
    np.testing.assert_array_equal(np.sort(used, -1)[recorded], np.sort(experts, -1)[recorded])


def test_compilations_are_bounded(params):
    jax.clear_caches()
    sampler = make_sampler()
    sampler.load(params, 0)
    converse_all(sampler, range(TRIALS))
    sampler.load(params, 1)
    converse_all(sampler, [3, 4])
    sampler.close()
    assert engine._prefill._cache_size() == 2 and engine._decode._cache_size() == 1


def test_replies_end_at_the_limits(sampler):
    async def ask(prompt, max_new):
        return await sampler.sample(99, 0, prompt, 0, max_new)

    reply = asyncio.run(ask(PROMPTS[0], 1))
    assert reply.finish == "length" and len(reply.ids) == 1
    reply = asyncio.run(ask(np.ones(MAX_LEN - 2, np.int32), 50))
    assert len(reply.ids) <= 2 and len(reply.experts) == MAX_LEN - 2 + len(reply.ids) - 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros(0, np.int32), "0 tokens leaves no room"),
        (np.ones(MAX_LEN, np.int32), "96 tokens leaves no room"),
        (np.array([1, 96]), "token 1 has id 96"),
        (np.array([-1]), "token 0 has id -1"),
    ],
)
def test_bad_streams_are_refused(sampler, tokens, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(sampler.sample(0, 0, tokens, 0, 4))


def test_other_seeds_and_turns_draw_other_tokens(sampler, params):
    other = make_sampler(seed=1)
    other.load(params, 0)
    a, b = converse_all(sampler, [7])[0], converse_all(other, [7])[0]
    other.close()
    assert not np.array_equal(a[0], b[0])


def test_a_stream_that_was_rewritten_is_counted_and_read_anew(sampler, params):
    async def run():
        first = await sampler.sample(0, 0, PROMPTS[3], 0, 6)
        changed = np.concatenate([PROMPTS[3], first.ids, OBSERVATION])
        changed[len(PROMPTS[3]) - 1] += 1
        return changed, await sampler.sample(0, 1, changed, 0, 6)

    changed, reply = asyncio.run(run())
    assert sampler.drifted == 1
    sampler.load(params, 1)
    alone = asyncio.run(sampler.sample(0, 1, changed, 0, 6))
    np.testing.assert_array_equal(reply.ids, alone.ids)


def test_no_reply_spans_two_versions(sampler, params):
    async def run():
        task = asyncio.create_task(sampler.sample(0, 0, PROMPTS[0], 0, 40))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="in flight"):
            publish(params, 1, sampler)
        assert (await task).version == 0
        publish(params, 1, sampler)
        return await sampler.sample(0, 1, PROMPTS[0], 0, 4)

    assert asyncio.run(run()).version == 1


def test_cancelled_requests_free_their_slot(sampler):
    async def run():
        tasks = [
            asyncio.create_task(sampler.sample(i, 0, PROMPTS[i], 0, 60)) for i in range(TRIALS)
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await asyncio.wait_for(sampler.sample(50, 0, PROMPTS[0], 0, 4), 60)

    assert len(asyncio.run(run()).ids) <= 4


def test_a_failing_worker_fails_everybody(params):
    sampler = make_sampler()
    sampler.load({"params": {}}, 0)  # no weights to compute with

    async def run():
        return await asyncio.gather(
            *(sampler.sample(i, 0, PROMPTS[i], 0, 4) for i in range(3)), return_exceptions=True
        )

    assert all(isinstance(error, RuntimeError) for error in asyncio.run(run()))
    with pytest.raises(RuntimeError, match="has ended"):
        asyncio.run(sampler.sample(0, 0, PROMPTS[0], 0, 4))
    sampler.close()
