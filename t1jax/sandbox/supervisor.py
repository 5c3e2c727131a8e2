"""Process 1 of a sandbox: keeps the agent's shell, runs programs, moves files. Standard library only.

One request of the host at a time, one answer each. Commands go to bash over a socket that is its standard
input and replaced by /dev/null while the command runs; the exit code comes back over the same socket with
the command's number, never through the output, so no output can be taken for it.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time

from t1jax.sandbox import files, wire
from t1jax.sandbox.children import Children, processes
from t1jax.sandbox.output import Output

TIMEOUT_CODE = 124
CHUNK = 1 << 16
SHELL = ["bash", "--norc", "--noprofile", "-o", "pipefail"]


class Supervisor:
    """Serves the host over `control` until it goes away. `spec`: see spawner.Spec."""

    def __init__(self, control: socket.socket, spec: dict):
        self._control, self._spec = control, spec
        self._children = Children(spec)
        self._shell: int | None = None
        self._channel: socket.socket | None = None
        self._pipe = os.pipe()
        self._number = 0
        self._said = b""
        self._unsent = b""
        self._last_code = 0
        self._ended = False
        self._interrupted = False

    def serve(self) -> None:
        operations = {
            "run": self._run,
            "execute": self._execute,
            "end_agent": self._end_agent,
            "put": self._put,
            "get": self._get,
            "reset": self._reset,
        }
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._children.wake, select.POLLIN)
        while True:
            if any(fd == self._children.wake for fd, _ in poll.poll()):
                self._children.reap()
                continue
            request, payload = wire.receive(self._control)
            name = request.pop("op")
            if name == "interrupt":  # came after its command had ended
                continue
            try:
                answer, data = operations[name](payload=payload, **request)
            except OSError as error:
                answer, data = {"error": f"{name}: {error.strerror}: {error.filename or ''}"}, b""
            wire.send(self._control, answer, data)

    def _run(self, payload: bytes, seconds: float, max_output: int | None):
        """Runs a command in the shell, which is started where there is none."""
        if self._ended:
            return {"error": "run: the agent's processes were ended"}, b""
        started, output = time.monotonic(), Output(max_output or self._spec["max_output"])
        self._children.reap()
        if self._shell is None or self._children.exit_code(self._shell) is not None:
            self._start_shell(self._spec["workdir"])
        before = processes()
        self._number += 1
        self._unsent, self._said = _script(payload, self._number, self._last_code), b""
        code = self._collect(self._pipe[0], self._status, output, started + seconds)
        note = ""
        if code is None or self._children.exit_code(self._shell) is not None:
            folder = self._spec["workdir"]
            if code is None:
                with contextlib.suppress(OSError):
                    folder = os.readlink(f"/proc/{self._shell}/cwd")
                self._children.kill(before - {self._shell})
                self._drain(self._pipe[0], output)
                note = f"timed out after {seconds:g} s, its processes were killed; "
            self._start_shell(folder)
            note = f"[{note}the shell was started again]"
        else:
            self._last_code = code
        return _result(code, output, started, note)

    def _execute(self, payload: bytes, argv: list, env: dict, cwd: str | None, seconds: float):
        """Runs a program outside the shell, in a session of its own."""
        started, output = time.monotonic(), Output(self._spec["max_output"])
        before = processes()
        reading, writing = os.pipe()
        try:
            with open("/dev/null", "rb") as nothing, open(writing, "wb"):
                pid = self._children.start(
                    argv, env, cwd or self._spec["workdir"], nothing.fileno(), writing
                )
            code = self._collect(
                reading, lambda: self._children.exit_code(pid), output, started + seconds
            )
            note = ""
            if code is None:
                self._children.kill(before)
                self._drain(reading, output)
                note = f"[timed out after {seconds:g} s, its processes were killed]"
        finally:
            os.close(reading)
        return _result(code, output, started, note)

    def _end_agent(self, payload: bytes):
        """Ends every process but this one, for good."""
        self._ended = True
        gone = self._children.kill_all()
        if self._channel is not None:
            self._channel.close()
        self._shell = self._channel = None
        return ({} if gone else {"error": "end_agent: processes would not die"}), b""

    def _put(self, payload: bytes, path: str, entries: list):
        files.write(path, entries, payload)
        return {}, b""

    def _get(self, payload: bytes, path: str, max_bytes: int):
        data = files.read(path, max_bytes)
        return {"found": data is not None}, data or b""

    def _reset(self, payload: bytes, path: str):
        files.reset(path)
        return {}, b""

    def _start_shell(self, folder: str) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, inner = socket.socketpair()
        self._channel.setblocking(False)
        self._unsent, self._last_code = b"", 0
        with inner:
            self._shell = self._children.start(
                SHELL, self._spec["env"], folder, inner.fileno(), self._pipe[1]
            )

    def _collect(self, source: int, finished, output: Output, deadline: float) -> int | None:
        """Reads `source` into `output` until `finished()` gives the exit code; None: time is up."""
        self._interrupted = False
        channel = self._channel.fileno() if self._channel is not None and self._unsent else -1
        poll = select.poll()
        for fd in (source, self._children.wake, self._control.fileno()):
            poll.register(fd, select.POLLIN)
        if channel >= 0:
            poll.register(channel, select.POLLIN | select.POLLOUT)
        while True:
            code = finished()
            if code is not None:
                self._drain(source, output)
                return code
            left = deadline - time.monotonic()
            if left <= 0 or self._interrupted:
                return None
            for fd, event in poll.poll(left * 1000 + 1):
                if fd == source:
                    output.add(os.read(source, CHUNK))
                    if event == select.POLLHUP:
                        poll.unregister(source)
                elif fd == self._children.wake:
                    self._children.reap()
                elif fd == self._control.fileno():
                    wire.receive(self._control)  # an interrupt; EOFError when the host is gone
                    self._interrupted = True
                elif not self._talk(event):
                    poll.unregister(channel)
                elif not self._unsent:
                    poll.modify(channel, select.POLLIN)

    def _talk(self, event: int) -> bool:
        """Moves what can be moved to and from the shell; False when its end is closed."""
        try:
            if event & select.POLLOUT and self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
            if event & (select.POLLIN | select.POLLHUP):
                said = self._channel.recv(4096)
                self._said = (self._said + said)[-4096:]
                return bool(said)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _status(self) -> int | None:
        """The exit code of the running command, or of the shell where the command ended it."""
        for line in self._said.split(b"\n")[:-1]:
            number, _, code = line.partition(b" ")
            if number == b"%d" % self._number and code.isdigit():
                return int(code) & 255
        return self._children.exit_code(self._shell)

    def _drain(self, source: int, output: Output) -> None:
        """Takes what lies in the pipe now, no more: a writer in the background may never stop."""
        (waiting,) = struct.unpack("i", fcntl.ioctl(source, termios.FIONREAD, b"\0" * 4))
        if waiting:
            output.add(os.read(source, waiting))


def _script(command: bytes, number: int, last_code: int) -> bytes:
    """One line for bash: `$?` as the command before left it, the command, its number and exit code back."""
    for plain, quoted in ((b"\0", b""), (b"\\", b"\\\\"), (b"'", b"\\'"), (b"\n", b"\\n")):
        command = command.replace(plain, quoted)
    before = b"(exit %d); " % last_code if last_code else b""
    report = b"{ builtin printf '%%d %%d\\n' %d $?; } >&0 2>/dev/null" % number
    return before + b"eval $'" + command + b"' </dev/null; " + report + b"\n"


def _result(code: int | None, output: Output, started: float, note: str):
    text = output.text()
    if note:
        text += ("" if text.endswith("\n") or not text else "\n") + note + "\n"
    answer = {
        "exit_code": TIMEOUT_CODE if code is None else code,
        "seconds": time.monotonic() - started,
        "timed_out": code is None,
    }
    return answer, text.encode()
