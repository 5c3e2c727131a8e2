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
DAC_OVERRIDE, SYS_PTRACE = 1, 19  # the supervisor keeps: reach every file, see every process
MIB = 1 << 20

ROOT = "/tmp"  # where the new root is put together, inside the new mount namespace
# with file systems of their own: a full disk of the agent's cannot stop the verifier
HARNESS = ("tests", "logs")
HARNESS_MIB = 64
FOLDERS = [
    "usr",
    "proc",
    "dev",
    "dev/shm",
    "dev/pts",
    "etc",
    "home",
    "media",
    "mnt",
    "opt",
    "run",
    "srv",
    "tmp",
    "var",
    "var/log",
    "var/tmp",
    "root",
    "app",
    "tests",
    "logs",
    "solution",
]
DEVICES = ("null", "zero", "full", "random", "urandom")
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
}


class ConfineError(Exception):
    """A step of the confinement failed: its name, and what the kernel said."""


def drop_root() -> None:
    """Leaves uid 0 for good; made the OOM killer's first choice.

    Nothing to leave for a plain user, or one who is uid 0 only inside a user namespace.
    """
    with _step("oom_score_adj"), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open("/proc/self/uid_map") as file:
        outside = file.read().split()[1]  # who uid 0 is in the namespace around this one
    if os.getuid() == 0 and outside == "0":
        with _step(f"leaving uid 0 for {NOBODY}"):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("hide", LIBC.prctl(4, 0, 0, 0, 0))  # PR_SET_DUMPABLE


def unshare() -> None:
    """New user, mount, pid (for children), network, IPC and UTS namespaces, as root of the first."""
    uid, gid = os.getuid(), os.getgid()
    # dumpable: /proc/self must be ours while the maps are written
    _call("dumpable", LIBC.prctl(4, 1, 0, 0, 0))
    _call("user namespace", LIBC.unshare(NEW_USER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with _step(f"{name} of the user namespace"), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("namespaces", LIBC.unshare(NEW_REST))
    _call("hide", LIBC.prctl(4, 0, 0, 0, 0))


def build(disk_mib: int) -> None:
    """The new root: a size-capped tmpfs, the host's /usr read-only, own /proc and /dev. As pid 1."""
    os.umask(0o022)
    _mount(None, "/", None, REC | PRIVATE)
    _tmpfs(ROOT, disk_mib)
    for name in FOLDERS:
        os.mkdir(f"{ROOT}/{name}")
    for name in ("tmp", "var/tmp", "dev/shm"):
        os.chmod(f"{ROOT}/{name}", 0o1777)
    for name in HARNESS:
        _tmpfs(f"{ROOT}/{name}", HARNESS_MIB)
    _read_only("/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{ROOT}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{ROOT}/{name}")
            _read_only(f"/{name}")
    for name, text in ETC.items():
        with open(f"{ROOT}/etc/{name}", "w") as file:
            file.write(text)
    if os.path.isdir("/etc/alternatives"):
        os.mkdir(f"{ROOT}/etc/alternatives")
        _read_only("/etc/alternatives")
    if os.path.exists("/etc/ld.so.cache"):
        os.close(os.open(f"{ROOT}/etc/ld.so.cache", os.O_CREAT, 0o644))
        _read_only("/etc/ld.so.cache")
    for name in DEVICES:
        os.close(os.open(f"{ROOT}/dev/{name}", os.O_CREAT, 0o666))
        _mount(f"/dev/{name}", f"{ROOT}/dev/{name}", None, BIND)
    _mount("devpts", f"{ROOT}/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666")
    os.symlink("pts/ptmx", f"{ROOT}/dev/ptmx")
    os.symlink("/proc/self/fd", f"{ROOT}/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{ROOT}/dev/{name}")
    # hidepid: the supervisor is not dumpable, so nobody inside even sees it
    _mount("proc", f"{ROOT}/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    with (
        _step("nested user namespaces off"),
        open(f"{ROOT}/proc/sys/user/max_user_namespaces", "w") as f,
    ):
        f.write("0")
    _mount(None, f"{ROOT}/proc", None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | NOEXEC)
    os.chdir(ROOT)
    _call("pivot_root", LIBC.syscall(PIVOT_ROOT, b".", b"."))
    _call("leaving the host's files", LIBC.umount2(b".", DETACH))
    os.chdir("/")


def isolate() -> None:
    """Host name, loopback, no capabilities for children, no new privileges, system-call filter; last step."""
    socket.sethostname("sandbox")
    with _step("loopback"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
    capability = 0
    while LIBC.prctl(24, capability, 0, 0, 0) == 0:  # PR_CAPBSET_DROP, up to the last there is
        capability += 1
    kept = 1 << DAC_OVERRIDE | 1 << SYS_PTRACE
    header = struct.pack("II", 0x20080522, 0)
    sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    _call("capset", LIBC.syscall(CAPSET, header, sets))
    _call("no_new_privs", LIBC.prctl(38, 1, 0, 0, 0))
    with _step("seccomp"):
        seccomp.install(LIBC)


def die_with_parent() -> None:
    """SIGKILL on the death of the parent process (reset by every change of identity: call it last)."""
    _call("parent-death signal", LIBC.prctl(1, signal.SIGKILL, 0, 0, 0))


def adopt_orphans() -> None:
    """Makes this process the parent of its grandchildren whose parents ended."""
    _call("subreaper", LIBC.prctl(36, 1, 0, 0, 0))


def limit(memory_mib: int, disk_mib: int, processes: int) -> None:
    """Limits of a program run inside, set in the child before exec. memory: address space of a process."""
    for name, value in (
        (resource.RLIMIT_AS, memory_mib * MIB),
        (resource.RLIMIT_FSIZE, disk_mib * MIB),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 65536),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


class _step:
    """Names the step in which an OSError happened."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            raise ConfineError(f"{self.name}: {error.strerror}") from error


def _call(name: str, result: int) -> None:
    if result != 0:
        raise ConfineError(f"{name}: {os.strerror(ctypes.get_errno())}")


def _mount(source, target: str, kind, flags: int, options: str | None = None) -> None:
    source, kind, options = (x.encode() if x else None for x in (source, kind, options))
    result = LIBC.mount(source, target.encode(), kind, ctypes.c_ulong(flags), options)
    _call(f"mount {target.removeprefix(ROOT) or '/'}", result)


def _tmpfs(target: str, mib: int) -> None:
    inodes = min(1000 + 100 * mib, 100_000)
    _mount("tmpfs", target, "tmpfs", NOSUID | NODEV, f"size={mib}m,nr_inodes={inodes},mode=0755")


def _read_only(path: str) -> None:
    """Binds a host path with all mounted below it, read-only, at the same place of the new root."""
    target = ROOT + path
    _mount(path, target, None, BIND | REC)
    attributes = struct.pack(
        "4Q", RDONLY | NOSUID | NODEV, 0, 0, 0
    )  # the same bits as MOUNT_ATTR_*
    recursive, here = 0x8000, -100
    result = LIBC.syscall(
        MOUNT_SETATTR, here, target.encode(), recursive, attributes, len(attributes)
    )
    _call(f"read-only {path} (needs Linux >= 5.12)", result)
