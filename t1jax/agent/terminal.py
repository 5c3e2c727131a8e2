"""The agent's terminal in the Terminus-2 protocol: a tmux session in its sandbox.

tmux keeps what scrolls off the screen. Each reading takes that and the screen and has tmux forget it, in one
step: so the work of a turn is linear in what is new, and nothing is lost in between. Of more than HISTORY lines
between two readings the first are gone, and the agent sees the screen instead. Blank lines at the end are left out.
"""

import asyncio
import shlex
import time

from t1jax.agent.action import Line
from t1jax.sandbox.output import Output
from t1jax.sandbox.protocol import Sandbox, SandboxError
from t1jax.types import ExecResult

WIDTH, HEIGHT = 160, 40
HISTORY = (
    20_000  # lines that tmux keeps between two readings: at most 17 MB of the sandbox's memory
)
MAX_CAPTURE = 64 << 20  # bytes of a reading: more than there can be
KEYS = 8_000  # bytes typed at a time: tmux refuses commands of 16 kB
CONTROL_S = 30.0  # deadline of one tmux command
PROMPT_S = 2.0  # how long the first prompt may take to appear

FOLDER = "/tmp/.terminus"
# -f: whatever ~/.tmux.conf says. -u: UTF-8 whatever the locale.
TMUX = f"tmux -f /dev/null -u -S {FOLDER}/socket"


class TerminalClosed(Exception):
    """The agent has ended its shell or tmux itself, or they no longer answer: one line."""


class Terminal:
    """Made by `open`. Every method raises SandboxError when the sandbox is gone, else TerminalClosed."""

    def __init__(self, sandbox: Sandbox, max_wait_s: float, max_output: int):
        self._sandbox, self._max_wait_s, self._max_output = sandbox, max_wait_s, max_output
        self._seen: str | None = None  # the screen as it was read last, None where it is not known

    @classmethod
    async def open(cls, sandbox: Sandbox, max_wait_s: float, max_output: int) -> "Terminal":
        """Starts a login shell in a new session and waits for its prompt.

        max_wait_s: of one command. max_output: bytes read a turn, first and last half. Raises SandboxError
        where the image has no tmux.
        """
        terminal = cls(sandbox, max_wait_s, max_output)
        found = await sandbox.run(f"command -v tmux && mkdir -p {FOLDER}", CONTROL_S)
        if found.exit_code:
            raise SandboxError(
                "there is no tmux in the task's image: install it in environment/Dockerfile"
            )
        session = f"new-session -d -s main -x {WIDTH} -y {HEIGHT} 'bash --login'"
        try:
            await terminal._tmux(f"set -g history-limit {HISTORY} \\; {session}")
            until = time.monotonic() + PROMPT_S
            while time.monotonic() < until:
                if (await terminal._tmux("capture-pane -p -t main")).strip():
                    break
                await asyncio.sleep(0.02)
        except TerminalClosed as error:
            raise SandboxError(f"tmux did not start: {error}") from None
        return terminal

    async def screen(self) -> str:
        """What the terminal shows now, under a heading."""
        rows, _ = await self._capture()
        return self._shown(rows)

    async def run(self, lines: tuple[Line, ...]) -> ExecResult:
        """Types each line and waits as long as it says; `output` is what is new since the last reading.

        Where that cannot be told, because the screen was cleared or painted over, it is the screen.
        """
        started, seen = time.monotonic(), self._seen
        for line in lines:
            until = time.monotonic() + min(line.wait_s, self._max_wait_s)
            for arguments in typing(line.text):
                await self._tmux(arguments)
            await asyncio.sleep(max(until - time.monotonic(), 0))
        rows, whole = await self._capture()
        new = since(seen, rows) if whole and seen is not None else None
        text = f"New Terminal Output:\n{self._cut(new)}" if new else self._shown(rows)
        return ExecResult(0, text, time.monotonic() - started, False)

    async def _capture(self) -> tuple[list[str], bool]:
        """All rows since the last capture, the screen's at the end, of which tmux keeps only those.

        Where tmux does not give them, the rows are the screen's, and not the whole.
        """
        everything = "capture-pane -p -t main -S - \\; clear-history -t main"
        read = await self._sandbox.run(f"{TMUX} {everything}", CONTROL_S, MAX_CAPTURE)
        rows = read.output.split("\n")[:-1]
        whole = read.exit_code == 0 and len(rows) >= HEIGHT
        if not whole:
            rows = (await self._tmux("capture-pane -p -t main")).split("\n")
        self._seen = screen_of(rows) if whole else None
        return rows, whole

    def _shown(self, rows: list[str]) -> str:
        return f"Current Terminal Screen:\n{self._cut(screen_of(rows))}"

    def _cut(self, text: str) -> str:
        kept = Output(self._max_output)
        kept.add(text.encode())
        return kept.text()

    async def _tmux(self, arguments: str) -> str:
        result = await self._sandbox.run(f"{TMUX} {arguments}", CONTROL_S)
        if result.exit_code:
            raise TerminalClosed(" ".join(result.output.split()) or "tmux does not answer")
        return result.output


def screen_of(rows: list[str]) -> str:
    return "\n".join(rows[-HEIGHT:]).rstrip()


def since(seen: str, rows: list[str]) -> str | None:
    """What stands from the last line of `seen` on, which the rows begin with; None where they do not."""
    text = "\n".join(rows).rstrip()
    return text[seen.rfind("\n") + 1 :] if text.startswith(seen) else None


def typing(keys: str) -> list[str]:
    """The arguments of tmux that type it. What is no key's name is typed character by character."""
    if len(keys.encode()) <= KEYS:
        return [_send("", keys)] if keys else []
    step = KEYS // 4  # of characters, which have at most 4 bytes
    return [_send("-l ", keys[i : i + step]) for i in range(0, len(keys), step)]


def _send(option: str, keys: str) -> str:
    if keys.endswith(";"):  # would end the tmux command
        keys = keys[:-1] + "\\;"
    return f"send-keys {option}-t main -- {shlex.quote(keys)}"
