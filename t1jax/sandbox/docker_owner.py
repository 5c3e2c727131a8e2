"""Who made a container: a process, known by more than its number, which another may have after it."""

import os
from pathlib import Path


def identity() -> str:
    """This process, unlike any other of this machine and of any other one: boot, namespace, pid, start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {_namespace()} {os.getpid()} {_start(os.getpid())}"


def gone(owner: str) -> bool:
    """True where the process of an identity has ended. Of a process elsewhere this is not known: False."""
    here, there = identity().split(), owner.split()
    return len(there) == 4 and there[:2] == here[:2] and _start(int(there[2])) != there[3]


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _start(pid: int) -> str | None:
    """When it started, in ticks since the boot; None where there is no such process, or it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
