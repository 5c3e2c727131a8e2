"""Engines that run already: started by the launcher, found by a fleet, left alone when it closes."""

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import jax
import numpy as np
import pytest
from fault_fixtures import until
from fleet_fixtures import FLEET, QWEN3, logp, make_fleet

from t1jax.model.hf import by_path, export_params
from t1jax.model.lm import init_policy
from t1jax.types import SamplerError

ROOT = Path(__file__).parents[2]


def launch(folder: Path, *flags: str, stderr=subprocess.PIPE) -> subprocess.Popen:
    """launch/sglang.py with one engine of the checkpoint `folder`/hf."""
    command = [sys.executable, "launch/sglang.py", f"--checkpoint={folder / 'hf'}", *flags]
    command += ["--device=cpu", "--dtype=float32", f"--logs={folder / 'logs'}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


@pytest.fixture
def launcher(tmp_path):
    """(process, address) of launch/sglang.py with one engine, serving weights of key 0."""
    params = init_policy(QWEN3, jax.random.key(0))
    export_params(by_path(params), QWEN3, tmp_path / "hf")
    process = launch(tmp_path, stderr=None)
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
        with pytest.raises(SamplerError, match="nowhere/bin/python is no program: run bash"):
            fleet.load(init_policy(QWEN3, jax.random.key(0)), 0)
    finally:
        fleet.close()


def engines_of(folder: Path) -> list[int]:
    """Processes whose command line names a file in `folder`, but for the launcher's own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            if str(folder).encode() in words and b"launch/sglang.py" not in words:
                found.append(int(path.parent.name))
    return found


@pytest.mark.engine
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after_s", [0.0, 2.0, 8.0])  # its first moment, imports, workers
def test_no_engine_outlives_a_launcher_that_ends_while_it_starts(tmp_path, sign, after_s):
    export_params(by_path(init_policy(QWEN3, jax.random.key(0))), QWEN3, tmp_path / "hf")
    process = launch(tmp_path)
    until(lambda: engines_of(tmp_path), 30)
    time.sleep(after_s)
    assert process.poll() is None
    process.send_signal(sign)
    out, err = process.communicate(timeout=30)
    if sign == signal.SIGTERM:
        assert (process.returncode, out, err) == (1, "", "error: interrupted\n")
    until(lambda: not engines_of(tmp_path), 20)


@pytest.mark.engine
def test_a_server_of_another_model_is_left_as_it_is(launcher, tmp_path):
    _, url = launcher
    other = dataclasses.replace(QWEN3, hidden_size=64)
    config = dataclasses.replace(FLEET, urls=url, transfer="tensors")
    fleet = make_fleet(other, tmp_path / "fleet", fleet=config)
    try:
        with pytest.raises(SamplerError, match="another model: its hidden_size is 32, the"):
            fleet.load(init_policy(other, jax.random.key(0)), 0)
    finally:
        fleet.close()
    assert asyncio.run(status("GET", f"{url}/health")) == 200


def test_an_address_that_is_not_this_machines_is_named(tmp_path):
    process = launch(tmp_path, "--host=192.0.2.1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "error: no server can listen at 192.0.2.1: Cannot assign requested address\n"
