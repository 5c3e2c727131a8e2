"""Images: by content, once, within their time; and what is refused."""

import asyncio
import dataclasses
import multiprocessing
import time

import pytest
from docker_fixtures import DOCKERFILE, docker_client, docker_config
from sandbox_fixtures import make_task

from t1jax.sandbox import docker_image
from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerHosts
from t1jax.sandbox.namespace import SandboxUnavailable
from t1jax.sandbox.protocol import SandboxError

pytestmark = pytest.mark.docker


def start(hosts, task):
    """The error of a start, or None."""

    async def main():
        try:
            await (await DockerSandbox.start(hosts, task)).close()
        except SandboxError as error:
            return error

    return asyncio.run(main())


def unique(text: str) -> str:
    """A Dockerfile that no earlier test run has left an image of."""
    return f"{DOCKERFILE}{text}\nLABEL unique={time.time_ns()}\n"


def test_the_tag_is_the_content(environment):
    folder = environment(DOCKERFILE)
    task = make_task(folder)
    first = docker_image.name(task)
    (folder / "data").mkdir()
    (folder / "data" / "a").write_text("a")
    second = docker_image.name(task)
    (folder / "data" / "a").chmod(0o755)
    third = docker_image.name(task)
    (folder / "data" / "a").write_text("b")
    fourth = docker_image.name(task)
    (folder / "data" / "a").unlink()
    (folder / "data").rmdir()
    assert len({first, second, third, fourth}) == 4 and docker_image.name(task) == first
    assert docker_image.name(dataclasses.replace(task, docker_image="x:1")) == "x:1"


@pytest.mark.parametrize(
    ("dockerfile", "says"),
    [
        ("RUN echo 'no such package' >&2; exit 4", "returned a non-zero code: 4: no such package"),
        ("COPY nothere /", "nothere"),
        ("NONSENSE x", "unknown instruction: NONSENSE"),
    ],
)
def test_a_failed_build_is_one_line_with_the_last_useful_one(
    docker_hosts, environment, dockerfile, says
):
    error = start(docker_hosts, make_task(environment(unique("") + dockerfile + "\n")))
    assert says in str(error) and "\n" not in str(error)


def test_a_build_has_a_time_of_its_own_and_ends_with_it(docker_hosts, environment):
    task = make_task(environment(unique("RUN sleep 987")), build_timeout_s=2.0)
    started = time.monotonic()
    assert "longer than its 2 s" in str(start(docker_hosts, task))
    assert time.monotonic() - started < 6
    until = time.monotonic() + 20
    while builders() and time.monotonic() < until:
        time.sleep(0.1)
    assert not builders()


def builders() -> list:
    return [c for c in docker_client().containers() if "sleep 987" in c["Command"]]


def test_many_starts_make_one_build(docker_hosts, environment):
    task = make_task(environment(unique("RUN date +%N > /stamp")))

    async def one():
        sandbox = await DockerSandbox.start(docker_hosts, task)
        try:
            return (await sandbox.run("cat /stamp", 20)).output
        finally:
            await sandbox.close()

    async def main():
        return await asyncio.gather(*(one() for _ in range(6)))

    assert len(set(asyncio.run(main()))) == 1


def build(task, config) -> str:
    """The image's id, made by a process of its own."""
    hosts = DockerHosts(config)
    try:
        return asyncio.run(hosts._hosts[0].image(task)).id
    finally:
        hosts.close()


def test_processes_build_one_after_the_other(environment):
    task = make_task(environment(unique("RUN sleep 1; date +%N > /stamp")))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(build, [(task, docker_config())] * 3)
    assert len(set(found)) == 1


def test_an_image_removed_meanwhile_is_made_again(docker_hosts, environment):
    task = make_task(environment(unique("")))
    assert start(docker_hosts, task) is None
    docker_client().remove_image(docker_image.name(task))
    assert start(docker_hosts, task) is None


def test_an_image_can_be_named(docker_hosts, environment):
    task = make_task(environment(""), docker_image="t1jax/base:bookworm")
    assert start(docker_hosts, task) is None
    error = start(docker_hosts, dataclasses.replace(task, docker_image="localhost:1/not/there:1"))
    assert "pull of localhost:1/not/there:1" in str(error)


@pytest.mark.parametrize(
    ("text", "fields", "says"),
    [
        (DOCKERFILE, {"network": "allowlist"}, "network_mode = 'allowlist' is not supported"),
        (DOCKERFILE + "USER nobody\n", {}, "runs as USER nobody"),
        ("FROM scratch\nCOPY Dockerfile /\n", {}, "has no bash"),
        (DOCKERFILE, {"cpus": 1000.0}, "CPUs"),
        (DOCKERFILE, {"memory_mb": 1}, "memory"),
    ],
)
def test_what_cannot_be_is_refused_at_once(docker_hosts, environment, text, fields, says):
    started = time.monotonic()
    error = start(docker_hosts, make_task(environment(text), **fields))
    assert says in str(error) and "\n" not in str(error) and time.monotonic() - started < 10


def test_a_task_needs_one_dockerfile(docker_hosts, environment):
    folder = environment(DOCKERFILE)
    (folder / "docker-compose.yaml").touch()
    with pytest.raises(SandboxUnavailable, match="several containers"):
        docker_image.name(make_task(folder))
    (folder / "docker-compose.yaml").unlink()
    (folder / "Dockerfile").unlink()
    with pytest.raises(SandboxUnavailable, match="Dockerfile is missing"):
        docker_image.name(make_task(folder))
