"""What every kind of sandbox does, and how it fails."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from t1jax.types import ExecResult


class SandboxError(RuntimeError):
    """The sandbox itself failed (died, would not start, lost its shell): an infrastructure error."""


class Tampered(Exception):
    """What an agent did to its sandbox, so that nothing in there can be trusted: one line."""


class Files(Protocol):
    """What a sandbox holds, running or not."""

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """Reads a regular file, never through a link; None if there is none or it is too large."""


Changes = Mapping[str, Literal["added", "changed", "deleted"]]  # by path
Check = Callable[[Changes, Files], Awaitable[str | None]]  # what was tampered with, in one line


class Sandbox(Files, Protocol):
    """A machine of the agent's own. Every method raises SandboxError when the sandbox is gone."""

    async def run(
        self, command: str, timeout_s: float, max_output: int | None = None
    ) -> ExecResult:
        """Runs a command in the agent's persistent shell; a time-out kills it inside.

        `max_output`: bytes kept of what it prints, first and last half; None for the sandbox's own bound.
        """

    async def put(self, path: str, source: Path) -> None:
        """Copies a host file or folder to an absolute path inside; mode bits are kept."""

    async def end_agent(self) -> None:
        """Ends every process the agent started, for good; `run` is refused afterwards."""

    async def changed(self) -> Changes:
        """Paths that are not as in the image, where the system's own folders can be written to; else {}.

        Of a fork: as it was made, by the image of what it was made from.
        """

    async def fork(self, check: Check) -> "Sandbox":
        """Another sandbox with the same files and network, but none of the processes. `run` is refused in it,
        and from now on here, where processes go on.

        Nothing of it runs before `check` has found nothing; else, or where the files are more than the task
        allows, it raises Tampered.
        """

    async def execute(
        self, argv: list[str], timeout_s: float, env: Mapping[str, str], cwd: str | None
    ) -> ExecResult:
        """Runs a program outside the agent's shell, with exactly this environment."""

    async def reset_folder(self, path: str) -> None:
        """Makes `path` a fresh empty folder, whatever stood there, following no link."""

    async def close(self) -> None:
        """Removes the sandbox and all in it. Idempotent."""
