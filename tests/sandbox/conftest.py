"""Fixtures that run an async body against a fresh sandbox of either kind."""

import asyncio
import re

import pytest
from docker_fixtures import DOCKERFILE, docker_config
from sandbox_fixtures import make_task

from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerHosts
from t1jax.sandbox.namespace import NamespaceSandbox, SandboxUnavailable, check_available


@pytest.fixture(scope="session")
def available():
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.fail(str(error))


@pytest.fixture
def inside(inside_namespace):
    """Most tests are of the default sandbox."""
    return inside_namespace


@pytest.fixture
def inside_namespace(available, environment):
    """inside(body, dockerfile, **task fields): awaits body(sandbox) in a new sandbox, gives its result."""

    def go(body, dockerfile="FROM scratch\n", max_output=10_000, **fields):
        task = make_task(environment(dockerfile), **fields)
        return asyncio.run(_inside(NamespaceSandbox.start(task, max_output), body))

    return go


@pytest.fixture(scope="session")
def docker_hosts():
    """A pool of the tests' one daemon, which nothing is left on."""
    hosts = DockerHosts(docker_config())
    yield hosts
    assert not hosts.lost
    hosts.close()


@pytest.fixture
def inside_docker(docker_hosts, environment):
    """The same in a container, whatever image the dockerfile is from."""

    def go(body, dockerfile=DOCKERFILE, max_output=10_000, **fields):
        dockerfile = re.sub(r"FROM \S+\n", DOCKERFILE, dockerfile)
        task = make_task(environment(dockerfile), **fields)
        return asyncio.run(_inside(DockerSandbox.start(docker_hosts, task, max_output), body))

    return go


@pytest.fixture
def environment(tmp_path):
    """environment(dockerfile): the task's environment folder, with the others' files kept."""

    def write(dockerfile):
        folder = tmp_path / "environment"
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").write_text(dockerfile)
        return folder

    return write


async def _inside(starting, body):
    sandbox = await starting
    try:
        return await body(sandbox)
    finally:
        await sandbox.close()
