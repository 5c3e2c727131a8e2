"""The Terminus-2 terminal in a container: the same tmux, another sandbox."""

import pytest

from t1jax.agent.action import Line
from t1jax.agent.terminal import Terminal
from t1jax.sandbox.protocol import SandboxError

pytestmark = pytest.mark.docker
LIMIT = 10_000


def test_what_is_typed_and_read(inside_docker):
    async def body(sandbox):
        terminal = await Terminal.open(sandbox, 60.0, LIMIT)
        read = [await terminal.screen()]
        for keys in (
            "sleep 100\n",
            "C-c",
            "echo 'naïve 日本 🙂'\n",
            "seq 5000\n",
            "clear\n",
            "exit 3",
        ):
            read.append((await terminal.run((Line(keys, 1.0),))).output)
        return read

    first, running, ended, letters, long, cleared, typed = inside_docker(body)
    prompt = first.removeprefix("Current Terminal Screen:\n")
    assert prompt.endswith("#")
    assert running.endswith("sleep 100") and ended.endswith(f"^C\n{prompt}")
    assert letters.endswith(f"\nnaïve 日本 🙂\n{prompt}")
    assert long.startswith(f"New Terminal Output:\n{prompt} seq 5000\n1\n2\n")
    assert "bytes omitted" in long and long.endswith(f"\n5000\n{prompt}")
    assert cleared == first
    assert typed == f"New Terminal Output:\n{prompt} exit 3"


def test_an_image_without_tmux_is_refused(inside_docker):
    async def body(sandbox):
        await sandbox.run("rm -f /usr/bin/tmux", 10.0)
        with pytest.raises(SandboxError, match="there is no tmux in the task's image"):
            await Terminal.open(sandbox, 60.0, LIMIT)

    inside_docker(body)
