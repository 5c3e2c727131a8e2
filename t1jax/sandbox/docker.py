"""A sandbox in a Docker container: any image, any package, limits on memory, processors and processes.

The agent is root without a network (but where its task is "public"), with the few capabilities that apt
needs. Its shell is bash with `pipefail`: `false | tee x` fails. The semantics are those of the namespace
sandbox. What it is not: a virtual machine (the kernel is shared); and an agent that takes over process 1
of its own container could outlive `end_agent`: where that matters, verify in a `fork`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import posixpath
import random
import socket
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Literal

import docker
import requests
from absl import logging

from t1jax.sandbox import docker_api, tar
from t1jax.sandbox.docker_hosts import DockerHost, DockerHosts, HostFailed
from t1jax.sandbox.docker_image import Image
from t1jax.sandbox.docker_shell import Shell
from t1jax.sandbox.namespace import ENV, MAX_OUTPUT, WORKDIR
from t1jax.sandbox.spawner import SandboxUnavailable
from t1jax.types import ExecResult, SandboxError, Task

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")  # what apt needs
OPEN_FILES = 1024
MIB = 1 << 20
RETRY_S = 0.5  # before the second try to start; twice as long before each further one
STREAMS = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
CHANGES = ("changed", "added", "deleted")  # by Docker's numbers
Change = Literal["changed", "added", "deleted"]


class DockerSandbox:
    """Implements types.Sandbox. Made by `start`; usable in the event loop that started it."""

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
        self._ended, self._closed = False, False

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
            try:
                async with hosts.place() as host:
                    image = await host.image(task)
                    return await cls._open(hosts, host, task, image, max_output)
            except HostFailed as error:
                last = error
                await asyncio.sleep(RETRY_S * 2**attempt * random.uniform(0.5, 1.5))
        raise last

    async def run(self, command: str, timeout_s: float) -> ExecResult:
        """Runs a command in the agent's bash, which keeps folder and variables between commands.

        Its standard input is empty. At the time-out (exit code 124) all processes it started are killed
        and the shell starts again in the same folder; after `exit` it starts again in the work folder.
        Either is said in the output. Processes left in the background stay.
        """
        if self._ended:
            raise SandboxError("run: the agent's processes were ended")
        return await self._shell.run(command, timeout_s)

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
        read = functools.partial(_read_file, name=self.name, path=path, max_bytes=max_bytes)
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

    async def end_shell(self) -> None:
        """Ends the shell alone, for tasks whose tests talk to what the agent left running.

        `run` is refused afterwards. Its other processes go on and may still change files.
        """
        self._ended = True
        await self._shell.end_shell()

    async def pause(self) -> None:
        """Stops every process until `unpause`; meanwhile only `fork` and `close` may be called."""
        await self._host.call(lambda api: api.pause(self.name))

    async def unpause(self) -> None:
        """Lets them go on."""
        await self._host.call(lambda api: api.unpause(self.name))

    async def changed(self) -> dict[str, Change]:
        """The paths that differ from the image, whoever changed them, and how."""
        found = await self._host.call(lambda api: api.diff(self.name)) or ()
        return {change["Path"]: CHANGES[change["Kind"]] for change in found}

    async def fork(self) -> "DockerSandbox":
        """A new sandbox on the same host with the files of this one and none of its processes.

        It needs no room of its own. Raises SandboxError for images with a VOLUME, which a copy would lack.
        """
        inspected = await self._host.call(lambda api: api.inspect_container(self.name))
        if volumes := [mount["Destination"] for mount in inspected["Mounts"]]:
            raise SandboxError(
                f"fork: the image declares VOLUME {volumes[0]}, no copy would hold it"
            )
        copy = self._hosts.name()
        await self._host.call(lambda api: api.commit(self.name, copy))
        self._host.containers += 1
        try:
            image = dataclasses.replace(self._image, id=copy)
            fork = await self._open(
                self._hosts, self._host, self._task, image, self._shell.max_output
            )
        except BaseException:
            self._host.containers -= 1
            await self._hosts.remove(self._host, "image", copy)
            raise
        fork._copy = copy
        return fork

    async def close(self) -> None:
        """Removes the container, its volumes and a fork's image. Idempotent.

        Raises SandboxError, within a bounded time, where that fails: `hosts.lost` has what is left.
        """
        if self._closed:
            return
        self._closed = True
        self._host.containers -= 1
        try:
            await self._hosts.remove(self._host, "container", self.name)
            if self._copy:
                await self._hosts.remove(self._host, "image", self._copy)
        finally:
            self._shell.close()

    @classmethod
    async def _open(
        cls, hosts: DockerHosts, host: DockerHost, task: Task, image: Image, max_output: int
    ) -> "DockerSandbox":
        name = hosts.name()
        opening = host.submit(lambda api: _start(api, host, hosts, name, image, task))
        try:
            stream = await asyncio.shield(asyncio.wrap_future(opening))
        except (
            asyncio.CancelledError
        ):  # process 1 ends when its stream does, and Docker removes the rest
            opening.add_done_callback(lambda done: done.exception() or done.result().close())
            raise
        try:
            stream.setblocking(False)
            shell = Shell(*await asyncio.open_connection(sock=stream), max_output)
            workdir = task.workdir or image.workdir or WORKDIR
            await shell.hello(workdir, {**ENV, **image.env, **task.env})
        except BaseException:
            with contextlib.suppress(SandboxError):  # it is on the list of the lost
                await hosts.remove(host, "container", name)
            stream.close()
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


def _start(
    api: docker.APIClient, host: DockerHost, hosts: DockerHosts, name: str, image: Image, task: Task
) -> socket.socket:
    """Creates and starts a container; gives the stream attached to it. Leaves nothing where it fails."""
    try:
        _create(api, host, hosts, name, image, task)
        # before the start, so that nothing it writes is read ahead; duplicated, for the SDK closes its own
        upgrade = {"Connection": "Upgrade", "Upgrade": "tcp"}
        with docker_api.streamed(
            api,
            "POST",
            f"/containers/{name}/attach",
            params=STREAMS,
            headers=upgrade,
            timeout=api.timeout,
        ) as reply:
            stream = socket.socket(fileno=os.dup(reply.raw.fileno()))
        try:
            api.start(name)
        except BaseException:
            stream.close()
            raise
        return stream
    except docker.errors.APIError:
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            api.remove_container(name, v=True, force=True)
        raise


def _create(
    api: docker.APIClient, host: DockerHost, hosts: DockerHosts, name: str, image: Image, task: Task
) -> None:
    limits = {
        "network_mode": hosts.config.network if task.network == "public" else "none",
        "ipc_mode": "private",
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": ["no-new-privileges"],
        "pids_limit": hosts.config.processes,
        "mem_limit": task.memory_mb * MIB,
        "memswap_limit": task.memory_mb * MIB,
        "nano_cpus": round(task.cpus * 1e9),
        "oom_score_adj": 500,  # before the trainer
        "ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
        ],
        "log_config": {"Type": "none"},
        "auto_remove": True,
    }
    create = functools.partial(
        api.create_container,
        image.id,
        name=name,
        hostname="sandbox",
        entrypoint=["bash", "--norc", "--noprofile"],
        command=[],
        environment={"BASH_ENV": ""},  # an image may name a file for every bash to read
        user="0:0",
        working_dir=task.workdir or image.workdir or WORKDIR,
        stdin_open=True,
        healthcheck={"Test": ["NONE"]},
        labels=hosts.labels,
    )
    if host.bounds_disks:
        try:
            disk = {"size": f"{task.storage_mb}m"}
            create(host_config=api.create_host_config(**limits, storage_opt=disk))
            return
        except docker.errors.APIError as error:
            if "storage-opt" not in str(error):
                raise
            host.bounds_disks = False
            logging.warning(
                "docker host %s cannot bound a container's disk (that takes overlay2 on xfs with pquota, btrfs"
                " or zfs): environment.storage_mb is not enforced there",
                host.url,
            )
    create(host_config=api.create_host_config(**limits))


def _read_file(api: docker.APIClient, name: str, path: str, max_bytes: int) -> bytes | None:
    plain = {"Accept-Encoding": "identity"}
    try:
        # not closed, the stream would keep the container locked
        with docker_api.streamed(
            api,
            "GET",
            f"/containers/{name}/archive",
            params={"path": path},
            headers=plain,
            timeout=api.timeout,
        ) as reply:
            return tar.read_file(reply.raw, max_bytes)
    except docker.errors.NotFound:
        return None
    except tarfile.TarError as error:
        raise SandboxError(f"get {path}: the daemon's answer broke off ({error})") from error


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"sandbox path must be absolute, without '..' and NUL: {path!r}")
    return posixpath.normpath(path)
