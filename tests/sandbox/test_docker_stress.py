"""Two hundred sandboxes, sixteen at a time, some of them killed: nothing is left, everyone accounted for."""

import asyncio
import collections
import contextlib
import random
from pathlib import Path

import pytest
from docker_fixtures import DOCKERFILE, docker_client, volumes_and_networks, wait_for_nothing_new
from sandbox_fixtures import make_task

from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.protocol import SandboxError

pytestmark = [pytest.mark.docker, pytest.mark.slow]
COUNT, AT_ONCE, KILLED = 200, 16, 0.1
MARK = "98765.4321"  # seconds that no other process of this machine sleeps


def containers_of(run: str) -> int:
    return len(docker_client().containers(all=True, filters={"label": f"t1jax.run={run}"}))


def test_many_sandboxes_leave_nothing(docker_hosts, environment):
    task, run = make_task(environment(DOCKERFILE), memory_mb=128), docker_hosts.labels["t1jax.run"]
    shared = volumes_and_networks()
    places, chance, before = asyncio.Semaphore(AT_ONCE), random.Random(0), containers_of(run)

    async def one(number: int, killed: bool) -> str:
        async with places:
            sandbox = await DockerSandbox.start(docker_hosts, task)
            try:
                if killed:
                    killing = asyncio.to_thread(docker_client().kill, sandbox.name)
                    asyncio.get_running_loop().call_later(0.1, asyncio.ensure_future, killing)
                result = await sandbox.run(
                    f"sleep {0.3 + killed}; sleep {MARK} & echo {number}", 60
                )
                assert result.output == f"{number}\n"
                return "finished"
            except SandboxError as error:
                assert "its container ended" in str(error)
                return "killed"
            finally:
                await sandbox.close()

    async def main():
        return await asyncio.gather(*(one(i, chance.random() < KILLED) for i in range(COUNT)))

    ends = collections.Counter(asyncio.run(main()))
    chance = random.Random(0)
    assert ends["killed"] == sum(chance.random() < KILLED for _ in range(COUNT))
    assert ends.total() == COUNT and containers_of(run) == before and not docker_hosts.lost
    wait_for_nothing_new(shared)
    assert not any(MARK.encode() in line for line in command_lines())


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()
