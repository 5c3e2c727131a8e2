"""The embedded default sandbox: Linux namespaces, no Docker, no root, no package.

What is inside: the host's /usr read-only (so the commands are the host's), everything else an empty,
size-capped tmpfs; no network but loopback; root without capabilities. The agent's shell is bash with
`pipefail`: `false | tee x` fails. What it is not: a virtual machine (the kernel is shared), and the sum of
all processes' memory is not bounded, only each one's address space and the disk.
"""

import asyncio
import contextlib
import os
import select
import shlex
import signal
import stat
from collections.abc import Mapping
from pathlib import Path

from t1jax.sandbox import dockerfile, spawner, wire
from t1jax.sandbox.protocol import Changes, Check, SandboxError
from t1jax.sandbox.spawner import SandboxUnavailable, Spec, check_available
from t1jax.types import ExecResult, Task

__all__ = ["ENV", "NamespaceSandbox", "SandboxUnavailable", "check_available"]

WORKDIR = "/app"
ENV = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": "dumb",
    "TZ": "UTC",
    "USER": "root",
}
PROCESSES = 128
MAX_OUTPUT = 10_000
GRACE_S = 30.0  # on top of a command's own deadline, before the sandbox counts as dead
CLOSE_S = 10.0


class NamespaceSandbox:
    """Implements protocol.Sandbox. Made by `start`; usable in the event loop that started it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._dead = ""
        self._pidfd: int | None = None
        self.pid: int | None = None

    @classmethod
    async def start(cls, task: Task, max_output: int = MAX_OUTPUT) -> "NamespaceSandbox":
        """A sandbox as the task's environment/Dockerfile describes it, FROM replaced by the host's /usr.

        `max_output`: bytes kept of a command's output, first and last half. Raises SandboxUnavailable
        where the machine or the task's environment does not allow it, SandboxError when a step fails.
        """
        if task.live_processes:
            raise SandboxUnavailable(
                f"{task.path}: verifier.live_processes needs the docker sandbox"
            )
        plan = dockerfile.read(task.environment)
        workdir = task.workdir or plan.workdir or WORKDIR
        env = {**ENV, **plan.env, **task.env}
        spec = Spec(workdir, env, task.memory_mb, task.storage_mb, PROCESSES, max_output)
        sandbox = await cls._open(spec)
        try:
            await sandbox._apply(plan, task.build_timeout_s)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def run(
        self, command: str, timeout_s: float, max_output: int | None = None
    ) -> ExecResult:
        """Runs a command in the agent's bash, which keeps folder and variables between commands.

        Its standard input is empty. At the time-out (exit code 124) all processes it started are killed
        and the shell starts again in the same folder; after `exit` it starts again in the work folder.
        Either is said in the output. Processes left in the background stay.
        """
        message = {"op": "run", "seconds": timeout_s, "max_output": max_output}
        answer, data = await self._call(
            message, command.encode("utf-8", "replace"), timeout_s + GRACE_S
        )
        return ExecResult(output=data.decode(), **answer)

    async def execute(
        self, argv: list[str], timeout_s: float, env: Mapping[str, str], cwd: str | None
    ) -> ExecResult:
        """Runs a program with exactly this environment, in `cwd` (None: the work folder; gone: /)."""
        message = {"op": "execute", "argv": argv, "env": dict(env), "cwd": cwd}
        answer, data = await self._call({**message, "seconds": timeout_s}, b"", timeout_s + GRACE_S)
        return ExecResult(output=data.decode(), **answer)

    async def put(self, path: str, source: Path) -> None:
        """Copies a host file or folder to an absolute path; mode bits kept, links copied as links.

        Whatever stands in the way inside is replaced, never followed.
        """
        entries, payload = _pack(source)
        await self._call({"op": "put", "path": _absolute(path), "entries": entries}, payload)

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """Reads a regular file, never through a link; None if there is none or it is too large."""
        message = {"op": "get", "path": _absolute(path), "max_bytes": max_bytes}
        answer, data = await self._call(message)
        return data if answer["found"] else None

    async def end_agent(self) -> None:
        """Ends every process inside, for good; `run` is refused afterwards."""
        await self._call({"op": "end_agent"})

    async def changed(self) -> Changes:
        """Nothing: the system's folders are the host's, read-only."""
        return {}

    async def fork(self, check: Check) -> "NamespaceSandbox":
        raise SandboxError("the namespace sandbox cannot be forked: use the docker sandbox")

    async def reset_folder(self, path: str) -> None:
        """Makes `path` a fresh empty folder, whatever stood there, following no link."""
        await self._call({"op": "reset", "path": _absolute(path)})

    async def close(self) -> None:
        """Kills the sandbox and waits until nothing of it is left. Idempotent."""
        self._dead = self._dead or "it was closed"
        self._writer.close()
        if self._pidfd is None:
            return
        pidfd, self._pidfd = self._pidfd, None
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            loop.add_reader(pidfd, gone.set)
            await asyncio.wait_for(gone.wait(), CLOSE_S)
        except ProcessLookupError:
            pass
        except asyncio.CancelledError:  # the kill is under way; nothing may outlive this call
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(1000 * CLOSE_S)
            raise
        except TimeoutError:
            raise SandboxError(f"sandbox process {self.pid} does not die") from None
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    @classmethod
    async def _open(cls, spec: Spec) -> "NamespaceSandbox":
        connection = spawner.shared().start(spec)
        connection.setblocking(False)
        sandbox = cls(*await asyncio.open_connection(sock=connection))
        try:
            async with asyncio.timeout(spawner.START_S):
                sandbox.pid = spawner.answer((await sandbox._receive())[0])["pid"]
                with contextlib.suppress(ProcessLookupError):  # ended already: its reason follows
                    sandbox._pidfd = os.pidfd_open(sandbox.pid)
                spawner.answer((await sandbox._receive())[0])
        except (OSError, EOFError, TimeoutError) as error:
            await sandbox.close()
            raise SandboxError(f"the sandbox did not start: {error!r}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _apply(self, plan: dockerfile.Plan, seconds: float) -> None:
        """Carries out the Dockerfile's steps."""
        for step in plan.steps:
            if isinstance(step, dockerfile.Folder):
                folder = ["", "folder", None, 0]
                await self._call({"op": "put", "path": step.target, "entries": [folder]})
                continue
            if isinstance(step, dockerfile.Copy):
                await self.put(step.target, step.source)
                continue
            result = await self.execute(list(step.argv), seconds, {**ENV, **step.env}, step.workdir)
            if result.exit_code:
                tail = result.output.strip().rpartition("\n")[2]
                raise SandboxError(
                    f"RUN {shlex.join(step.argv)} gave {result.exit_code}: {tail} (the namespace sandbox has"
                    " no network and a read-only /usr: tasks that install something need the docker sandbox)"
                )

    async def _call(self, message: dict, payload: bytes = b"", seconds: float = GRACE_S):
        """One request and its answer, under a deadline. Raises SandboxError."""
        async with self._turn:
            if self._dead:
                raise SandboxError(f"the sandbox is gone: {self._dead}")
            exchange = asyncio.ensure_future(self._exchange(message, payload, seconds))
            try:
                answer, data = await asyncio.shield(exchange)
            except asyncio.CancelledError:
                await self._interrupt(exchange)
                raise
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer, data

    async def _interrupt(self, exchange: asyncio.Task) -> None:
        """Ends the command of a cancelled call inside, so that the next call finds order."""
        self._writer.write(wire.pack({"op": "interrupt"}))
        try:
            await asyncio.wait([exchange], timeout=GRACE_S)
        finally:
            if not exchange.done():
                self._dead = "a call was abandoned before its answer came"
                exchange.cancel()
            elif not exchange.cancelled():
                exchange.exception()  # is known by `_dead`

    async def _exchange(self, message: dict, payload: bytes, seconds: float):
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(wire.pack(message, payload))
                await self._writer.drain()
                return await self._receive()
        except TimeoutError:
            self._dead = f"no answer to {message['op']} within {seconds:g} s"
        except (EOFError, OSError):
            self._dead = f"it died during {message['op']}"
        await self.close()
        raise SandboxError(f"the sandbox is gone: {self._dead}")

    async def _receive(self) -> tuple[dict, bytes]:
        prefix = await self._reader.readexactly(wire.PREFIX.size)
        text, payload = wire.PREFIX.unpack(prefix)
        message = wire.parse(await self._reader.readexactly(text))
        return message, await self._reader.readexactly(payload)


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"sandbox path must be absolute, without '..' and NUL: {path!r}")
    return path


def _pack(source: Path) -> tuple[list, bytes]:
    """A host file or tree as the entries and the payload of files.write."""
    paths = [source, *sorted(source.rglob("*"))] if source.is_dir() else [source]
    entries, parts = [], []
    for path in paths:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            kind, data = "link", os.fsencode(os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            kind, data = "folder", b""
        elif stat.S_ISREG(status.st_mode):
            kind, data = "file", path.read_bytes()
        else:
            raise SandboxError(f"put: {path} is neither a file, a folder nor a link")
        relative = str(path.relative_to(source)) if path != source else ""
        entries.append([relative, kind, stat.S_IMODE(status.st_mode) & 0o777, len(data)])
        parts.append(data)
    return entries, b"".join(parts)
