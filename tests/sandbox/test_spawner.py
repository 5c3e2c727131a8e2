"""Where the namespace sandbox cannot run, one clear line says so, and nothing runs outside of it."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import t1jax
from t1jax.sandbox import spawner
from t1jax.sandbox.spawner import SandboxUnavailable

# Becomes `UID` of a new user namespace that allows no further one.
NESTED = """
import ctypes, os
uid, gid = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"{UID} {uid} 1"), ("gid_map", f"{UID} {gid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
from t1jax.sandbox import spawner  # now: numpy's threads would not allow the step above
try:
    spawner.check_available()
except spawner.SandboxUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize(("uid", "says"), [(1000, "user namespace: "), (0, "leaving uid 0")])
def test_no_user_namespaces(available, uid, says):
    root = Path(t1jax.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"UID = {uid}\n{NESTED}"], cwd=root, capture_output=True, text=True
    )
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    assert done.stdout.startswith(f"cannot start a namespace sandbox: ConfineError: {says}")
    assert "max_user_namespaces" in done.stdout and "docker sandbox" in done.stdout


@pytest.mark.parametrize(
    ("owner", "name", "value", "says"),
    [
        (sys, "platform", "darwin", "needs Linux, this is darwin"),
        (platform, "machine", lambda: "aarch64", "x86_64 only, this is aarch64"),
        (spawner.os, "access", lambda *_: False, "needs bash"),
    ],
)
def test_other_machines(monkeypatch, owner, name, value, says):
    monkeypatch.setattr(spawner, "_current", None)
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(SandboxUnavailable, match=says):
        spawner.check_available()
