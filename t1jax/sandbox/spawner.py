"""The host's side of the fork server: one small process per trainer that forks a sandbox in milliseconds."""

import atexit
import dataclasses
import os
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path

from t1jax.sandbox import wire
from t1jax.sandbox.protocol import SandboxError

START_S = 30.0  # deadline of a start
PROGRAM = Path(__file__).with_name("namespace_init.py")
HELP = (
    "user namespaces must be on (sysctl user.max_user_namespaces > 0, kernel.unprivileged_userns_clone = 1 and"
    " kernel.apparmor_restrict_unprivileged_userns = 0 where they exist); inside a container, start it with"
    " --security-opt seccomp=unconfined --security-opt systempaths=unconfined, or use the docker sandbox"
)


class SandboxUnavailable(SandboxError):
    """This machine cannot run the namespace sandbox; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a new sandbox is like. Sizes in MiB; `max_output` in bytes of a command's output."""

    workdir: str
    env: dict[str, str]
    memory_mib: int
    disk_mib: int
    processes: int
    max_output: int


class Spawner:
    """Owns a fork server. `start` may be called from any thread."""

    def __init__(self):
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(START_S)
        self.owner = os.getpid()
        with theirs:
            argv = [sys.executable, "-I", "-S", str(PROGRAM), str(theirs.fileno()), str(self.owner)]
            self._process = subprocess.Popen(
                argv,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is for the trainer
                env={k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},
            )

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def start(self, spec: Spec) -> socket.socket:
        """Asks for a sandbox: gives its connection, on which {"pid"} and {"ready"} or {"error"} follow."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.settimeout(START_S)
                wire.send(ours, dataclasses.asdict(spec))
                socket.send_fds(self._requests, [b"sandbox"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandbox fork server is gone: {error}") from error
        return ours

    def close(self) -> None:
        """Ends the fork server and every sandbox of it."""
        self._requests.close()
        if self.owner == os.getpid():
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()


_lock = threading.Lock()
_current: Spawner | None = None


def shared() -> Spawner:
    """This process's fork server, started when first needed, started anew when it died."""
    global _current
    with _lock:
        if _current is None or not _current.alive:
            _check_machine()
            _current = Spawner()
            atexit.register(_current.close)
        return _current


def answer(message: dict) -> dict:
    """Passes a message of a starting sandbox on; raises SandboxUnavailable where it is an error."""
    if "error" in message:
        raise SandboxUnavailable(f"cannot start a namespace sandbox: {message['error']}; {HELP}")
    return message


def check_available() -> None:
    """Starts an empty sandbox and drops it. Raises SandboxUnavailable with one line of what is missing."""
    spec = Spec("/app", {}, memory_mib=512, disk_mib=16, processes=16, max_output=1000)
    with shared().start(spec) as connection:
        try:
            while "ready" not in answer(wire.receive(connection)[0]):
                pass
        except (EOFError, OSError) as error:
            raise SandboxUnavailable(f"the namespace sandbox did not start: {error}") from error


def _check_machine() -> None:
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"the namespace sandbox needs Linux, this is {sys.platform}: use the docker sandbox"
        )
    if platform.machine() != "x86_64":
        raise SandboxUnavailable(
            f"the namespace sandbox has a system-call filter for x86_64 only, this is"
            f" {platform.machine()}: use the docker sandbox"
        )
    if not any(os.access(f"{folder}/bash", os.X_OK) for folder in ("/usr/bin", "/bin")):
        raise SandboxUnavailable("the namespace sandbox needs bash in /usr/bin: install bash")
