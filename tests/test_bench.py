"""What benchmarks count. Their speed is measured by running them, never by a test."""

import asyncio
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from t1jax.bench import model, routes, routes_server, sampler, turns
from t1jax.bench.reference import MODEL
from t1jax.model.lm import init_policy
from t1jax.model.size import count_active
from t1jax.rollout.sglang import read_experts


def test_flops_of_the_weights_by_hand():
    """Without attention and memory: twice the parameters a token is multiplied with."""
    flops = model.forward_flops(1)
    c = MODEL
    full = c.num_layers // c.full_attention_interval
    scores = 2 * 2 * full * c.num_heads * c.head_dim
    values = c.delta_v_heads * c.delta_v_dim
    memory = 2 * 3 * (c.num_layers - full) * values * c.delta_k_dim
    vectors = 0.01 * count_active(c)  # norms, convolutions, decays
    assert flops - scores - memory == pytest.approx(2 * count_active(c), abs=2 * vectors)


def test_the_sampler_is_asked_for_every_token(monkeypatch):
    small = dataclasses.replace(MODEL, num_layers=4)
    monkeypatch.setattr(sampler, "MODEL", small)
    one = sampler.make_sampler(2)
    one.load(init_policy(small, jax.random.key(0)), 0)
    replies = []
    plain = one.sample

    async def sample(*args):
        replies.append(await plain(*args))

    one.sample = sample
    sampler.sample(one, 2)
    one.close()
    assert [len(r.ids) for r in replies] == [sampler.REPLY] * 2
    assert all(np.isfinite(r.logprobs).all() for r in replies)


def test_the_first_round_is_left_out_and_the_faster_way_counts():
    first, second, only = iter([1, 9, 7, 8]), iter([9, 6, 9, 9]), iter([0, 4, 3, 5])
    sides = [[lambda: next(first), lambda: next(second)], [lambda: next(only)]]
    assert turns.take_turns(*sides) == [6, 3]


def test_the_turns_of_a_trial_bring_every_row_once():
    for count in (1, routes.TURNS):
        parts = routes.split(count)
        assert len(parts) == count and parts[0][0] == 0 and parts[-1][1] == routes.TOKENS
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))


def test_a_narrow_row_is_the_engines_own():
    server = routes_server.Server(3000, 2, 3, 256)
    slots = server.slots[100:2900]
    text = routes_server.encode(server.narrow(slots))
    sizes = routes.SIZES | {"num_hidden_layers": 2, "num_experts_per_tok": 3}
    small = dataclasses.replace(routes.MODEL, sizes=sizes)
    found, begin, width = read_experts(text, 2900, 100, small, (1, 2, 4))
    assert (begin, width) == (100, 1)
    np.testing.assert_array_equal(found, server.buffer[slots])
    server.buffer[slots[-1], 0, 0] = 256
    with pytest.raises(ValueError, match="an expert that does not exist"):
        server.narrow(slots)


@pytest.mark.parametrize("form", routes.FORMS)
def test_an_engine_without_a_model_answers_the_client_that_training_uses(form):
    """Parts of the time are counted, and add up to less than the calls."""
    with routes.serving() as url:
        parts = asyncio.run(routes.ask(url, form, routes.split(routes.TURNS)[:3]))
    assert all(parts[name] > 0 for name in routes.SERVER_PARTS)
    assert sum(parts[name] for name in routes.SERVER_PARTS) < parts["calls"]
