"""All processes of a sandbox as its process 1 has them: starts some, reaps all, kills. Standard library only."""

import contextlib
import os
import signal
import time
import warnings  # noqa: F401  os.execvpe imports it late, when the host's files are gone

from t1jax.sandbox import confine

KILL_S = 5.0  # how long killed processes may take to go


class Children:
    """`wake`: a descriptor that is readable when some child ended, until `reap`."""

    def __init__(self, spec: dict):
        self._spec = spec
        self._running: set[int] = set()  # of those started here
        self._exited: dict[int, int] = {}
        self.wake, writing = os.pipe()
        for fd in (self.wake, writing):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # in process 1 that means ignored

    def start(self, argv: list, env: dict, cwd: str, stdin: int, out: int) -> int:
        """Starts a program with its own session and limits; in / where `cwd` is gone. Gives its pid."""
        pid = os.fork()
        if pid:
            self._running.add(pid)
            self._exited.pop(pid, None)
            return pid
        try:
            os.setsid()
            for number, fd in enumerate((stdin, out, out)):
                os.dup2(fd, number)
            os.closerange(3, 1 << 16)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
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

    def exit_code(self, pid: int | None) -> int | None:
        """Of a program started here, 128 + signal where one killed it; None while it runs."""
        return self._exited.get(pid)

    def reap(self) -> None:
        """Collects ended children, of which process 1 gets everybody's."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in self._running:
                    self._running.remove(pid)
                    code = os.waitstatus_to_exitcode(status)
                    self._exited[pid] = code if code >= 0 else 128 - code

    def kill(self, spared: set[int]) -> None:
        """Kills every process not in `spared`; all of them when they multiply faster."""
        for _ in range(20):
            strangers = processes() - spared
            if not strangers:
                return
            for pid in strangers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
            self.reap()
        self.kill_all()

    def kill_all(self) -> bool:
        """Kills every process but this one; False when some are still there after KILL_S."""
        until = time.monotonic() + KILL_S
        while time.monotonic() < until:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return True
            self.reap()
            time.sleep(0.0005)
        return False


def processes() -> set[int]:
    """The pids of all processes but process 1."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}
