"""Namespaces, file system, capabilities and limits of one sandbox, on ctypes alone.

Linux >= 5.12, x86-64, no privilege needed. Standard library only: it runs inside the forked supervisor.
The uid outside is never 0: as real root, /proc/sys would otherwise be the host's.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct

from t1jax.sandbox import seccomp

LIBC = ctypes.CDLL(None, use_errno=True)

NOBODY = 65533  # uid and gid taken on when the trainer runs as root
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
NEW_USER, NEW_REST = 0x10000000, 0x20000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
MOUNT_SETATTR, CAPSET, PIVOT_ROOT = 442, 126, 155  # system calls without a wrapper in libc
DAC_OVERRIDE, SYS_PTRACE = (
    1,
    19,
)  # what the supervisor keeps: reach every file and see every process
MIB = 1 << 20

ROOT = "/tmp"  # where the new root is put together, inside the new mount namespace
# own file systems: a full disk of the agent's cannot stop the verifier
HARNESS = ("tests", "logs")
