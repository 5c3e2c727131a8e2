"""Agents that cheat gain nothing, through the real verifier in real containers; and the host never notices."""

import asyncio
import dataclasses
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
from t1jax.sandbox.docker_hosts import NETWORK
from t1jax.sandbox.protocol import SandboxError
from t1jax.types import Verdict

pytestmark = pytest.mark.docker
MARK = f"ATTACK_{secrets.token_hex(8)}"  # a variable of every process of an attack's
SETTINGS = ("core_pattern", "modprobe", "panic", "hostname", "domainname", "sysrq")
CHECK = "test_an_attack_gains_nothing"
AT_A_TIME = 4
FILES = ("passwd", "shadow", "group", "profile", "bash.bashrc", "ld.so.preload", "crontab", "hosts")


async def trial(make: MakeSandbox, attack: Attack) -> tuple[Verdict, str]:
    """The verdict on a scripted agent, and all that its commands said."""
    task = TASKS[attack.task]
    sandbox = await make(dataclasses.replace(task, env={MARK: "1"}))
    said = []
    try:
        for command in (PRELUDE, *attack.work, *attack.commands):
            said.append((await sandbox.run(command, attack.timeout_s)).output)
        return await verify(task, sandbox, fresh=True), "".join(said)
    except SandboxError as error:
        return Verdict((), None, "infra", str(error), 0.0), "".join(said)
    finally:
        await sandbox.close()


@pytest.fixture(scope="module")
def outcomes(request) -> dict[Attack, tuple[Verdict, str]]:
    """Of the attacks that are asked for, and of the same work without them, a few at a time."""
    items = [item for item in request.session.items if item.originalname == CHECK]
    attacks = [ATTACKS[item.callspec.params["name"]] for item in items]
    wanted = {*attacks, *map(honest, attacks)}

    async def all_of_them(make: MakeSandbox):
        places = asyncio.Semaphore(AT_A_TIME)

        async def one(attack: Attack):
            async with places:
                return attack, await trial(make, attack)

        return dict(await asyncio.gather(*map(one, wanted)))

    return judged(all_of_them)


def honest(attack: Attack) -> Attack:
    return Attack(attack.task, (), attack.work)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gains_nothing(name, outcomes):
    attack = ATTACKS[name]
    verdict, said = outcomes[attack]
    fair, _ = outcomes[honest(attack)]
    assert (fair.cause, fair.outcome) == ("report", False), fair.output
    assert "BREACH" not in said, said
    if verdict.outcome is None:
        assert attack.lost and verdict.cause == "infra", (verdict.cause, verdict.output)
    elif verdict.cause == "tampered":
        assert (verdict.outcome, reward(verdict)) == (False, 0.0)
    else:
        assert (verdict.cause, verdict.outcome) == ("report", False), verdict.output
        assert verdict.assertions == fair.assertions, verdict.output


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
        "networks": {n["Name"] for n in api.networks()} - {NETWORK},
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
