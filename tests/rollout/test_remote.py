"""Engines that run already: started by the launcher, found by a fleet, left alone when it closes."""

import asyncio
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import jax
import numpy as np
import pytest
from fleet_fixtures import FLEET, QWEN3, logp, make_fleet

from t1jax.model.hf import by_path, export_params
from t1jax.model.lm import init_policy
from t1jax.types import SamplerError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launcher(tmp_path):
    """(process, address) of launch/sglang.py with one engine, serving weights of key 0."""
    params = init_policy(QWEN3, jax.random.key(0))
    export_params(by_path(params), QWEN3, tmp_path / "hf")
    command = [sys.executable, "launch/sglang.py", f"--checkpoint={tmp_path / 'hf'}"]
    command += ["--device=cpu", "--dtype=float32", f"--logs={tmp_path / 'logs'}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


async def status(method: str, url: str) -> int:
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url, json={}) as answer:
            return answer.status


@pytest.mark.engine
def test_a_fleet_takes_engines_that_run_and_leaves_them_running(launcher, tmp_path):
    _, url = launcher
    stream = np.arange(4, 24, dtype=np.int32)

    def never(params, folder):
        pytest.fail("the engine would have to read a file")

    # One fleet after the other; the second finds what one that was killed has left open.
    for version, transfer, changes in ((0, "disk", {}), (1, "tensors", {"export": never})):
        params = init_policy(QWEN3, jax.random.key(version + 5))
        config = dataclasses.replace(FLEET, urls=f"{url}/", transfer=transfer)
        fleet = make_fleet(QWEN3, tmp_path / "fleet", fleet=config, **changes)
        try:
            fleet.load(params, version)
            reply = asyncio.run(fleet.sample(0, 0, stream, 0, 8))
        finally:
            fleet.close()
        assert reply.version == version
        ((own, _),) = logp(QWEN3, params, [np.concatenate([stream, reply.ids])], [reply.experts])
        assert np.abs(own[len(stream) :] - reply.logprobs).max() <= 1e-3
        assert asyncio.run(status("POST", f"{url}/begin_weight_update")) == 200


def test_an_address_where_nobody_answers_is_named(tmp_path):
    server = dataclasses.replace(FLEET.server, start_timeout_s=1.0)
    fleet = make_fleet(
        QWEN3,
        tmp_path,
        fleet=dataclasses.replace(FLEET, server=server, urls="http://127.0.0.1:9"),
    )
    try:
        with pytest.raises(SamplerError, match=r"nothing answers at http://127\.0\.0\.1:9"):
            fleet.load(init_policy(QWEN3, jax.random.key(0)), 0)
    finally:
        fleet.close()


def test_a_python_without_sglang_is_named(tmp_path):
    server = dataclasses.replace(FLEET.server, python="nowhere/bin/python")
    fleet = make_fleet(QWEN3, tmp_path, fleet=dataclasses.replace(FLEET, server=server))
    try:
        with pytest.raises(SamplerError, match="nowhere/bin/python is missing: run bash"):
            fleet.load(init_policy(QWEN3, jax.random.key(0)), 0)
    finally:
        fleet.close()
