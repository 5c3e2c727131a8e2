"""Which changes of the system count as tampering."""

import asyncio

import pytest

from t1jax.agent.tamper import find_tampering, has_code, remove_picked_up
from t1jax.sandbox.protocol import SandboxError
from t1jax.types import ExecResult

EDITABLE = b"import __editable___tool_1_0_finder; __editable___tool_1_0_finder.install()\n"


class Changed:
    """A sandbox in which these files differ from the image: path -> (kind, content)."""

    def __init__(self, files, exit_code=0):
        self._files, self._exit_code = files, exit_code
        self.executed = []

    async def execute(self, argv, timeout_s, env, cwd):
        self.executed.append(argv)
        return ExecResult(self._exit_code, "", 0.0, False)

    @property
    def changes(self):
        return {path: kind for path, (kind, _) in self._files.items()}

    async def get(self, path, max_bytes):
        data = self._files[path][1]
        return data if len(data) <= max_bytes else None


@pytest.mark.parametrize(
    ("path", "kind", "data", "says"),
    [
        ("/usr/bin/bash", "changed", b"", "/usr/bin/bash of the image was changed"),
        ("/bin/sh", "deleted", b"", "/bin/sh of the image was deleted"),
        ("/usr/bin/htop", "added", b"", None),  # the agent may install what it likes
        ("/app/bin/tool", "changed", b"", None),
        ("/etc/ld.so.preload", "added", b"", "/etc/ld.so.preload was added"),
        ("/usr/lib/python3/dist-packages/sitecustomize.py", "added", b"", "was added"),
        ("/opt/x/usercustomize/__init__.py", "changed", b"", "was changed"),
        ("/usr/lib/python3/dist-packages/a.pth", "added", b"import os; os._exit(0)", "runs code"),
        ("/usr/lib/python3/dist-packages/a.pth", "added", b"x" * 70_000, "runs code"),
        ("/usr/lib/python3/dist-packages/a.pth", "added", b"/app/src\n", None),
        ("/usr/lib/python3/dist-packages/a.pth", "added", EDITABLE, None),
        ("/usr/local/lib/python3.11/dist-packages/a.pth", "deleted", b"", None),
        ("/usr", "deleted", b"", "/usr of the image was deleted"),
        ("/usr/bin", "changed", b"", "/usr/bin of the image was changed"),  # by nothing in it
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "changed", b"", "was changed"),
        ("/usr/lib/python3.11/json/__init__.py", "changed", b"", "was changed"),
        ("/usr/lib/python3.11/venv/__main__.py", "added", b"", None),
        ("/usr/lib/python3.11/__pycache__/os.cpython-311.pyc", "changed", b"", None),
        ("/usr/lib/python3/dist-packages/_pytest", "deleted", b"", "was deleted"),
        ("/usr/local/lib/python3.12/json.py", "changed", b"", "was changed"),
        ("/usr/local/lib/python3.12/site-packages/pip/main.py", "changed", b"", None),
        ("/usr/local/lib/python3.12/site-packages/pluggy/_hooks.py", "changed", b"", "was changed"),
        ("/app/venv/lib/python3.12/site-packages/_pytest/x.py", "changed", b"", "was changed"),
        ("/usr/local/bin/python3.12", "changed", b"", "was changed"),
        ("/usr/local/bin/pip3", "changed", b"", None),
        ("/usr/bin/pyvenv.cfg", "added", b"", "was added"),
        ("/bin/sh", "added", b"", "was added"),
        ("/etc/ssl/openssl.cnf", "changed", b"[x]\n dynamic_path = /opt/x.so\n", "loads modules"),
        ("/etc/ssl/openssl.cnf", "changed", b"# dynamic_path\n[req]\nbits = 2048\n", None),
        (
            "/etc/ld.so.cache",
            "changed",
            b"\0/lib/x86_64-linux-gnu/libc.so.6\0/opt/libq.so.1\0",
            None,
        ),
        ("/etc/ld.so.cache", "changed", b"\0/opt/lib/libc.so.6\0", "other libraries"),
        ("/etc/ld.so.cache", "changed", b"\0" * (5 << 20), "other libraries"),
    ],
)
def test_what_counts(path, kind, data, says):
    sandbox = Changed({path: (kind, data), "/app/x": ("added", b"")})
    found = asyncio.run(find_tampering(sandbox.changes, sandbox))
    assert found is None if says is None else says in found


def test_code_behind_an_editable_hook_is_code():
    assert has_code(EDITABLE[:-1] + b"; import evil\n")
    assert has_code(b"/app\nimport\tevil\n") and not has_code(b"# import this\nimportant\n")


SITE = "/usr/local/lib/python3.11/dist-packages"


def test_what_the_runner_would_pick_up_is_removed():
    kept = {
        f"{SITE}/httpx/__init__.py": ("added", b""),
        f"{SITE}/httpx-1.dist-info/entry_points.txt": ("added", b"[console_scripts]\n"),
        f"{SITE}/gone-1.dist-info/entry_points.txt": ("deleted", b""),
        "/app/venv/lib/python3.11/site-packages/pytest/__init__.py": ("added", b""),
        "/app/__pycache__": ("added", b""),
        "/usr/lib/python3/dist-packages/_pytest": ("changed", b""),  # as something in it was
    }
    removed = {
        f"{SITE}/pytest": ("added", b""),
        f"{SITE}/pytest-8.dist-info": ("added", b""),
        f"{SITE}/anyio-4.dist-info/entry_points.txt": ("added", b"[pytest11]\nanyio = x\n"),
        "/usr/lib/python3.11/pytest.py": ("added", b""),
        "/usr/lib/python3.11/json/__pycache__": ("changed", b""),
        "/etc/nsswitch.conf": ("changed", b""),
    }
    sandbox = Changed(kept | removed)
    asyncio.run(remove_picked_up(sandbox.changes, sandbox))
    ((*command, last),) = ([*argv[:3], sorted(argv[3:])] for argv in sandbox.executed)
    assert (command, last) == (["rm", "-rf", "--"], sorted(removed))
    sandbox = Changed(kept)
    asyncio.run(remove_picked_up(sandbox.changes, sandbox))
    assert sandbox.executed == []


def test_few_files_are_read():
    points = {f"{SITE}/x{i}/entry_points.txt": ("added", b"") for i in range(1000)}
    sandbox = Changed(points)
    asyncio.run(remove_picked_up(sandbox.changes, sandbox))
    assert sum(len(argv) - 3 for argv in sandbox.executed) == 800
    sandbox = Changed({f"{SITE}/{i}.pth": ("added", b"") for i in range(1000)})
    assert "more than 200" in asyncio.run(find_tampering(sandbox.changes, sandbox))


def test_what_cannot_be_removed_is_a_failure_of_the_sandbox():
    sandbox = Changed({f"{SITE}/pytest": ("added", b"")}, exit_code=1)
    with pytest.raises(SandboxError, match="cannot be removed"):
        asyncio.run(remove_picked_up(sandbox.changes, sandbox))
