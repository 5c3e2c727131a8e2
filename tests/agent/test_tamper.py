"""Which changes of the system count as tampering."""

import asyncio

import pytest

from t1jax.agent.tamper import find_tampering, has_code

EDITABLE = b"import __editable___tool_1_0_finder; __editable___tool_1_0_finder.install()\n"


class Changed:
    """A sandbox in which these files differ from the image: path -> (kind, content)."""

    def __init__(self, files):
        self._files = files

    async def changed(self):
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
        ("/usr/lib/python3/dist-packages/a.pth", "deleted", b"", None),
    ],
)
def test_what_counts(path, kind, data, says):
    found = asyncio.run(find_tampering(Changed({path: (kind, data), "/app/x": ("added", b"")})))
    assert found is None if says is None else says in found


def test_code_behind_an_editable_hook_is_code():
    assert has_code(EDITABLE[:-1] + b"; import evil\n")
    assert has_code(b"/app\nimport\tevil\n") and not has_code(b"# import this\nimportant\n")
