"""What only a sandbox in a container has: its limits, its death, its copies, and what it leaves behind."""

import asyncio
import subprocess
import sys
import time

import pytest
from docker_fixtures import (
    DOCKERFILE,
    ROOT,
    docker_client,
    docker_url,
    volumes_and_networks,
    wait_for_nothing_new,
)
from sandbox_fixtures import commands, make_task, nothing, outputs

from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.protocol import SandboxError, Tampered

pytestmark = pytest.mark.docker
ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def inside(inside_docker):
    return inside_docker


def left_of(run: str) -> set[str]:
    """Containers and images of a pool that are there; other tests may use the daemon at the same time."""
    api, mine = docker_client(), {"label": f"t1jax.run={run}"}
    found = api.containers(all=True, filters=mine) + api.images(filters=mine)
    return {x["Id"] for x in found}


def wait_for_none_of(run: str) -> None:
    until = time.monotonic() + 20
    while left_of(run) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left_of(run)


@pytest.fixture(autouse=True)
def nothing_is_left(docker_hosts):
    before = volumes_and_networks()
    yield
    wait_for_nothing_new(before)
    assert not left_of(docker_hosts.labels["t1jax.run"])


def test_the_container_is_confined(inside):
    async def body(sandbox):
        return docker_client().inspect_container(sandbox.name)

    found = inside(body, memory_mb=256, cpus=0.5)
    host = found["HostConfig"]
    assert host["NetworkMode"] == "none" and host["IpcMode"] == "private"
    assert host["LogConfig"]["Type"] == "none" and host["AutoRemove"]
    assert host["Memory"] == host["MemorySwap"] == 256 << 20 and host["NanoCpus"] == 500_000_000
    assert host["PidsLimit"] == 256 and not host["Privileged"] and not found["Mounts"]
    assert found["Config"]["Labels"].keys() >= {"t1jax", "t1jax.run", "t1jax.owner"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("mount -t tmpfs x /mnt", "permission denied"),
        ("unshare -n true", "not permitted"),
        ("mknod /tmp/sda b 8 0", "not permitted"),
        ("echo x > /proc/sys/kernel/core_pattern", "Read-only"),
        ("echo 9 > /proc/sys/kernel/panic", "Read-only"),
        ("echo x > /dev/tcp/1.1.1.1/80", "unreachable"),
        ("ulimit -c unlimited", "cannot modify"),
        (
            "ip link 2>/dev/null | grep -c eth || cat /proc/net/dev | grep -c eth || echo none",
            "none",
        ),
        ("grep NoNewPrivs /proc/self/status", "1"),
    ],
)
def test_is_denied(inside, command, says):
    assert says in commands(inside, command)[0].output


def test_apt_and_other_users_work(inside):
    made, user = outputs(
        inside,
        "useradd -m agent && dpkg-reconfigure -f noninteractive tzdata 2>&1 | tail -n 1; apt-get check",
        "su agent -c 'id -un; touch ~/x; sleep 1000 >/dev/null & echo on'",
    )
    assert made[0] == 0 and user == (0, "agent\non\n")


def test_a_public_task_has_a_network(inside):
    assert outputs(inside, "grep -c eth0 /proc/net/dev", network="public") == [(0, "1\n")]


def test_memory_is_bounded_for_all_processes_together(inside):
    (code, _), after = outputs(inside, "head -c 400M /dev/zero | tail", "echo alive", memory_mb=128)
    assert code == 137 and after == (0, "alive\n")


def test_fork_bomb_is_bounded_and_ends(inside):
    async def body(sandbox):
        await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 1", 2)
        listing = (await sandbox.execute(["/bin/ls", "/proc"], 20, ENV, "/")).output.split()
        started = time.monotonic()
        await sandbox.end_agent()
        after = await sandbox.execute(["/bin/bash", "-c", "echo alive /proc/[0-9]*"], 20, ENV, "/")
        return sum(name.isdigit() for name in listing), after.output.split(), started

    count, words, started = inside(body)
    assert count <= 256
    assert words[:2] == ["alive", "/proc/1"] and len(words) == 3 and time.monotonic() - started < 10


def test_kill_all_survives(inside):
    lines = ("kill -9 -1", "kill -STOP 1; kill -9 1; sh -c 'kill -9 -1'", "echo alive")
    assert outputs(inside, *lines)[-1] == (0, "alive\n")


def test_no_zombies_are_kept(inside):
    lines = ("for i in 1 2 3; do (setsid true &); done; sleep 0.2", "ps -eo stat | grep -c Z")
    assert outputs(inside, *lines)[-1] == (1, "0\n")


def test_noise_on_the_streams_of_process_1_is_only_output(inside):
    noise, after = outputs(
        inside,
        "echo 'garbage' > /proc/1/fd/0; printf 'end_agent x' > /proc/1/fd/0; echo x > /proc/1/fd/1",
        "echo on",
    )
    assert noise == (0, "x\n") and after == (0, "on\n")


def test_flood_on_the_streams_of_process_1_fills_nothing(inside):
    async def body(sandbox):
        flooded = await sandbox.run("yes > /proc/1/fd/1 & sleep 0.3", 20)
        await sandbox.end_agent()
        after = await sandbox.execute(["echo", "on"], 20, ENV, "/")
        path = docker_client().inspect_container(sandbox.name)["LogPath"]
        return len(flooded.output), after.output, path

    size, after, path = inside(body)
    assert size < 11_000 and after == "on\n" and path == ""


def test_traces_of_the_shell_do_not_confuse_the_protocol(inside):
    assert outputs(inside, "set -xv; true", "false", "{ set +xv; } 2>/dev/null", "echo on")[-1] == (
        0,
        "on\n",
    )


def test_large_commands_arrive_whole(inside):
    size = 300_000
    assert outputs(inside, f"x={'é' * size}; echo ${{#x}}") == [(0, f"{size}\n")]


def test_a_stopped_shell_is_replaced(inside):
    late, after = commands(inside, "kill -STOP $$", f"echo on # {'x' * 100_000}", timeout_s=1.0)
    assert late.timed_out and after.output == "on\n"


def test_variables_must_have_names(inside):
    async def body(sandbox):
        with pytest.raises(ValueError, match="'A B'"):
            await sandbox.execute(["true"], 20, {"A B": ""}, "/")

    inside(body)


def test_death_of_the_container_is_told_at_once(inside):
    async def body(sandbox):
        running = asyncio.ensure_future(sandbox.run("sleep 1000", 60))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        await asyncio.to_thread(docker_client().kill, sandbox.name)
        with pytest.raises(SandboxError, match="gone: its container ended during run"):
            await running
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.get("/etc/passwd", 100)
        return time.monotonic() - started

    assert inside(body) < 5


def test_a_cancelled_start_leaves_nothing(docker_hosts, environment):
    async def main(delay):
        starting = asyncio.ensure_future(
            DockerSandbox.start(docker_hosts, make_task(environment(DOCKERFILE)))
        )
        await asyncio.sleep(delay)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    for delay in (0.0, 0.02, 0.1, 0.2):
        asyncio.run(main(delay))
    wait_for_none_of(docker_hosts.labels["t1jax.run"])


def test_a_cancelled_close_has_ended_the_sandbox_too(docker_hosts, environment):
    async def main():
        sandbox = await DockerSandbox.start(docker_hosts, make_task(environment(DOCKERFILE)))
        closing = asyncio.ensure_future(sandbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(main())
    wait_for_none_of(docker_hosts.labels["t1jax.run"])


def test_get_leaves_the_container_unlocked(inside):
    async def body(sandbox):
        await sandbox.run(
            "truncate -s 200M /tmp/sparse; mkdir /tmp/big; cp -r /usr/lib/git-core /tmp/big", 60
        )
        started = time.monotonic()
        for path in ("/tmp/sparse", "/tmp/big", "/tmp/none"):
            assert await sandbox.get(path, 1 << 20) is None
        await sandbox.reset_folder("/tmp/x")
        await sandbox.changed()
        return time.monotonic() - started

    assert inside(body) < 20


def test_get_sees_through_no_swapped_parent(inside):
    async def body(sandbox):
        await sandbox.run("mkdir -p /tmp/a/b; echo x > /tmp/a/b/f; ln -s /tmp/a /tmp/l", 20)
        paths = ("/tmp/a/b/f", "/tmp/l/b/f", "/tmp//a/./b/f")
        return [await sandbox.get(path, 9) for path in paths]

    assert inside(body) == [b"x\n", None, b"x\n"]


def test_put_changes_no_folder_above(inside, tmp_path):
    (tmp_path / "file").write_text("ours")

    async def body(sandbox):
        await sandbox.put("/tmp/new/file", tmp_path / "file")
        return (await sandbox.run("stat -c '%a %U' /tmp /tmp/new /tmp/new/file", 20)).output

    assert inside(body) == "1777 root\n755 root\n644 root\n"


def test_changed_tells_what_differs_from_the_image(inside):
    async def body(sandbox):
        await sandbox.run(
            "echo x >> /etc/hostname; echo x > /opt/new; echo x >> /etc/issue; rm /etc/debian_version",
            20,
        )
        return await sandbox.changed()

    found = inside(body)
    assert found["/opt/new"] == "added" and found["/etc/issue"] == "changed"
    assert found["/etc/debian_version"] == "deleted" and "/usr/bin/bash" not in found


def test_a_fork_has_the_files_and_the_network_and_none_of_the_processes(inside):
    async def body(sandbox):
        await sandbox.run("echo x > /app/f; (while :; do date +%N > /app/g; done) &", 20)
        await sandbox.run("(while :; do echo hello | nc -lN 127.0.0.1 8000; done) & sleep 0.3", 20)
        fork = await sandbox.fork(nothing)
        try:
            for place in (sandbox, fork):
                with pytest.raises(SandboxError, match="ended"):
                    await place.run("true", 20)
            script = "pwd; cat f; hostname; set -- /proc/[0-9]*; echo $#; echo y > f; nc -d 127.0.0.1 8000"
            seen = await fork.execute(["bash", "-c", script], 20, ENV, None)
            return seen.output, await sandbox.get("/app/f", 9)
        finally:
            await fork.close()

    assert inside(body) == ("/app\nx\nsandbox\n2\nhello\n", b"x\n")


def test_a_fork_is_checked_before_anything_runs_in_it(inside):
    """Not even process 1, which is the agent's bash here."""

    async def body(sandbox):
        await sandbox.run("printf '#!/bin/sh\\necho y > /app/f' > /opt/b; chmod +x /opt/b", 20)
        await sandbox.run("echo x > /app/f; mv /opt/b /usr/bin/bash", 20)
        seen = []

        async def check(changed, files):
            seen.append((changed["/usr/bin/bash"], await files.get("/app/f", 9)))
            return "bash was changed"

        with pytest.raises(Tampered, match="bash was changed"):
            await sandbox.fork(check)
        return seen

    assert inside(body) == [("changed", b"x\n")]


def test_a_fork_does_not_write_out_what_is_not_there(inside):
    async def body(sandbox):
        await sandbox.run("truncate -s 1T /opt/x", 20)
        with pytest.raises(
            Tampered, match=r"files of 10995116\d+ bytes, environment\.storage_mb = "
        ):
            await sandbox.fork(nothing)

    inside(body)


def test_signals_do_not_end_process_1(inside):
    async def body(sandbox):
        command = (
            "for s in HUP INT QUIT ILL ABRT FPE SEGV PIPE ALRM TERM USR1 USR2; do kill -$s 1; done"
        )
        await sandbox.run(command, 20)
        own = "sleep 100 & kill -TERM $!; wait $!; echo $?"
        return (await sandbox.run(own, 20)).output, (await sandbox.run("echo on", 20)).output

    assert inside(body) == ("143\n", "on\n")


def test_a_folder_may_give_its_group_to_files(inside):
    command = "groupadd g; mkdir d; chgrp g d; chmod 2770 d; stat -c %a d"
    assert outputs(inside, command) == [(0, "2770\n")]


def test_a_fork_refuses_volumes_and_leaves_none(inside):
    async def body(sandbox):
        await sandbox.run("echo x > /data/x", 20)
        with pytest.raises(SandboxError, match="VOLUME /data"):
            await sandbox.fork(nothing)

    inside(body, DOCKERFILE + "VOLUME /data\n")


def test_a_paused_sandbox_does_nothing(inside):
    async def body(sandbox):
        async def size():
            fork = await sandbox.fork(nothing)
            try:
                return len(await fork.get("/tmp/n", 1 << 20))
            finally:
                await fork.close()

        await sandbox.run("(while :; do echo >> /tmp/n; sleep 0.01; done) & sleep 0.1", 20)
        await sandbox.pause()
        first = await size()
        await asyncio.sleep(0.3)
        second = await size()
        await sandbox.unpause()
        return first == second, (await sandbox.execute(["echo", "on"], 20, ENV, "/")).output

    assert inside(body) == (True, "on\n")


OWNER = """
import asyncio, sys
sys.path.insert(0, "tests")
from pathlib import Path
from sandbox_fixtures import make_task, nothing
from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerConfig, DockerHosts

async def main(url, environment):
    hosts = DockerHosts(DockerConfig((url,)))
    sandbox = await DockerSandbox.start(hosts, make_task(Path(environment)))
    await sandbox.fork(nothing)
    print(hosts.labels["t1jax.run"], flush=True)
    await sandbox.run("sleep 1000", 1000)

asyncio.run(main(*sys.argv[1:]))
"""


def test_death_of_the_owner_ends_its_containers_and_the_next_start_reaps(docker_hosts, environment):
    command = [sys.executable, "-c", OWNER, docker_url(), str(environment(DOCKERFILE))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            run = owner.stdout.readline().strip()
            asyncio.run(docker_hosts.sweep())  # the owner lives: nothing of it is touched
            assert len(left_of(run)) == 3
        finally:
            owner.kill()
    asyncio.run(docker_hosts.sweep())
    assert not left_of(run)


def test_only_containers_of_ended_processes_of_this_machine_are_reaped(docker_hosts):
    api, mine = docker_client(), docker_hosts.labels
    boot, namespace, _, start = mine["t1jax.owner"].split()
    child = subprocess.Popen(["true"])
    child.wait()

    def make(owner):
        labels = {**mine, "t1jax.owner": owner}
        return api.create_container("t1jax/base:bookworm", "true", labels=labels)["Id"]

    make(f"{boot} {namespace} {child.pid} {start}")
    kept = {make(f"other {namespace} 1 1"), make(f"{boot} other 1 1"), make(mine["t1jax.owner"])}
    asyncio.run(docker_hosts.sweep())
    try:
        assert left_of(mine["t1jax.run"]) == kept
    finally:
        for name in kept:
            api.remove_container(name)
