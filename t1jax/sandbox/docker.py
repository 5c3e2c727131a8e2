"""A sandbox in a Docker container: any image, any package, limits on memory, processors and processes.

The agent is root without a network (but where its task is "public"), with the few capabilities that apt
needs. Its shell is bash with `pipefail`: `false | tee x` fails. The semantics are those of the namespace
sandbox. What it is not: a virtual machine (the kernel is shared); and an agent that takes over process 1
of its own container could outlive `end_agent`: tests therefore run in a `fork`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import posixpath
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Literal

import docker

from t1jax.sandbox import docker_container, tar
from t1jax.sandbox.docker_hosts import DockerHost, DockerHosts, HostFailed
from t1jax.sandbox.docker_image import Image
from t1jax.sandbox.docker_shell import Shell
from t1jax.sandbox.namespace import ENV, MAX_OUTPUT, WORKDIR
from t1jax.sandbox.protocol import Changes, Check, Files, SandboxError, Tampered
from t1jax.sandbox.spawner import SandboxUnavailable
from t1jax.types import ExecResult, Task

RETRY_S = 0.5  # before the second try to start; twice as long before each further one
CHANGES = ("changed", "added", "deleted")  # by Docker's numbers
Change = Literal["changed", "added", "deleted"]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a fork is made from: the container's name, and the check of what it will hold."""

    name: str
    check: Callable[[Files], Awaitable[str | None]]


@dataclasses.dataclass(frozen=True)
class _Created:
    """Files of a container that does not run yet."""

    host: DockerHost
    name: str

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """See protocol.Files. The daemon follows links in the folders above, within the container."""
        read = functools.partial(docker_container.read_file, path=_absolute(path))
        return await self.host.call(functools.partial(read, name=self.name, max_bytes=max_bytes))


class DockerSandbox:
    """Implements protocol.Sandbox. Made by `start`; usable in the event loop that started it."""

    def __init__(
        self,
        hosts: DockerHosts,
        host: DockerHost,
        task: Task,
        image: Image,
        name: str,
        shell: Shell,
    ):
        self.name = name  # of the container
        self._hosts, self._host, self._task, self._image = hosts, host, task, image
        self._shell = shell
        self._copy: str | None = None  # the image of a fork, its own to remove
        self._changed: Changes | None = None  # of a fork, when it was made
        self._ended, self._closed, self._paused = False, False, False

    @classmethod
    async def start(
        cls, hosts: DockerHosts, task: Task, max_output: int = MAX_OUTPUT
    ) -> "DockerSandbox":
        """A container of the task's image, which is made where it is not there, on a host with room.

        `max_output`: bytes kept of a command's output, first and last half. Raises SandboxUnavailable
        where the task cannot run in Docker or no host answers, SandboxError when a step fails.
        """
        if task.network == "allowlist":
            raise SandboxUnavailable(
                f"{task.path / 'task.toml'}: environment.network_mode = 'allowlist' is not supported by the"
                " docker sandbox (public and no-network are)"
            )
        for attempt in range(hosts.config.attempts):
            if attempt:
                await asyncio.sleep(RETRY_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                async with hosts.place() as host:
                    image = await host.image(task)
                    return await cls._open(hosts, host, task, image, max_output)
            except HostFailed as error:
                last = error
        raise last

    async def run(
        self, command: str, timeout_s: float, max_output: int | None = None
    ) -> ExecResult:
        """Runs a command in the agent's bash, which keeps folder and variables between commands.

        Its standard input is empty. At the time-out (exit code 124) all processes it started are killed
        and the shell starts again in the same folder; after `exit` it starts again in the work folder.
        Either is said in the output. Processes left in the background stay.
        """
        if self._ended:
            raise SandboxError("run: the agent's processes were ended")
        return await self._shell.run(command, timeout_s, max_output)

    async def execute(
        self, argv: list[str], timeout_s: float, env: Mapping[str, str], cwd: str | None
    ) -> ExecResult:
        """Runs a program with exactly this environment, in `cwd` (None: the work folder; gone: /).

        Raises ValueError for the name of a variable that bash does not take.
        """
        return await self._shell.execute(argv, timeout_s, env, cwd)

    async def put(self, path: str, source: Path) -> None:
        """Copies a host file or folder to an absolute path; mode bits kept, links copied as links.

        Whatever stands in the way inside is replaced, never followed.
        """
        path = _absolute(path)
        missing = await self._missing(path)
        await self._unpack(functools.partial(tar.pack, path, source, missing))

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """Reads a regular file, never through a link; None if there is none or it is too large."""
        path = _absolute(path)
        if await self._missing(path):
            return None
        read = functools.partial(
            docker_container.read_file, name=self.name, path=path, max_bytes=max_bytes
        )
        return await self._host.call(read)

    async def reset_folder(self, path: str) -> None:
        """Makes `path` a fresh empty folder, whatever stood there, following no link."""
        path = _absolute(path)
        missing = await self._missing(path)
        await self._unpack(functools.partial(tar.fresh_folder, path, missing))

    async def end_agent(self) -> None:
        """Ends every process inside, for good; `run` is refused afterwards."""
        self._ended = True
        await self._shell.end_agent()

    async def pause(self) -> None:
        """Stops every process until `unpause`; meanwhile only `fork`, `changed` and `close` may be called."""
        await self._host.call(lambda api: api.pause(self.name))
        self._paused = True

    async def unpause(self) -> None:
        """Lets them go on."""
        await self._host.call(lambda api: api.unpause(self.name))
        self._paused = False

    async def changed(self) -> Changes:
        """The paths that differ from the image, whoever changed them, and how; of a fork as it was made."""
        if self._changed is not None:
            return self._changed
        found = await self._host.call(lambda api: api.diff(self.name)) or ()
        return {change["Path"]: CHANGES[change["Kind"]] for change in found}

    async def fork(self, check: Check) -> "DockerSandbox":
        """Another sandbox on the same host with the files and the network of this one, but none of its processes.

        `run` is refused in it, and from now on here, where processes go on. It needs no room of its own.
        `check` reads the files before anything of them runs. Raises Tampered where it finds something, and where
        there is more than environment.storage_mb, holes in files counted; SandboxError for images with a VOLUME,
        which a copy would lack.
        """
        self._ended = True
        inspected = await self._host.call(lambda api: api.inspect_container(self.name))
        if volumes := [mount["Destination"] for mount in inspected["Mounts"]]:
            raise SandboxError(
                f"fork: the image declares VOLUME {volumes[0]}, no copy would hold it"
            )
        copy = self._hosts.name()
        paused = self._paused
        if (
            not paused
        ):  # or a process could take back a change between what is told and what is copied
            await self.pause()
        try:
            # A commit writes sparse files out.
            size = await self._host.call(functools.partial(docker_container.size, name=self.name))
            if size > self._task.storage_mb * docker_container.MIB:
                raise Tampered(
                    f"files of {size} bytes, environment.storage_mb = {self._task.storage_mb}"
                )
            changed = await self.changed()
            await self._host.call(lambda api: api.commit(self.name, copy))
        finally:
            if not paused:
                await self.unpause()
        self._host.containers += 1
        try:
            image = dataclasses.replace(self._image, id=copy)
            fork = await self._open(
                self._hosts,
                self._host,
                self._task,
                image,
                self._shell.max_output,
                Origin(self.name, lambda files: check(changed, files)),
            )
        except BaseException:
            self._host.containers -= 1
            await self._hosts.remove(self._host, "image", copy)
            raise
        fork._copy, fork._changed, fork._ended = copy, changed, True
        return fork

    async def close(self) -> None:
        """Removes the container, its volumes and a fork's image. Idempotent.

        Raises SandboxError, within a bounded time, where that fails: `hosts.lost` has what is left.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self._hosts.remove(self._host, "container", self.name)
            if self._copy:
                await self._hosts.remove(self._host, "image", self._copy)
        finally:
            self._host.containers -= 1
            self._shell.close()

    @classmethod
    async def _open(
        cls,
        hosts: DockerHosts,
        host: DockerHost,
        task: Task,
        image: Image,
        max_output: int,
        origin: Origin | None = None,
    ) -> "DockerSandbox":
        """`origin`: of a fork."""
        await host.starts.take()
        name, workdir = hosts.name(), task.workdir or image.workdir or WORKDIR
        beside = origin and origin.name
        settings = docker_container.settings(name, image, workdir, hosts.labels, beside)
        limits = docker_container.limits(task, hosts.config, beside)
        job = host.submit(lambda api: docker_container.create(api, host, settings, limits))
        try:
            await asyncio.shield(asyncio.wrap_future(job))
            if origin and (found := await origin.check(_Created(host, name))):
                raise Tampered(found)
            job = host.submit(lambda api: docker_container.start(api, name, image))
            stream = await asyncio.shield(asyncio.wrap_future(job))
            stream.setblocking(False)
            shell = Shell(*await asyncio.open_connection(sock=stream), max_output)
            await shell.hello(workdir, {**ENV, **image.env, **task.env})
        except BaseException:
            await asyncio.shield(_abandon(hosts, host, name, job))
            raise
        return cls(hosts, host, task, image, name, shell)

    async def _missing(self, path: str) -> list[str]:
        """Those of the folders above `path` that are not there, or no folders, top down."""
        names = path.strip("/").split("/")[:-1]
        real = await self._shell.real_folders(names)
        return ["/".join(names[: i + 1]) for i in range(real, len(names))]

    async def _unpack(self, pack: Callable[[], IO[bytes]]) -> None:
        """Unpacks a tar stream at /. It is made in a thread, for it may be large."""

        def work(api: docker.APIClient) -> None:
            with pack() as data:
                api.put_archive(self.name, "/", data)

        await self._host.call(work)


async def _abandon(hosts: DockerHosts, host: DockerHost, name: str, job: Future) -> None:
    """Removes a container that is being made, once the last job for it is done."""
    with contextlib.suppress(SandboxError):
        if stream := await asyncio.wrap_future(job):
            stream.close()
    with contextlib.suppress(SandboxError):  # it is on the list of the lost
        await hosts.remove(host, "container", name)


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"sandbox path must be absolute, without '..' and NUL: {path!r}")
    return posixpath.normpath(path)
