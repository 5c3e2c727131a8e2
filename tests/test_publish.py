import asyncio

import jax
import numpy as np
import pytest

from t1jax.engine import JaxSampler
from t1jax.model.config import ModelConfig
from t1jax.model.lm import init_policy
from t1jax.publish import publish
from t1jax.types import Sampling

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    full_attention_interval=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    delta_k_heads=1,
    delta_v_heads=1,
    delta_k_dim=8,
    delta_v_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_width=8,
    shared_width=8,
    embed_std=1.0,
)
OLD, NEW = (init_policy(CONFIG, jax.random.key(seed)) for seed in (0, 1))


def make_sampler():
    return JaxSampler(
        CONFIG,
        slots=2,
        max_len=64,
        prefill_rows=2,
        prefill_buckets=(16,),
        seed=0,
        sampling=Sampling(1.0, 1.0, 0),
        stop_ids=(),
    )


@pytest.fixture
def sampler():
    sampler = make_sampler()
    yield sampler
    sampler.close()


def test_replies_carry_the_version_and_nothing_cached_survives_it(sampler):
    prompt = np.arange(9, dtype=np.int32)

    async def second_turn(sampler, first_weights):
        """A reply under NEW to a stream whose beginning was read under `first_weights`."""
        publish(first_weights, 1, sampler)
        first = await sampler.sample(0, 0, prompt, 0, 4)
        publish(NEW, 2, sampler)
        second = await sampler.sample(0, 1, np.concatenate([prompt, fixed]), 12, 4)
        return first, second

    fixed = np.array([4, 5, 6, 7, 8])
    first, second = asyncio.run(second_turn(sampler, OLD))
    assert (first.version, second.version) == (1, 2)
    fresh = make_sampler()
    _, expected = asyncio.run(second_turn(fresh, NEW))
    fresh.close()
    np.testing.assert_array_equal(second.ids, expected.ids)
    np.testing.assert_array_equal(second.logprobs, expected.logprobs)
    np.testing.assert_array_equal(second.experts, expected.experts)


def test_new_weights_change_the_logprobs(sampler):
    async def logprobs(params, version):
        publish(params, version, sampler)
        return (await sampler.sample(0, 0, np.arange(9), 0, 4)).logprobs

    assert not np.array_equal(asyncio.run(logprobs(OLD, 1)), asyncio.run(logprobs(NEW, 2)))


def test_publishing_while_a_reply_is_made_is_refused(sampler):
    async def run():
        publish(OLD, 1, sampler)
        running = asyncio.create_task(sampler.sample(0, 0, np.arange(9), 0, 40))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="no request is in flight"):
            publish(NEW, 2, sampler)
        assert (await running).version == 1

    asyncio.run(run())


def test_a_version_that_did_not_arrive_is_told(sampler):
    class Stale:
        version = 1

        def load(self, params, version):
            """An engine that keeps its old weights."""

    with pytest.raises(RuntimeError, match="published version 2, the sampler reports 1"):
        publish(NEW, 2, Stale())
