"""The host's side of docker_init.bash: requests to a container's process 1, and what comes back.

One stream each way, attached to the container before it starts: what its programs write and the answers
of process 1 and of the shell come in the order in which they were written. An answer is a line that begins
with the request's nonce, so nothing a program writes can be taken for it.
"""

import asyncio
import re
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from t1jax.sandbox.output import Output
from t1jax.sandbox.protocol import SandboxError
from t1jax.types import ExecResult

PROGRAM = Path(__file__).with_name("docker_init.bash").read_text()
TIMEOUT_CODE = 124
GRACE_S = 30.0  # within which process 1 answers; on top of a program's own deadline
CHUNK = 1 << 16
FRAME = struct.Struct(">BxxxI")  # Docker's header: which of the streams, bytes that follow
ANSWER = re.compile(rb" (done|gone|killed) (\d{1,3})\n")  # behind a nonce
WINDOW = 2 * 16 + len(b" killed 255")  # bytes that may be the start of one
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Answers:
    """Parts a stream into what programs wrote and the answer to the last request, wherever it is cut."""

    def __init__(self):
        self._last, self._nonce, self._held = b"-", b"-", b""

    def expect(self, nonce: bytes) -> None:
        """From now on the answer with this nonce counts; one that comes late to the last is dropped."""
        self._last, self._nonce = self._nonce, nonce

    def feed(self, data: bytes, output: Output) -> tuple[str, int] | None:
        """Gives the answer if it is there; what came before it goes to `output`.

        The last bytes are kept: they may become an answer, or came after it and are for the next request.
        """
        self._held += data
        self._take(self._last, output)
        if answer := self._take(self._nonce, output):
            return answer
        output.add(self._held[:-WINDOW])
        self._held = self._held[-WINDOW:]
        return None

    def _take(self, nonce: bytes, output: Output) -> tuple[str, int] | None:
        start = -1
        while (start := self._held.find(nonce, start + 1)) >= 0:
            if answer := ANSWER.match(self._held, start + len(nonce)):
                output.add(self._held[:start])
                self._held = self._held[answer.end() :]
                return answer[1].decode(), int(answer[2])
        return None


class Shell:
    """Talks with process 1 of one container, one request at a time. Its methods raise SandboxError.

    `max_output`: bytes kept of a program's output, first and last half.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_output: int):
        self._reader, self._writer, self.max_output = reader, writer, max_output
        self._turn = asyncio.Lock()
        self._token = secrets.token_hex(16).encode()
        self._answers = Answers()
        self._frame = 0  # bytes left of the one that is being read
        self._last_code = 0
        self._dead = ""

    async def hello(self, workdir: str, env: Mapping[str, str]) -> None:
        """The first request: what every shell is to have."""
        self._writer.write(PROGRAM.encode() + b"serve %s\n" % self._token)
        await self._ask("hello", workdir, *_variables(env))

    async def run(self, command: str, timeout_s: float, max_output: int | None) -> ExecResult:
        """Runs a command in the agent's shell."""
        nonce = _nonce()
        async with self._turn:
            line = _script(command.encode("utf-8", "replace"), nonce, self._last_code)
            output = Output(max_output or self.max_output)
            ended, result = await self._watch(
                nonce, "run", line, timeout_s=timeout_s, output=output
            )
            self._last_code = result.exit_code if ended == "done" else 0
        return result

    async def execute(
        self, argv: list[str], timeout_s: float, env: Mapping[str, str], cwd: str | None
    ) -> ExecResult:
        """Runs a program outside it. Raises ValueError for a variable whose name bash does not take."""
        arguments = (cwd or "", str(len(env)), *_variables(env), *argv)
        async with self._turn:
            output = Output(self.max_output)
            _, result = await self._watch(
                _nonce(), "execute", *arguments, timeout_s=timeout_s, output=output
            )
        return result

    async def end_agent(self) -> None:
        """Kills every process but process 1."""
        if left := await self._ask("end_agent"):
            raise SandboxError(f"end_agent: {left} processes would not die")

    async def real_folders(self, names: list[str]) -> int:
        """How many of the folders /NAME, /NAME/NAME, ... are there, and no links."""
        return await self._ask("walk", *names)

    def close(self) -> None:
        """Process 1 ends when it reads the end of its input."""
        self._dead = self._dead or "it was closed"
        self._writer.close()

    async def _ask(self, function: str, *arguments: str) -> int:
        """A request that is answered at once: the answer's number."""
        async with self._turn:
            return (await self._at_once(function, *arguments, output=Output(0)))[1]

    async def _watch(
        self, nonce: bytes, function: str, *arguments, timeout_s: float, output: Output
    ):
        """Starts a program and waits for its end, or ends it: when time is up, or the call is cancelled."""
        started, ended = time.monotonic(), "killed"
        try:
            async with asyncio.timeout(timeout_s):
                ended, code = await self._exchange(nonce, function, *arguments, output=output)
        except TimeoutError:
            await self._at_once("stop", output=output)
            code = TIMEOUT_CODE
        except asyncio.CancelledError:
            await self._at_once("stop", output=output)
            raise
        text = _noted(output.text(), function, ended, timeout_s)
        return ended, ExecResult(code, text, time.monotonic() - started, ended == "killed")

    async def _at_once(self, function: str, *arguments, output: Output) -> tuple[str, int]:
        """A request that process 1 answers itself; without an answer the sandbox counts as dead."""
        try:
            async with asyncio.timeout(GRACE_S):
                return await self._exchange(_nonce(), function, *arguments, output=output)
        except TimeoutError:
            self._dead = f"no answer to {function} within {GRACE_S:g} s"
            raise self._gone() from None
        except asyncio.CancelledError:
            self._dead = self._dead or f"{function} was abandoned before its answer came"
            raise

    async def _exchange(self, nonce: bytes, function: str, *arguments, output: Output):
        """Sends a request and receives its answer: a word and a number."""
        if self._dead:
            raise self._gone()
        words = (self._token, function.encode(), nonce, *map(_quote, arguments))
        self._answers.expect(nonce)
        try:
            self._writer.write(b" ".join(words) + b"\n")
            await self._writer.drain()
            answer = self._answers.feed(b"", output)
            while answer is None:
                answer = self._answers.feed(await self._read(), output)
        except (EOFError, OSError):
            self._dead = self._dead or f"its container ended during {function}"
            raise self._gone() from None
        return answer

    async def _read(self) -> bytes:
        """Some of what comes next. Loses nothing when it is cancelled."""
        if not self._frame:
            _, self._frame = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        data = await self._reader.read(min(self._frame, CHUNK))
        if not data:
            raise EOFError
        self._frame -= len(data)
        return data

    def _gone(self) -> SandboxError:
        return SandboxError(f"the sandbox is gone: {self._dead}")


def _nonce() -> bytes:
    return secrets.token_hex(16).encode()


def _quote(text: str | bytes) -> bytes:
    """One word for bash, whatever it holds; without NUL."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    for plain, quoted in ((b"\0", b""), (b"\\", b"\\\\"), (b"'", b"\\'"), (b"\n", b"\\n")):
        data = data.replace(plain, quoted)
    return b"$'" + data + b"'"


def _variables(env: Mapping[str, str]) -> list[str]:
    if bad := [name for name in env if not NAME.fullmatch(name)]:
        raise ValueError(f"environment variable {bad[0]!r}: a name has letters, digits and _ only")
    return [f"{name}={value}" for name, value in env.items()]


def _script(command: bytes, nonce: bytes, last_code: int) -> bytes:
    """One line for the shell: `$?` as the last command left it, the command, its nonce and exit code back."""
    before = b"(exit %d); " % last_code if last_code else b""
    report = b"{ builtin printf '%%s done %%d\n' %s $?; } >&9 2>/dev/null" % nonce
    return before + b"eval " + _quote(command) + b" </dev/null 9>&-; " + report


def _noted(text: str, function: str, ended: str, timeout_s: float) -> str:
    """Says in the output what was done beyond the program."""
    notes = []
    if ended == "killed":
        notes.append(f"timed out after {timeout_s:g} s, its processes were killed")
    if function == "run" and ended != "done":
        notes.append("the shell was started again")
    if not notes:
        return text
    return text + ("" if text.endswith("\n") or not text else "\n") + f"[{'; '.join(notes)}]\n"
