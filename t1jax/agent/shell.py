"""How an agent works in its sandbox: the persistent shell of the bash protocol, or a terminal (terminus)."""

from typing import Protocol

from t1jax.agent import action
from t1jax.agent.action import Command, Line, observation
from t1jax.agent.terminal import Terminal
from t1jax.sandbox.protocol import Sandbox
from t1jax.types import ExecResult


class Console(Protocol):
    async def screen(self) -> str:
        """What the agent sees now, under a heading; "" where there is nothing to see."""

    async def run(self, lines: tuple[Line, ...]) -> ExecResult | None:
        """Runs an action's lines in order; None where nothing came of it."""


async def open_console(
    protocol: action.Protocol, sandbox: Sandbox, command_timeout_s: float, max_output: int
) -> Console:
    """max_output: bytes of what a turn prints. Raises SandboxError."""
    if protocol == "bash":
        return Shell(sandbox, command_timeout_s)
    return await Terminal.open(sandbox, command_timeout_s, max_output)


class Shell:
    """One command a turn; its output is cut by the sandbox."""

    def __init__(self, sandbox: Sandbox, command_timeout_s: float):
        self._sandbox, self._command_timeout_s = sandbox, command_timeout_s
        self._last: ExecResult | None = None

    async def screen(self) -> str:
        if self._last is None:
            return ""
        return f"Output of the last command:\n{observation(Command(()), self._last, 'bash')}"

    async def run(self, lines: tuple[Line, ...]) -> ExecResult | None:
        if not lines:
            return None
        (line,) = lines
        self._last = await self._sandbox.run(line.text, self._command_timeout_s)
        return self._last
