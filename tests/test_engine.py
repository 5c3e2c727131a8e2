import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax import engine
from t1jax.engine import JaxSampler
from t1jax.model.config import ModelConfig
from t1jax.model.lm import init_policy, token_logp
from t1jax.types import Sampling

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    full_attention_interval=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    delta_k_heads=1,
    delta_v_heads=2,
    delta_k_dim=16,
    delta_v_dim=8,
    num_experts=8,
    experts_per_token=2,
    expert_width=16,
    shared_width=16,
    embed_std=1.0,
)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0)
STOP = 3
MAX_LEN = 96
TOKEN_LOGP = jax.jit(token_logp, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return init_policy(CONFIG, jax.random.key(0))


@pytest.fixture
def make_sampler(params):
    made = []

    def make(config=CONFIG, params=params, slots=6, sampling=SAMPLING, seed=0, stop_ids=(STOP,)):
        made.append(
            JaxSampler(
                config,
                slots=slots,
                max_len=MAX_LEN,
                prefill_rows=4,
                prefill_buckets=(8, 24),
                seed=seed,
                sampling=sampling,
                stop_ids=stop_ids,
            )
        )
        made[-1].load(params, 7)
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


@dataclasses.dataclass
class Stream:
    """What a trial of several turns recorded; row t of all arrays belongs to token t."""

    tokens: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray
    experts: np.ndarray


def draw(rng, low, high):
    return rng.integers(0, CONFIG.vocab_size, int(rng.integers(low, high))).astype(np.int32)


async def run_trial(sampler, trial, turns=3, max_new=10, pause=lambda: 0):
    """A trial whose contexts are a function of its number; every reply's alignment is checked."""
    rng = np.random.default_rng(trial)
    tokens, logprobs, sampled = draw(rng, 9, 40), [], []
    experts = []
    for turn in range(turns):
        await asyncio.sleep(pause())
        rows = sum(map(len, experts))
        reply = await sampler.sample(trial, turn, tokens, rows, max_new)
        n = len(tokens) + len(reply.ids)
        assert reply.experts_start == rows and len(reply.experts) == n - 1 - rows
        assert reply.version == sampler.version
        assert len(reply.ids) == len(reply.logprobs) <= max_new and np.all(reply.logprobs <= 0)
        assert reply.finish == ("stop" if reply.ids[-1] == STOP else "length")
        assert STOP not in reply.ids[:-1]
        experts.append(reply.experts)
        new = len(tokens) - len(logprobs)
        logprobs = np.concatenate([logprobs, np.zeros(new), reply.logprobs])
        sampled = np.concatenate([sampled, np.zeros(new), np.ones(len(reply.ids))])
        tokens = np.concatenate([tokens, reply.ids])
        if turn < turns - 1:
            tokens = np.concatenate([tokens, draw(rng, 2, 9)])
    await sampler.release(trial)
    return Stream(tokens, logprobs.astype(np.float32), sampled > 0, np.concatenate(experts))


async def run_trials(sampler, trials, **kwargs):
    return await asyncio.gather(*(run_trial(sampler, trial, **kwargs) for trial in trials))


def retrace(params, stream, temperature=1.0, replay=True):
    """The trainer's log-probs of the stream and its experts."""
    n = len(stream.tokens)
    experts = np.full((1, MAX_LEN, *stream.experts.shape[1:]), -1, np.int32)
    experts[0, : n - 1] = stream.experts
    tokens = np.zeros((1, MAX_LEN), np.int32)
    tokens[0, :n] = stream.tokens
    segments = (np.arange(MAX_LEN) < n).astype(np.int32)[None]
    logp, _, used = TOKEN_LOGP(
        CONFIG,
        params,
        tokens,
        np.arange(MAX_LEN, dtype=np.int32)[None],
        segments,
        experts if replay else None,
        jnp.full(1, temperature),
    )
    return np.asarray(logp)[0, :n], np.asarray(used)[0, : n - 1]


def assert_parity(params, stream, **kwargs):
    logp, used = retrace(params, stream, **kwargs)
    np.testing.assert_allclose(
        logp[stream.sampled], stream.logprobs[stream.sampled], atol=2e-5, rtol=0
    )
    np.testing.assert_array_equal(used, stream.experts)


def assert_same(a, b):
    for field in dataclasses.fields(Stream):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_a_trial_is_the_same_alone_and_in_any_crowd(make_sampler):
    alone = [asyncio.run(run_trials(make_sampler(), [trial]))[0] for trial in (5, 11)]
    for order in range(3):
        rng = np.random.default_rng(order)
        trials = [int(trial) for trial in rng.permutation(21)]
        pause = lambda rng=rng: rng.uniform(0, 0.01)  # noqa: E731
        crowd = asyncio.run(run_trials(make_sampler(), trials, pause=pause))
        for stream, trial in zip(alone, (5, 11), strict=True):
            assert_same(stream, crowd[trials.index(trial)])


def test_seed_trial_and_turn_choose_the_sample(make_sampler):
    prompt = np.arange(12, dtype=np.int32)

    async def replies(sampler):
        keys = [(0, 0), (1, 0), (2, 1)]
        results = [await sampler.sample(*key, prompt, 0, 20) for key in keys]
        return [tuple(result.ids) for result in results]

    first = asyncio.run(replies(make_sampler(stop_ids=())))
    other = asyncio.run(replies(make_sampler(stop_ids=(), seed=1)))
    assert len({*first, *other}) == 6
    assert first == asyncio.run(replies(make_sampler(stop_ids=())))


def test_logprobs_and_experts_are_the_trainers(make_sampler, params):
    sampler = make_sampler()
    streams = asyncio.run(run_trials(sampler, range(8)))
    assert sampler.rewritten == 0
    different, total = 0, 0
    for stream in streams:
        assert stream.experts.dtype == np.uint8
        assert_parity(params, stream)
        _, free = retrace(params, stream, replay=False)
        different += np.sum(np.sort(free, -1) != np.sort(stream.experts, -1))
        total += free.size
    assert different <= total / 1000  # near ties


def test_wrong_experts_change_the_logprobs(make_sampler, params):
    stream = asyncio.run(run_trial(make_sampler(), 0))
    stream.experts = (stream.experts + 1) % CONFIG.num_experts
    logp, _ = retrace(params, stream)
    assert np.abs(logp - stream.logprobs)[stream.sampled].max() > 1e-2


def test_temperature_divides_the_logits(make_sampler, params):
    sampler = make_sampler(sampling=Sampling(0.5, 1.0, 0))
    assert_parity(params, asyncio.run(run_trial(sampler, 1)), temperature=0.5)


def test_top_k_1_takes_the_likeliest(make_sampler):
    async def reply(seed, top_k):
        sampler = make_sampler(sampling=Sampling(3.0, 1.0, top_k), seed=seed)
        return (await sampler.sample(0, 0, np.arange(9), 0, 8)).ids.tolist()

    likeliest = [asyncio.run(reply(seed, 1)) for seed in range(3)]
    assert likeliest[0] == likeliest[1] == likeliest[2]
    assert len({tuple(asyncio.run(reply(seed, 0))) for seed in range(3)}) == 3


@pytest.mark.slow
def test_many_experts_are_stored_in_two_bytes(make_sampler):
    config = dataclasses.replace(CONFIG, num_experts=300, expert_width=1)
    params = init_policy(config, jax.random.key(1))
    stream = asyncio.run(run_trial(make_sampler(config, params), 0))
    assert stream.experts.dtype == np.uint16 and stream.experts.max() >= 256


def test_a_prompt_longer_than_every_bucket_is_read_in_pieces(make_sampler, params):
    tokens = draw(np.random.default_rng(0), 70, 80)
    reply = asyncio.run(make_sampler().sample(0, 0, tokens, 0, 6))
    everything = np.concatenate([tokens, reply.ids])
    sampled = np.arange(len(everything)) >= len(tokens)
    logprobs = np.concatenate([np.zeros(len(tokens), np.float32), reply.logprobs])
    assert_parity(params, Stream(everything, logprobs, sampled, reply.experts))


def test_the_reply_ends_where_the_context_is_full(make_sampler):
    tokens = np.arange(MAX_LEN - 4, dtype=np.int32) % CONFIG.vocab_size
    reply = asyncio.run(make_sampler(stop_ids=()).sample(0, 0, tokens, 0, 50))
    assert (reply.finish, len(reply.ids), len(reply.experts)) == ("length", 4, MAX_LEN - 1)


def test_a_stream_that_does_not_go_on_is_read_anew(make_sampler, params):
    sampler = make_sampler(stop_ids=())
    tokens = np.arange(10, 22, dtype=np.int32)

    async def run():
        first = await sampler.sample(0, 0, tokens, 0, 4)
        changed = np.concatenate([tokens, first.ids[:2], [9, 9, 9, 9]])
        assert changed[14] != first.ids[2]
        second = await sampler.sample(0, 1, changed, 5, 4)
        assert second.experts_start == 5 and len(second.experts) == len(changed) + 4 - 1 - 5
        again = await sampler.sample(1, 1, changed, 0, 1)  # never cached: the whole stream's rows
        return changed, second, again

    changed, second, again = asyncio.run(run())
    assert sampler.rewritten == 1  # first.ids[2]: the reply's last id was not read
    np.testing.assert_array_equal(again.experts[5:], second.experts[: len(changed) - 5])
    stream = Stream(
        np.concatenate([changed, second.ids]),
        np.concatenate([np.zeros(len(changed), np.float32), second.logprobs]),
        np.arange(len(changed) + 4) >= len(changed),
        np.concatenate([again.experts[:5], second.experts]),
    )
    assert_parity(params, stream)


def test_rows_asked_for_once_more_are_returned(make_sampler):
    sampler = make_sampler(stop_ids=())

    async def run():
        tokens = np.arange(12, dtype=np.int32)
        first = await sampler.sample(0, 0, tokens, 0, 4)
        more = np.concatenate([tokens, first.ids, [1, 2]])
        return await sampler.sample(0, 1, more, 3, 4)

    reply = asyncio.run(run())
    assert (reply.experts_start, len(reply.experts)) == (3, 18 + 4 - 1 - 3)
    assert sampler.rewritten == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 0, [], 0, 4), "stream of shape"),
        ((0, 0, [1] * MAX_LEN, 0, 4), "stream of shape"),
        ((0, 0, [[1, 2]], 0, 4), "stream of shape"),
        ((0, 0, [1, 48], 0, 4), "token 1 has id 48, outside a vocabulary of 48"),
        ((0, 0, [-1, 4], 0, 4), "token 0 has id -1"),
        ((0, 0, [1, 2**32 + 1], 0, 4), "token 1 has id 4294967297"),
        ((0, 0, [1, 2], 2, 4), "experts_start=2"),
        ((0, 0, [1, 2], 0, 0), "max_new=0"),
        ((2**31, 0, [1, 2], 0, 4), "below 2"),
    ],
)
def test_bad_requests_are_refused_at_the_door(make_sampler, arguments, message):
    sampler = make_sampler()
    with pytest.raises(ValueError, match=message):
        asyncio.run(sampler.sample(*arguments))
    assert len(asyncio.run(sampler.sample(0, 0, np.array([1, 2]), 0, 1)).ids) == 1


@pytest.mark.parametrize("bad", [(0.0, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.1, 0), (1.0, 1.0, -1)])
def test_sampling_without_logprobs_is_refused(bad):
    with pytest.raises(ValueError):
        Sampling(*bad)


def test_compilations_are_as_many_as_buckets_and_one(make_sampler):
    def compiled():
        return engine.prefill._cache_size(), engine.decode._cache_size()

    config = dataclasses.replace(CONFIG, rms_eps=2e-6)  # of no other test
    sampler = make_sampler(config)
    before = compiled()
    asyncio.run(run_trials(sampler, range(20)))
    assert (compiled()[0] - before[0], compiled()[1] - before[1]) == (2, 1)
    after = compiled()
    sampler.load(init_policy(CONFIG, jax.random.key(3)), 8)
    asyncio.run(run_trials(sampler, range(30, 60), turns=2))
    assert compiled() == after


def test_weights_wait_until_nothing_is_in_flight(make_sampler, params):
    sampler = make_sampler(stop_ids=())

    async def run():
        running = asyncio.create_task(sampler.sample(0, 0, np.arange(20), 0, 60))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="no request is in flight"):
            sampler.load(params, 8)
        assert (await running).version == 7
        running = asyncio.create_task(sampler.sample(0, 1, np.arange(20), 0, 60))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        sampler.load(params, 8)  # the cancelled one leaves first
        return await sampler.sample(0, 2, np.arange(20), 0, 1)

    assert asyncio.run(run()).version == 8


def test_cancelling_frees_the_slot_for_the_next_trial(make_sampler):
    sampler = make_sampler(slots=1, stop_ids=())

    async def run():
        await sampler.sample(9, 0, np.arange(9), 0, 2)  # compiles
        await sampler.release(9)
        tasks = [
            asyncio.create_task(sampler.sample(trial, 0, np.arange(9), 0, 80)) for trial in range(3)
        ]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        tasks[1].cancel()  # waits for a slot
        reply = await asyncio.wait_for(tasks[2], 60)
        await sampler.release(2)
        again = await sampler.sample(0, 0, np.arange(9), 0, 80)  # the trial's next attempt
        return reply, again

    reply, again = asyncio.run(run())
    assert len(reply.ids) == len(again.ids) == 80
    assert sampler.rewritten == 0


def test_a_trial_has_one_request_at_a_time(make_sampler):
    sampler = make_sampler(stop_ids=())

    async def run():
        running = asyncio.create_task(sampler.sample(0, 0, np.arange(9), 0, 80))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="trial 0 already has a request"):
            await sampler.sample(0, 1, np.arange(9), 0, 1)
        await running

    asyncio.run(run())


def test_a_failing_worker_fails_everybody_and_says_why(make_sampler):
    sampler = make_sampler()
    sampler.load({"params": {}}, 8)  # no such model

    async def run():
        return await asyncio.gather(
            *(run_trial(sampler, t) for t in range(9)), return_exceptions=True
        )

    for error in asyncio.run(run()):
        assert isinstance(error, RuntimeError) and "the sampler has ended: 'trunk'" in str(error)
    with pytest.raises(RuntimeError, match="the sampler has ended"):
        sampler.load({}, 9)


def test_closing_fails_what_is_in_flight(make_sampler):
    sampler = make_sampler(stop_ids=())

    async def run():
        tasks = [
            asyncio.create_task(sampler.sample(trial, 0, np.arange(9), 0, 80)) for trial in range(9)
        ]
        await asyncio.sleep(0.01)
        sampler.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, RuntimeError) and "closed" in str(error)
    sampler.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        asyncio.run(sampler.sample(0, 0, np.arange(9), 0, 1))


def test_without_weights_nothing_is_sampled():
    sampler = JaxSampler(
        CONFIG,
        slots=1,
        max_len=8,
        prefill_rows=1,
        prefill_buckets=(8,),
        seed=0,
        sampling=SAMPLING,
        stop_ids=(),
    )
    with pytest.raises(RuntimeError, match="no weights are loaded"):
        asyncio.run(sampler.sample(0, 0, np.arange(3), 0, 1))
    sampler.close()
