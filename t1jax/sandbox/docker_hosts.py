"""Docker daemons as one pool of room for sandboxes."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import docker
import requests

from t1jax.admission import TokenBucket
from t1jax.sandbox import docker_image, docker_owner
from t1jax.sandbox.docker_image import Image
from t1jax.sandbox.protocol import SandboxError
from t1jax.sandbox.spawner import SandboxUnavailable
from t1jax.types import Task

CALL_S = 120.0  # deadline of one request to a daemon; large copies take long
CALLS, BUILDS = 16, 2  # at a time on one host
AVOIDED_S = 30.0  # how long a host that did not answer gets nothing new
ROOM_S = 0.05  # between looks for room
REMOVE_S = 30.0  # deadline of a removal
REMOVE_PAUSES_S = (0.1, 0.3, 1.0, 3.0)  # between tries
NETWORK = "t1jax"
Kind = Literal["container", "image"]


@dataclasses.dataclass(frozen=True)
class DockerConfig:
    """Where sandboxes run and what all have in common; a task's own needs are in task.toml.

    `hosts`: "unix:///path/docker.sock" or "tcp://name:port", by default that of $DOCKER_HOST. The API is
    root on its machine: reach a remote one through a tunnel, never over an open port. `network`: the Docker
    network of tasks that are "public", NETWORK is made where it is not there. They reach what it reaches, the
    host too, but not each other in NETWORK: keep it apart from your own services. `fresh_verifier`: tests run in
    a fork of the container, which no process of the agent's has ever been in; half a second. Switch it off for
    images with a VOLUME, which have no forks.
    """

    hosts: tuple[str, ...] = (os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"),)
    containers: int = 64  # at a time on one host; more starts wait
    starts_per_s: float = 4.0  # on one host, on average
    attempts: int = 4  # to start a container, on hosts that may differ
    processes: int = 256  # in one container, threads included
    network: str = NETWORK
    fresh_verifier: bool = True

    def __post_init__(self):
        for url in self.hosts:
            if not url.startswith(("unix:///", "tcp://")):
                raise ValueError(f"docker host {url!r} is neither unix:///PATH nor tcp://NAME:PORT")
        if not self.hosts or min(self.containers, self.attempts, self.processes) < 1:
            raise ValueError(
                "hosts, containers, attempts and processes must not be empty or below 1"
            )
        if not self.starts_per_s > 0:
            raise ValueError(f"starts_per_s = {self.starts_per_s} is not positive")


class DockerHost:
    """One daemon. Its methods may be called from any event loop, and raise SandboxError."""

    def __init__(self, url: str, config: DockerConfig):
        self.url = url
        self.containers = 0  # that were placed here and are not closed
        self.avoided_until = 0.0
        self.bounds_disks = True  # until it says it cannot
        self.starts = TokenBucket(config.starts_per_s, CALLS)
        self._calls = concurrent.futures.ThreadPoolExecutor(CALLS, "docker")
        self._building = threading.Semaphore(BUILDS)
        self._images: dict[str, concurrent.futures.Future] = {}

    @functools.cached_property
    def api(self) -> docker.APIClient:
        """The SDK's client; made in one of this host's threads, for it asks for the daemon's version."""
        return docker.APIClient(self.url, version="auto", timeout=CALL_S, max_pool_size=CALLS)

    def submit(self, work: Callable[[docker.APIClient], Any]) -> concurrent.futures.Future:
        """Has a thread do the work, whatever becomes of who wants it."""
        return self._calls.submit(self._work, work)

    async def call(self, work: Callable[[docker.APIClient], Any]) -> Any:
        """The work's result. A cancelled caller does not end it."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(work)))

    async def image(self, task: Task) -> Image:
        """The task's image, made once for all who wait. Raises SandboxError."""
        tag = await asyncio.to_thread(docker_image.name, task)
        future = self._images.get(tag)
        if future is None or (future.done() and future.exception()):
            make = functools.partial(docker_image.make, task=task, tag=tag)
            future = self._images[tag] = self._build(make)
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Waits for the calls under way; nothing can be asked afterwards."""
        self._calls.shutdown()
        if "api" in self.__dict__:
            self.api.close()

    def _build(self, make: Callable[[docker.APIClient], Image]) -> concurrent.futures.Future:
        """Has a thread do it that may take minutes, and that does not keep a process from ending."""
        future = concurrent.futures.Future()

        def build() -> None:
            with self._building:
                try:
                    future.set_result(self._work(make))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=build, name="docker-build", daemon=True).start()
        return future

    def _work(self, work: Callable[[docker.APIClient], Any]) -> Any:
        try:
            return work(self.api)
        except docker.errors.ImageNotFound as error:
            self._images.clear()  # someone removed one
            raise HostFailed(f"docker host {self.url}: {error.explanation}") from error
        except docker.errors.APIError as error:
            kind = SandboxError if error.is_client_error() else HostFailed
            raise kind(f"docker host {self.url}: {error.explanation or error}") from error
        except (docker.errors.DockerException, requests.RequestException) as error:
            self.avoided_until = time.monotonic() + AVOIDED_S
            raise HostDown(
                f"no Docker daemon answers at {self.url} ({type(error).__name__}): start one"
                " (`bash launch/dockerd.sh` starts one here and prints its URL) or name another host"
            ) from error


class HostFailed(SandboxError):
    """A Docker host could not do it this time: another try may help."""


class HostDown(HostFailed, SandboxUnavailable):
    """A Docker host does not answer."""


class DockerHosts:
    """A pool of daemons; makes room, spreads load, leaves nothing behind. Close it at the end.

    `lost`: what could not be removed, as (host, kind, name, reason); `sweep` tries again.
    """

    def __init__(self, config: DockerConfig):
        self.config = config
        self.lost: list[tuple[DockerHost, str, str, str]] = []
        self._hosts = [DockerHost(url, config) for url in config.hosts]
        self._run = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._swept = False

    @property
    def labels(self) -> dict[str, str]:
        """Of all that is made for sandboxes."""
        return {"t1jax": "sandbox", "t1jax.run": self._run, "t1jax.owner": docker_owner.identity()}

    def name(self) -> str:
        """A new name for a container or an image."""
        return f"t1jax-{self._run}-{next(self._numbers)}"

    def check(self) -> None:
        """Raises SandboxUnavailable, with one line, where no host answers."""
        errors = []
        for host in self._hosts:
            try:
                host.submit(docker.APIClient.ping).result()
                return
            except SandboxError as error:
                errors.append(error)
        raise errors[0]

    async def sweep(self) -> None:
        """Removes what ended processes of this machine and failed removals left on the hosts that answer."""
        self._swept = True
        lost, self.lost = [found[:3] for found in self.lost], []
        for host in self._hosts:
            with contextlib.suppress(SandboxError):
                lost += [(host, *found) for found in await host.call(_orphans)]
        for host, kind, name in lost:
            with contextlib.suppress(SandboxError):  # it is on the list again
                await self.remove(host, kind, name)

    async def remove(self, host: DockerHost, kind: Kind, name: str) -> None:
        """Removes a container with its volumes, or an image, that may be gone already; tries for seconds.

        Raises SandboxError and puts it on the list where that fails.
        """
        try:
            async with asyncio.timeout(REMOVE_S):
                await host.call(functools.partial(_remove, kind=kind, name=name))
        except (SandboxError, TimeoutError) as error:
            reason = str(error) or f"not within {REMOVE_S:g} s"
            self.lost.append((host, kind, name, reason))
            raise SandboxError(f"{kind} {name} could not be removed: {reason}") from error

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[DockerHost]:
        """The host for one more container, when there is room; it is taken unless the body raises."""
        if not self._swept:
            await self.sweep()
        while (host := self._freest()) is None:
            await asyncio.sleep(ROOM_S * random.uniform(0.5, 1.5))
        host.containers += 1
        try:
            yield host
        except BaseException:
            host.containers -= 1
            raise

    def _freest(self) -> DockerHost | None:
        """The least loaded host with room, of those that answer, or of all where none does."""
        now = time.monotonic()
        up = [host for host in self._hosts if host.avoided_until <= now] or self._hosts
        host = min(up, key=lambda host: host.containers)
        return host if host.containers < self.config.containers else None

    def close(self) -> None:
        """Ends the use of the hosts; close the sandboxes before. Idempotent."""
        for host in self._hosts:
            host.close()


def _remove(api: docker.APIClient, kind: Kind, name: str) -> None:
    for wait in (*REMOVE_PAUSES_S, None):
        try:
            if kind == "container":
                api.remove_container(name, v=True, force=True)
            else:
                api.remove_image(name, force=True)
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:  # it is being removed already, or busy
            if wait is None:
                raise
            time.sleep(wait)


def _orphans(api: docker.APIClient) -> list[tuple[Kind, str]]:
    """Containers, then images, whose owners have ended."""
    mine = {"label": "t1jax=sandbox"}
    found = [("container", c) for c in api.containers(all=True, filters=mine)]
    found += [("image", i) for i in api.images(filters=mine)]
    return [
        (kind, x["Id"])
        for kind, x in found
        if docker_owner.gone(x["Labels"].get("t1jax.owner", ""))
    ]
