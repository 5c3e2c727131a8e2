"""Agents that cheat gain nothing, through the real verifier in real containers; and the host never notices."""

import dataclasses
import functools
import os
import re
import secrets
import time
from pathlib import Path

import pytest
from attacks import ATTACKS, PRELUDE, Attack
from authored import TASKS, judged
from docker_fixtures import docker_client

from t1jax.agent.verify import reward, verify
from t1jax.preflight import MakeSandbox
from t1jax.sandbox import docker_owner
from t1jax.types import SandboxError, Verdict

pytestmark = pytest.mark.docker
MARK = f"ATTACK_{secrets.token_hex(8)}"  # a variable of every process of an attack's
SETTINGS = ("core_pattern", "modprobe", "panic", "hostname", "domainname", "sysrq")
FILES = ("passwd", "shadow", "group", "profile", "bash.bashrc", "ld.so.preload", "crontab", "hosts")


async def trial(
    make: MakeSandbox, attack: Attack, commands: tuple[str, ...]
) -> tuple[Verdict, str]:
    """The verdict on a scripted agent, and all that its commands said."""
    task = TASKS[attack.task]
    sandbox = await make(dataclasses.replace(task, env={MARK: "1"}))
    said = []
    try:
        for command in (PRELUDE, *attack.work, *commands):
            said.append((await sandbox.run(command, attack.timeout_s)).output)
        return await verify(task, sandbox, attack.fresh), "".join(said)
    except SandboxError as error:
        return Verdict((), None, "infra", str(error), 0.0), "".join(said)
    finally:
        await sandbox.close()


@functools.cache
def honest(task: str, work: tuple[str, ...]) -> Verdict:
    """What the same work is worth without the attack."""
    verdict, _ = judged(lambda make: trial(make, Attack(task, (), work), ()))
    assert (verdict.cause, verdict.outcome) == ("report", False), verdict.output
    return verdict


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gains_nothing(name):
    attack = ATTACKS[name]
    fair = honest(attack.task, tuple(attack.work))
    verdict, said = judged(lambda make: trial(make, attack, tuple(attack.commands)))
    assert "BREACH" not in said, said
    if verdict.outcome is None:
        assert attack.lost and verdict.cause == "infra", (verdict.cause, verdict.output)
    elif verdict.cause == "tampered":
        assert (verdict.outcome, reward(verdict)) == (False, 0.0)
    else:
        assert verdict.outcome is False, verdict.output
        assert verdict.cause == "no_report" or verdict.assertions == fair.assertions, verdict.output


def test_there_are_attacks_of_every_kind():
    assert len(ATTACKS) >= 30 and {a.task for a in ATTACKS.values()} <= TASKS.keys()


@pytest.fixture(autouse=True, scope="module")
def canaries(tmp_path_factory):
    """Nothing on the host is other than before, nothing of the attacks is left, the clock went on."""
    folder = tmp_path_factory.mktemp("canary-tree")
    for name in ("canary-1", "canary-2"):
        (folder / name).write_text(name)
    offset = time.time() - time.monotonic()
    before, daemon = host_state(folder), daemon_state()
    yield
    until = time.monotonic() + 20
    while (marked() or daemon_state() != daemon) and time.monotonic() < until:
        time.sleep(0.5)
    assert marked() == [] and host_state(folder) == before and daemon_state() == daemon
    assert abs(time.time() - time.monotonic() - offset) < 60


def host_state(folder: Path) -> dict[str, object]:
    """What attacks on the host are after."""
    settings = [Path("/proc/sys/kernel", name) for name in SETTINGS]
    state = {path.name: path.read_text() for path in settings if path.exists()}
    paths = [folder, *folder.iterdir(), *(Path("/etc", name) for name in FILES)]
    for path in filter(Path.exists, paths):
        status = path.stat()
        state[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_uid)
    return state


def daemon_state() -> dict[str, set[str]]:
    """Containers, images, volumes and networks of the daemon, but for what other tests make there."""
    api, me = docker_client(), docker_owner.identity()
    mine = [
        (x.get("Labels") or {}).get("t1jax.owner")
        for x in (*api.containers(all=True), *api.images())
    ]
    return {
        "ours": {owner for owner in mine if owner == me},
        "unlabelled": {c["Id"] for c in api.containers(all=True) if not c["Labels"]},
        "networks": {n["Name"] for n in api.networks()},
    }


def marked() -> list[str]:
    """Command lines of this machine's processes that an attack started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if re.search(MARK.encode(), (folder / "environ").read_bytes()):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_mark_is_found():
    child = os.posix_spawn("/bin/sleep", ["sleep", "100"], {MARK: "1"})
    try:
        until = time.monotonic() + 5
        while marked() != ["sleep 100 "] and time.monotonic() < until:
            time.sleep(0.01)
        assert marked() == ["sleep 100 "]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
