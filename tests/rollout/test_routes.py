"""Routed experts as a real SGLang server of our launcher sends them."""

import asyncio
import base64
import dataclasses

import aiohttp
import jax
import numpy as np
import pytest
from fleet_fixtures import FLEET, QWEN3

from t1jax.model.hf import by_path, export_params
from t1jax.model.lm import init_policy
from t1jax.rollout import server


@pytest.mark.engine
@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (300, np.uint16)])
def test_the_smallest_width_and_only_the_rows_asked_for(tmp_path, experts, dtype):
    config = dataclasses.replace(QWEN3, num_experts=experts)
    export_params(by_path(init_policy(config, jax.random.key(0))), config, tmp_path / "model")
    prompt = np.random.default_rng(0).integers(4, 128, 2500).tolist()

    async def ask(url: str, start: int) -> np.ndarray:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True},
            "return_routed_experts": True,
            "routed_experts_start_len": start,
        }
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/generate", json=body) as answer:
                data = base64.b64decode((await answer.json())["meta_info"]["routed_experts"])
        return np.frombuffer(data, dtype).reshape(-1, config.num_layers, config.experts_per_token)

    async def talk(url: str) -> list[np.ndarray]:
        return [await ask(url, start) for start in (0, 700, 2500)]

    one = server.start(FLEET.server, tmp_path / "model", tmp_path / "log")
    try:
        asyncio.run(server.wait_ready(one, FLEET.server.start_timeout_s))
        whole, part, last = asyncio.run(talk(one.url))
    finally:
        server.stop(one)
    assert (len(whole), len(part), len(last)) == (2503, 1803, 3)
    np.testing.assert_array_equal(part[:1800], whole[700:2500])
    assert 0.8 * experts < whole.max() < experts
    chosen = np.sort(whole, -1)
    assert (chosen[..., 1:] > chosen[..., :-1]).all()  # a token's experts are different ones
