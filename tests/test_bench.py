"""What benchmarks count. Their speed is measured by running them, never by a test."""

import dataclasses

import jax
import numpy as np
import pytest

from t1jax import bench
from t1jax.model.lm import init_policy
from t1jax.model.size import count_active


def test_flops_of_the_weights_by_hand():
    """Without attention and memory: twice the parameters a token is multiplied with."""
    flops = bench.forward_flops(1)
    c = bench.MODEL
    full = c.num_layers // c.full_attention_interval
    scores = 2 * 2 * full * c.num_heads * c.head_dim
    values = c.delta_v_heads * c.delta_v_dim
    memory = 2 * 3 * (c.num_layers - full) * values * c.delta_k_dim
    vectors = 0.01 * count_active(c)  # norms, convolutions, decays
    assert flops - scores - memory == pytest.approx(2 * count_active(c), abs=2 * vectors)


def test_the_sampler_is_asked_for_every_token():
    model = dataclasses.replace(bench.MODEL, num_layers=4)
    sampler = bench.JaxSampler(
        model,
        slots=2,
        max_len=bench.PROMPT + bench.REPLY,
        prefill_rows=2,
        prefill_buckets=(bench.PROMPT,),
        seed=0,
        sampling=bench.Sampling(1.0, 1.0, 0),
        stop_ids=(),
    )
    sampler.load(init_policy(model, jax.random.key(0)), 0)
    replies = []
    plain = sampler.sample

    async def sample(*args):
        replies.append(await plain(*args))

    sampler.sample = sample
    bench.sample(sampler, 2)
    sampler.close()
    assert [len(r.ids) for r in replies] == [bench.REPLY] * 2
    assert all(np.isfinite(r.logprobs).all() for r in replies)
