"""A Docker daemon with the tests' base image: that of $DOCKER_HOST, else one of launch/dockerd.sh.

It is left running, for the next tests: `bash launch/dockerd.sh stop` ends it.
"""

import functools
import os
import subprocess
import time
from pathlib import Path

import docker
import pytest

from t1jax.sandbox.docker_hosts import NETWORK, DockerConfig

ROOT = Path(__file__).parent.parent
DOCKERFILE = "FROM t1jax/base:bookworm\n"
START_S = 900  # the first time a base image is made


@functools.cache
def docker_url() -> str:
    """The daemon's URL. Fails the test where there is none and only root could start one."""
    if url := os.environ.get("DOCKER_HOST"):
        _script("base_image.sh", url)
        return url
    if os.getuid() != 0:
        pytest.fail("no DOCKER_HOST is set, and only root can start a daemon")
    url = _script("dockerd.sh").splitlines()[-1]
    _script("base_image.sh", url)
    return url


def docker_config(**fields) -> DockerConfig:
    """For the tests: as many starts as the machine can make."""
    return DockerConfig(**{"hosts": (docker_url(),), "starts_per_s": 100.0, **fields})


def docker_client() -> docker.APIClient:
    """The SDK's client, to look at what the sandboxes leave."""
    return docker.APIClient(docker_url(), version="auto")


def volumes_and_networks() -> set[str]:
    """Those that are there, but for the network of public tasks, which stays."""
    api = docker_client()
    volumes, networks = api.volumes()["Volumes"] or (), api.networks()
    return {v["Name"] for v in volumes} | {n["Id"] for n in networks if n["Name"] != NETWORK}


def wait_for_nothing_new(before: set[str]) -> None:
    """Of volumes and networks; other tests may use the daemon at the same time, and theirs go, too."""
    until = time.monotonic() + 20
    while (new := volumes_and_networks() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not new


def _script(name: str, *arguments: str) -> str:
    command = ["bash", str(ROOT / "launch" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    if done.returncode:
        pytest.fail(done.stderr.strip())
    return done.stdout
