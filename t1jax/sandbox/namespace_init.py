"""The stand-alone program behind the namespace sandbox: forks one confined supervisor per request.

Started as `python -I -S namespace_init.py FD HOST_PID`. FD is a socket on which every message carries one
descriptor: the new sandbox's own connection to the host, which holds the specification as its first frame.
It ends, and every sandbox with it, when the host closes the socket or dies.
"""

import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from t1jax.sandbox import confine, supervisor, wire


def main(requests: socket.socket, host: int) -> None:
    """Forks until the host is gone."""
    os.chdir("/")
    host_exit = os.pidfd_open(host)
    problem = None
    try:
        confine.drop_root()
        confine.adopt_orphans()
    except confine.ConfineError as error:
        problem = error  # told to every request
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended sandboxes are reaped by the kernel
    gc.disable()
    gc.freeze()
    poll = select.poll()
    for fd in (requests.fileno(), host_exit):
        poll.register(fd, select.POLLIN)
    while not any(fd == host_exit for fd, _ in poll.poll()):
        message, fds, _, _ = socket.recv_fds(requests, 16, 1)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            os.close(host_exit)
            os.set_inheritable(fds[0], False)
            _sandbox(socket.socket(fileno=fds[0]), problem)
        os.close(fds[0])


def _sandbox(control: socket.socket, problem: Exception | None) -> None:
    """Becomes a sandbox, or says on `control` why it cannot. Never returns."""
    try:
        if problem:
            raise problem
        spec, _ = wire.receive(control)
        confine.unshare()
        parent = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid:
            wire.send(control, {"pid": pid})
            os._exit(0)
        select.select([parent], [], [])  # gone: now the fork server is the parent
        os.close(parent)
        confine.build(spec["disk_mib"])
        os.makedirs(spec["workdir"], exist_ok=True)
        confine.isolate()
        confine.die_with_parent()
        wire.send(control, {"ready": True})
        supervisor.Supervisor(control, spec).serve()
    except (EOFError, ConnectionError):
        pass  # the host closed the sandbox
    except Exception as error:
        wire.send(control, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
