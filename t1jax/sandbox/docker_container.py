"""What the Docker daemon does for a sandbox, in a thread: makes its container, reads its files."""

import contextlib
import os
import socket
import tarfile
from collections.abc import Mapping

import docker
from absl import logging

from t1jax.sandbox import docker_api, tar
from t1jax.sandbox.docker_hosts import NETWORK, DockerConfig, DockerHost
from t1jax.sandbox.docker_image import Image
from t1jax.sandbox.protocol import SandboxError
from t1jax.sandbox.spawner import SandboxUnavailable
from t1jax.types import Task

# What apt and folders shared by a group need.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
ULIMITS = {"core": 0, "nofile": 1024}
MIB = 1 << 20
STREAMS = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}


def settings(
    name: str, image: Image, workdir: str, labels: Mapping[str, str], beside: str | None
) -> dict:
    """What the container is, as the SDK wants it. `beside`: another one, whose network and name it has."""
    return {
        "image": image.id,
        "name": name,
        "hostname": None if beside else "sandbox",
        "entrypoint": ["bash", "--norc", "--noprofile"],
        "command": [],
        "environment": {
            "BASH_ENV": "",  # an image may name a file for every bash to read
            "PATH": "/usr/bin:/bin:/usr/local/bin",  # where bash is looked for, the image's own first
        },
        "user": "0:0",
        "working_dir": workdir,
        "stdin_open": True,
        "healthcheck": {"Test": ["NONE"]},
        "labels": dict(labels),
    }


def limits(task: Task, config: DockerConfig, beside: str | None) -> dict:
    """What the container may, as the SDK wants it."""
    own = config.network if task.network == "public" else "none"
    return {
        "network_mode": f"container:{beside}" if beside else own,
        "ipc_mode": "private",
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": ["no-new-privileges"],
        "pids_limit": config.processes,
        "mem_limit": task.memory_mb * MIB,
        "memswap_limit": task.memory_mb * MIB,
        "nano_cpus": round(task.cpus * 1e9),
        "oom_score_adj": 500,  # before the trainer
        "ulimits": [docker.types.Ulimit(name=n, soft=v, hard=v) for n, v in ULIMITS.items()],
        "log_config": {"Type": "none"},
        "storage_opt": {"size": f"{task.storage_mb}m"},
        "auto_remove": True,
    }


def create(api: docker.APIClient, host: DockerHost, settings: dict, limits: dict) -> None:
    """Makes a container that does not run yet."""
    if limits["network_mode"] == NETWORK:
        _make_network(api)
    _create(api, host, settings, limits)


def start(api: docker.APIClient, name: str, image: Image) -> socket.socket:
    """Starts a container; gives the stream attached to it."""
    stream = _attach(api, name)  # before the start: what it writes is not read ahead
    try:
        api.start(name)
    except docker.errors.APIError as error:
        stream.close()
        if error.is_client_error() and '"bash"' in str(error.explanation):
            raise SandboxUnavailable(
                f"image {image.id} has no bash, which the agent's shell is: install it in the Dockerfile"
            ) from error
        raise
    except BaseException:
        stream.close()
        raise
    return stream


def _make_network(api: docker.APIClient) -> None:
    """One whose containers do not reach each other; it stays."""
    if not api.networks(names=[NETWORK]):
        apart = {"com.docker.network.bridge.enable_icc": "false"}
        with contextlib.suppress(docker.errors.APIError):  # another process was faster
            api.create_network(NETWORK, driver="bridge", options=apart, check_duplicate=True)


def _create(api: docker.APIClient, host: DockerHost, settings: dict, limits: dict) -> None:
    if not host.bounds_disks:
        limits = {key: value for key, value in limits.items() if key != "storage_opt"}
    try:
        api.create_container(**settings, host_config=api.create_host_config(**limits))
    except docker.errors.APIError as error:
        if not host.bounds_disks or "storage-opt" not in str(error.explanation):
            raise
        host.bounds_disks = False
        logging.warning(
            "docker host %s cannot bound a container's disk (that takes overlay2 on xfs with pquota, btrfs or"
            " zfs): environment.storage_mb is not enforced there",
            host.url,
        )
        _create(api, host, settings, limits)


def _attach(api: docker.APIClient, name: str) -> socket.socket:
    path, upgrade = f"/containers/{name}/attach", {"Connection": "Upgrade", "Upgrade": "tcp"}
    with docker_api.streamed(
        api, "POST", path, params=STREAMS, headers=upgrade, timeout=api.timeout
    ) as reply:
        return socket.socket(fileno=os.dup(reply.raw.fileno()))  # the reply closes its own


def size(api: docker.APIClient, name: str) -> int:
    """Bytes that a container has written and not removed, holes in files counted."""
    (found,) = api.containers(all=True, size=True, filters={"name": f"^/{name}$"})
    return found.get("SizeRw", 0)


def read_file(api: docker.APIClient, name: str, path: str, max_bytes: int) -> bytes | None:
    """The bytes of a regular file of a container; None for anything else, or above `max_bytes`."""
    archive, plain = f"/containers/{name}/archive", {"Accept-Encoding": "identity"}
    try:
        # left open, the stream would keep the container locked
        with docker_api.streamed(
            api, "GET", archive, params={"path": path}, headers=plain, timeout=api.timeout
        ) as reply:
            return tar.read_file(reply.raw, max_bytes)
    except docker.errors.NotFound:
        return None
    except tarfile.TarError as error:
        raise SandboxError(f"get {path}: the daemon's answer broke off ({error})") from error
