"""Process 1 of a sandbox: keeps the agent's shell, runs programs, moves files. Standard library only.

One request of the host at a time, one answer each. Commands go to bash over a socket that is its standard
input and replaced by /dev/null while the command runs; the exit code comes back over the same socket with
the command's number, never through the output, so no output can be taken for it.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import termios
import time
import warnings  # noqa: F401  os.execvpe imports it late, when the host's files are gone

from t1jax.sandbox import confine, files, wire
from t1jax.sandbox.output import Output

TIMEOUT_CODE = 124
CHUNK = 1 << 16
KILL_S = 5.0  # how long killed processes may take to go
SHELL = ["bash", "--norc", "--noprofile", "-o", "pipefail"]


class Supervisor:
    """Serves the host over `control` until it goes away. `spec`: see spawner.Spec."""

    def __init__(self, control: socket.socket, spec: dict):
        self._control, self._spec = control, spec
        self._shell: int | None = None
        self._channel: socket.socket | None = None
        self._pipe = os.pipe()
        self._number = 0
        self._said = b""
        self._unsent = b""
        self._last_code = 0
        self._started: set[int] = set()  # by this process itself, and running
        self._exited: dict[int, int] = {}  # exit codes of those, 128 + signal for killed ones
        self._ended = False
        self._interrupted = False
        self._wake = _wake_on_child()
        for name in ("SIGINT", "SIGPIPE", "SIGXFSZ"):
            signal.signal(
                getattr(signal, name), signal.SIG_DFL
            )  # process 1 ignores what is default
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

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
        poll.register(self._wake, select.POLLIN)
        while True:
            if any(fd == self._wake for fd, _ in poll.poll()):
                self._reap()
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

    def _run(self, payload: bytes, seconds: float):
        """Runs a command in the shell, which is started where there is none."""
        if self._ended:
            return {"error": "run: the agent's processes were ended"}, b""
        started, output = time.monotonic(), Output(self._spec["max_output"])
        self._reap()
        if self._shell is None or self._shell in self._exited:
            self._start_shell(self._spec["workdir"])
        before = _processes()
        self._number += 1
        self._unsent, self._said = _script(payload, self._number, self._last_code), b""
        code = self._collect(self._pipe[0], self._status, output, started + seconds)
        note = ""
        if code is None or self._shell in self._exited:
            folder = self._spec["workdir"]
            if code is None:
                with contextlib.suppress(OSError):
                    folder = os.readlink(f"/proc/{self._shell}/cwd")
                self._kill(before - {self._shell})
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
        before = _processes()
        reading, writing = os.pipe()
        try:
            with open("/dev/null", "rb") as nothing, open(writing, "wb"):
                pid = self._spawn(
                    argv, env, cwd or self._spec["workdir"], nothing.fileno(), writing
                )
            code = self._collect(reading, lambda: self._exited.get(pid), output, started + seconds)
            note = ""
            if code is None:
                self._kill(before)
                self._drain(reading, output)
                note = f"[timed out after {seconds:g} s, its processes were killed]"
        finally:
            os.close(reading)
        return _result(code, output, started, note)

    def _end_agent(self, payload: bytes):
        """Ends every process but this one, for good."""
        self._ended = True
        gone = self._kill_all()
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
            self._shell = self._spawn(
                SHELL, self._spec["env"], folder, inner.fileno(), self._pipe[1]
            )

    def _spawn(self, argv: list, env: dict, cwd: str, stdin: int, out: int) -> int:
        """Starts a program with its own session and limits; in / where `cwd` is gone. Gives its pid."""
        pid = os.fork()
        if pid:
            self._started.add(pid)
            return pid
        try:
            os.setsid()
            for number, fd in enumerate((stdin, out, out)):
                os.dup2(fd, number)
            os.closerange(3, 1 << 16)
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(name, signal.SIG_DFL)
            confine.limit(self._spec["memory_mib"], self._spec["disk_mib"], self._spec["processes"])
            try:
                os.chdir(cwd)
            except OSError:
                os.chdir("/")
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        finally:
            os._exit(126)

    def _collect(self, source: int, finished, output: Output, deadline: float) -> int | None:
        """Reads `source` into `output` until `finished()` gives the exit code; None: time is up."""
        self._interrupted = False
        channel = self._channel.fileno() if self._channel is not None and self._unsent else -1
        poll = select.poll()
        for fd in (source, self._wake, self._control.fileno()):
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
                elif fd == self._wake:
                    self._reap()
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
        return self._exited.get(self._shell)

    def _drain(self, source: int, output: Output) -> None:
        """Takes what lies in the pipe now, no more: a writer in the background may never stop."""
        (waiting,) = struct.unpack("i", fcntl.ioctl(source, termios.FIONREAD, b"\0" * 4))
        if waiting:
            output.add(os.read(source, waiting))

    def _reap(self) -> None:
        """Collects ended children, of which process 1 gets everybody's."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, CHUNK):
                pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._started:
                    self._started.remove(pid)
                    code = os.waitstatus_to_exitcode(status)
                    self._exited[pid] = code if code >= 0 else 128 - code

    def _kill(self, spared: set) -> None:
        """Kills every process not in `spared`; all of them when they multiply faster."""
        for _ in range(20):
            strangers = _processes() - spared
            if not strangers:
                return
            for pid in strangers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
            self._reap()
        self._kill_all()

    def _kill_all(self) -> bool:
        """Kills every process but this one; False when some are still there after KILL_S."""
        until = time.monotonic() + KILL_S
        while time.monotonic() < until:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return True
            self._reap()
            time.sleep(0.0005)
        return False


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


def _processes() -> set:
    """The pids of all processes but this one."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}


def _wake_on_child() -> int:
    """A descriptor that becomes readable when a child ends."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading
