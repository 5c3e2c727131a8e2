"""What only the namespace sandbox has: a fork server, processes of this machine, a disk of its own."""

import asyncio
import os
import signal
import time

import pytest
from sandbox_fixtures import outputs

from t1jax.sandbox import spawner
from t1jax.sandbox.protocol import SandboxError

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


def test_process_numbers_are_the_same_everywhere(inside):
    line = "echo $$; sleep 100 & kill -9 $!; wait $!"
    assert outputs(inside, line) == outputs(inside, line)


def test_death_is_told_at_once(inside):
    async def body(sandbox):
        running = asyncio.ensure_future(sandbox.run("sleep 1000", 60))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="gone"):
            await running
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.get("/etc/passwd", 100)
        return time.monotonic() - started

    assert inside(body) < 2


def test_fork_server_is_replaced_when_it_dies(inside):
    async def body(sandbox):
        spawner.shared()._process.kill()
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.run("sleep 1000", 60)

    inside(body)
    assert outputs(inside, "echo on") == [(0, "on\n")]


def test_close_leaves_no_process(inside):
    async def body(sandbox):
        await sandbox.run("sleep 1000 & (setsid sleep 1000 &)", 20)
        await sandbox.close()
        await sandbox.close()
        return sandbox.pid

    assert not os.path.exists(f"/proc/{inside(body)}")


def test_a_cancelled_close_has_ended_the_sandbox_too(inside):
    async def body(sandbox):
        await sandbox.run("for i in $(seq 40); do sleep 1000 & done", 20)
        closing = asyncio.ensure_future(sandbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not os.path.exists(f"/proc/{sandbox.pid}")

    inside(body)


def test_many_at_once_do_not_mix(inside):
    async def body(first):
        async def one(i):
            sandbox = await type(first)._open(SPEC)
            results = [
                await sandbox.run(f"x=$((x + {i})); echo $x > f; cat f", 60) for _ in range(3)
            ]
            await sandbox.close()
            return [r.output for r in results]

        return await asyncio.gather(*(one(i) for i in range(24)))

    SPEC = spawner.Spec("/app", {"PATH": "/usr/bin:/bin"}, 512, 16, 64, 1000)
    assert inside(body) == [[f"{i}\n", f"{2 * i}\n", f"{3 * i}\n"] for i in range(24)]


def test_full_disk_stops_the_agent_but_not_the_verifier(inside, tmp_path):
    (tmp_path / "file").write_text("ours")

    async def body(sandbox):
        full = await sandbox.run(
            "cat /dev/zero > /tmp/a; cat /dev/zero > /tmp/b; df -m / | tail -1", 60
        )
        await sandbox.put("/tests/file", tmp_path / "file")
        with pytest.raises(SandboxError, match="No space"):
            await sandbox.put("/root/file", tmp_path / "file")
        verdict = await sandbox.execute(["cp", "/tests/file", "/logs/copy"], 20, ENV, "/")
        return full.output, verdict.exit_code, await sandbox.get("/logs/copy", 9)

    full, code, copy = inside(body, storage_mb=16)
    assert "100%" in full and code == 0 and copy == b"ours"


def test_memory_of_a_process_is_bounded(inside):
    (code, output), after = outputs(
        inside, "head -c 400M /dev/zero | tail", "echo alive", memory_mb=128
    )
    assert code == 1 and "memory" in output and after == (0, "alive\n")
