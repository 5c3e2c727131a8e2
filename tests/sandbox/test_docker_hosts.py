"""The pool: hosts that do not answer, room, rates, and removals that fail."""

import asyncio
import time

import docker
import pytest
import requests
from docker_fixtures import DOCKERFILE, docker_client, docker_config, docker_url
from sandbox_fixtures import make_task

from t1jax.sandbox import docker_hosts as pool
from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerConfig, DockerHosts
from t1jax.sandbox.namespace import SandboxUnavailable
from t1jax.sandbox.protocol import SandboxError

pytestmark = pytest.mark.docker
NOBODY = "unix:///nonexistent/docker.sock"


@pytest.fixture
def make_hosts():
    """make_hosts(**fields of the configuration): a pool, closed at the end."""
    made = []

    def make(**fields):
        made.append(DockerHosts(docker_config(**fields)))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hosts": ("ssh://x",)}, "ssh://x"),
        ({"hosts": ()}, "hosts"),
        ({"containers": 0}, "containers"),
        ({"starts_per_s": 0.0}, "starts_per_s"),
    ],
)
def test_a_configuration_is_checked(fields, says):
    with pytest.raises(ValueError, match=says):
        DockerConfig(**fields)


def test_no_daemon_is_one_clear_line(make_hosts, environment):
    hosts = make_hosts(hosts=(NOBODY,), attempts=1)
    with pytest.raises(SandboxUnavailable, match=f"no Docker daemon answers at {NOBODY}"):
        hosts.check()
    with pytest.raises(SandboxUnavailable, match="launch/dockerd"):
        asyncio.run(DockerSandbox.start(hosts, make_task(environment(DOCKERFILE))))


def test_a_dead_host_is_avoided(make_hosts, environment):
    hosts = make_hosts(hosts=(NOBODY, docker_url()))
    hosts.check()

    async def main():
        for _ in range(3):
            sandbox = await DockerSandbox.start(hosts, make_task(environment(DOCKERFILE)))
            assert sandbox._host.url == docker_url()
            await sandbox.close()

    asyncio.run(main())
    assert [host.containers for host in hosts._hosts] == [0, 0]


def test_the_least_loaded_host_is_taken(make_hosts, environment):
    same = docker_url().replace("unix:///", "unix:////")  # the same daemon by another name
    hosts = make_hosts(hosts=(docker_url(), same), containers=2)

    async def main():
        starting = (
            DockerSandbox.start(hosts, make_task(environment(DOCKERFILE))) for _ in range(4)
        )
        sandboxes = await asyncio.gather(*starting)
        placed = [host.containers for host in hosts._hosts]
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        return placed

    assert asyncio.run(main()) == [2, 2]


def test_starts_wait_for_room_and_a_pool_outlives_its_loop(make_hosts, environment):
    hosts = make_hosts(containers=1)

    async def main():
        first = await DockerSandbox.start(hosts, make_task(environment(DOCKERFILE)))
        second = asyncio.ensure_future(
            DockerSandbox.start(hosts, make_task(environment(DOCKERFILE)))
        )
        await asyncio.sleep(0.5)
        assert not second.done()
        await first.close()
        await (await second).close()

    for _ in range(2):
        asyncio.run(main())


def test_starts_are_limited_in_rate(make_hosts):
    hosts = make_hosts(starts_per_s=20.0)

    async def main():
        started = time.monotonic()
        for _ in range(pool.CALLS + 10):
            async with hosts.place() as host:
                await host.starts.take()
        return time.monotonic() - started

    assert 0.4 < asyncio.run(main()) < 3


def test_a_removal_that_fails_is_bounded_and_listed_and_swept(make_hosts, environment, monkeypatch):
    hosts = make_hosts()

    def blocked(api, kind, name):
        time.sleep(1.0)

    async def main():
        sandbox = await DockerSandbox.start(hosts, make_task(environment(DOCKERFILE)))
        with monkeypatch.context() as patch:
            patch.setattr(pool, "REMOVE_S", 0.2)
            patch.setattr(pool, "_remove", blocked)
            started = time.monotonic()
            with pytest.raises(SandboxError, match=f"{sandbox.name} could not be removed"):
                await sandbox.close()
            assert time.monotonic() - started < 0.9
        assert [lost[2] for lost in hosts.lost] == [sandbox.name]
        await hosts.sweep()
        return sandbox.name

    name = asyncio.run(main())
    assert not hosts.lost and not docker_client().containers(all=True, filters={"name": name})


def test_a_host_that_fails_is_asked_again(make_hosts, environment, monkeypatch):
    hosts, failures, start = make_hosts(), iter(range(2)), docker.APIClient.start

    def fail_twice(api, name):
        if next(failures, None) is None:
            return start(api, name)
        reply = requests.Response()
        reply.status_code = 500
        raise docker.errors.APIError("500", reply, "the daemon is busy")

    async def main():
        sandbox = await DockerSandbox.start(hosts, make_task(environment(DOCKERFILE)))
        await sandbox.close()

    monkeypatch.setattr(docker.APIClient, "start", fail_twice)
    asyncio.run(main())
    assert next(failures, None) is None and hosts._hosts[0].containers == 0
    failures = iter(range(100))
    with pytest.raises(SandboxError, match="the daemon is busy"):
        asyncio.run(main())
    assert not docker_client().containers(all=True, filters={"label": f"t1jax.run={hosts._run}"})
