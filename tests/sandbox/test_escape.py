"""What the agent must not be able to do to the host, to the network or to its own supervisor."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import t1jax
from t1jax.sandbox import seccomp, spawner

PYTHON = "/usr/bin/python3"
needs_python = pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"probes need {PYTHON}")

CALLS = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {seccomp.DENIED!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print("open:", name, ctypes.get_errno())
for name, (number, argument) in {seccomp.ONLY_ONESELF!r}.items():
    arguments = [0] * 6
    arguments[argument] = 1
    ctypes.set_errno(0)
    if libc.syscall(number, *arguments) != -1 or ctypes.get_errno() != errno.EPERM:
        print("open:", name, ctypes.get_errno())
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    ctypes.set_errno(0)
    if libc.syscall(56, flag, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print("open: clone", hex(flag))
if libc.syscall(435, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
    print("open: clone3")
for family in range(46):
    if family not in {seccomp.FAMILIES!r} and libc.socket(family, 2, 0) != -1:
        print("open: socket family", family)
"""

SIGNALS = """
import fcntl, os, signal, socket
for number in range(1, 65):
    if number not in (32, 33):
        os.kill(1, number)
a, b = socket.socketpair()
fcntl.fcntl(a, fcntl.F_SETOWN, 1)
fcntl.fcntl(a, 10, signal.SIGKILL)  # F_SETSIG
fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
b.send(b"x")
"""


def output(inside, command, timeout_s=30.0, **fields):
    async def body(sandbox):
        return (await sandbox.run(command, timeout_s)).output

    return inside(body, **fields)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("mount -t tmpfs x /mnt", "permission denied|Operation not permitted|must be superuser"),
        ("mount -o remount,rw /usr", "permission denied|Operation not permitted|must be superuser"),
        ("umount /proc", "permission denied|Operation not permitted|must be superuser"),
        ("unshare -U true", "Operation not permitted"),
        ("unshare -n true", "Operation not permitted"),
        ("chroot /usr /bin/true", "Operation not permitted"),
        ("mknod /tmp/sda b 8 0", "Operation not permitted"),
        ("chown 1 /tmp", "Invalid argument"),
        ("hostname other", "must be root|not permitted|Permission"),
        ("touch /usr/bin/mine", "Read-only file system"),
        ("echo x > /proc/sys/kernel/core_pattern", "Read-only file system|Permission denied"),
        ("echo 9 > /proc/sys/user/max_user_namespaces", "Read-only file system"),
        ("echo b > /proc/sysrq-trigger", "Read-only file system|Permission denied|No such file"),
        ("cat /proc/1/environ", "No such file"),
        ("ls /proc/1/root", "No such file"),
        ("echo x > /dev/tcp/1.1.1.1/80", "unreachable"),
        ("echo x > /dev/udp/8.8.8.8/53", "unreachable"),
        ("ulimit -c unlimited", "cannot modify"),
        ("ulimit -Hu 4096", "cannot modify"),
    ],
)
def test_is_denied(inside, command, says):
    assert re.search(says, output(inside, command))


def test_files_of_the_host_are_not_there(inside):
    with tempfile.NamedTemporaryFile(dir="/tmp", mode="w", suffix=".probe") as file:
        os.chmod(file.name, 0o644)
        assert output(inside, "find / -xdev -name '*.probe' 2>/dev/null") == ""
        assert "No such file" in output(inside, f"cat {file.name}")
    assert output(inside, "ls /sys /home /root /var/log 2>/dev/null").split() == [
        "/home:",
        "/root:",
        "/var/log:",
    ]


def test_loopback_is_up_and_the_only_interface(inside):
    listing = output(inside, "cat /proc/net/dev; exec 5<>/dev/udp/127.0.0.1/9 && echo up")
    assert [line.split(":")[0].strip() for line in listing.splitlines()[2:-1]] == ["lo"]
    assert listing.endswith("up\n")


def test_identity_outside_is_never_root(inside):
    async def body(sandbox):
        await sandbox.run("sleep 1000 &", 20)
        rows = {}
        for name in ("status", "uid_map"):
            rows[name] = Path(f"/proc/{sandbox.pid}/{name}").read_text()
        return rows

    rows = inside(body)
    uids = next(r for r in rows["status"].splitlines() if r.startswith("Uid:")).split()[1:]
    assert (
        "0" not in uids and rows["uid_map"].split()[1] != "0" and rows["uid_map"].split()[2] == "1"
    )
    assert "NoNewPrivs:\t1" in rows["status"] and "Seccomp:\t2" in rows["status"]


def test_no_capability_reaches_the_agent(inside):
    status = output(inside, "grep Cap /proc/self/status")
    assert {line.split()[1] for line in status.splitlines()} == {"0" * 16}


@needs_python
def test_system_calls_are_filtered(inside):
    async def body(sandbox):
        result = await sandbox.execute([PYTHON, "-I", "-c", CALLS], 30, {}, "/")
        return result.exit_code, result.output

    assert inside(body) == (0, "")


@needs_python
def test_no_signal_reaches_the_supervisor(inside):
    async def body(sandbox):
        attack = await sandbox.execute([PYTHON, "-I", "-c", SIGNALS], 30, {}, "/")
        after = await sandbox.run("echo alive", 20)
        return attack.exit_code, after.output

    assert inside(body) == (0, "alive\n")


def test_kill_all_survives(inside):
    async def body(sandbox):
        await sandbox.run("kill -9 -1", 20)
        await sandbox.run("kill -STOP 1; kill -9 1; kill -9 $$", 20)
        return (await sandbox.run("echo alive", 20)).output

    assert inside(body) == "alive\n"


def test_fork_bomb_is_bounded_and_ends(inside):
    async def body(sandbox):
        await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 1", 2)
        listing = (await sandbox.execute(["/bin/ls", "/proc"], 20, {}, "/")).output.split()
        count = sum(name.isdigit() for name in listing)
        started = time.monotonic()
        await sandbox.end_agent()
        after = await sandbox.execute(["/bin/bash", "-c", "echo alive /proc/[0-9]*"], 20, {}, "/")
        return count, after.output.split(), time.monotonic() - started

    count, words, seconds = inside(body)
    assert count <= 130
    assert words[0] == "alive" and len(words) == 2 and seconds < 5


PARENT = """
import asyncio, os, sys, time
from pathlib import Path
from t1jax.sandbox import spawner
from t1jax.sandbox.namespace import NamespaceSandbox

async def main():
    sandbox = await NamespaceSandbox._open(spawner.Spec("/app", {"PATH": "/usr/bin:/bin"}, 512, 16, 64, 1000))
    if MODE == "killed" and os.fork() == 0:
        time.sleep(20)  # a worker that inherited every descriptor of ours
        os._exit(0)
    result = await sandbox.run("sleep MARK & (setsid sleep MARK &) ; id -u; echo started", 20)
    print(result.output, flush=True)
    time.sleep(60 if MODE == "killed" else 0)

asyncio.run(main())
"""


def processes(*words: str) -> list[int]:
    """The pids of this machine's processes whose command line holds all words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("mode", ["killed", "left"])
def test_death_of_the_trainer_leaves_no_process(available, mode):
    mark = f"{os.getpid()}.{time.time_ns() % 10**9}"
    script = f"MODE = {mode!r}\n" + PARENT.replace("MARK", mark)
    root = Path(t1jax.__file__).parents[1]
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout.readline() == "0\n" and trainer.stdout.readline() == "started\n"
    servers = processes("namespace_init.py", str(trainer.pid))
    if mode == "killed":
        assert processes("sleep\0" + mark) and servers
        trainer.kill()
    trainer.wait(20)
    until = time.monotonic() + 10
    while (processes("sleep\0" + mark) or any(map(alive, servers))) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes("sleep\0" + mark) == [] and not any(map(alive, servers))
    for worker in processes(mark, "MODE"):
        os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


PLAIN = """
import asyncio, os, subprocess, sys
from t1jax.sandbox import spawner
from t1jax.sandbox.namespace import NamespaceSandbox

os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.executable = "/usr/bin/python3"

async def main():
    spawner.check_available()
    sandbox = await NamespaceSandbox._open(spawner.Spec("/app", {"PATH": "/usr/bin:/bin"}, 512, 16, 64, 1000))
    result = await sandbox.run("id -u; touch f; ls; echo x > /proc/sys/kernel/core_pattern; unshare -U true", 20)
    await sandbox.end_agent()
    await sandbox.close()
    print(result.output)

asyncio.run(main())
"""


@needs_python
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as a plain user already")
def test_works_for_a_plain_user(available):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(Path(t1jax.__file__).parent, Path(folder, "t1jax"))
        done = subprocess.run(
            [sys.executable, "-c", PLAIN], cwd=folder, capture_output=True, text=True, timeout=60
        )
    assert done.stdout.startswith("0\nf\n"), done.stderr
    assert "core_pattern" in done.stdout and "Operation not permitted" in done.stdout


def test_concurrent_sandboxes_do_not_see_each_other(inside):
    async def body(first):
        second = await type(first)._open(
            spawner.Spec("/app", {"PATH": "/usr/bin:/bin"}, 512, 16, 64, 1000)
        )
        await first.run("echo secret > /tmp/x; sleep 777 &", 20)
        seen = await second.run("ls /tmp; ps -eo args | grep -c '[s]leep'", 20)
        await second.close()
        return seen.output

    assert inside(body) == "0\n"
